"""What a search needs to know of a format: its levels, where one ends and the next begins, and its legal scales."""

from __future__ import annotations

import bisect
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.formats import e2m1, e4m3, e8m0, nf3

F32 = NDArray[np.float32]

SIGNED_KIND, SYMMETRIC_KIND, E2M1_KIND = 0, 1, 2

TINY = 2.0**-126
"""Smallest normal float32: stands for zero in a threshold, so that no comparison depends on subnormals."""

STATS = 8
"""Numbers a GPU program leaves: sums of w^2, (w - q)^2, importance * (w - q)^2; zero, subnormal, saturated groups;
groups with a weight that is not finite; nothing."""

LEVEL_RANGE = (2.0**-16, 2.0**16)
"""What the largest magnitude of a code book may be."""

VIRTUAL = 16
"""Scales above the largest legal one that are looked at to know whether a group would have taken them: two octaves."""

E4M3_EXACT_BELOW = 2.0**-6
"""E4M3 values below it are subnormal: multiples of 2^-9."""

USEFUL = 2 / 7
"""See ``kernels``: 7 is midway between 6 and 8, E2M1's largest level and the next level of twice the scale."""

E8M0_LOWEST = -64
"""Exponent of the smallest scale of an MXFP4 group whose largest weight was moved to 1 .. 2."""


class CodeBook(NamedTuple):
    """A format as the search sees it. Scales are known by index, ascending; index 0 is the scale zero.

    Attributes:
        group: Columns that share a scale.
        bits: 3 or 4 for a code.
        kind: ``E2M1_KIND``: levels are magnitudes, and bit 3 of a code is the sign. ``SIGNED_KIND``: levels have their
            sign. ``SYMMETRIC_KIND``: so, and the search sees magnitudes alone, to the same result.
        levels: f32 [8], ascending.
        thresholds: f32 [7]: ``weight / scale`` above number i means a level above number i.
        zones: f32 [4]. Above the last and below the first a weight is clipped, and its error grows as the scale falls.
            Between the second and the third lie no level but perhaps zero, and errors there grow as the scale grows.
        values: f32: scale of each index.
        inverses: f32: 1 / values, 0 for index 0.
        legal: Largest index that may be chosen.
        limit: Largest index that is looked at.
        reach: A search starts at the largest scale that is not above ``largest weight / reach``.
        nearest: ``absmax`` takes the scale nearest to it instead, ties to even.
        mantissa_bits: 3 (E4M3) or 0 (E8M0): ``float32 bits >> (23 - mantissa_bits)`` less ``offset`` is an index.
        offset: See there.
        exact_below: Scales below it are multiples of 2^-9 (E4M3 subnormals), and index = scale * 2^9.
        subnormal_below: Indices 1 .. this - 1 are such scales.
        clamp: Weights are searched as if they were at most this large, so that no square leaves float32. A scale is
            asked for long before that is clipped anyway.
        binary: Each group is moved by a power of two before the search, to a largest weight of 1 .. 2 (E8M0).
        byte_offset: Then, index = byte + the exponent it was moved by + this.
        useful: E2M1 alone: scales from largest weight * this are never better than their halves,
        halves_from: where the halves exist: at indices from this.
    """

    group: int
    bits: int
    kind: int
    levels: F32
    thresholds: F32
    zones: F32
    values: F32
    inverses: F32
    legal: int
    limit: int
    reach: float
    nearest: bool
    mantissa_bits: int
    offset: int
    exact_below: float
    subnormal_below: int
    clamp: float
    binary: bool
    byte_offset: int
    useful: float
    halves_from: int


def _thresholds(levels: F32) -> F32:
    """Middles between neighbours. A tie goes to the level nearer zero, and zero itself to the level above it."""
    middles = (levels[1:].astype(np.float64) + levels[:-1]) / 2
    thresholds = middles.astype(np.float32)
    below_zero = np.nextafter(thresholds, np.float32(-np.inf))
    thresholds = np.where(thresholds > 0, thresholds, below_zero)
    return np.where(np.abs(thresholds) < TINY, np.float32(-TINY), thresholds).astype(np.float32)


