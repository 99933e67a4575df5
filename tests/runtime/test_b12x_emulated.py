"""The b12x backend over b12x's own host code and emulated kernels: which launches, with what, for whom."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.b12x_calls import plain_call
from hybrid_pack import EnvironmentFailure, UsageError
from hybrid_pack.runtime import (
    Accepted,
    HybridMoE,
    MoERuntime,
    PackedMoELayer,
    Rejected,
    b12x_backend,
    b12x_probe,
    moe_runtime,
)
from hybrid_pack.runtime.b12x_backend import B12xBackend
from hybrid_pack.runtime.moe_runtime import RuntimeKey
from hybrid_pack.runtime.random_layer import random_layer
from hybrid_pack.runtime.torch_backend import TorchBackend
from tests.golden import oracle
from tests.runtime.launch_arguments import comparable

try:
    from tests.runtime.b12x_emulator import Gpu, Stream, emulated, to_gpu
except ImportError:  # the fixture below says what that means
    emulated = None  # type: ignore[assignment]

H, INNER, E = 256, 128, 8
KEPT, TAIL = (1, 4), (0, 2, 3, 5, 6, 7)
TOP_K = 3
LIMIT = 6e-3  # BF16 rounding of each route's result, of each tier's sum and of their sum

ONE_GRID, PREFILL = ["one grid"], ["prefill", "sum"]
NO_GATE = {"activation": "relu2"}
OAI = "swigluoai(alpha=1.702, limit=0.7)"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    oracle.require()
    with emulated(monkeypatch) as emulation:
        yield emulation


def layer_of(kept: tuple[int, ...] = KEPT, tail: tuple[int, ...] = TAIL, **options: Any) -> PackedMoELayer:
    sizes = {"hidden": H, "intermediate": INNER, "num_experts": E, **options}
    return random_layer(kept_ids=kept, tail_ids=tail, **sizes)


def given(tokens: int, experts: int = E, top_k: int = TOP_K, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tokens, H, generator=generator).to(torch.bfloat16),
        torch.rand(tokens, top_k, generator=generator),
        torch.randint(-1, experts, (tokens, top_k), generator=generator, dtype=torch.int32),
    ]


def run(moe: HybridMoE, arguments: list[torch.Tensor], **options: Any) -> torch.Tensor:
    return moe(*map(to_gpu, arguments), **options).as_subclass(torch.Tensor)


def assert_right(layer: PackedMoELayer, found: torch.Tensor, arguments: list[torch.Tensor]) -> None:
    expected = TorchBackend(layer).accumulate(*arguments)
    assert not (found[expected.abs().sum(1) == 0]).any(), "tokens without an active place are exactly zero"
    assert float((found.float() - expected).norm()) <= LIMIT * float(expected.norm())


CASES = {
    "both tiers": (KEPT, TAIL, {}, ONE_GRID, 2 * PREFILL),
    "one expert each": ((3,), (5,), {}, ONE_GRID, 2 * PREFILL),
    "mxfp4": (KEPT, TAIL, {"kept_scale_format": "e8m0_k32"}, ONE_GRID, 2 * PREFILL),
    "narrow tiles": (KEPT, TAIL, {"intermediate": 64}, ONE_GRID, 2 * PREFILL),
    "all kept": (tuple(range(E)), (), {}, ["decode"], PREFILL),
    "all tail": ((), tuple(range(E)), {}, ["decode"], PREFILL),
    "an expert-parallel rank": ((4, 7), (5, 6), {}, ONE_GRID, 2 * PREFILL),
    "a rank with kept only": ((4, 5), (), {}, ["decode"], PREFILL),
    "clamped": (KEPT, TAIL, {"activation": "silu(limit=0.5)"}, ["decode", "decode"], 2 * PREFILL),
    "gpt-oss's": (KEPT, TAIL, {"activation": OAI}, ["decode", "decode"], 2 * PREFILL),
    "no gate": (KEPT, TAIL, {**NO_GATE, "intermediate": 256}, 2 * PREFILL, 2 * PREFILL),
    "no gate, narrow tiles": (KEPT, TAIL, NO_GATE, 2 * PREFILL, 2 * PREFILL),
    "no gate, mxfp4": (KEPT, TAIL, {**NO_GATE, "kept_scale_format": "e8m0_k32"}, 2 * PREFILL, 2 * PREFILL),
    "no gate, an odd number of tiles": (KEPT, TAIL, {**NO_GATE, "intermediate": 384}, 2 * PREFILL, 2 * PREFILL),
    "no gate, all kept": (tuple(range(E)), (), NO_GATE, PREFILL, PREFILL),
    "no gate, all tail": ((), tuple(range(E)), NO_GATE, PREFILL, PREFILL),
    "no gate, an expert-parallel rank": ((4, 7), (5, 6), NO_GATE, 2 * PREFILL, 2 * PREFILL),
}


@pytest.mark.parametrize("case", CASES)
def test_launches_and_results(gpu: Gpu, case: str) -> None:
    kept, tail, options, few, many = CASES[case]
    layer = layer_of(kept, tail, **options)
    moe = HybridMoE(gpu.place(layer), TOP_K, max_tokens=40)
    assert moe.backend == "b12x" and moe.choices[0] == Accepted("b12x")
    for tokens in (1, 2, 3, 8, 9, 16, 33, 40):
        arguments = given(tokens, seed=tokens)
        gpu.launches.clear()
        assert_right(layer, run(moe, arguments), arguments)
        assert gpu.launches == (few if tokens <= 8 else many)


def test_more_experts_than_one_grid_takes(gpu: Gpu) -> None:
    layer = layer_of((0, 299), tuple(range(1, 299)), num_experts=300, intermediate=64)
    moe = HybridMoE(gpu.place(layer), TOP_K, max_tokens=8)
    arguments = given(8, 300)
    gpu.launches.clear()
    assert_right(layer, run(moe, arguments), arguments)
    assert gpu.launches == ["decode", "decode"]


@pytest.mark.parametrize("top_k", [1, 2, 8, 16])
def test_any_top_k(gpu: Gpu, top_k: int) -> None:
    layer = layer_of()
    moe = HybridMoE(gpu.place(layer), top_k, max_tokens=20)
    for tokens in (1, 7, 20):
        arguments = given(tokens, top_k=top_k)
        assert_right(layer, run(moe, arguments), arguments)


@pytest.mark.parametrize("tokens", [1, 4, 9, 12])
@pytest.mark.parametrize("options", [{}, NO_GATE], ids=str)
def test_ids_that_are_not_run(gpu: Gpu, tokens: int, options: dict[str, Any]) -> None:
    layer = layer_of((4, 7), (5, 6), **options)
    moe = HybridMoE(gpu.place(layer), TOP_K, max_tokens=16)
    x, weights, ids = given(tokens)
    ids[:] = torch.tensor([-1, 2, -7], dtype=torch.int32)  # none, another rank's, nonsense
    assert not run(moe, [x, weights, ids]).any()
    strange = ids.clone()
    strange[:, 2] = torch.tensor([E, 1000, 2**31 - 1, -(2**31)] * 3, dtype=torch.int32)[:tokens]
    assert not run(moe, [x, weights, strange]).any()
    ids[:, 1], ids[-1, 2] = 5, 7
    assert_right(layer, run(moe, [x, weights, ids]), [x, weights, ids])


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("max_tokens", [1, 9])
@pytest.mark.parametrize("options", [{}, NO_GATE], ids=str)
def test_an_expert_named_twice_counts_twice(gpu: Gpu, tokens: int, max_tokens: int, options: dict[str, Any]) -> None:
    if tokens > max_tokens:
        return
    layer = layer_of(**options)
    moe = HybridMoE(gpu.place(layer), TOP_K, max_tokens)
    x, weights, ids = given(tokens)
    ids[:] = torch.tensor([4, 4, 2], dtype=torch.int32)
    assert_right(layer, run(moe, [x, weights, ids]), [x, weights, ids])


def test_more_tokens_than_a_chunk(gpu: Gpu) -> None:
    layer = layer_of()
    placed = gpu.place(layer)
    runtime = MoERuntime(RuntimeKey.of(placed, TOP_K), 100, largest_chunk=16)
    moe = HybridMoE(placed, TOP_K, max_tokens=100, runtime=runtime)
    for tokens, launches in ((16, 2 * PREFILL), (40, 4 * PREFILL + ONE_GRID), (48, 6 * PREFILL)):
        arguments = given(tokens)
        gpu.launches.clear()
        assert_right(layer, run(moe, arguments), arguments)
        assert gpu.launches == launches


@pytest.mark.parametrize(("max_tokens", "top_k"), [(70, 3), (64, 8), (33, 16), (5, 1), (17, 5)])
@pytest.mark.parametrize("blocks", [moe_runtime.ROUTE_BLOCKS, ((20, 8), (1 << 30, 64)), ((3, 8), (1 << 30, 32))])
@pytest.mark.parametrize("options", [{}, NO_GATE], ids=str)
def test_nothing_is_compiled_by_a_call(
    gpu: Gpu, max_tokens: int, top_k: int, blocks: tuple[tuple[int, int], ...], options: dict[str, Any]
) -> None:
    layer = gpu.place(layer_of(**options))
    runtime = MoERuntime(RuntimeKey.of(layer, top_k), max_tokens, route_blocks=blocks)
    moe = HybridMoE(layer, top_k, max_tokens, runtime=runtime)
    before = list(gpu.compiled), set(gpu.triton)
    for tokens in range(max_tokens + 1):
        x, weights, ids = given(tokens, top_k=top_k)
        y = run(moe, [x, weights, ids])
        memory = torch.empty(ids.numel() + 1, dtype=torch.int32)
        shifted = memory[1:].view(ids.shape).copy_(ids)  # four bytes off the alignment that Triton compiles for
        assert torch.equal(run(moe, [x, weights, shifted]), y)
    assert (gpu.compiled, gpu.triton) == before


def test_route_blocks(gpu: Gpu) -> None:
    layer = layer_of()
    placed = gpu.place(layer)
    runtime = MoERuntime(RuntimeKey.of(placed, TOP_K), 64, route_blocks=((20, 8), (1 << 30, 64)))
    assert runtime.prefill_sizes() == [(32, 8), (64, 64)]
    moe = HybridMoE(placed, TOP_K, 64, runtime=runtime)
    for tokens in (9, 20, 21, 64):
        arguments = given(tokens)
        assert_right(layer, run(moe, arguments), arguments)
    with pytest.raises(UsageError, match="must end with any number of tokens"):
        MoERuntime(RuntimeKey.of(placed, TOP_K), 64, route_blocks=((20, 8),))


OTHERS = [{"kept_scale_format": "e8m0_k32"}, {"activation": "silu(limit=0.5)"}, {"activation": OAI}, NO_GATE]


@pytest.mark.parametrize("options", [{}, *OTHERS, {**NO_GATE, "intermediate": 384}], ids=str)
def test_launches_are_b12x_s_own(gpu: Gpu, options: dict[str, Any]) -> None:
    """The same compiled kernels, in the same order, with the same arguments, as b12x's public functions give them."""
    placed = gpu.place(layer_of(**options))
    runtime = MoERuntime(RuntimeKey.of(placed, TOP_K), 100, route_blocks=((20, 8), (40, 32), (1 << 30, 64)))
    backend = B12xBackend(placed, TOP_K, 100, runtime)
    first = 9 if backend.one_grid is None and backend.runtime.has_decode else 1
    assert (backend.one_grid_problem is None) == ("activation" not in options)
    for tokens in (*range(first, 10), 16, 17, 20, 21, 32, 33, 40, 41, 64, 65, 100):
        x, weights, ids, out = map(to_gpu, (*given(tokens), torch.empty(tokens, H, dtype=torch.bfloat16)))
        ways = []
        for call in (lambda: backend(x, weights, ids, out), plain_call(backend, (x, weights, ids), out)):  # noqa: B023
            gpu.calls.clear()
            call()
            ways.append([(id(kernel), *map(comparable, arguments)) for kernel, arguments in gpu.calls])
        assert ways[0] == ways[1] and len(ways[0]) == (1 if tokens <= 8 and backend.one_grid else 4)


