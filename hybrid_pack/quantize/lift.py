"""NVFP4 block scales that the device cannot hold beside the largest: they become zero or the smallest it holds.

b12x 1.1.0 flushes block scales below 2^-6, E4M3's subnormals, when the largest of a matrix is near 448, as it is where
this package chooses the second-level scale. The best that every rank can hold is taken instead.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.formats import e2m1, e4m3
from hybrid_pack.quantize.stats import QuantStats

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

GROUP = 16
SMALLEST_BYTE = 8
"""E4M3 byte of 2^-6, the smallest normal number."""

LARGEST_BYTE = 47
"""Of 2^-2 times 1.875: a group that would take a subnormal scale has no weight of a quarter of it, so that larger ones
give zero."""

LARGEST_WEIGHTED_BYTE = 0x7E
"""With importances that is no law: a weight that matters little may be that large, and clipped at the subnormal scale.
All scales are tried."""

_MIDPOINTS = (np.array(e2m1.MAGNITUDES[1:]) + np.array(e2m1.MAGNITUDES[:-1])) / 2


def _nearest(weights: NDArray[np.float64], scale: float) -> U8:
    """E2M1 codes of the nearest levels; midway the one nearer zero, and never -0."""
    magnitude = np.searchsorted(_MIDPOINTS, np.abs(weights) / scale, side="left").astype(np.uint8)
    return np.where((weights < 0) & (magnitude > 0), magnitude | 8, magnitude).astype(np.uint8)


def lift_subnormal(
    weights: F32, second: float, importance: F32 | None, codes: U8, scales: U8, stats: QuantStats
) -> None:
    """Replace subnormal block scales in place.

    Args:
        weights: f32 [N, K].
        second: Second-level scale.
        importance: f32 [K], or None.
        codes: u8 [N, K/2], changed.
        scales: u8 [N, K/16], changed: none of 1 to 7 is left.
        stats: Of these rows, changed.
    """
    rows, groups = np.nonzero((scales > 0) & (scales < SMALLEST_BYTE))
    if not rows.size:
        return
    n, k = weights.shape
    exact = weights.reshape(n, k // GROUP, GROUP)[rows, groups].astype(np.float64)
    channels = np.ones(k) if importance is None else importance.astype(np.float64)
    weight = channels.reshape(k // GROUP, GROUP)[groups]
    packed = codes.reshape(n, k // GROUP, GROUP // 2)
    pairs = packed[rows, groups]
    before = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(-1, GROUP)
    old = exact - e2m1.VALUES[before] * (e4m3.VALUES[scales[rows, groups]] * second)[:, None]
    best = (weight * exact**2).sum(axis=1)  # of zero, which a tie keeps
    lifted, chosen, new = np.zeros_like(before), np.zeros(len(rows), np.uint8), exact.copy()
    last = LARGEST_BYTE if importance is None else LARGEST_WEIGHTED_BYTE
    for byte in range(SMALLEST_BYTE, last + 1):
        scale = float(e4m3.VALUES[byte]) * second
        trial = _nearest(exact, scale)
        left = exact - e2m1.VALUES[trial] * scale
        error = (weight * left**2).sum(axis=1)
        better = error < best
        best[better], chosen[better] = error[better], byte
        lifted[better], new[better] = trial[better], left[better]
    packed[rows, groups] = lifted[:, 0::2] | lifted[:, 1::2] << 4
    scales[rows, groups] = chosen
    stats.error += float((new**2).sum() - (old**2).sum())
    stats.weighted_error += float((weight * new**2).sum() - (weight * old**2).sum())
    stats.subnormal -= rows.size
    stats.zero += int((chosen == 0).sum())
    there = chosen > 0  # the others count as all groups that became zero do
    stats.small += int(there.sum())
    stats.small_signal += float((exact[there] ** 2).sum())
    stats.small_error += float((new[there] ** 2).sum())