def _zones(levels: F32, kind: int) -> F32:
    """The four borders of ``CodeBook.zones``; one that does not exist is infinite."""
    below = [float(level) for level in levels if level < 0]
    above = [float(level) for level in levels if level > 0]
    infinity = float("inf")
    outer = (min(below, default=-infinity), max(above, default=infinity))
    inner = (max(below, default=-infinity), min(above, default=infinity))
    if kind != SIGNED_KIND:
        outer, inner = (-infinity, outer[1]), (-infinity, inner[1])
    return np.array([outer[0], inner[0], inner[1], outer[1]], np.float32)


def _inverses(values: F32) -> F32:
    inverses = np.zeros_like(values)
    inverses[1:] = np.float32(1) / values[1:]
    return inverses


def _e4m3_scales() -> F32:
    """f32 [256]: E4M3's pattern, carried on past its largest value for the scales that are only looked at."""
    index = np.arange(256)
    exponent, mantissa = index >> 3, index & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    return values.astype(np.float32)


def _e4m3_book(levels: F32, group: int, bits: int, kind: int, legal: int) -> CodeBook:
    values = _e4m3_scales()
    reach = float(np.abs(levels).max())
    return CodeBook(
        group=group,
        bits=bits,
        kind=kind,
        levels=levels,
        thresholds=_thresholds(levels),
        zones=_zones(levels, kind),
        values=values,
        inverses=_inverses(values),
        legal=legal,
        limit=legal + VIRTUAL,
        reach=reach,
        nearest=True,
        mantissa_bits=3,
        offset=(127 - 7) << 3,
        exact_below=E4M3_EXACT_BELOW,
        subnormal_below=8,
        clamp=float(np.float32(values[legal] * reach * 2.0**16)),
        binary=False,
        byte_offset=0,
        useful=USEFUL,
        halves_from=16,
    )


@lru_cache(maxsize=16)
def nf3_book(levels: tuple[float, ...]) -> CodeBook:
    """NF3 with a code book of eight levels.

    Raises:
        ValueError: Not eight finite ascending numbers, or so large or small that squares would leave float32.
    """
    array = np.array(levels, np.float32)
    ascending = array.shape == (8,) and bool(np.isfinite(array).all()) and bool((np.diff(array) > 0).all())
    if not ascending:
        raise ValueError(f"NF3 levels are eight finite ascending numbers, not {levels!r}")
    if not LEVEL_RANGE[0] <= float(np.abs(array).max()) <= LEVEL_RANGE[1]:
        raise ValueError(f"the largest NF3 level lies between 2^-16 and 2^16, not {levels!r}")
    kind = SYMMETRIC_KIND if bool((array == -array[::-1]).all()) else SIGNED_KIND
    largest = bisect.bisect_left(e4m3.VALUES[:0x7F].tolist(), nf3.SCALE_LIMIT) - 1
    return _e4m3_book(array, nf3.GROUP, 3, kind, largest)


@lru_cache(maxsize=1)
def nvfp4_book() -> CodeBook:
    """NVFP4: magnitudes of E2M1, E4M3 scales up to 448, of weights already divided by the second-level scale."""
    return _e4m3_book(np.array(e2m1.MAGNITUDES, np.float32), 16, 4, E2M1_KIND, e4m3.NAN_BYTES[0] - 1)


@lru_cache(maxsize=1)
def mxfp4_book() -> CodeBook:
    """MXFP4: magnitudes of E2M1, power-of-two scales relative to the group's largest weight.

    ``reach`` is 4 and ``absmax`` rounds down, which is the rule of OCP Microscaling Formats v1.0, section 6.3:
    exponent of the largest weight less that of the largest level.
    """
    levels = np.array(e2m1.MAGNITUDES, np.float32)
    values = np.zeros(128, np.float32)
    values[1:] = np.ldexp(np.float32(1), np.arange(127) + E8M0_LOWEST)
    return CodeBook(
        group=32,
        bits=4,
        kind=E2M1_KIND,
        levels=levels,
        thresholds=_thresholds(levels),
        zones=_zones(levels, E2M1_KIND),
        values=values,
        inverses=_inverses(values),
        legal=127,
        limit=127,
        reach=4.0,
        nearest=False,
        mantissa_bits=0,
        offset=127 + E8M0_LOWEST - 1,
        exact_below=0.0,
        subnormal_below=0,
        clamp=4.0,
        binary=True,
        byte_offset=1 - E8M0_LOWEST - e8m0.BIAS,
        useful=USEFUL,
        halves_from=1,
    )
