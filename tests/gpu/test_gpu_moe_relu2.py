"""Experts without a gate (relu2), and gpt-oss's activation, with b12x on a GPU.

Kernels are compiled for 2 to 11 s each, so layers share them: 15 different ones are asked for here (and three of them a
second time, which b12x has on disk by then). Code for NF3 is compiled for a number of experts, which is six everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hybrid_pack
from benchmarks.b12x_calls import plain_call
from hybrid_pack.convert import convert
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.io.names import FAMILIES
from hybrid_pack.plan import make_plan
from hybrid_pack.runtime import HybridMoE, MoERuntime, PackedMoELayer
from hybrid_pack.runtime.moe_runtime import RuntimeKey
from hybrid_pack.runtime.random_layer import random_layer
from hybrid_pack.runtime.timing import graph_of
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec, write_checkpoint
from tests.gpu.support import LIMIT, check, expected_of, given, note, relative
from tests.runtime.launch_arguments import comparable

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("b12x")]

H, INNER, E, TOP_K, MOST = 256, 256, 8, 3, 4096
TOKENS = (1, 2, 4, 8, 9, 33, 256, 4096)
KEPT, TAIL = (0, 3), (1, 2, 4, 5, 6, 7)
SPLIT_K = 2e-3
"""Largest distance between two runs: rows of an expert fall into blocks in no fixed order (``test_gpu_moe_calls``)."""

SPLITS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "both": (KEPT, TAIL),
    "kept": (tuple(range(E)), ()),
    "tail": ((), TAIL),
    "a rank of two": ((4,), (0, 1, 2, 3, 5, 6)),
}
"""Of the small layers; ids in neither tier are held by other ranks."""


def small(split: str) -> PackedMoELayer:
    return random_layer(H, INNER, E, *SPLITS[split], activation="relu2", device="cuda")


@pytest.fixture(scope="module")
def moes() -> dict[str, HybridMoE]:
    return {split: HybridMoE(small(split), TOP_K, MOST, "b12x") for split in SPLITS}


@pytest.mark.parametrize("split", SPLITS)
def test_small_layers(moes: dict[str, HybridMoE], split: str) -> None:
    moe = moes[split]
    assert moe.layer.tiles == (64, 256, 64, 256) and not moe.layer.geometry.gated
    distances = {m: check(moe, given(m, H, E, TOP_K), f"relu2 {split}") for m in TOKENS}
    note("relative L2", pack=f"relu2, H {H}, I {INNER}, {split}", by_tokens=distances)


def test_the_shape_of_nemotron() -> None:
    """Nemotron-3 Nano: H 2688, I 1856, which is padded to 1920; MXFP4 beside NF3, an odd number of N tiles."""
    layer = random_layer(2688, 1920, E, KEPT, TAIL, activation="relu2", kept_scale_format="e8m0_k32", device="cuda")
    assert layer.tiles == (64, 128, 64, 128)
    runtime = MoERuntime(RuntimeKey.of(layer, TOP_K), MOST, route_blocks=((128, 8), (1 << 30, 64)))
    moe = HybridMoE(layer, TOP_K, MOST, "b12x", runtime)
    distances = {m: check(moe, given(m, 2688, E, TOP_K), "Nemotron") for m in TOKENS}
    note("relative L2", pack="relu2, Nemotron-3 Nano, MXFP4", by_tokens=distances)
    few = given(64, 2688, 2, TOP_K, lowest=0)  # all tokens visit two experts
    check(moe, few, "two experts only")


def test_a_converted_pack(tmp_path: Path) -> None:
    family = next(i for i, f in enumerate(FAMILIES) if f.models.startswith("Nemotron-3"))
    spec = Spec(
        family=family, hidden=H, intermediate=INNER, num_experts=E, top_k=TOP_K, kept=2, moe_layers=(1,),
        dense_layers=(0,), mtp_layer=False,
    )  # fmt: skip
    write_checkpoint(tmp_path / "source", spec)
    convert(make_plan(open_checkpoint(tmp_path / "source"), Topology()), tmp_path / "pack")
    layer = hybrid_pack.open_pack(tmp_path / "pack").load_layer(1, device="cuda")
    assert layer.kept is not None and layer.tail is not None and layer.geometry.activation == "relu2"
    moe = HybridMoE(layer, TOP_K, MOST)
    distances = {m: check(moe, given(m, H, E, TOP_K), "a converted pack") for m in TOKENS}
    note("relative L2", pack="relu2, converted", by_tokens=distances)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("tokens", [1, 8, 9, 64])
def test_ids_that_are_not_experts_here(moes: dict[str, HybridMoE], split: str, tokens: int) -> None:
    moe, (x, weights, ids) = moes[split], given(tokens, H, E, TOP_K)
    here = torch.tensor(moe.layer.expert_ids, dtype=torch.int32, device="cuda")
    away = [expert for expert in range(E) if expert not in moe.layer.expert_ids]
    nowhere = torch.tensor([-1, *away, E, 1000, 2**31 - 1, -(2**31)], dtype=torch.int32, device="cuda")
    strange = nowhere[torch.randint(0, len(nowhere), (tokens, TOP_K), device="cuda")]
    assert not moe(x, weights, strange).any()
    held = torch.isin(ids, here)
    expected = expected_of(moe.layer, (x, weights, torch.where(held, ids, -1)))
    if held.any():
        assert relative(moe(x, weights, torch.where(held, ids, strange)), expected) <= LIMIT


def test_an_expert_named_twice_and_one_place(moes: dict[str, HybridMoE]) -> None:
    moe = moes["both"]
    for tokens in (1, 2, 8, 16):
        x, weights, ids = given(tokens, H, E, TOP_K, lowest=0)
        ids[:, 1] = ids[:, 0]
        check(moe, (x, weights, ids), "twice")
        ids[:] = 0
        ids[:, 2] = 1
        check(moe, (x, weights, ids), "two experts only")
    assert moe(*(argument[:0] for argument in given(1, H, E, TOP_K))).shape == (0, H)


@pytest.mark.parametrize("split", ["both", "kept", "tail"])
@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 64, 600])
def test_replay_equals_eager(moes: dict[str, HybridMoE], split: str, tokens: int) -> None:
    moe = moes[split]
    arguments, other = given(tokens, H, E, TOP_K), given(tokens, H, E, TOP_K, seed=5)
    out = torch.empty_like(arguments[0])
    graph = graph_of(lambda: moe(*arguments, out=out), moe.layer.device)
    for new in (arguments, other):
        for place, tensor in zip(arguments, [t.clone() for t in new], strict=True):
            place.copy_(tensor)
        eager, replayed = [moe(*arguments).clone() for _ in range(3)], []
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
            replayed.append(out.clone())
        same = all(torch.equal(one, eager[0]) for one in (*eager, *replayed))
        note("replay and eager", activation="relu2", split=split, tokens=tokens, equal_bit_for_bit=same)
        assert relative(replayed[0], expected_of(moe.layer, arguments)) <= LIMIT
        for one in (*eager, *replayed):
            assert relative(one, eager[0].float()) <= SPLIT_K


def test_few_tokens_are_captured_without_a_call_before() -> None:
    """Nothing is left to be compiled by a call; of nine experts, for which Triton has compiled nothing yet."""
    layer = random_layer(H, INNER, 9, (*KEPT, 8), TAIL, activation="relu2", device="cuda")
    moe = HybridMoE(layer, TOP_K, 17, "b12x")
    for tokens in range(17, 0, -1):
        arguments = given(tokens, H, 9, TOP_K)
        out, graph = torch.empty_like(arguments[0]), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            moe(*arguments, out=out)
        graph.replay()
        assert relative(out, expected_of(layer, arguments)) <= LIMIT


class Recorder:
    """A compiled kernel that writes down what it is called with."""

    def __init__(self, compiled: Any, calls: list[list[object]]) -> None:
        self._compiled, self._calls = compiled, calls

    def __call__(self, *arguments: Any) -> Any:
        self._calls.append([id(self), *map(comparable, arguments)])
        return self._compiled(*arguments)


def test_launches_are_b12x_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same compiled kernels, in the same order, with the same arguments as b12x's functions give them."""
    layer = small("both")
    runtime = MoERuntime(RuntimeKey.of(layer, TOP_K), 64)
    calls: list[list[object]] = []
    compile_ = runtime.kernel.b12x_compile
    for cache in ("_FUSED_CACHE", "_SUM_CACHE"):
        monkeypatch.setattr(runtime.kernel, cache, {})
    monkeypatch.setattr(runtime.kernel, "b12x_compile", lambda *a, **k: Recorder(compile_(*a, **k), calls))
    moe = HybridMoE(layer, TOP_K, 64, "b12x", runtime)
    backend: Any = moe._run
    assert "only experts with a gate" in backend.one_grid_problem
    for tokens in (*range(1, 10), 16, 33, 64):
        arguments = given(tokens, H, E, TOP_K)
        out = torch.empty_like(arguments[0])
        ways, results = [], []
        for call in (lambda: moe(*arguments, out=out), plain_call(backend, arguments, out)):  # noqa: B023
            calls.clear()
            out.fill_(float("nan"))
            call()
            ways.append(list(calls))
            results.append(out.clone())
        assert ways[0] == ways[1] and len(ways[0]) == 4
        assert relative(results[0], results[1].float()) <= SPLIT_K
        assert relative(results[0], expected_of(layer, arguments)) <= LIMIT


@pytest.mark.parametrize(("split", "most"), [("both", 8), ("kept", 64)])
def test_gpt_oss_s_activation(split: str, most: int) -> None:
    layer = random_layer(H, INNER, E, *SPLITS[split], activation="swigluoai(alpha=1.702, limit=0.7)", device="cuda")
    moe = HybridMoE(layer, TOP_K, most, "b12x")
    for tokens in (1, 2, 8, 9, 64):
        if tokens <= most:
            check(moe, given(tokens, H, E, TOP_K), "swigluoai")
