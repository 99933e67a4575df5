"""PackedMoELayer.dequantize against the source's own tensors: the float64 weight rounded to float32, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hybrid_pack
from hybrid_pack import UsageError
from tests.reference.floats import F64
from tests.runtime.dialects import DIALECTS, MAPPED, Packs, spec
from tests.runtime.sources import experts_of


def assert_same_bits(found: torch.Tensor, expected: F64) -> None:
    assert found.dtype == torch.float32 and tuple(found.shape) == expected.shape
    assert found.numpy().tobytes() == expected.astype(np.float32).tobytes()


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 2), (8, 1)])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_equals_the_source(packs: Packs, dialect: str, tp: int, ep: int) -> None:
    pack = hybrid_pack.open_pack(packs.pack(dialect, tp, ep))
    for layer, experts in experts_of(packs.source(dialect)).items():
        held = []
        for rank in range(pack.topology.ranks):
            loaded = pack.load_layer(layer, rank)
            for expert in loaded.expert_ids:
                gate_up, down = loaded.dequantize(expert)
                expected_gate_up, expected_down = experts[expert].share(tp, pack.topology.tp_rank(rank))
                assert_same_bits(gate_up, expected_gate_up)
                assert_same_bits(down, expected_down)
                held.append(expert)
        assert sorted(held) == sorted(list(experts) * tp)


@pytest.mark.parametrize("dialect", ["mxfp4", "deepseek_v4"])
def test_mxfp4_has_nothing_to_round(packs: Packs, dialect: str) -> None:
    layer = hybrid_pack.open_pack(packs.pack(dialect)).load_layer(MAPPED)
    assert layer.kept is not None
    for expert in layer.kept.expert_ids.tolist():
        expected = experts_of(packs.source(dialect))[MAPPED][expert].share(1, 0)
        for found, exact in zip(layer.dequantize(expert), expected, strict=True):
            assert np.array_equal(found.double().numpy(), exact)


def test_levels_of_the_checkpoint_and_of_the_kernel(packs: Packs) -> None:
    levels = (-1.0, -0.7, -0.4, -0.1, 0.15, 0.3, 0.65, 0.9)
    packs.source("levels", spec(mtp_layer=False), {"nf3_levels": list(levels)})
    layer = hybrid_pack.open_pack(packs.pack("levels")).load_layer(MAPPED)
    assert layer.geometry.nf3_levels == levels and layer.tail is not None and layer.kept is not None
    rounded = tuple(torch.tensor(levels).to(torch.bfloat16).tolist())
    assert rounded != levels
    expert = int(layer.tail.expert_ids[1])
    for choice, book in (("manifest", levels), ("bfloat16", rounded)):
        expected = experts_of(packs.source("levels"), book)[MAPPED][expert].share(1, 0)
        found = layer.dequantize(expert, levels=choice)
        assert_same_bits(found[0], expected[0])
        assert_same_bits(found[1], expected[1])
        if choice == "bfloat16":  # 8 bits of level times 4 of scale fit float32
            assert np.array_equal(found[0].double().numpy(), expected[0])
    kept = int(layer.kept.expert_ids[0])
    for plain, same in zip(layer.dequantize(kept), layer.dequantize(kept, levels="bfloat16"), strict=True):
        assert torch.equal(plain, same)


def test_groups_with_zero_scale_are_zero(packs: Packs) -> None:
    layer = hybrid_pack.open_pack(packs.pack("nvfp4")).load_layer(MAPPED)
    assert layer.tail is not None
    zero_groups = 0
    for expert in layer.tail.expert_ids.tolist():
        groups = layer.dequantize(expert)[0].unflatten(1, (-1, 32))
        zero_groups += int((groups == 0).all(-1).sum())
        assert torch.equal((groups == 0).any(-1), (groups == 0).all(-1))  # NF3 has no zero level
    assert zero_groups > 10


def test_expert_ids(packs: Packs) -> None:
    layer = hybrid_pack.open_pack(packs.pack("nvfp4", 2, 2)).load_layer(MAPPED, 2)
    assert layer.expert_ids == (4, 5, 6, 7)
    for expert in (3, 8, -1, "4", None):
        with pytest.raises(UsageError, match=r"expert .* of layer 1 is not on rank 2 \(expected one of 4\.\.7\)"):
            layer.dequantize(expert)  # type: ignore[arg-type]
