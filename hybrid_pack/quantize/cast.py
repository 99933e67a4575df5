"""MXFP4 as NVFP4 without rounding: codes stay, power-of-two scales become E4M3 scales and a second-level scale."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.formats import e8m0

U8 = NDArray[np.uint8]

HIGHEST_EXPONENT = 8
LOWEST_EXPONENT = -9
"""Powers of two E4M3 holds: 2^-9 (subnormal) to 2^8."""

LOWEST_SECOND_EXPONENT = -126
"""The second-level scale stays a normal float32."""


def _e4m3_byte(exponent: int) -> int:
    """Byte of 2^exponent, -9 to 8."""
    return (exponent + 7) << 3 if exponent >= -6 else 1 << (exponent - LOWEST_EXPONENT)


def mxfp4_to_nvfp4(
    scales: Sequence[U8], codes: Sequence[U8] | None = None, lowest_exponent: int = LOWEST_EXPONENT
) -> tuple[list[U8], float] | None:
    """Recode the scales of MXFP4 matrices that share one second-level scale (gate and up; or down alone).

    ``e2m1(code) * 2^(byte - 127)`` equals ``e2m1(code) * e4m3(new) * second`` for every code of every group that is
    not all zero. The largest scale becomes 2^8.

    Args:
        scales: Each u8 [N, K/32], E8M0.
        codes: The matrices' codes, each u8 [N, K/2], two a byte; lets groups of zeros have any scale. Without them
            every group counts.
        lowest_exponent: Smallest exponent of an E4M3 scale to use; -6 keeps to normal numbers, which is what b12x
            1.1.0's scale byte holds beside 2^8.

    Returns:
        E4M3 bytes, each u8 [N, K/16] (groups of zeros get 0x00), and the second-level scale, a power of two; or None
        where the scales span too much.

    Raises:
        ValueError: A scale byte of 255, which is NaN.
    """
    used = [np.ones(array.shape, np.bool_) if codes is None else _used(codes[i]) for i, array in enumerate(scales)]
    for array in scales:
        if (array == e8m0.NAN_BYTE).any():
            raise ValueError("an E8M0 scale byte is 255, which is not a number")
    present = [array[mask] for array, mask in zip(scales, used, strict=True) if mask.any()]
    if not present:
        return [np.zeros((array.shape[0], 2 * array.shape[1]), np.uint8) for array in scales], 1.0
    highest = max(int(array.max()) for array in present) - e8m0.BIAS
    lowest = min(int(array.min()) for array in present) - e8m0.BIAS
    second = max(highest - HIGHEST_EXPONENT, LOWEST_SECOND_EXPONENT)
    if lowest - second < lowest_exponent:
        return None
    table = np.zeros(256, np.uint8)
    for exponent in range(lowest, highest + 1):
        table[exponent + e8m0.BIAS] = _e4m3_byte(exponent - second)
    recoded = [np.where(mask, table[array], 0).astype(np.uint8) for array, mask in zip(scales, used, strict=True)]
    return [np.repeat(array, 2, axis=1) for array in recoded], math.ldexp(1.0, second)


def _used(codes: U8) -> NDArray[np.bool_]:
    """bool [N, K/32]: groups with a code that is not 0 or -0, from u8 [N, K/2]."""
    n, width = codes.shape
    return np.asarray((codes.reshape(n, width // 16, 16) & 0x77).any(axis=2))
