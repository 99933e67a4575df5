"""NVFP4's second-level scale: it decides which numbers the block scales of a matrix can be.

Of a matrix whose largest magnitude is amax it is amax / (6 * q), which takes the largest weight to the largest code at
block scale q. Block scales are E4M3 times it, so two scales a power of two apart give the same numbers but at the ends,
and the eight mantissas of E4M3 give all grids on which the largest weight is exact. Of most weights every grid is
as good, and q = 256 is best because a search can still enlarge the block scales it takes to be largest, up to 448. But
weights that were dequantised from NVFP4 lie on one of these grids, usually that of q = 448 (ModelOpt and
compressed-tensors take amax / 2688), and on that one alone they stay what they are: 20 dB and more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.quantize.book import TINY
from hybrid_pack.quantize.lift import lift_subnormal
from hybrid_pack.quantize.rows import Search, quantize_nvfp4

F32 = NDArray[np.float32]

LARGEST_CODE = 6.0
DEFAULT_BLOCK_SCALE = 256.0
OTHER_BLOCK_SCALES = (448.0, 416.0, 384.0, 352.0, 320.0, 288.0, 240.0)
"""The other mantissas at their largest; 480 is no number of E4M3."""

SAMPLE = 1 << 16
"""Weights of a matrix on which a scale is chosen: 4,096 blocks, whose errors differ from those of all by 0.5 % where
weights are as large as each other; a few huge ones, which would have most of the error, can be in none of them."""

LEAST_GAIN = 1 / 64
"""Share of the error that another scale than the default must save: three times what a sample is off by."""


def nvfp4_second_scale(amax: float, block_scale: float = DEFAULT_BLOCK_SCALE) -> float:
    """Second-level scale of matrices whose largest magnitude is amax: amax / (6 * block_scale), 1 for amax 0.

    A float32. Gate and up of an expert share one: pass the larger amax. Never less than 2^-126, so that it has an
    inverse.

    Raises:
        ValueError: amax is negative or not finite.
    """
    if not 0 <= amax < float("inf"):
        raise ValueError(f"the largest magnitude is a finite number from 0, not {amax!r}")
    return max(float(np.float32(amax / (LARGEST_CODE * block_scale))), TINY) if amax > 0 else 1.0


def best_second_scale(sample: F32, amax: float, search: Search, importance: F32 | None = None) -> float:
    """The second-level scale with the least error on some rows; the default where no other saves ``LEAST_GAIN`` of it.

    Args:
        sample: f32 [N, K], rows of all matrices that share the scale; N may be 0.
        amax: Largest magnitude of these matrices, at least that of the sample.
        search: How block scales will be found.
        importance: f32 [K], for ``weighted`` alone; it is then the weighted error that counts.

    Raises:
        ValueError: As ``nvfp4_second_scale`` and ``quantize_nvfp4``.
    """
    default = nvfp4_second_scale(amax)
    if not sample.any():
        return default
    n, k = sample.shape
    codes, scales = np.empty((n, k // 2), np.uint8), np.empty((n, k // 16), np.uint8)

    def error(second: float) -> float:
        stats = quantize_nvfp4(sample, second, search, importance, codes, scales)
        lift_subnormal(sample, second, importance, codes, scales, stats)
        return stats.weighted_error

    others = [nvfp4_second_scale(amax, block_scale) for block_scale in OTHER_BLOCK_SCALES]
    errors = {second: error(second) for second in others}
    best = min(others, key=errors.__getitem__)
    return best if errors[best] < (1 - LEAST_GAIN) * error(default) else default
