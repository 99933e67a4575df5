"""What the tensors that are no packed expert cost a rank: an estimate that errs to the large side.

Serving splits most matrices over the tensor-parallel ranks and gives every rank the whole of the rest. By name, after
vLLM's model files: attention projections, MLA's up-projections, dense and shared-expert matrices, experts left in the
base, embedding and output head are split; everything else is whole on each rank, MLA's down-projections, DSA's
indexer, router, norms, vision and audio parts among it. Only tensors of two or more dimensions are split, so biases
and scales of one dimension count whole. Key and value projections are split over their heads at most.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_pack.io.names import looks_like_expert
from hybrid_pack.tiers.source import BaseTensor

_SPLIT = re.compile(
    r"(^|\.)(q_proj|o_proj|q_b_proj|kv_b_proj|wq_b|wo_b"
    r"|gate_proj|up_proj|gate_up_proj|down_proj|w1|w2|w3"
    r"|in_proj_qkvz?|in_proj_z|linear_attn\.out_proj"
    r"|embed_tokens|lm_head|shared_head\.head)\.[^.]+"
    r"|(^|\.)(embed|head)\.weight"
)
_KEY_VALUE = re.compile(r"(^|\.)(k_proj|v_proj|qkv_proj)\.[^.]+")
_WHOLE = re.compile(r"(^|\.)(indexer|visual|vision\w*|audio\w*|mm_projector|multi_modal_projector)\.")


@dataclass(frozen=True)
class BaseBytes:
    """Bytes of the base tensors.

    Attributes:
        total: All of them: what a rank would hold if nothing were split.
        split: Those that are split, before the split.
        whole: Those that every rank holds whole.
        per_rank: What a rank is counted to hold.
    """

    total: int
    split: int
    whole: int
    per_rank: int


def ways(tensor: BaseTensor, tp: int, kv_heads: int) -> int:
    """Over how many ranks a tensor is split; 1 where it is not.

    Args:
        tensor: Which one.
        tp: Tensor-parallel size.
        kv_heads: Key-value heads; a rank holds one at least.
    """
    if len(tensor.shape) < 2 or _WHOLE.search(tensor.name):
        return 1
    if _KEY_VALUE.search(tensor.name):
        return max(1, kv_heads // max(1, -(-kv_heads // tp)))  # whole heads, one at least
    return tp if _SPLIT.search(tensor.name) or looks_like_expert(tensor.name) else 1


def base_bytes(tensors: Iterable[BaseTensor], tp: int, config: Mapping[str, Any]) -> BaseBytes:
    """Count the base tensors for a tensor-parallel size; expert parallelism does not split them.

    Args:
        tensors: All of them.
        tp: Tensor-parallel size.
        config: The decoder's configuration.
    """
    heads = config.get("num_key_value_heads")
    kv_heads = heads if type(heads) is int else 1
    total = split = per_rank = 0
    for tensor in tensors:
        parts = ways(tensor, tp, kv_heads)
        total += tensor.nbytes
        split += tensor.nbytes if parts > 1 else 0
        per_rank += -(-tensor.nbytes // parts)
    return BaseBytes(total, split, total - split, per_rank)