def test_the_one_grid_code_is_not_that_of_another_split(gpu: Gpu) -> None:
    # Same layer size and tail: b12x's own key would be the same, its code would skip kept experts.
    for kept in ((0,), (0, 1), (0, 1, 7)):
        layer = layer_of(kept, (2, 3))
        arguments = given(4)
        moe = HybridMoE(gpu.place(layer), TOP_K, 8)
        assert_right(layer, run(moe, arguments), arguments)
    assert sum("hybrid" in key for key in gpu.compiled) == 3


def test_code_with_and_without_a_gate_is_told_apart(gpu: Gpu) -> None:
    """By b12x's keys of compiled code, also those on disk: for the same H and I, and the same rows of w13."""
    for options in ({"intermediate": 256}, {**NO_GATE, "intermediate": 256}, {**NO_GATE, "intermediate": 512}):
        layer = layer_of(**options)
        moe = HybridMoE(gpu.place(layer), TOP_K, 16)
        arguments = given(16)
        assert_right(layer, run(moe, arguments), arguments)
    fused = [key for key in gpu.compiled if "w4a16_fused_moe" in key and "hybrid" not in key]
    assert len(fused) == len(set(fused)) == 3 * 2
    assert [("relu2" in key) for key in fused] == 2 * [False] + 4 * [True]


