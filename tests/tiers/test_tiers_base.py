"""Which base tensors serving splits."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.synthetic import Spec, write_checkpoint
from hybrid_pack.tiers.base import BaseBytes, base_bytes, ways
from hybrid_pack.tiers.source import BaseTensor

TP, KV_HEADS = 8, 4

WAYS = {
    "model.embed_tokens.weight": TP,
    "lm_head.weight": TP,
    "model.layers.78.embed_tokens.weight": TP,
    "model.layers.78.shared_head.head.weight": TP,
    "model.language_model.embed_tokens.weight": TP,
    "embed.weight": TP,
    "head.weight": TP,
    "model.layers.0.self_attn.q_proj.weight": TP,
    "model.layers.0.self_attn.k_proj.weight": KV_HEADS,
    "model.layers.0.self_attn.v_proj.weight_scale_inv": KV_HEADS,
    "model.layers.0.self_attn.o_proj.weight": TP,
    "model.layers.0.self_attn.q_b_proj.weight_scale": TP,
    "model.layers.0.self_attn.kv_b_proj.weight": TP,
    "layers.0.attn.wq_b.weight": TP,
    "layers.0.attn.wo_b.weight": TP,
    "model.layers.0.mlp.down_proj.weight": TP,
    "model.layers.3.mlp.shared_experts.gate_proj.weight": TP,
    "layers.3.ffn.shared_experts.w1.weight": TP,
    "model.layers.9.mlp.experts.12.up_proj.weight": TP,
    "mtp.0.ffn.experts.3.w2.weight": TP,
    "model.language_model.layers.0.linear_attn.in_proj_qkv.weight": TP,
    "model.language_model.layers.0.linear_attn.out_proj.weight": TP,
    "model.layers.0.self_attn.q_a_proj.weight": 1,
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": 1,
    "model.layers.0.self_attn.indexer.wq_b.weight": 1,
    "model.layers.0.self_attn.indexer.wk.weight": 1,
    "layers.0.attn.wkv.weight": 1,
    "layers.0.attn.indexer.wq_b.weight": 1,
    "model.layers.3.mlp.gate.weight": 1,
    "model.layers.3.mlp.shared_expert_gate.weight": 1,
    "model.layers.78.eh_proj.weight": 1,
    "model.visual.blocks.0.attn.q_proj.weight": 1,
    "vision_tower.encoder.layers.0.mlp.up_proj.weight": 1,
    "model.unheard_of.weight": 1,
    "model.layers.0.self_attn.my_q_proj_norm.weight": 1,
}


@pytest.mark.parametrize("name", WAYS)
def test_ways(name: str) -> None:
    assert ways(BaseTensor(name, (64, 32), 4096), TP, KV_HEADS) == WAYS[name]
    assert ways(BaseTensor(name, (64, 32), 4096), 1, KV_HEADS) == 1


@pytest.mark.parametrize("shape", [(), (64,)])
@pytest.mark.parametrize("name", WAYS)
def test_vectors_are_whole(name: str, shape: tuple[int, ...]) -> None:
    assert ways(BaseTensor(name, shape, 256), TP, KV_HEADS) == 1


@pytest.mark.parametrize(("tp", "heads", "parts"), [(1, 8, 1), (4, 8, 4), (8, 8, 8), (16, 8, 8), (3, 4, 2), (3, 8, 2)])
def test_a_rank_holds_whole_heads(tp: int, heads: int, parts: int) -> None:
    assert ways(BaseTensor("model.layers.0.self_attn.v_proj.weight", (64, 32), 4096), tp, heads) == parts


def test_sums_round_up() -> None:
    tensors = [
        BaseTensor("lm_head.weight", (5, 2), 20),
        BaseTensor("model.layers.0.self_attn.k_proj.weight", (4, 2), 16),
        BaseTensor("model.norm.weight", (3,), 6),
    ]
    assert base_bytes(tensors, 8, {"num_key_value_heads": 2}) == BaseBytes(42, 36, 6, 3 + 8 + 6)
    assert base_bytes(tensors, 8, {}) == BaseBytes(42, 20, 22, 3 + 16 + 6)
    assert base_bytes(tensors, 1, {}) == BaseBytes(42, 0, 42, 42)
    assert base_bytes(tensors, 8, {"num_key_value_heads": 0}).per_rank == 3 + 16 + 6
    assert base_bytes([], 4, {}) == BaseBytes(0, 0, 0, 0)


@pytest.mark.parametrize("dialect", ["bf16", "mxfp8", "fp8_row"])
def test_a_checkpoint(tmp_path: Path, dialect: str) -> None:
    write_checkpoint(tmp_path / "source", Spec(base_dialect=dialect))  # type: ignore[arg-type]
    source = open_checkpoint(tmp_path / "source")
    tensors = [BaseTensor(t.header.name, t.header.shape, t.header.nbytes) for t in source.base]
    found = base_bytes(tensors, 4, {})
    assert found.total == sum(t.header.nbytes for t in source.base) == found.split + found.whole
    assert found.per_rank == found.whole + found.split // 4
    assert found.whole < found.per_rank < found.total
