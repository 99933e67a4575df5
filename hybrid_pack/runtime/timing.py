"""How long a layer takes: random tokens, balanced routing, on the GPU in a CUDA graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from hybrid_pack.runtime.moe import HybridMoE

SIZES = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
"""Numbers of tokens that are timed."""

_WARM_UP, _ROUNDS = 3, 5
_LEAST_SECONDS, _MOST_CALLS = 0.02, 200
_CPU_SECONDS = 2.0

Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class MoETiming:
    """One number of tokens.

    Attributes:
        tokens: M.
        seconds: Of a call, the median of a few rounds.
        floor_seconds: Time the packed bytes of the experts visited take at the device's memory bandwidth; None where
            that is not known.
        how: ``graph``: replay of a CUDA graph, which is the kernels' time. ``call``: calls from Python.
    """

    tokens: int
    seconds: float
    floor_seconds: float | None
    how: str


def routing(moe: HybridMoE, tokens: int, seed: int = 0) -> Arguments:
    """Random arguments of a call; each token visits ``top_k`` different experts that the rank holds, if it has so many.

    Args:
        moe: A layer.
        tokens: M.
        seed: Same seed, same arguments.
    """
    device, generator = moe.layer.device, torch.Generator().manual_seed(seed)
    held = torch.tensor(moe.layer.expert_ids, dtype=torch.int32)
    order = torch.rand(tokens, max(len(held), moe.top_k), generator=generator).argsort(1)[:, : moe.top_k]
    x = torch.randn(tokens, moe.layer.geometry.hidden_size, generator=generator).to(torch.bfloat16)
    weights = torch.rand(tokens, moe.top_k, generator=generator).softmax(1)
    return x.to(device), weights.to(device), held[order % len(held)].to(device)


def visited_bytes(moe: HybridMoE, topk_ids: torch.Tensor) -> int:
    """Packed bytes of the experts that a routing visits, each once."""
    total, ids = 0, set(topk_ids.flatten().tolist())
    for tier in (moe.layer.kept, moe.layer.tail):
        if tier is not None:
            each = sum(t[0].nbytes for t in (tier.w13, tier.w2, tier.w13_scale, tier.w2_scale))
            total += each * len(ids.intersection(tier.expert_ids.tolist()))
    return total


def bandwidth(device: torch.device) -> float | None:
    """Bytes a second that a copy on the device reads and writes, measured; None on the CPU."""
    if device.type != "cuda":
        return None
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / gpu_seconds(lambda: target.copy_(source), device)


def gpu_seconds(action: Callable[[], object], device: torch.device) -> float:
    """Median seconds of an action on the GPU, called from Python again and again."""
    stream = torch.cuda.current_stream(device)
    for _ in range(_WARM_UP):
        action()
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def measure(calls: int) -> float:
        began.record(stream)
        for _ in range(calls):
            action()
        ended.record(stream)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3 / calls

    calls = max(1, min(_MOST_CALLS, int(_LEAST_SECONDS / max(measure(1), 1e-6))))
    return statistics.median(measure(calls) for _ in range(_ROUNDS))


def graph_of(action: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """A CUDA graph of an action, warmed up."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        action()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph


def _cpu_seconds(action: Callable[[], object]) -> float:
    action()
    taken: list[float] = []
    while len(taken) < _ROUNDS and sum(taken) < _CPU_SECONDS:
        began = time.perf_counter()
        action()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def time_moe(moe: HybridMoE, sizes: Iterable[int] = SIZES, *, most_seconds: float | None = None) -> Iterator[MoETiming]:
    """Time a layer for growing numbers of tokens; yields as it goes.

    Args:
        moe: A layer.
        sizes: Numbers of tokens; those above the layer's ``max_tokens`` are left out.
        most_seconds: Stop after a call that took longer.
    """
    device = moe.layer.device
    per_second = bandwidth(device)
    graphs = device.type == "cuda" and moe.backend == "b12x"  # the torch backend asks the device which experts it needs
    for tokens in sizes:
        if tokens > moe.max_tokens:
            return
        arguments = routing(moe, tokens)
        out = torch.empty_like(arguments[0])

        def call(arguments: Arguments = arguments, out: torch.Tensor = out) -> torch.Tensor:
            return moe(*arguments, out=out)

        if graphs:
            seconds = gpu_seconds(graph_of(call, device).replay, device)
        else:
            seconds = gpu_seconds(call, device) if device.type == "cuda" else _cpu_seconds(call)
        floor = None if per_second is None else visited_bytes(moe, arguments[2]) / per_second
        yield MoETiming(tokens, seconds, floor, "graph" if graphs else "call")
        if most_seconds is not None and seconds > most_seconds:
            return
