"""HybridMoE, summed over ranks, against the float64 product of the source's own tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import hybrid_pack
from hybrid_pack.runtime import HybridMoE, Pack
from hybrid_pack.runtime.torch_backend import TorchBackend
from tests.reference.floats import F64
from tests.reference.moe import moe
from tests.runtime.dialects import DIALECTS, MAPPED, Packs, spec
from tests.runtime.sources import experts_of

HIDDEN, EXPERTS, TOP_K = 256, 8, 3
F32_LIMIT, BF16_LIMIT = 1e-6, 4e-3
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(tokens: int, seed: int = 0) -> Inputs:
    """Random tokens; about one place in eight is inactive, and some tokens name an expert twice."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=rng).to(torch.bfloat16)
    ids = torch.randint(0, EXPERTS, (tokens, TOP_K), generator=rng, dtype=torch.int32)
    ids[torch.rand(tokens, TOP_K, generator=rng) < 0.125] = -1
    return x, torch.randn(tokens, TOP_K, generator=rng), ids


def expected(root: Path, layer: int, given: Inputs) -> F64:
    experts = {e: (np.concatenate([w.gate, w.up]), w.down) for e, w in experts_of(root)[layer].items()}
    x, weights, ids = given
    return moe(x.double().numpy(), experts, weights.double().numpy(), ids.numpy())


def distance(y: torch.Tensor, reference: F64) -> float:
    return float(np.linalg.norm(y.double().numpy() - reference) / np.linalg.norm(reference))


def over_ranks(pack: Pack, layer: int, given: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of the ranks' float32 accumulations, and of their BF16 results."""
    exact, rounded = torch.zeros_like(given[0], dtype=torch.float64), torch.zeros_like(given[0], dtype=torch.float64)
    for rank in range(pack.topology.ranks):
        loaded = pack.load_layer(layer, rank)
        exact += TorchBackend(loaded).accumulate(*given)
        y = HybridMoE(loaded, top_k=TOP_K)(*given)
        assert y.dtype == torch.bfloat16 and y.shape == given[0].shape
        rounded += y
    return exact, rounded


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_sum_over_ranks(packs: Packs, dialect: str, tp: int, ep: int) -> None:
    pack = hybrid_pack.open_pack(packs.pack(dialect, tp, ep))
    for layer in pack.layers:
        given = inputs(17, layer)
        reference = expected(packs.source(dialect), layer, given)
        exact, rounded = over_ranks(pack, layer, given)
        assert distance(exact, reference) < F32_LIMIT
        assert distance(rounded, reference) < BF16_LIMIT


@pytest.mark.parametrize("tokens", [1, 3, 200])
def test_number_of_tokens(packs: Packs, tokens: int) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4", 2, 2))
    given = inputs(tokens, tokens)
    exact, rounded = over_ranks(pack, MAPPED, given)
    reference = expected(packs.source("nvfp4"), MAPPED, given)
    assert distance(exact, reference) < F32_LIMIT
    assert distance(rounded, reference) < BF16_LIMIT


def test_a_token_is_computed_alone_as_in_a_batch(packs: Packs) -> None:
    moe_layer = HybridMoE(hybrid_pack.open_pack(packs.pack("nvfp4")).load_layer(MAPPED), top_k=TOP_K)
    x, weights, ids = inputs(40)
    together = moe_layer(x, weights, ids)
    for token in (0, 17, 39):
        part = slice(token, token + 1)
        torch.testing.assert_close(moe_layer(x[part], weights[part], ids[part]), together[part], rtol=1e-2, atol=1e-3)


def test_repeated_ids_count_each_time(packs: Packs) -> None:
    backend = TorchBackend(hybrid_pack.open_pack(packs.pack("nvfp4")).load_layer(MAPPED))
    x, _, _ = inputs(2)
    ids = torch.tensor([[5, 5, 5], [2, 7, 2]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.25, -1.0], [1.0, 2.0, 3.0]])
    reference = expected(packs.source("nvfp4"), MAPPED, (x, weights, ids))
    assert distance(backend.accumulate(x, weights, ids), reference) < F32_LIMIT
    once = torch.tensor([[5, -1, -1], [2, 7, -1]], dtype=torch.int32)
    merged = backend.accumulate(x, torch.tensor([[-0.25, 9.0, 9.0], [4.0, 2.0, 9.0]]), once)
    torch.testing.assert_close(backend.accumulate(x, weights, ids), merged)


