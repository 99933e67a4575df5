"""HybridMoE with b12x on a GPU against the float32 product of dequantised weights: packs, shapes, routings, layers."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hybrid_pack
from benchmarks.b12x_calls import plain_call
from hybrid_pack import EnvironmentFailure, UsageError
from hybrid_pack.convert import convert
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.plan import make_plan
from hybrid_pack.runtime import HybridMoE, MoERuntime, b12x_backend
from hybrid_pack.runtime.moe_runtime import RuntimeKey
from hybrid_pack.runtime.random_layer import random_layer
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec, write_checkpoint
from tests.gpu.support import LIMIT, TOKENS, Arguments, check, expected_of, given, note, relative
from tests.runtime.dialects import MAPPED, MTP, Packs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("b12x")]

HIDDEN, EXPERTS, TOP_K = 256, 8, 3

SMALL = [("nvfp4", 1), ("nvfp4", 8), ("mxfp4", 1), ("mxfp4", 8), ("kquant", 2), ("one_kept", 2), ("all_tail", 2)]
"""(dialect, tp) with H 256 and I 512/tp: tiles (64, 256, 64, 256), or at tp 8 (64, 128, 64, 128)."""


@pytest.mark.parametrize(("dialect", "tp"), SMALL)
def test_packs(packs: Packs, dialect: str, tp: int) -> None:
    pack = hybrid_pack.open_pack(packs.pack(dialect, tp))
    layer = pack.load_layer(MAPPED, tp - 1, device="cuda")
    moe = HybridMoE(layer, TOP_K, max(TOKENS))
    distances = {m: check(moe, given(m, HIDDEN, EXPERTS, TOP_K), f"{dialect} tp {tp}") for m in TOKENS}
    note("relative L2", pack=dialect, tp=tp, tiles=layer.tiles, by_tokens=distances)


@pytest.mark.parametrize("tp", [1, 8])
def test_the_mtp_layer_is_all_kept(packs: Packs, tp: int) -> None:
    layer = hybrid_pack.open_pack(packs.pack("mxfp4", tp)).load_layer(MTP, 0, device="cuda")
    assert layer.tail is None and layer.geometry.kept_scale_format == "e4m3_k16"
    moe = HybridMoE(layer, TOP_K, max(TOKENS))
    for tokens in TOKENS:
        check(moe, given(tokens, HIDDEN, EXPERTS, TOP_K), "MTP")


def test_the_shape_of_kimi(packs: Packs) -> None:
    layer = random_layer(3584, 192, 16, (1, 5), tuple(i for i in range(16) if i not in (1, 5)), device="cuda")
    assert layer.tiles == (128, 64, 64, 128)
    moe = HybridMoE(layer, 6, 64)
    for tokens in (1, 8, 9, 64):
        check(moe, given(tokens, 3584, 16, 6), "Kimi-K3 TP16")


@pytest.mark.parametrize("kept_format", ["nvfp4", "mxfp4"])
def test_glm_5_2_tp4(tmp_path: Path, kept_format: Any) -> None:
    spec = Spec(
        hidden=6144, intermediate=512, num_experts=32, kept=8, top_k=8, moe_layers=(3,), dense_layers=(),
        mtp_layer=False, kept_format=kept_format,
    )  # fmt: skip
    write_checkpoint(tmp_path / "source", spec)
    convert(make_plan(open_checkpoint(tmp_path / "source"), Topology(1, 1)), tmp_path / "pack")
    layer = hybrid_pack.open_pack(tmp_path / "pack").load_layer(3, device="cuda")
    moe = HybridMoE(layer, 8, max(TOKENS))
    distances = {m: check(moe, given(m, 6144, 32, 8), f"GLM-5.2 TP4 {kept_format}") for m in TOKENS}
    note("relative L2", pack=f"GLM-5.2 TP4, 32 experts, {kept_format}", by_tokens=distances)


def test_glm_5_2_tp4_with_all_its_experts() -> None:
    kept = tuple(range(1, 256, 4))
    tail = tuple(i for i in range(256) if i % 4 != 1)
    layer = random_layer(6144, 512, 256, kept, tail, device="cuda")
    moe = HybridMoE(layer, 8, max(TOKENS))
    distances = {m: check(moe, given(m, 6144, 256, 8), "GLM-5.2 TP4, 256 experts") for m in TOKENS}
    note("relative L2", pack="GLM-5.2 TP4, 256 experts, random", by_tokens=distances)
    few = given(64, 6144, 2, 8, lowest=0)  # all tokens visit two experts
    check(moe, few, "two experts only")


def dense(layer: Any, arguments: Arguments, weights: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """f32 [M, H]: every expert for every token, which is faster for a few experts and waits for nothing."""
    x, topk_weights, ids = arguments
    y = torch.zeros(x.shape, device="cuda")
    for expert, (gate_up, down) in enumerate(weights):
        gate, up = (x.float() @ gate_up.T).chunk(2, dim=1)
        share = (topk_weights * (ids == expert)).sum(1, keepdim=True)
        y += torch.nn.functional.silu(gate) * up @ down.T * share
    return y


def test_a_thousand_routings() -> None:
    layer = random_layer(HIDDEN, 256, EXPERTS, (0, 3, 6), (1, 2, 4, 5, 7), device="cuda")
    moe, top_k = HybridMoE(layer, 4, 64), 4
    weights = [layer.dequantize(expert) for expert in range(EXPERTS)]
    sizes = torch.randint(1, 65, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    distances, stray = [], []
    for seed, tokens in enumerate(sizes):
        if seed % 2:
            tokens = tokens % 8 + 1  # the one-grid kernel has half of them
        arguments = given(tokens, HIDDEN, EXPERTS, top_k, seed, lowest=-1 - seed % 9)
        if seed % 3 == 0:
            arguments[2][:, 1] = arguments[2][:, 0]
        found, expected = moe(*arguments).float(), dense(layer, arguments, weights)
        active = (arguments[2] >= 0).any(1)
        stray.append(found[~active].abs().sum())
        distances.append((found - expected).norm() / expected.norm().clamp_min(1e-30))
    worst = float(torch.stack(distances).max())
    note("a thousand routings", worst_relative_l2=worst)
    assert worst <= LIMIT and float(torch.stack(stray).sum()) == 0


@pytest.mark.parametrize("tokens", [1, 8, 9, 64])
def test_ids_that_are_not_experts_here(tokens: int) -> None:
    layer = random_layer(HIDDEN, 256, EXPERTS, (4, 7), (5, 6), device="cuda")
    moe = HybridMoE(layer, TOP_K, 64)
    x, weights, ids = given(tokens, HIDDEN, EXPERTS, TOP_K)
    nowhere = torch.tensor([-1, 0, 3, 8, 1000, 2**31 - 1, -(2**31)], dtype=torch.int32, device="cuda")
    strange = nowhere[torch.randint(0, 7, (tokens, TOP_K), device="cuda")]
    assert not moe(x, weights, strange).any()
    mixed = torch.where(ids >= 4, ids, strange)
    expected = expected_of(layer, (x, weights, torch.where(ids >= 4, ids, -1)))
    assert relative(moe(x, weights, mixed), expected) <= LIMIT


def test_no_tokens_and_one_place() -> None:
    layer = random_layer(HIDDEN, 256, EXPERTS, (0, 3), (1, 2, 4, 5, 6, 7), device="cuda")
    moe = HybridMoE(layer, 1, 1)
    x, weights, ids = given(1, HIDDEN, EXPERTS, 1, lowest=0)
    check(moe, (x, weights, ids))
    assert moe(x[:0], weights[:0], ids[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("activation", ["silu(limit=0.5)", "silu(limit=10.0)"])
def test_clamped_silu(activation: str) -> None:
    layer = random_layer(
        HIDDEN,
        256,
        EXPERTS,
        (0, 3, 6),
        (1, 2, 4, 5, 7),
        activation=activation,
        device="cuda",
        kept_scale_format="e8m0_k32",
    )
    moe = HybridMoE(layer, TOP_K, 64)
    for tokens in (1, 8, 9, 64):
        check(moe, given(tokens, HIDDEN, EXPERTS, TOP_K), activation)


def test_layers_of_different_splits_share_a_runtime() -> None:
    splits: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((0, 3), (1, 2, 4, 5, 6, 7)), ((5,), (0, 1, 2, 3, 4, 6, 7)), (tuple(range(8)), ()), ((), tuple(range(8))),
        ((4, 7), (5, 6)), ((4, 6, 7), (5,)),
    ]  # fmt: skip
    layers = [random_layer(HIDDEN, 256, EXPERTS, *split, device="cuda", seed=i) for i, split in enumerate(splits)]
    runtime = MoERuntime(RuntimeKey.of(layers[0], TOP_K), 300)
    moes = [HybridMoE(layer, TOP_K, 300, runtime=runtime) for layer in layers]
    before = torch.cuda.memory_allocated()
    twins = [HybridMoE(layer, TOP_K, 300, runtime=runtime) for layer in layers for _ in range(10)]
    assert torch.cuda.memory_allocated() - before < 60 * 65536, "expert maps and nothing else"
    for tokens in (4, 8, 300, 4):
        for moe in (*moes, twins[0], twins[-1]):
            check(moe, given(tokens, HIDDEN, EXPERTS, TOP_K), str(moe.layer))


def test_the_default_runtime_is_shared_and_goes_with_its_layers() -> None:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    layers = [random_layer(HIDDEN, 256, EXPERTS, (0, 3), (1, 2, 4, 5, 6, 7), device="cuda", seed=i) for i in range(8)]
    weights = torch.cuda.memory_allocated() - before
    moes = [HybridMoE(layer, TOP_K, 4096) for layer in layers]
    runtime = moes[0]._run.runtime  # type: ignore[attr-defined]
    used = torch.cuda.memory_allocated() - before - weights
    assert runtime.nbytes <= used <= runtime.nbytes + 8 * 65536
    note("scratch", hidden=HIDDEN, intermediate=256, top_k=TOP_K, max_tokens=4096, bytes=runtime.nbytes)
    del moes, layers, runtime
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + 65536


def test_more_tokens_than_a_chunk() -> None:
    layer = random_layer(HIDDEN, 256, EXPERTS, (0, 3), (1, 2, 4, 5, 6, 7), device="cuda")
    moe = HybridMoE(layer, 2, 20_000)
    for tokens in (8192, 8193, 8196, 16384 + 700):
        check(moe, given(tokens, HIDDEN, EXPERTS, 2), "chunks")


def test_wrong_layers_are_refused() -> None:
    layer = random_layer(HIDDEN, 256, EXPERTS, (0, 3), (1, 2, 4, 5, 6, 7), device="cuda")
    with pytest.raises(EnvironmentFailure, match=r"says tiles \(64, 128, 64, 128\), but .* are packed for \(64, 256"):
        HybridMoE(replace(layer, tiles=(64, 128, 64, 128)), TOP_K, backend="b12x")
    levels = replace(layer.geometry, nf3_levels=(-1.0, -0.6, -0.3, -0.1, 0.1, 0.3, 0.6, 1.0))
    with pytest.raises(EnvironmentFailure, match="not those built into the kernel"):
        HybridMoE(replace(layer, geometry=levels), TOP_K, backend="b12x")
    assert layer.tail is not None
    short = replace(layer, tail=replace(layer.tail, w2=layer.tail.w2[:, :-3].contiguous()))
    with pytest.raises(UsageError, match=r"tail\.w2 is not what the layer's geometry says"):
        HybridMoE(short, TOP_K, backend="b12x")
    on_cpu = random_layer(HIDDEN, 256, EXPERTS, (0, 3), (1, 2, 4, 5, 6, 7))
    with pytest.raises(EnvironmentFailure, match="load it with device='cuda'"):
        HybridMoE(on_cpu, TOP_K, backend="b12x")


@pytest.mark.parametrize("kept_scale_format", ["e4m3_k16", "e8m0_k32"])
@pytest.mark.parametrize("tiles", list(b12x_backend._SELF_TEST_SIZES), ids=str)
def test_the_self_test_for_other_gpus_passes_here(tiles: Any, kept_scale_format: str) -> None:
    if tiles == (128, 64, 64, 128) and kept_scale_format == "e8m0_k32":
        return
    assert b12x_backend.self_test(torch.device("cuda", 0), tiles, kept_scale_format) is None


def test_ours_and_b12x_s_own_calls_agree() -> None:
    layer = random_layer(HIDDEN, 256, EXPERTS, (0, 3), (1, 2, 4, 5, 6, 7), device="cuda")
    moe = HybridMoE(layer, TOP_K, 1024)
    for tokens in (*range(1, 10), 33, 128, 300, 700):
        arguments = given(tokens, HIDDEN, EXPERTS, TOP_K)
        other = torch.empty_like(arguments[0])
        plain_call(moe._run, arguments, other)()  # type: ignore[arg-type]
        assert relative(moe(*arguments), other.float()) < 5e-3
