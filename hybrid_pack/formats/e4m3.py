"""E4M3 (float8_e4m3fn), the block scale of NVFP4 and NF3 (OCP 8-bit Floating Point v1.0): bias 7, no infinity."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NAN_BYTES = (0x7F, 0xFF)
MAX = 448.0


def _values() -> NDArray[np.float64]:
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 0xF, byte & 0x7
    magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values = np.where(byte & 0x80, -magnitude, magnitude)
    values[list(NAN_BYTES)] = np.nan
    return values


VALUES: NDArray[np.float64] = _values()
"""f64 [256]: value of each byte ``0bSEEEEMMM``; 0x7F and 0xFF are NaN, 0x80 is -0."""
