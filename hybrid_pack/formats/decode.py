"""Stored expert rows to float32.

Every value is the float32 nearest to the product of what is stored:

==============  ======================================================================================================
format          value
==============  ======================================================================================================
nvfp4           e2m1 * e4m3 is exact; times the second scale (a float32) is one rounding
mxfp4           e2m1 * 2^(byte - bias), exact; infinite from 2^128
nf3             level * e4m3 (or e4m3 / 16), one rounding; kernels take the levels in BF16, this does not
mxfp8           e4m3 * 2^(byte - 127), exact; infinite from 2^128
fp8_*           e4m3 * scale (a float32, or one from BF16, F16 or E8M0 exactly), one rounding
bf16, f16, f32  exact
==============  ======================================================================================================

A scale that is no number gives values that are none: who reads a source checks scales first (``formats/checks.py``).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.formats import decode_kernels, e2m1, e4m3, e8m0
from hybrid_pack.formats.nf3 import DEFAULT_LEVELS
from hybrid_pack.formats.source import SourceFormat

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


def scale_values(form: SourceFormat) -> NDArray[np.float64]:
    """f64 [256]: the scale each stored byte means, without NVFP4's second level.

    Raises:
        ValueError: The format's scales are no bytes.
    """
    if form.scale_field is None or form.scale_bytes != 1:
        raise ValueError(f"{form.name} has no scales of one byte")
    if form.name in ("mxfp4", "mxfp8", "fp8_block"):
        return e8m0.VALUES * 2.0 ** (e8m0.BIAS - form.scale_bias)
    return e4m3.VALUES / 16 if form.scale_times_16 else e4m3.VALUES


def _narrow(values: NDArray[np.float64]) -> F32:
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


@lru_cache(maxsize=8)
def _table(form: SourceFormat, levels: tuple[float, ...]) -> F32:
    """f32 [256, codes]: value of each code under each scale byte."""
    codes = e2m1.VALUES if form.bits == 4 else np.array(levels)
    return _narrow(scale_values(form)[:, None] * codes)


@lru_cache(maxsize=1)
def _e4m3() -> F32:
    return _narrow(e4m3.VALUES)


def _bits_of_bf16(codes: U8) -> NDArray[np.uint32]:
    words = np.ascontiguousarray(codes).view("<u2")
    out = np.empty(words.shape, np.uint32)
    decode_kernels.bf16(words, out)
    return out


def float_scales(form: SourceFormat, scales: U8) -> F32:
    """Stored scales u8 [scale rows, bytes] as numbers f32 [scale rows, scales of a row]."""
    stored = np.ascontiguousarray(scales)
    if form.scale_dtype == "F32":
        return stored.view("<f4")
    if form.scale_dtype == "F16":
        return stored.view("<f2").astype(np.float32)
    if form.scale_dtype == "BF16":
        return _bits_of_bf16(stored).view(np.float32)
    return _narrow(scale_values(form))[stored]


def decode_rows(
    form: SourceFormat,
    codes: U8,
    scales: U8 | None,
    second: float,
    out: F32,
    first_row: int = 0,
    row_step: int = 1,
    levels: tuple[float, ...] = DEFAULT_LEVELS,
) -> None:
    """Decode rows of an expert matrix.

    Args:
        form: How they are stored.
        codes: u8 [rows, code bytes].
        scales: The scales as bytes: those of these rows, u8 [rows, bytes]; or of the whole matrix, u8 [scale rows,
            bytes], where rows share one (``fp8_block``, ``fp8_tensor``); None where there are none.
        second: NVFP4's second-level scale, itself and not its reciprocal; 1.0 elsewhere.
        out: f32 [rows, K], contiguous; filled.
        first_row: Stored row of row 0; used where rows share a scale.
        row_step: Stored rows from one row to the next; likewise.
        levels: NF3 code book.
    """
    codes = np.ascontiguousarray(codes)
    if form.name == "bf16":
        decode_kernels.bf16(codes.view("<u2"), out.view(np.uint32))
    elif form.name in ("f16", "f32"):
        out[...] = codes.view("<f2" if form.name == "f16" else "<f4")
    elif scales is None:
        raise ValueError(f"{form.name} without scales")
    elif form.bits == 4:
        decode_kernels.fp4(codes, np.ascontiguousarray(scales), _table(form, DEFAULT_LEVELS), np.float32(second), out)
    elif form.bits == 3:
        decode_kernels.nf3(codes, np.ascontiguousarray(scales), _table(form, levels), out)
    else:
        first, step = (0, 1) if form.row_group == 1 else (first_row, row_step)
        numbers = float_scales(form, scales)
        decode_kernels.fp8(codes, _e4m3(), numbers, first, step, form.row_group, form.group, out)