def test_why_there_is_no_one_grid(gpu: Gpu) -> None:
    problems = {
        "experts of both tiers": layer_of((), tuple(range(E)), **NO_GATE),
        "only experts with a gate": layer_of(**NO_GATE),
        "no swiglu_limit": layer_of(activation=OAI),
    }
    for problem, layer in problems.items():
        assert problem in str(B12xBackend(gpu.place(layer), TOP_K, 8).one_grid_problem)
    b12x, _ = b12x_probe.kernels()
    with pytest.raises(ValueError, match="hybrid W4A16 requires a gated activation"):
        b12x.compile_w4a16_fused_moe_hybrid(
            size_m=8, hidden_size=H, intermediate_size=INNER, tier0_num_experts=2, tier1_num_experts=6, top_k=TOP_K,
            activation="relu2", map_slots=E, sms=4, max_shared_mem=232_448, force_tile_config=(64, 128, 64, 128),
        )  # fmt: skip


def test_layers_share_a_runtime(gpu: Gpu) -> None:
    splits = [(KEPT, TAIL), ((0,), tuple(range(1, E))), (tuple(range(E)), ()), ((), tuple(range(E)))]
    layers = [layer_of(kept, tail, seed=i) for i, (kept, tail) in enumerate(splits)]
    moes = [HybridMoE(gpu.place(layer), TOP_K, 32) for layer in layers]
    backends = [moe._run for moe in moes]
    assert len({id(backend.runtime) for backend in backends}) == 1
    assert len({id(backend.runtime.scratch.cache13) for backend in backends}) == 1
    before = list(gpu.compiled)
    twin = HybridMoE(gpu.place(layer_of(seed=9)), TOP_K, 32)
    assert gpu.compiled == before and twin._run.runtime is backends[0].runtime
    for tokens in (4, 20):
        for layer, moe in zip(layers, moes, strict=True):
            arguments = given(tokens)
            assert_right(layer, run(moe, arguments), arguments)
    assert HybridMoE(gpu.place(layers[0]), TOP_K, 16)._run.runtime is not backends[0].runtime
    runtime = MoERuntime(RuntimeKey.of(moes[0].layer, TOP_K), 32)
    assert HybridMoE(moes[0].layer, TOP_K, 16, runtime=runtime)._run.runtime is runtime


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 4}, r"made for another top_k \(expected 4, found 3\)"),
        ({"max_tokens": 33}, r"too small \(expected max_tokens of at least 33, found 32\)"),
        ({"hidden": 512}, r"made for another hidden_size \(expected 512, found 256\)"),
        ({"num_experts": 16}, "made for another num_experts"),
        ({"activation": "silu(limit=2)"}, "made for another activation"),
    ],
)
def test_a_runtime_of_other_sizes(gpu: Gpu, change: dict[str, Any], message: str) -> None:
    runtime = MoERuntime(RuntimeKey.of(gpu.place(layer_of()), TOP_K), 32)
    sizes = {"top_k": change.pop("top_k", TOP_K), "max_tokens": change.pop("max_tokens", 32)}
    with pytest.raises(UsageError, match=message):
        HybridMoE(gpu.place(layer_of(**change)), runtime=runtime, **sizes)


