"""How fast is ``HybridMoE`` on a GPU, and what does it add to b12x itself? GLM-5.2 TP4: 256 experts, 64 kept, top 8.

    python -m benchmarks.gpu_moe [--out FILE] [--rounds N] [--no-sweep]

Ours and direct calls of b12x's own functions with the same tensors and buffers take turns. ``graph`` is the replay of a
CUDA graph, which is the kernels' time; ``eager`` is calling from Python again and again. Small batches go through
several routings, so that the 60 MB cache of an H200 does not hold the weights of the next call. The floor is the time
the packed bytes of the experts visited take at the rate of a copy on the device. The sweep times other sizes of a route
block (``ROUTE_BLOCKS``).
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.b12x_calls import plain_call
from hybrid_pack.runtime import HybridMoE, MoERuntime
from hybrid_pack.runtime.doctor import driver_version
from hybrid_pack.runtime.moe_runtime import DECODE_TOKENS, ROUTE_BLOCKS, RuntimeKey
from hybrid_pack.runtime.random_layer import random_layer
from hybrid_pack.runtime.timing import Arguments, bandwidth, gpu_seconds, graph_of, routing, visited_bytes

SIZES = (1, 2, 4, 8, 16, 64, 256, 1024, 4096, 8192)
GOALS = {1: 1.02, 8: 1.02, 64: 1.02, 4096: 1.02}
"""Most that ours may take, as a ratio to direct calls."""
SWEEP_SIZES = (16, 64, 128, 256, 512, 1024, 2048, 4096)
SWEEP_BLOCKS = (8, 32, 64)
TORCH_SIZES = (1, 8)
MAX_TOKENS, TOP_K, EXPERTS = 8192, 8, 256
FLOPS_PER_TOKEN = 2 * 3 * 6144 * 512 * TOP_K
Action = Callable[[], object]


def calls(moe: HybridMoE, tokens: int) -> tuple[Action, Action, int, int]:
    """(ours, direct, calls in each, bytes of the experts visited): several calls with other routings for few tokens."""
    backend: Any = moe._run
    many = max(1, min(16, 64 // tokens))
    sets = [routing(moe, tokens, seed) for seed in range(many)]
    outs = [torch.empty_like(arguments[0]) for arguments in sets]
    theirs = [plain_call(backend, arguments, out) for arguments, out in zip(sets, outs, strict=True)]

    def ours() -> None:
        for arguments, out in zip(sets, outs, strict=True):
            moe(*arguments, out=out)

    def others() -> None:
        for action in theirs:
            action()

    return ours, others, many, sum(visited_bytes(moe, arguments[2]) for arguments in sets) // many


def take_turns(actions: dict[str, Action], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of each action, by rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            seconds[name].append(gpu_seconds(action, device))
    return seconds


def measure(moe: HybridMoE, rounds: int, per_second: float) -> list[dict[str, Any]]:
    """A row for each number of tokens."""
    device, rows = moe.layer.device, []
    for tokens in SIZES:
        ours, theirs, many, nbytes = calls(moe, tokens)
        graphs: dict[str, Action] = {"ours": graph_of(ours, device).replay, "direct": graph_of(theirs, device).replay}
        row: dict[str, Any] = {"tokens": tokens, "floor_us": nbytes / per_second * 1e6}
        eager: dict[str, Action] = {"ours": ours, "direct": theirs}
        for how, actions in (("graph", graphs), ("eager", eager)):
            seconds = take_turns(actions, rounds, device)
            row[how] = {name: common.summary([s / many * 1e6 for s in values]) for name, values in seconds.items()}
            row[f"{how}_ratio"] = common.ratios(seconds, "ours", "direct")["median"]
        row["tflops"] = FLOPS_PER_TOKEN * tokens / row["graph"]["ours"]["median"] / 1e6
        rows.append(row)
        text = ", ".join(
            f"{how} {row[how]['ours']['median']:.1f} us (direct {row[how]['direct']['median']:.1f}, "
            f"ratio {row[f'{how}_ratio']:.3f})"
            for how in ("graph", "eager")
        )
        print(f"  {tokens:>5} tokens: {text}, floor {row['floor_us']:.1f} us", flush=True)
    return rows


def sweep(moe: HybridMoE, per_second: float) -> list[dict[str, Any]]:
    """Time of a call by the size of a route block, and of decode calls in a row."""
    device, rows = moe.layer.device, []
    moes = {}
    for block in SWEEP_BLOCKS:
        runtime = MoERuntime(RuntimeKey.of(moe.layer, TOP_K), max(SWEEP_SIZES), route_blocks=((1 << 30, block),))
        moes[block] = HybridMoE(moe.layer, TOP_K, max(SWEEP_SIZES), "b12x", runtime)
    for tokens in SWEEP_SIZES:
        arguments = routing(moe, tokens)
        out = torch.empty_like(arguments[0])
        row: dict[str, Any] = {"tokens": tokens}
        row["floor_us"] = visited_bytes(moe, arguments[2]) / per_second * 1e6
        for block, other in moes.items():
            graph = graph_of(lambda other=other, a=arguments, out=out: other(*a, out=out), device)  # type: ignore[misc]
            row[f"block_{block}_us"] = gpu_seconds(graph.replay, device) * 1e6

        def pieces(arguments: Arguments = arguments, out: torch.Tensor = out, tokens: int = tokens) -> None:
            for i in range(0, tokens, DECODE_TOKENS):
                part = slice(i, i + DECODE_TOKENS)
                moe(arguments[0][part], arguments[1][part], arguments[2][part], out=out[part])

        row["decode_in_pieces_us"] = gpu_seconds(graph_of(pieces, device).replay, device) * 1e6
        rows.append(row)
        print(f"  sweep {json.dumps(row)}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="Write the result here, too.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-sweep", action="store_true")
    options = parser.parse_args()
    kept = tuple(range(1, EXPERTS, 4))
    tail = tuple(i for i in range(EXPERTS) if i % 4 != 1)
    layer = random_layer(6144, 512, EXPERTS, kept, tail, top_k=TOP_K, device="cuda")
    began = time.perf_counter()
    moe = HybridMoE(layer, TOP_K, MAX_TOKENS, "b12x")
    built = time.perf_counter() - began
    began = time.perf_counter()
    HybridMoE(layer, TOP_K, MAX_TOKENS, "b12x")
    again = time.perf_counter() - began
    per_second = bandwidth(layer.device)
    assert per_second is not None
    scratch: Any = moe._run
    print(
        f"built in {built:.1f} s, a second layer in {again * 1e3:.1f} ms; copy {per_second / 1e12:.2f} TB/s", flush=True
    )
    rows = measure(moe, options.rounds, per_second)
    torch_backend = HybridMoE(layer, TOP_K, max(TORCH_SIZES), "torch")
    slow = {}
    for tokens in TORCH_SIZES:
        slow[tokens] = (
            gpu_seconds(functools.partial(torch_backend, *routing(torch_backend, tokens)), layer.device) * 1e6
        )
    machine = common.machine(Path.cwd())
    machine |= {"gpu": torch.cuda.get_device_name(), "driver": driver_version(), "torch_cuda": torch.version.cuda}
    result = {
        "machine": machine,
        "layer": {"hidden": 6144, "intermediate": 512, "experts": EXPERTS, "kept": len(kept), "top_k": TOP_K},
        "seconds_to_build": {"first_layer": built, "second_layer": again},
        "scratch_bytes": scratch.runtime.nbytes,
        "route_blocks": ROUTE_BLOCKS,
        "copy_bytes_per_second": per_second,
        "rows": rows,
        "torch_backend_us": slow,
        "goals": {
            f"{tokens} tokens, {how}": {"most": most, "found": row[f"{how}_ratio"], "met": row[f"{how}_ratio"] <= most}
            for tokens, most in GOALS.items()
            for row in rows
            if row["tokens"] == tokens
            for how in ("graph", "eager")
        },
        "sweep": [] if options.no_sweep else sweep(moe, per_second),
    }
    print(json.dumps(result["goals"], indent=1))
    common.save("gpu_moe", result)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
