"""E2M1, E4M3, E8M0 and the kernel's scale byte, each from its sign, exponent and mantissa bits."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def minifloat(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """Value of a float with subnormals and no special values: sign on top, then exponent, then mantissa."""
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    negative = code >> (mantissa_bits + exponent_bits) & 1
    if exponent == 0:
        magnitude = math.ldexp(mantissa, 1 - bias - mantissa_bits)
    else:
        magnitude = math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)
    return -magnitude if negative else magnitude


def e2m1(code: int) -> float:
    """Value of a 4-bit code 0..15: bias 1, so 0 .5 1 1.5 2 3 4 6 and their negatives."""
    return minifloat(code, 2, 1, 1)


def e4m3(byte: int) -> float:
    """Value of a float8_e4m3fn byte: bias 7, no infinity, all ones is NaN."""
    return math.nan if byte & 0x7F == 0x7F else minifloat(byte, 4, 3, 7)


def e8m0(byte: int) -> float:
    """Value of an E8M0 byte: 2^(byte - 127), 255 is NaN."""
    return math.nan if byte == 255 else 2.0 ** (byte - 127)


def device_scale(byte: int) -> float:
    """Value of an E4M3-derived device byte: a float16 without its sign and its low seven mantissa bits.

    Five exponent bits with bias 15 and three mantissa bits; exponent 31 is infinity or NaN and never stored.
    """
    if byte >= 0xF8:
        return math.inf if byte == 0xF8 else math.nan
    return minifloat(byte, 5, 3, 15)


def register_scale(byte: int) -> float:
    """What the kernel's registers hold for an E4M3-derived device byte (b12x 1.1.0, its E4M3 to BF16 instruction).

    Bit 7 of the byte becomes bit 14 of a BF16 and bits 6..0 become bits 10..4: the BF16 exponent is that of the float16
    plus 112 where bit 7 is set, and its low four bits alone where it is not. So a byte below 0x80 means 2^-112 of what
    one above means, and no matrix may mix the two: NVFP4 uses bytes from 0x80, NF3 bytes below it.
    """
    bits = (byte & 0x80) << 7 | (byte & 0x7F) << 4
    return minifloat(bits, 8, 7, 127)


E2M1: F64 = np.array([e2m1(code) for code in range(16)])
"""f64 [16]."""

E4M3: F64 = np.array([e4m3(byte) for byte in range(256)])
"""f64 [256], NaN at 0x7F and 0xFF."""

E8M0: F64 = np.array([e8m0(byte) for byte in range(256)])
"""f64 [256], NaN at 255."""

DEVICE_SCALE: F64 = np.array([device_scale(byte) for byte in range(256)])
"""f64 [256], not finite from 0xF8."""

REGISTER_SCALE: F64 = np.array([register_scale(byte) for byte in range(256)])
"""f64 [256]."""