def test_results_and_where_they_lie(gpu: Gpu) -> None:
    layer = layer_of()
    moe = HybridMoE(gpu.place(layer), TOP_K, 16)
    arguments = [given(tokens, seed=tokens) for tokens in (4, 16, 9, 4)]
    results = [run(moe, given) for given in arguments]  # more than there are buffers
    for result, given_ in zip(results, arguments, strict=True):
        assert_right(layer, result, given_)
    pool = {buffer.data_ptr() for buffer in moe._run.runtime.outputs._buffers}
    assert [result.data_ptr() in pool for result in results] == [True, True, False, False]
    results.clear()
    view = run(moe, arguments[0])[1:].t()
    assert run(moe, arguments[1]).data_ptr() != view.data_ptr() - 2 * H
    gpu.capturing = True
    assert run(moe, arguments[0]).data_ptr() not in pool
    gpu.capturing = False
    out = torch.full((16, H), 9.0, dtype=torch.bfloat16)
    assert run(moe, arguments[1], out=to_gpu(out)).data_ptr() == out.data_ptr()
    assert_right(layer, out, arguments[1])


def test_arguments_the_kernels_cannot_read(gpu: Gpu) -> None:
    moe = HybridMoE(gpu.place(layer_of()), TOP_K, 16)
    x, weights, ids = map(to_gpu, given(4))
    memory = to_gpu(torch.zeros(5 * H, dtype=torch.bfloat16))
    with pytest.raises(UsageError, match="not aligned"):
        moe(memory[4 : 4 + 4 * H].view(4, H), weights, ids)
    for out in (x, memory[: 4 * H].view(4, H)):
        with pytest.raises(UsageError, match="out overlaps x"):
            moe(memory[H:].view(4, H) if out is not x else x, weights, ids, out=out)
    moe(memory[:H].view(1, H), weights[:1], ids[:1], out=memory[H : 2 * H].view(1, H))
    with pytest.raises(UsageError, match="out: wrong shape"):
        moe(x, weights, ids, out=memory[: 3 * H].view(3, H))


