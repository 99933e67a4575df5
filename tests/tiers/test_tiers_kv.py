"""KV cache from inline configurations and, where they are in reach, the real ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.tiers.kv import kv_cache

SHARED = Path(os.environ.get("HYBRID_PACK_SHARED", Path(__file__).parents[3] / "shared"))
CONFIGS = SHARED / "data" / "configs"

GQA = {"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "hidden_size": 4096}
MLA = {"num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
DSA = MLA | {"index_head_dim": 128, "index_topk": 2048}


@pytest.mark.parametrize(
    ("config", "tp", "kind", "bf16", "fp8"),
    [
        (GQA, 1, "GQA", 2 * 4 * 128 * 2, 2 * 4 * 128),
        (GQA, 2, "GQA", 2 * 2 * 128 * 2, 2 * 2 * 128),
        (GQA, 4, "GQA", 2 * 128 * 2, 2 * 128),
        (GQA, 8, "GQA", 2 * 128 * 2, 2 * 128),  # one head at least
        (GQA, 3, "GQA", 2 * 2 * 128 * 2, 2 * 2 * 128),  # the largest share of four heads
        (GQA | {"head_dim": None}, 4, "GQA", 2 * 64 * 2, 2 * 64),
        (GQA | {"num_key_value_heads": None}, 4, "GQA", 2 * 16 * 128 * 2, 2 * 16 * 128),
        (GQA | {"sliding_window": None}, 4, "GQA", 512, 256),
        (GQA | {"sliding_window": 4096, "use_sliding_window": False}, 4, "GQA", 512, 256),
        (GQA | {"layer_types": ["full_attention"]}, 4, "GQA", 512, 256),
        (GQA | {"attn_type_list": [1]}, 4, "GQA", 512, 256),
        (MLA, 1, "MLA", 1152, 576),
        (MLA, 8, "MLA", 1152, 576),  # every rank holds all of it
        (DSA, 8, "MLA with indexer", 1152 + 132, 656 + 132),
        (DSA | {"layer_types": ["deepseek_sparse_attention"]}, 8, "MLA with indexer", 1284, 788),
    ],
)
def test_one_layer(config: dict[str, Any], tp: int, kind: str, bf16: int, fp8: int) -> None:
    found = kv_cache(config, 1, tp)
    assert (found.kind, found.why_not, found.bf16, found.fp8) == (kind, None, bf16, fp8)
    more = kv_cache(config, 10, tp)
    assert (more.bf16, more.fp8) == (10 * bf16, 10 * fp8)


def test_shared_indexers_have_no_cache() -> None:
    found = kv_cache(DSA | {"indexer_types": ["full", "shared", "shared", "full"]}, 5, 4)  # a fifth, MTP layer
    assert (found.bf16, found.fp8) == (5 * 1152 + 3 * 132, 5 * 656 + 3 * 132)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (GQA | {"layer_types": ["full_attention", "linear_attention"]}, "the model has linear_attention layers"),
        (GQA | {"layer_types": ["sliding_attention"]}, "the model has sliding_attention layers"),
        (GQA | {"layer_types": "full_attention"}, "the model has layer_types that are no list of names"),
        (GQA | {"layer_types": [["full_attention"]]}, "the model has layer_types that are no list of names"),
        (GQA | {"sliding_window": 128}, "the model has a sliding window"),
        (GQA | {"attn_type_list": [1, 0]}, "the model has linear attention"),
        (GQA | {"attention_chunk_size": 8192}, "the model has chunked attention"),
        (GQA | {"hybrid_override_pattern": "M*ME"}, "the model has state-space layers"),
        (GQA | {"mamba_num_heads": 64}, "the model has state-space layers"),
        (GQA | {"compress_ratios": [0, 4]}, "the model has compressed attention"),
        (GQA | {"sparse_attention_config": {"sparse_topk_blocks": 16}}, "the model has block-sparse attention"),
        (GQA | {"full_attention_interval": 4}, "the model has linear attention"),
        (MLA | {"linear_attn_config": {"kda_layers": [1]}}, "the model has linear attention"),
        ({}, "the config does not give the sizes of its heads"),
        ({"num_attention_heads": 8}, "the config does not give the sizes of its heads"),
        ({"head_dim": 128}, "the config does not give the sizes of its heads"),
        (GQA | {"head_dim": "128", "hidden_size": None}, "the config does not give the sizes of its heads"),
    ],
)
def test_not_estimated(config: dict[str, Any], why: str) -> None:
    found = kv_cache(config, 4, 2)
    assert (found.kind, found.why_not, found.bf16, found.fp8) == (None, why, 0, 0)


def test_unknown_number_of_layers() -> None:
    assert kv_cache(GQA, 0, 1).why_not == "the config does not say how many layers there are"


REAL = {
    "zai-org--GLM-5.2": (79, "MLA with indexer", 79 * 1152 + 22 * 132),
    "zai-org--GLM-5": (79, "MLA with indexer", 79 * 1284),
    "deepseek-ai--DeepSeek-R1": (61, "MLA", 61 * 1152),
    "deepseek-ai--DeepSeek-V3.2": (61, "MLA with indexer", 61 * 1284),
    "moonshotai--Kimi-K2.5": (61, "MLA", 61 * 1152),
    "Qwen--Qwen3-30B-A3B": (48, "GQA", 48 * 512),
    "Qwen--Qwen3-235B-A22B": (94, "GQA", 94 * 512),
    "MiniMaxAI--MiniMax-M2.7": (62, "GQA", 62 * 2 * 2 * 128 * 2),
    "mistralai--Mixtral-8x7B-v0.1": (32, "GQA", 32 * 2 * 2 * 128 * 2),
    "deepseek-ai--DeepSeek-V4-Pro": (61, None, 0),
    "Qwen--Qwen3.5-397B-A17B": (60, None, 0),
    "moonshotai--Kimi-K3": (93, None, 0),
    "MiniMaxAI--MiniMax-M3": (60, None, 0),
    "google--gemma-4-26B-A4B": (30, None, 0),
    "openai--gpt-oss-120b": (36, None, 0),
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": (48, None, 0),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": (52, None, 0),
    "stepfun-ai--Step-3.7-Flash": (45, None, 0),
}


@pytest.mark.skipif(not CONFIGS.is_dir(), reason=f"no real configs in {CONFIGS}; set HYBRID_PACK_SHARED")
@pytest.mark.parametrize("name", REAL)
def test_real_models_on_four_ranks(name: str) -> None:
    config = json.loads((CONFIGS / f"{name}_config.json").read_text())
    layers, kind, bf16 = REAL[name]
    found = kv_cache({**config, **config.get("text_config", {})}, layers, 4)
    assert (found.kind, found.bf16) == (kind, bf16)
