"""The torch backend and its decoder on a GPU: the same as on the CPU."""

from __future__ import annotations

import pytest
import torch

import hybrid_pack
from hybrid_pack.runtime import HybridMoE
from tests.runtime.dialects import MAPPED, Packs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dialect", ["nvfp4", "mxfp4", "kquant"])
def test_same_weights_and_products_as_on_the_cpu(packs: Packs, dialect: str) -> None:
    pack = hybrid_pack.open_pack(packs.pack(dialect, 2, 2))
    for rank in range(4):
        here, there = pack.load_layer(MAPPED, rank), pack.load_layer(MAPPED, rank, device="cuda")
        assert there.device.type == "cuda"
        for expert in here.expert_ids:
            for ours, theirs in zip(here.dequantize(expert), there.dequantize(expert), strict=True):
                assert torch.equal(ours, theirs.cpu())
        x = torch.randn(20, 256).to(torch.bfloat16)
        weights, ids = torch.rand(20, 3), torch.randint(-1, 8, (20, 3), dtype=torch.int32)
        expected = HybridMoE(here, top_k=3, backend="torch")(x, weights, ids)
        found = HybridMoE(there, top_k=3, backend="torch")(x.cuda(), weights.cuda(), ids.cuda())
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-2, atol=1e-3)
