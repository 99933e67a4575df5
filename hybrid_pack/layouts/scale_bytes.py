"""What a device scale byte means, and the tables that turn stored scale bytes into device bytes.

The kernel's E4M3-derived byte is the high byte of ``float16_bits << 1``: five exponent and three mantissa bits of a
float16 without its sign. ``value(byte) = float16(byte << 7)``. Weights are rebuilt as

==========  ===================================================================
tier        weight
==========  ===================================================================
NVFP4       ``e2m1(code) * value(byte) * global_scale * 2^-126``
MXFP4       ``e2m1(code) * 2^(byte - 127) * global_scale``
NF3         ``level[code] * value(byte) * global_scale * 2^-112``
==========  ===================================================================

Constants are those of b12x 1.1.0, ``w4a16/prepare.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NF3_GLOBAL_SCALE = 2.0**116
NF3_VALUE_EXPONENT = -112
NVFP4_VALUE_EXPONENT = -126
NVFP4_GLOBAL_EXPONENT = 119
NVFP4_SECOND_LIMIT = 512.0
"""Second-level scales at or above it give a global scale that binary32 does not hold."""
MXFP4_TARGET_BYTE = 200
"""Where the largest byte of an expert matrix is moved, so that no group's operand is subnormal in BF16 and flushed."""
MXFP4_MAX_SHIFT = 126
MXFP4_MAX_BYTE = 247
"""Largest E8M0 byte the kernel takes; b12x saturates at it."""
MXFP4_LEAST_BYTE = 121
"""Smallest E8M0 byte whose operands are all normal in BF16. The kernel multiplies ``e2m1(code) * 2^-126`` by
``2^(byte - 120)`` before anything is summed: 0.5 at byte 121 is 2^-126, and what is below may be flushed to zero."""

NVFP4_BYTES = (0x80, 0xF6)
"""Smallest and largest device byte of an NVFP4 block that is not zero."""

NF3_MAX_BYTE = 0x7F
"""Largest device byte of an NF3 group: scales are below 32."""

LARGEST_DEVICE_BYTE = 0xF7
"""Largest E4M3-derived device byte that is finite."""

DEVICE_VALUES: NDArray[np.float64] = (np.arange(256, dtype=np.uint16) << 7).view(np.float16).astype(np.float64)
"""f64 [256]: value(byte) of an E4M3-derived device byte; bytes from 0xF8 are infinity or NaN and never written."""

E8M0_VALUES: NDArray[np.float64] = np.ldexp(1.0, np.arange(256) - 127)
"""f64 [256]: 2^(byte - 127) of an MXFP4 device byte."""


@dataclass(frozen=True)
class ScaleTable:
    """Device byte for each stored byte, and how faithful it is.

    Attributes:
        device: u8 [256], the device byte.
        flushed: bool [256], stored values that are not zero but become zero: in the device byte, or of MXFP4, whose
            bytes stay what they are, in the kernel.
        saturated: bool [256], stored values above the largest device value.
        error: f64 [256], relative error of the stored byte's value in the device byte; 0 where exact.
    """

    device: NDArray[np.uint8]
    flushed: NDArray[np.bool_]
    saturated: NDArray[np.bool_]
    error: NDArray[np.float64]


def _encode(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Nearest device byte of non-negative values, ties to even."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits = np.nan_to_num(values).astype(np.float16).view(np.uint16).astype(np.int64)
    return ((bits + 0x3F + ((bits >> 7) & 1)) >> 7).clip(0, 255).astype(np.uint8)


def _table(values: NDArray[np.float64], flush_below: float) -> ScaleTable:
    """Table for values given in the units of value(byte); negative and NaN entries are the caller's to refuse."""
    usable = np.where(np.isfinite(values) & (values > 0), values, 0.0)
    saturated = usable > DEVICE_VALUES[LARGEST_DEVICE_BYTE]
    usable = np.minimum(usable, DEVICE_VALUES[LARGEST_DEVICE_BYTE])
    device = np.where(usable < flush_below, 0, _encode(usable)).astype(np.uint8)
    stored = DEVICE_VALUES[device]
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.where(usable > 0, np.abs(stored / usable - 1), 0.0)
    flushed = (usable > 0) & (device == 0)
    return ScaleTable(device, flushed, saturated, np.where(flushed, 0.0, error))


def nf3_table(scales: NDArray[np.float64]) -> ScaleTable:
    """Table of NF3 scales, exact for every E4M3 value below 32 and for E4M3 values divided by 16.

    Args:
        scales: f64 [256], the scale each stored byte means. Below 32; the caller refuses others.
    """
    return _table(np.where(scales < 32, scales, 0.0) * 2.0**-4, 0.0)


def nvfp4_factor(largest: float) -> float:
    """The power of two that brings an expert matrix's largest block scale near 448, as b12x computes it for a tensor.

    Args:
        largest: Largest block scale of the matrix, at most 448; 0 if all are zero.
    """
    if not 0 < largest < 448:
        return 1.0
    return float(2.0 ** math.floor(math.log2(448.0 / largest)))


def nvfp4_table(scales: NDArray[np.float64], factor: float) -> ScaleTable:
    """Table of NVFP4 block scales times a factor; what lands below 2^-6 is flushed to zero, as the kernel needs.

    Args:
        scales: f64 [256], the block scale each stored byte means, relative to the matrix's second-level scale.
        factor: Power of two from ``nvfp4_factor``.
    """
    return _table(scales * factor * 2.0**7, 2.0)


def nvfp4_global_scale(second_scale: float, factor: float) -> float:
    """Global scale that goes with ``nvfp4_table``: ``second_scale * 2^119 / factor``; exact, being powers of two."""
    return float(np.float32(math.ldexp(second_scale, NVFP4_GLOBAL_EXPONENT) / factor))


def mxfp4_shift(largest_byte: int) -> int:
    """The constant added to all scale bytes of an expert matrix, 0..126, so that the largest becomes 200 if it can."""
    return min(max(MXFP4_TARGET_BYTE - largest_byte, 0), MXFP4_MAX_SHIFT)


def mxfp4_table(shift: int) -> ScaleTable:
    """Table of E8M0 bytes plus a shift, saturated at 247 as in b12x; byte 255 is the caller's to refuse.

    What is flushed keeps its byte: whether anything is lost depends on the group's codes.
    """
    shifted = np.arange(256) + shift
    saturated = shifted > MXFP4_MAX_BYTE
    error = np.where(saturated, 1 - np.ldexp(1.0, np.minimum(MXFP4_MAX_BYTE - shifted, 0)), 0.0)
    device = np.minimum(shifted, MXFP4_MAX_BYTE).astype(np.uint8)
    return ScaleTable(device, device < MXFP4_LEAST_BYTE, saturated, error)


def mxfp4_global_scale(shift: int) -> float:
    """Global scale that goes with ``mxfp4_table``: 2^-shift."""
    return math.ldexp(1.0, -shift)
