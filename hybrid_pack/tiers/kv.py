"""Bytes of KV cache that one token needs on one rank, from config.json, where the attention is of a plain kind.

Estimated: grouped-query attention in every layer (keys and values of the rank's heads, one head at least), and MLA
(the latent and the rotary key, whole on each rank) with DSA's indexer where there is one. Not estimated: models that
mix in sliding-window, chunked, linear, state-space, compressed or block-sparse layers, whose caches do not grow alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PLAIN_LAYERS = frozenset({"full_attention", "attention", "deepseek_sparse_attention"})
_FP8_GROUP = 128
"""Elements that share one F32 scale in vLLM's caches of sparse MLA (``fp8_ds_mla``) and of its indexer."""

_OTHER_KINDS: Mapping[str, str] = {
    "linear_attn_config": "linear attention",
    "full_attention_interval": "linear attention",
    "hybrid_override_pattern": "state-space layers",
    "mamba_num_heads": "state-space layers",
    "compress_ratios": "compressed attention",
    "attention_chunk_size": "chunked attention",
    "sparse_attention_config": "block-sparse attention",
    "num_kv_shared_layers": "layers that share a cache",
}


@dataclass(frozen=True)
class KvCache:
    """What a token needs on a rank.

    Attributes:
        kind: ``MLA``, ``MLA with indexer`` or ``GQA``; None where it is not estimated.
        why_not: Why it is not estimated.
        bf16: Bytes of a token with a BF16 cache.
        fp8: Bytes with an FP8 cache.
    """

    kind: str | None
    why_not: str | None
    bf16: int
    fp8: int


def _not(why: str) -> KvCache:
    return KvCache(None, why, 0, 0)


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    return value if type(value) is int and value > 0 else 0


def _other_kind(config: Mapping[str, Any]) -> str | None:
    """What is not plain attention in a model."""
    for key, what in _OTHER_KINDS.items():
        if config.get(key):
            return what
    types = config.get("layer_types")
    if types is not None and not (isinstance(types, list) and all(isinstance(t, str) for t in types)):
        return "layer_types that are no list of names"
    strange = next((t for t in types or () if t not in PLAIN_LAYERS), None)
    if strange is not None:
        return f"{strange} layers"
    marks = config.get("attn_type_list")
    if isinstance(marks, Sequence) and any(mark != 1 for mark in marks):
        return "linear attention"
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        return "a sliding window"
    return None


def _indexer_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers with an indexer of their own; those marked ``shared`` use another's choice."""
    types = config.get("indexer_types")
    shared = sum(t == "shared" for t in types) if isinstance(types, Sequence) else 0
    return layers - shared


def kv_cache(config: Mapping[str, Any], layers: int, tp: int) -> KvCache:
    """Estimate the cache.

    Args:
        config: The decoder's configuration.
        layers: Decoder layers, MTP layers too if they are served; 0 where that is not known.
        tp: Tensor-parallel size.
    """
    if not layers:
        return _not("the config does not say how many layers there are")
    kind = _other_kind(config)
    if kind is not None:
        return _not(f"the model has {kind}")
    latent, rotary = _size(config, "kv_lora_rank"), _size(config, "qk_rope_head_dim")
    if latent and rotary:
        bf16, fp8 = 2 * (latent + rotary) * layers, (latent + rotary) * layers
        index = _size(config, "index_head_dim")
        if not index:
            return KvCache("MLA", None, bf16, fp8)
        scales = 4 * -(-latent // _FP8_GROUP)
        indexer = (index + 4 * -(-index // _FP8_GROUP)) * _indexer_layers(config, layers)  # FP8 in either case
        return KvCache("MLA with indexer", None, bf16 + indexer, (latent + scales + 2 * rotary) * layers + indexer)
    heads = _size(config, "num_attention_heads")
    width = _size(config, "head_dim") or (_size(config, "hidden_size") // heads if heads else 0)
    kv_heads = _size(config, "num_key_value_heads") or heads
    if not width or not kv_heads:
        return _not("the config does not give the sizes of its heads")
    elements = 2 * -(-kv_heads // tp) * width * layers
    return KvCache("GQA", None, 2 * elements, elements)