def test_another_stream_waits_for_the_last_one(gpu: Gpu) -> None:
    moe = HybridMoE(gpu.place(layer_of()), TOP_K, 16)
    first, second = gpu.stream, Stream(7)
    run(moe, given(1))
    gpu.stream = second
    run(moe, given(1))
    run(moe, given(9))
    assert (first.waited, second.waited) == ([], [0])
    gpu.stream, gpu.capturing = first, True
    run(moe, given(1))
    assert first.waited == []
    gpu.capturing = False
    run(moe, given(1))
    assert first.waited == [7]


def broken(layer: PackedMoELayer, tier: str = "tail", **fields: torch.Tensor) -> PackedMoELayer:
    return replace(layer, **{tier: replace(getattr(layer, tier), **fields)})  # type: ignore[arg-type]


def test_layers_that_are_not_what_they_say(gpu: Gpu) -> None:
    layer = layer_of()
    assert layer.tail is not None and layer.kept is not None
    odd = torch.empty(layer.tail.w2.numel() + 1, dtype=torch.int32)[1:].view(layer.tail.w2.shape)
    wrong = {
        "tail.w13 is not what": broken(layer, w13=layer.tail.w13[:, :-1].contiguous()),
        "tail.w13_scale is not what": broken(layer, w13_scale=layer.tail.w13_scale.to(torch.int8)),
        "kept.w2_global_scale is not what": broken(layer, "kept", w2_global_scale=layer.kept.w2_global_scale[:1]),
        "tail.w2 is not aligned": broken(layer, w2=odd),
        "expert ids are not distinct": broken(layer, expert_ids=layer.tail.expert_ids + 1),
    }
    for message, bad in wrong.items():
        with pytest.raises(UsageError, match=message):
            HybridMoE(gpu.place(bad), TOP_K, 16, backend="b12x")
    fine = broken(layer, w2_global_scale=torch.cat([torch.zeros(1), layer.tail.w2_global_scale])[1:])
    arguments = given(4)
    assert_right(layer, run(HybridMoE(gpu.place(fine), TOP_K, 16), arguments), arguments)


