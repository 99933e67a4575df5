"""GPTQ as its paper derives it, in numpy and float64: one column at a time, and the inverse Hessian shrunk after each.

Frantar et al. 2022 (arXiv:2210.17323), equations 2 and 3: a column q is rounded, the columns not yet rounded move by
``-(w_q - quant(w_q)) / [H^-1]_qq * H^-1[:, q]``, and row and column q are taken out of ``H^-1`` by Gaussian
elimination. No Cholesky, no blocks, no permutation of anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .floats import E4M3, F64
from .source import U8


@dataclass(frozen=True)
class Quantised:
    """What GPTQ gave.

    Attributes:
        codes: u8 [N, K].
        values: f64 [N, K], decoded.
        margin: Least distance, in units of the scale, of any value that was rounded to the midpoint of two levels.
    """

    codes: U8
    values: F64
    margin: float


def error(weights: NDArray[Any], values: NDArray[Any], hessian: NDArray[Any]) -> float:
    """``trace((W - Q) H (W - Q)^T)``, row by row."""
    h = np.asarray(hessian, np.float64)
    total = 0.0
    for row in np.asarray(weights, np.float64) - np.asarray(values, np.float64):
        total += float(row @ h @ row)
    return total


def decode(codes: NDArray[Any], scales: NDArray[Any], levels: Sequence[float]) -> F64:
    """f64 [N, K]: level times scale, one value at a time."""
    values = np.empty(codes.shape)
    for row, column in np.ndindex(*codes.shape):
        values[row, column] = levels[codes[row, column]] * E4M3[scales[row, column // 32]]
    return values


def nearest(value: float, scale: float, levels: Sequence[float]) -> tuple[int, float]:
    """(code, distance in scales to the next midpoint); scale zero means that nothing but zero can be stored."""
    if scale == 0:
        return 0, np.inf
    distances = [abs(value - level * scale) for level in levels]
    code = int(np.argmin(distances))
    midpoints = [(a + b) / 2 for a, b in pairwise(levels)]
    return code, min(abs(value / scale - midpoint) for midpoint in midpoints)


def gptq(
    weights: NDArray[Any],
    hessian: NDArray[Any],
    scales: NDArray[Any],
    levels: Sequence[float],
    *,
    damping: float,
    by_activation: bool,
) -> Quantised:
    """Quantise with given scales.

    Args:
        weights: [N, K].
        hessian: [K, K], positive semidefinite, no zero on the diagonal.
        scales: u8 [N, K/32] E4M3 bytes.
        levels: Eight.
        damping: In parts of the mean of the diagonal.
        by_activation: Columns by descending diagonal, else from left to right.
    """
    w = np.array(weights, np.float64)
    h = np.array(hessian, np.float64)
    n, k = w.shape
    diagonal = h.diagonal().copy()
    inverse = np.linalg.inv(h + damping * diagonal.mean() * np.eye(k))
    order = sorted(range(k), key=lambda q: -diagonal[q]) if by_activation else list(range(k))
    codes, values, margin = np.zeros((n, k), np.uint8), np.zeros((n, k)), np.inf
    left = set(range(k))
    for q in order:
        left.remove(q)
        rest = sorted(left)
        for row in range(n):
            scale = float(E4M3[scales[row, q // 32]])
            codes[row, q], distance = nearest(w[row, q], scale, levels)
            values[row, q] = levels[codes[row, q]] * scale
            margin = min(margin, distance)
            w[row, rest] -= (w[row, q] - values[row, q]) / inverse[q, q] * inverse[q, rest]
        inverse = inverse - np.outer(inverse[:, q], inverse[q, :]) / inverse[q, q]
    return Quantised(codes, values, margin)


def least_loss(weights: NDArray[Any], importance: NDArray[Any], levels: Sequence[float]) -> float:
    """The least of ``losses`` over the scales below 32."""
    return float(losses(weights, importance, levels, 30.0).min())


def losses(weights: NDArray[Any], importance: NDArray[Any], levels: Sequence[float], largest: float) -> F64:
    """``sum importance * (w - nearest)^2`` of 32 weights for every E4M3 scale up to one, zero among them."""
    w, h, ladder = np.asarray(weights, np.float64), np.asarray(importance, np.float64), np.array(levels)
    found = []
    for scale in E4M3[:0x7F]:
        if scale <= largest:
            found.append(float((h * ((w[:, None] - scale * ladder) ** 2).min(1)).sum()))  # of scale zero, h * w^2
    return np.array(found)
