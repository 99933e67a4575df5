"""Rows as a checkpoint stores them: bytes to codes, codes to bytes, and the weights they mean."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .floats import E2M1, E4M3, E8M0, F64, minifloat

U8 = NDArray[np.uint8]

SourceName = Literal["nvfp4", "mxfp4", "nf3", "nf3_times_16"]
"""``nf3_times_16`` is the kquant dialect: the scale byte holds the E4M3 bits of 16 times the scale."""

WideName = Literal["mxfp8", "fp8_block", "fp8_row", "fp8_tensor", "bf16", "f16", "f32"]

GROUP: dict[str, int] = {"nvfp4": 16, "mxfp4": 32, "nf3": 32, "nf3_times_16": 32, "mxfp8": 32}
"""Columns that share a scale."""

BLOCK = 128
"""Rows and columns of a block of ``fp8_block``; the last of each may be smaller."""

NF3_LEVELS = (-1.0, -0.6047, -0.3563, -0.1275, 0.1275, 0.3563, 0.6047, 1.0)
"""The default code book."""


def nf3_codes(stored: U8) -> U8:
    """Stored NF3 rows u8 [N, K/8*3] to codes u8 [N, K], 0..7.

    Three bytes are a little-endian 24-bit word of eight codes, code i at bits 3i.
    """
    rows, width = stored.shape
    triples = stored.reshape(rows, width // 3, 3).astype(np.uint32)
    words = triples[:, :, 0] + 256 * triples[:, :, 1] + 65536 * triples[:, :, 2]
    codes = [words // 8**i % 8 for i in range(8)]
    return np.stack(codes, axis=2).reshape(rows, width // 3 * 8).astype(np.uint8)


def store_nf3(codes: U8) -> U8:
    """Codes u8 [N, K], 0..7, K a multiple of 8, to stored rows u8 [N, K/8*3]: the inverse of ``nf3_codes``."""
    rows, columns = codes.shape
    eights = codes.reshape(rows, columns // 8, 8).astype(np.uint32)
    words = sum((eights[:, :, i] * 8**i for i in range(8)), np.zeros(eights.shape[:2], np.uint32))
    triples = np.stack([words % 256, words // 256 % 256, words // 65536], axis=2)
    return triples.reshape(rows, columns // 8 * 3).astype(np.uint8)


def fp4_codes(stored: U8) -> U8:
    """Stored FP4 rows u8 [N, K/2] to codes u8 [N, K], 0..15; the low nibble is the even column."""
    rows, width = stored.shape
    return np.stack([stored % 16, stored // 16], axis=2).reshape(rows, 2 * width)


def store_fp4(codes: U8) -> U8:
    """Codes u8 [N, K], 0..15, K even, to stored rows u8 [N, K/2]: the inverse of ``fp4_codes``."""
    return np.ascontiguousarray(codes[:, 0::2] + 16 * codes[:, 1::2])


def codes_of(name: SourceName, stored: U8) -> U8:
    """Stored rows of any format to codes u8 [N, K]."""
    return fp4_codes(stored) if name in ("nvfp4", "mxfp4") else nf3_codes(stored)


def store(name: SourceName, codes: U8) -> U8:
    """Codes u8 [N, K] to stored rows of any format."""
    return store_fp4(codes) if name in ("nvfp4", "mxfp4") else store_nf3(codes)


def dequantize(
    name: SourceName,
    stored: U8,
    scales: U8,
    second: float = 1.0,
    levels: tuple[float, ...] = NF3_LEVELS,
    bias: int = 127,
) -> F64:
    """The weights a source expert matrix means.

    Args:
        name: The stored format.
        stored: u8 [N, K/2] (FP4) or [N, K/8*3] (NF3).
        scales: u8 [N, K/group], the raw bytes: E4M3 for NVFP4 and NF3, E8M0 for MXFP4.
        second: Second-level scale, NVFP4 only.
        levels: NF3 code book, eight values.
        bias: Of MXFP4's scales.

    Returns:
        f64 [N, K].
    """
    codes = codes_of(name, stored)
    block = np.repeat(scales, GROUP[name], axis=1)
    if name == "nvfp4":
        return np.asarray(E2M1[codes] * E4M3[block] * second, np.float64)
    if name == "mxfp4":
        return np.asarray(E2M1[codes] * E8M0[block] * 2.0 ** (127 - bias), np.float64)
    divisor = 16.0 if name == "nf3_times_16" else 1.0
    return np.asarray(np.array(levels)[codes] * (E4M3[block] / divisor), np.float64)


@lru_cache(maxsize=1 << 16)
def number(dtype: str, stored: bytes) -> float:
    """Value of a BF16, F16 or F32 from its bytes: sign, exponent and mantissa bits, infinities and no numbers."""
    exponent_bits, mantissa_bits = {"BF16": (8, 7), "F16": (5, 10), "F32": (8, 23)}[dtype]
    bits = int.from_bytes(stored, "little")
    top = (1 << exponent_bits) - 1
    if bits >> mantissa_bits & top == top:
        sign = -1.0 if bits >> (exponent_bits + mantissa_bits) else 1.0
        return math.nan if bits & ((1 << mantissa_bits) - 1) else sign * math.inf
    return minifloat(bits, exponent_bits, mantissa_bits, top // 2)


def numbers(dtype: str, stored: U8) -> F64:
    """Values of rows of numbers u8 [rows, bytes] as f64 [rows, numbers]; E8M0 too."""
    if dtype == "F8_E8M0":
        return E8M0[stored]
    size = 4 if dtype == "F32" else 2
    rows, width = stored.shape
    flat = stored.tobytes()
    values = [number(dtype, flat[at : at + size]) for at in range(0, len(flat), size)]
    return np.array(values, np.float64).reshape(rows, width // size)


def dequantize_wide(name: WideName, stored: U8, scales: F64) -> F64:
    """The weights a wide expert matrix means.

    Args:
        name: The stored format.
        stored: u8 [N, bytes], elements one after another.
        scales: f64, one for each group of each row, each block, each row, or the whole matrix; [0, 0] where none.

    Returns:
        f64 [N, K].
    """
    if name in ("bf16", "f16", "f32"):
        return numbers(name.upper(), stored)
    weights = E4M3[stored]
    rows, columns = np.indices(weights.shape)
    at = {
        "mxfp8": (rows, columns // 32),
        "fp8_block": (rows // BLOCK, columns // BLOCK),
        "fp8_row": (rows, 0),
        "fp8_tensor": (0, 0),
    }[name]
    return np.asarray(weights * scales[at], np.float64)