def test_layers_the_kernels_do_not_take(gpu: Gpu) -> None:
    layer = gpu.place(layer_of())
    levels = replace(layer.geometry, nf3_levels=(-1.0, -0.6, -0.3, -0.1, 0.1, 0.3, 0.6, 1.0))
    for reason, bad in {
        "says tiles .* packed for": replace(layer, tiles=(64, 128, 64, 128)),
        "NF3 levels .* not those built into": replace(layer, geometry=levels),
    }.items():
        with pytest.raises(EnvironmentFailure, match=reason):
            HybridMoE(bad, TOP_K, 16, backend="b12x")
        with pytest.warns(RuntimeWarning, match="slow torch backend"):
            moe = HybridMoE(bad, TOP_K, 16)
        assert moe.backend == "torch" and isinstance(moe.choices[0], Rejected)
    no_gate = gpu.place(layer_of(**NO_GATE))
    for reason, bad in {
        "'silu' is of experts with a gate": replace(no_gate, geometry=replace(no_gate.geometry, activation="silu")),
        "'relu2' is of experts without a gate": replace(layer, geometry=replace(layer.geometry, activation="relu2")),
        "'gelu' is not run by b12x": replace(layer, geometry=replace(layer.geometry, activation="gelu")),
    }.items():
        with pytest.raises(EnvironmentFailure, match=f"^layer 0 rank 0: the backend 'b12x' .*{reason}"):
            HybridMoE(bad, TOP_K, 16, backend="b12x")
    kept_only = gpu.place(layer_of(tuple(range(E)), ()))
    assert HybridMoE(replace(kept_only, geometry=replace(levels, kept_scale_format="e4m3_k16"))).backend == "b12x"


@pytest.mark.parametrize("case", ["both tiers", "narrow tiles", "mxfp4", "all kept", "no gate", "no gate, mxfp4"])
def test_a_gpu_nobody_has_tried_is_tested_first(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    kept, tail, options, _, _ = CASES[case]
    layer = gpu.place(layer_of(kept, tail, **options))
    gpu.capability = (10, 0)

    def on_the_gpu(*sizes: Any, device: torch.device, **options: Any) -> PackedMoELayer:
        return gpu.place(random_layer(*sizes, **options))

    monkeypatch.setattr(b12x_backend, "random_layer", on_the_gpu)
    assert HybridMoE(layer, TOP_K, 16).backend == "b12x"
    few = "one grid" if layer.geometry.gated else "prefill"
    assert gpu.launches.count(few) >= 2
    b12x_backend.self_test.cache_clear()
    gpu.bend = 1.02
    with pytest.raises(EnvironmentFailure, match=r"capability 10\.0, and its self-test gave wrong results"):
        HybridMoE(layer, TOP_K, 16, backend="b12x")
    b12x_backend.self_test.cache_clear()
    gpu.bend, gpu.fails = 1.0, RuntimeError("no kernel image")
    with pytest.raises(EnvironmentFailure, match="self-test failed: RuntimeError: no kernel image"):
        HybridMoE(layer, TOP_K, 16, backend="b12x")
    gpu.fails, gpu.capability = None, (8, 9)
    with pytest.raises(EnvironmentFailure, match=r"compute capability 8\.9; the kernels need 9\.0 or newer"):
        HybridMoE(layer, TOP_K, 16, backend="b12x")


def test_what_fails_while_it_is_built(gpu: Gpu) -> None:
    layer = gpu.place(layer_of())
    gpu.fails = RuntimeError("spills to local memory")
    with pytest.raises(EnvironmentFailure, match=r"'b12x' cannot run .* built: RuntimeError: spills to local memory"):
        HybridMoE(layer, TOP_K, 16, backend="b12x")
    with pytest.warns(RuntimeWarning, match="spills to local memory"):
        assert HybridMoE(layer, TOP_K, 16).backend == "torch"
    gpu.fails = torch.cuda.OutOfMemoryError("tried to allocate 9 GiB")
    with pytest.raises(EnvironmentFailure, match="device memory is not enough for the scratch of b12x"):
        HybridMoE(layer, TOP_K, 16)


def test_gradients_are_not_recorded(gpu: Gpu) -> None:
    moe = HybridMoE(gpu.place(layer_of()), TOP_K, 16)
    x, weights, ids = map(to_gpu, given(9))
    assert not moe(x.requires_grad_(), weights.requires_grad_(), ids).requires_grad


def test_made_in_inference_mode_and_used_outside(gpu: Gpu) -> None:
    with torch.inference_mode():
        moe = HybridMoE(gpu.place(layer_of()), TOP_K, 16)
    run(moe, given(9))
    with torch.inference_mode():
        run(moe, given(9))
