"""Every scale tried on every group in float64: the least error there is, found without any cleverness."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .floats import E2M1, E4M3, E8M0, F64
from .source import NF3_LEVELS

U8 = NDArray[np.uint8]

NF3_SCALES: F64 = E4M3[:0x60]
"""f64 [96]: E4M3 scales below 32, zero among them."""

NVFP4_SCALES: F64 = E4M3[:0x7F]
"""f64 [127]: all E4M3 scales that are not negative."""

MXFP4_SCALES: F64 = E8M0[:255]
"""f64 [255]: all E8M0 scales."""

E2M1_LEVELS: F64 = np.unique(E2M1)
"""f64 [15], ascending."""


def nearest_errors(groups: F64, levels: F64) -> F64:
    """Distance of every number to the nearest level."""
    return np.asarray(np.abs(groups[..., None] - levels).min(axis=-1))


def errors_of_scales(groups: F64, levels: F64, scales: F64, importance: F64 | None = None) -> F64:
    """Sum of (importance *) squared errors of each group at each scale.

    Args:
        groups: f64 [groups, columns].
        levels: f64, ascending; of scale one.
        scales: f64 [scales], not negative.
        importance: f64 [groups, columns], or None for ones.

    Returns:
        f64 [scales, groups].
    """
    weight = np.ones_like(groups) if importance is None else importance
    return np.stack([(weight * nearest_errors(groups, levels * scale) ** 2).sum(axis=1) for scale in scales])


def in_groups(matrix: F64, group: int) -> F64:
    """[N, K] to [N * K/group, group]."""
    return np.asarray(matrix, np.float64).reshape(-1, group)


def by_group(importance: F64, rows: int, group: int) -> F64:
    """[K] to [N * K/group, group], the same for every row."""
    return in_groups(np.broadcast_to(importance, (rows, importance.size)), group)


def least_error(
    name: str,
    weights: F64,
    second: float = 1.0,
    levels: tuple[float, ...] = NF3_LEVELS,
    importance: F64 | None = None,
) -> F64:
    """Least error of each group over all legal scales of a format.

    Args:
        name: "nf3", "nvfp4" or "mxfp4".
        weights: f64 [N, K].
        second: Second-level scale, NVFP4 only.
        levels: NF3 code book.
        importance: f64 [K] or None.

    Returns:
        f64 [N * K/group].
    """
    group = 16 if name == "nvfp4" else 32
    scales = {"nf3": NF3_SCALES, "nvfp4": NVFP4_SCALES * second, "mxfp4": MXFP4_SCALES}[name]
    book = np.array(levels, np.float64) if name == "nf3" else E2M1_LEVELS
    weighting = None if importance is None else by_group(importance, len(weights), group)
    return np.asarray(errors_of_scales(in_groups(weights, group), book, scales, weighting).min(axis=0))
