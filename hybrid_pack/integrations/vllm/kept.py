"""Experts that are left in the base, such as those of Qwen's MTP layers: run by vLLM. Imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from hybrid_pack.formats.source import Header
from hybrid_pack.integrations.vllm.fits import why_not_dtype

_FP8 = "CompressedTensorsW8A8Fp8MoEMethod"
_METHODS: Mapping[str, tuple[str, ...]] = {
    "mxfp8": ("ModelOptMxFp8FusedMoE", "CompressedTensorsW8A8Mxfp8MoEMethod"),
    "nvfp4": ("ModelOptNvFp4FusedMoE", "CompressedTensorsW4A4Nvfp4MoEMethod"),
    "mxfp4": ("Mxfp4MoEMethod", "GptOssMxfp4MoEMethod", "CompressedTensorsW4A4Mxfp4MoEMethod"),
    "fp8_block": ("Fp8MoEMethod", _FP8),
    "fp8_tensor": ("Fp8MoEMethod", "ModelOptFp8MoEMethod", _FP8),
    "fp8_row": (_FP8,),
}
"""vLLM's methods by what they read."""
_NONE = ("NoneType", "UnquantizedFusedMoEMethod")


def why_not_experts(method: str, forms: Collection[str]) -> str | None:
    """What vLLM would need to read quantised experts of the base; None where it does.

    Args:
        method: Name of the class that vLLM has for the source's config.
        forms: Formats of the experts' matrices; ``unknown`` where headers do not tell.

    Returns:
        The methods that read them, in words.
    """
    if len(forms) > 1:
        return f"one format, not {' and '.join(sorted(forms))}"
    form = next(iter(forms), "unknown")
    if form == "unknown":
        return "a method for quantised experts" if method in _NONE else None
    reading = _METHODS.get(form, ())
    return None if method in reading else f"{' or '.join(reading) or 'a method'} for {form}"


_STACKS = ("w13_", "w2_")
"""vLLM's gate and up, and down, of all experts."""
_MADE_BY_VLLM = frozenset({"bias", "weight_g_idx", "g_idx_sort_indices"})
"""What it registers whether or not there is such a thing, and then fills or leaves alone."""

_OF_INPUTS = frozenset({"input_scale", "input_global_scale"})
_INPUT_AS_IT_IS = frozenset({"MARLIN", "HUMMING"})
"""Kernels for NVFP4 that do not read these (``fused_moe/oracle/nvfp4.py``)."""


def why_not_read(
    registered: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    experts: Iterable[Mapping[str, Header]],
    backend: str | None = None,
) -> str | None:
    """How what a method has registered differs from what is stored; None where it is the same.

    Args:
        registered: Dtype and shape of the parameters, such as ``w13_weight_scale``; the first dimension is of experts.
        experts: Headers of every matrix's tensors by field.
        backend: Name of the kernel that vLLM has chosen for NVFP4, if that is what the method is for.
    """
    matrices = list(experts)
    if not matrices:
        return None  # stored as one tensor a layer, which every model cuts in its own way
    every = frozenset.intersection(*map(frozenset, matrices))
    some = frozenset().union(*matrices)
    stacks = {stack: {n.removeprefix(stack) for n in registered if n.startswith(stack)} for stack in _STACKS}
    wanted = frozenset().union(*stacks.values())
    spare = _MADE_BY_VLLM | (_OF_INPUTS if backend in _INPUT_AS_IT_IS else frozenset())
    if lacking := sorted(wanted - every - spare):
        return f"needs {', '.join(lacking)}, which not all experts have"
    if unread := sorted(some - frozenset.intersection(*map(frozenset, stacks.values()))):
        return f"does not read {', '.join(unread)}"
    columns = all(fields["weight"][0] == "F8_E4M3" for fields in matrices if "weight" in fields)
    for name in sorted((wanted & every) - {"weight_shape"}):  # which nothing is computed with
        for stack in _STACKS:
            dtype, shape = registered[f"{stack}{name}"]
            headers = {fields[name] for fields in matrices}
            reasons = [why_not_dtype(dtype, stored) for stored, _ in headers]
            if not any(_same_kind(shape[1:], whole, columns) for _, whole in headers):
                reasons.append(f"as {list(shape)}, and it is {' or '.join(str(list(w)) for _, w in sorted(headers))}")
            for reason in filter(None, reasons):
                return f"reads {stack}{name} {reason}"
    return None


def _same_kind(shape: Sequence[int], whole: Sequence[int], columns: bool) -> bool:
    """Whether one expert's part of a parameter has the dimensions of what is stored.

    Args:
        shape: Of the part, gate and up together.
        whole: Of the tensor; kernels may pad or transpose it.
        columns: Whether one column and several are told apart: scales of rows and of blocks.
    """
    if tuple(whole) in ((), (1,)):
        return len(shape) <= 1
    return len(shape) == len(whole) and not (columns and len(whole) == 2 and (shape[1] == 1) is not (whole[1] == 1))
