"""Experts that are left in the base, such as those of Qwen's MTP layers: run by vLLM. Imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Collection, Mapping

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
