"""Whether quantised codes and scales are what their method promises, by trying the others: no quantiser is used.

A code is right if no other level is nearer to the weight. A scale found by least squares is right if neither neighbour
among the format's scales, with nearest codes, has a smaller squared error. Arithmetic is binary32 with a margin for its
rounding, sums are binary64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.formats import e2m1, e4m3, e8m0
from hybrid_pack.jit import inline, kernel

MARGIN = 4e-6
"""Of a distance, relative to the largest magnitude in its group: some roundings of binary32."""

FLOOR = 1e-40
"""Of a distance: binary32 is no help below it."""

ERROR_MARGIN = 1e-4
"""Of a group's squared error, relative to itself: sums in another order decide near ties otherwise."""


@dataclass(frozen=True)
class ScaleLadder:
    """The scales a format has.

    Attributes:
        values: f32 [256], what each stored byte means; 0 for bytes that are never written.
        lower: i64 [256], the next smaller byte, or the byte itself.
        higher: i64 [256], the next larger one, or the byte itself.
    """

    values: NDArray[np.float32]
    lower: NDArray[np.int64]
    higher: NDArray[np.int64]

    @classmethod
    def of(cls, values: NDArray[np.float64], usable: NDArray[np.bool_]) -> ScaleLadder:
        """From f64 [256] values that ascend over the usable bytes."""
        steps = np.flatnonzero(usable)
        lower, higher = np.arange(256), np.arange(256)
        lower[steps[1:]], higher[steps[:-1]] = steps[:-1], steps[1:]
        return cls(np.where(usable, values, 0).astype(np.float32), lower, higher)


def nf3_ladder(limit: float) -> ScaleLadder:
    """E4M3 scales from zero up to, not including, a limit."""
    byte = np.arange(256)
    return ScaleLadder.of(np.nan_to_num(e4m3.VALUES), (byte < 0x7F) & (np.nan_to_num(e4m3.VALUES) < limit))


def nvfp4_ladder(second: float) -> ScaleLadder:
    """E4M3 scales times a second-level scale; none that is subnormal, which the device would take for zero."""
    byte = np.arange(256)
    return ScaleLadder.of(np.nan_to_num(e4m3.VALUES) * second, (byte == 0) | ((byte >= 8) & (byte < 0x7F)))


def mxfp4_ladder() -> ScaleLadder:
    """E8M0 scales."""
    return ScaleLadder.of(np.nan_to_num(e8m0.VALUES), np.arange(256) < 255)


FP4_LEVELS: NDArray[np.float32] = np.asarray(e2m1.VALUES, np.float32)


@inline
def _code(codes, row, k, bits):  # type: ignore[no-untyped-def]
    """Code of column k of a stored row: nibbles, low first, or eight 3-bit codes in three bytes."""
    if bits == 4:
        return (codes[row, k >> 1] >> ((k & 1) * 4)) & 15
    first = (k >> 3) * 3
    word = codes[row, first] | (codes[row, first + 1] << 8) | (codes[row, first + 2] << 16)
    return (word >> ((k & 7) * 3)) & 7


@kernel
def examine(  # type: ignore[no-untyped-def]
    weights, codes, scales, bits, group, levels, values, lower, higher, nearest, least, sums, found
):
    """Hold codes and scales against the weights they were made from.

    Args:
        weights: f32 [R, K].
        codes: i64-safe u8 [R, bytes], stored rows.
        scales: u8 [R, K/group].
        bits: Of a code, 3 or 4.
        group: Columns that share a scale.
        levels: f32 [2^bits].
        values: f32 [256], with ``lower`` and ``higher`` from a ``ScaleLadder``.
        lower: i64 [256].
        higher: i64 [256].
        nearest: Whether codes must be the nearest levels.
        least: Whether scales must have the least squared error among their neighbours.
        sums: f64 [2]; the squares of weights and of differences are added.
        found: i64 [6]; codes that are not nearest, row and column of the first; scales, row and group of the first.
    """
    here = np.empty(group, np.float32)
    best = np.empty(group, np.float32)
    trial = np.empty(group, np.float32)
    for row in range(weights.shape[0]):
        for g in range(scales.shape[1]):
            byte = scales[row, g]
            scale = values[byte]
            largest = np.float32(0)
            signal = 0.0
            error = 0.0
            for i in range(group):
                here[i] = weights[row, g * group + i]
                largest = max(largest, abs(here[i]))
                signal += np.float64(here[i]) * np.float64(here[i])
            margin = np.float32(MARGIN) * largest + np.float32(FLOOR)
            _distances(here, levels, scale, best)
            least_error = 0.0
            for i in range(group):
                k = g * group + i
                distance = abs(here[i] - levels[_code(codes, row, k, bits)] * scale)
                error += np.float64(distance) * np.float64(distance)
                least_error += np.float64(best[i]) * np.float64(best[i])
                if nearest and distance > best[i] + margin:
                    if found[0] == 0:
                        found[1], found[2] = row, k
                    found[0] += 1
            sums[0] += signal
            sums[1] += error
            if least:
                for other in (lower[byte], higher[byte]):
                    if other == byte:
                        continue
                    _distances(here, levels, values[other], trial)
                    total = 0.0
                    for i in range(group):
                        total += np.float64(trial[i]) * np.float64(trial[i])
                    if total < least_error * (1 - ERROR_MARGIN) - np.float64(margin) * np.float64(margin):
                        if found[3] == 0:
                            found[4], found[5] = row, g
                        found[3] += 1
                        break


@inline
def _distances(here, levels, scale, out):  # type: ignore[no-untyped-def]
    """Distance of each weight from the nearest level."""
    for i in range(here.size):
        out[i] = abs(here[i] - levels[0] * scale)
    for j in range(1, levels.size):
        level = levels[j] * scale
        for i in range(here.size):
            out[i] = min(out[i], abs(here[i] - level))
