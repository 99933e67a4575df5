"""Quantise rows of a float32 matrix to NF3, NVFP4 or MXFP4, as a checkpoint stores them.

All work on any number of rows, release the GIL, and write the same bytes however the rows of a matrix are cut into
calls: every group is decided from its own weights alone.

``search`` is how a group's scale is found:

- ``absmax``: from the largest weight alone, as most tools do;
- ``mse``: the scale with the least sum of squared errors;
- ``weighted``: the same with squares weighted by ``importance``, one number for each input channel, such as the mean
  square of what the channel carries. A group without any importance is searched unweighted, and in FP4 so is one whose
  weights of importance are all zero, which no scale changes. In NF3 such a group takes scale zero, at no cost by
  importance, and its other weights are lost.

The two searches find the best of all scales a format has. What is packed for NVFP4 then goes through ``lift``: a block
whose best scale is subnormal, which the device does not hold, gets the best of those it does.

A weight midway between two levels takes the one nearer zero, and 0 and -0 take the smallest level above zero where
there is no level zero. A tie between scales takes the smaller one. Codes of FP4 never mean -0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.quantize.book import TINY, CodeBook, mxfp4_book, nf3_book, nvfp4_book
from hybrid_pack.quantize.stats import QuantStats

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

Search = Literal["absmax", "mse", "weighted"]
SEARCHES: tuple[Search, ...] = ("absmax", "mse", "weighted")


def quantize_nf3(
    weights: F32, levels: Sequence[float], search: Search, importance: F32 | None, codes: U8, scales: U8
) -> QuantStats:
    """Quantise to NF3: ``level[code] * scale``, an E4M3 scale below 32 for 32 columns.

    Args:
        weights: f32 [N, K], C-contiguous, K a multiple of 32.
        levels: Eight ascending numbers, ``formats.nf3.DEFAULT_LEVELS`` where a checkpoint has none of its own.
        search: See the module's text.
        importance: f32 [K], finite, not negative; for ``weighted`` alone.
        codes: u8 [N, K/8*3] out: little-endian 24-bit words of eight codes, code i at bits 3i.
        scales: u8 [N, K/32] out: E4M3 bytes 0x00 to 0x5F. A group may be best served by scale zero.

    Returns:
        What it cost. ``saturated`` counts groups that would have been better at 32 or more.

    Raises:
        ValueError: A weight that is not finite (names row and column), a wrong shape, level or importance.
    """
    return _quantize(nf3_book(tuple(map(float, levels))), weights, 1.0, search, importance, codes, scales)


def quantize_nvfp4(
    weights: F32, second: float, search: Search, importance: F32 | None, codes: U8, scales: U8
) -> QuantStats:
    """Quantise to NVFP4: ``e2m1(code) * scale * second``, an E4M3 scale for 16 columns.

    Args:
        weights: f32 [N, K], C-contiguous, K a multiple of 16.
        second: Second-level scale, a float32; see ``quantize.second``.
        search: See the module's text.
        importance: f32 [K], finite, not negative; for ``weighted`` alone.
        codes: u8 [N, K/2] out, low nibble the even column.
        scales: u8 [N, K/16] out: E4M3 bytes 0x00 to 0x7E.

    Returns:
        What it cost. ``saturated`` counts blocks that would have been better above 448, which needs a small ``second``.

    Raises:
        ValueError: As ``quantize_nf3``; or a second-level scale that is not a positive normal float32.
    """
    check_second_scale(second)
    return _quantize(nvfp4_book(), weights, second, search, importance, codes, scales)


def quantize_mxfp4(weights: F32, search: Search, importance: F32 | None, codes: U8, scales: U8) -> QuantStats:
    """Quantise to MXFP4: ``e2m1(code) * 2^(scale - 127)``, a scale for 32 columns.

    Args:
        weights: f32 [N, K], C-contiguous, K a multiple of 32.
        search: See the module's text; ``absmax`` is the rule of OCP Microscaling Formats v1.0, section 6.3.
        importance: f32 [K], finite, not negative; for ``weighted`` alone.
        codes: u8 [N, K/2] out, low nibble the even column.
        scales: u8 [N, K/32] out: 0 to 254; 0 where all codes are zero.

    Returns:
        What it cost.

    Raises:
        ValueError: As ``quantize_nf3``.
    """
    return _quantize(mxfp4_book(), weights, 1.0, search, importance, codes, scales)


def check_second_scale(second: float) -> None:
    """Refuse a second-level scale that is not a positive normal float32 with a normal inverse."""
    if not TINY <= second <= 1 / TINY:
        raise ValueError(f"the second-level scale is a number from 2^-126 to 2^126, not {second!r}")


def normal_importance(search: Search, importance: F32 | None, k: int) -> tuple[F32 | None, float]:
    """Importance with its largest value moved to 1 .. 2 by a power of two, so that products stay inside float32.

    Args:
        search: See the module's text.
        importance: f32 [K].
        k: Columns.

    Returns:
        f32 [K] or None, and what it is to be multiplied with to be the importance given.

    Raises:
        ValueError: Not a search, an importance where none is used, none where one is, or one that is no weight.
    """
    if search not in SEARCHES:
        raise ValueError(f"search is one of {', '.join(SEARCHES)}, not {search!r}")
    if (importance is not None) != (search == "weighted"):
        raise ValueError(f"search {search} with{'out' if importance is None else ''} an importance")
    if importance is None:
        return None, 1.0
    if importance.dtype != np.float32 or importance.shape != (k,):
        raise ValueError(f"importance is f32 [{k}], not {importance.dtype} {list(importance.shape)}")
    wrong = np.flatnonzero(~(np.isfinite(importance) & (importance >= 0)))
    if wrong.size:
        raise ValueError(f"importance of column {wrong[0]} is {importance[wrong[0]]}, not a finite number from 0")
    largest = float(importance.max(initial=0.0))
    exponent = math.frexp(largest)[1] - 1 if largest > 0 else 0
    return np.ldexp(importance, -exponent), math.ldexp(1.0, exponent)


def _matrix(weights: F32, group: int) -> tuple[int, int]:
    if weights.dtype != np.float32 or weights.ndim != 2 or not weights.flags.c_contiguous:
        raise ValueError(f"weights are f32 [N, K] without gaps, not {weights.dtype} {list(weights.shape)}")
    n, k = weights.shape
    if n == 0 or k == 0 or k % group:
        raise ValueError(f"weights are [N, K] with K a multiple of {group}, not [{n}, {k}]")
    return n, k


def _output(array: U8, name: str, n: int, width: int) -> None:
    if array.dtype != np.uint8 or array.shape != (n, width) or not array.flags.c_contiguous:
        raise ValueError(f"{name} are u8 [{n}, {width}] without gaps, not {array.dtype} {list(array.shape)}")


def _quantize(
    book: CodeBook, weights: F32, second: float, search: Search, importance: F32 | None, codes: U8, scales: U8
) -> QuantStats:
    from hybrid_pack.quantize.kernels import quantize_groups

    n, k = _matrix(weights, book.group)
    _output(codes, "codes", n, k * book.bits // 8)
    _output(scales, "scales", n, k // book.group)
    normal, unit = normal_importance(search, importance, k)
    sums, counts = np.zeros(3, np.float64), np.zeros(3, np.int64)
    wrong = quantize_groups(
        book,
        weights.reshape(-1, book.group),
        np.ones((1, book.group), np.float32) if normal is None else normal.reshape(-1, book.group),
        normal is not None,
        search != "absmax",
        np.float32(second),
        codes.reshape(-1),
        scales.reshape(-1),
        sums,
        counts,
    )
    if wrong >= 0:
        flat = weights.reshape(-1)
        first = int(wrong) * book.group
        first += int(np.flatnonzero(~np.isfinite(flat[first:]))[0])
        raise ValueError(f"row {first // k}, column {first % k} is {flat[first]}, not a finite number")
    zero, subnormal, saturated = map(int, counts)
    signal, error, weighted_error = map(float, sums)
    weighted_error = error if normal is None else weighted_error * unit
    return QuantStats(signal, error, weighted_error, scales.size, zero, subnormal, saturated)
