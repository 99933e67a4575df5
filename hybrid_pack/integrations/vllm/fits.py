"""Whether a parameter of vLLM's holds a tensor as it is stored. Imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybrid_pack.formats.source import Header
from hybrid_pack.integrations.vllm.dequantise import TORCH_DTYPES

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def why_not_dtype(dtype: torch.dtype, stored: str) -> str | None:
    """How a parameter's dtype differs from the stored one; None where it is the same, or wider.

    vLLM copies tensors, which converts what has another dtype: codes would become numbers near them, and scales that
    are exponents become 0 or large.

    Args:
        dtype: Of the parameter.
        stored: By its name in safetensors.
    """
    found = TORCH_DTYPES.get(stored)
    wider = dtype == torch.float32 and found in (torch.bfloat16, torch.float16)
    return None if dtype == found or wider else f"as {_NAMES.get(dtype, dtype)}, and it is {stored}"


def why_not_held(dtype: torch.dtype, shape: Sequence[int], stored: Header, cut: int = 1) -> str | None:
    """How a parameter differs from what is stored; None where it is the same.

    A shape that differs is an assertion of vLLM's without words. Rows are not compared, for a parameter has those of
    all the matrices that vLLM fuses.

    Args:
        dtype: Of the parameter.
        shape: Of a rank's parameter.
        stored: Header of the tensor, of one of the matrices.
        cut: Ranks that share its columns.
    """
    name, whole = stored
    if (why_not := why_not_dtype(dtype, name)) is not None:
        return why_not
    if whole in ((), (1,)):
        same = len(shape) <= 1  # one for each matrix
    elif len(whole) == 2 == len(shape):
        same = shape[1] * cut == whole[1] or shape[1] == whole[1] == 1
    else:
        same = len(shape) == len(whole)
    return None if same else f"as {list(shape)}, and it is {list(whole)}"