def test_nothing_active_is_zero_even_for_tokens_that_are_not_numbers(packs: Packs) -> None:
    moe_layer = HybridMoE(hybrid_pack.open_pack(packs.pack("nvfp4")).load_layer(MAPPED), top_k=TOP_K)
    x = torch.full((3, HIDDEN), torch.nan, dtype=torch.bfloat16)
    y = moe_layer(x, torch.full((3, TOP_K), torch.nan), torch.full((3, TOP_K), -1, dtype=torch.int32))
    assert torch.equal(y, torch.zeros_like(x))


def test_one_bad_token_stays_alone(packs: Packs) -> None:
    moe_layer = HybridMoE(hybrid_pack.open_pack(packs.pack("nvfp4")).load_layer(MAPPED), top_k=TOP_K)
    x, weights, ids = inputs(9)
    ids[:] = torch.tensor([0, 1, 2], dtype=torch.int32)
    good = moe_layer(x, weights, ids)
    x[4] = torch.inf
    bad = moe_layer(x, weights, ids)
    assert not bad[4].isfinite().any()
    keep = torch.arange(9) != 4
    assert torch.equal(bad[keep], good[keep])


def test_experts_of_other_ranks_contribute_nothing(packs: Packs) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4", 1, 2))
    x, weights, _ = inputs(4)
    for rank in (0, 1):
        loaded = pack.load_layer(MAPPED, rank)
        assert loaded.expert_ids == tuple(range(4 * rank, 4 * rank + 4))
        elsewhere = torch.tensor([[(4 * rank + 4 + i) % 8 for i in range(TOP_K)]] * 4, dtype=torch.int32)
        assert not HybridMoE(loaded, top_k=TOP_K)(x, weights, elsewhere).any()


def test_ranks_with_an_empty_tier_are_among_those_tested(packs: Packs) -> None:
    one_kept = hybrid_pack.open_pack(packs.pack("one_kept", 1, 2))
    tiers = [one_kept.load_layer(MAPPED, rank) for rank in (0, 1)]
    assert sorted((t.kept is None, t.tail is None) for t in tiers) == [(False, False), (True, False)]
    mtp = hybrid_pack.open_pack(packs.pack("mxfp4")).load_layer(2)
    assert mtp.tail is None and mtp.geometry.kept_scale_format == "e4m3_k16"  # though the mapped layer is MXFP4
    all_tail = hybrid_pack.open_pack(packs.pack("all_tail")).load_layer(MAPPED)
    assert all_tail.kept is None and all_tail.geometry.kept_scale_format is None


def test_clamped_activation(packs: Packs) -> None:
    limit = 0.25
    source = packs.source("clamped", spec(family=1, mtp_layer=False), swiglu_limit=limit)
    given = inputs(12)
    x, weights, ids = given
    reference = np.zeros((12, HIDDEN))
    clamped = 0
    for token, (row, chosen) in enumerate(zip(x.double().numpy(), ids.tolist(), strict=True)):
        for place, expert in enumerate(chosen):
            if expert >= 0:
                w = experts_of(source)[MAPPED][expert]
                gate, up = w.gate @ row, w.up @ row
                clamped += int((gate > limit).sum() + (np.abs(up) > limit).sum())
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
                reference[token] += float(weights[token, place]) * (w.down @ (gate / (1 + np.exp(-gate)) * up))
    assert clamped > 1000
    for tp in (1, 2):
        pack = hybrid_pack.open_pack(packs.pack("clamped", tp))
        assert pack.manifest.layout.activation == f"silu(limit={limit})"
        exact, rounded = over_ranks(pack, MAPPED, given)
        assert distance(exact, reference) < F32_LIMIT
        assert distance(rounded, reference) < BF16_LIMIT
