"""What the device's scale bytes make of matrices that were moved: mostly nothing, else an error that is counted."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.convert.encode import Part
from hybrid_pack.convert.scales import Counts
from hybrid_pack.formats import e2m1
from hybrid_pack.formats.decode import scale_values
from hybrid_pack.layouts import scale_bytes
from hybrid_pack.layouts.rows import Rows
from hybrid_pack.layouts.scale_bytes import ScaleTable
from hybrid_pack.layouts.scales import count_used_scale_bytes

CHUNK_ROWS = 256
"""Rows looked at together: 2 bytes for each pair of codes."""

_FOUR_TIMES_SQUARES = (4 * e2m1.VALUES**2).astype(np.uint16)
_ENERGY = (_FOUR_TIMES_SQUARES[:, None] + _FOUR_TIMES_SQUARES[None, :]).reshape(256)
"""u16 [256]: four times the sum of the squares of the two E2M1 codes in a byte, at most 288."""


def scale_changes(part: Part, table: ScaleTable, global_scale: float) -> NDArray[np.float64]:
    """f64 [256]: by how much the device's scale differs from the one a stored byte means; 0 where it is the same.

    MXFP4 that the kernel flushes has the scale 0.

    Args:
        part: A matrix in NVFP4 or MXFP4; NF3's scales are all exact.
        table: Of its scales.
        global_scale: Of the device matrix.
    """
    stored = np.nan_to_num(scale_values(part.format)) * part.second
    if part.format.name == "mxfp4":
        held = np.where(table.flushed, 0.0, scale_bytes.E8M0_VALUES[table.device] * global_scale)
        return np.asarray(held - stored, np.float64)
    unit = global_scale * 2.0**scale_bytes.NVFP4_VALUE_EXPONENT
    return np.asarray(scale_bytes.DEVICE_VALUES[table.device] * unit - stored, np.float64)


def moved_error(part: Part, codes: Rows, scales: Rows, counts: Counts, table: ScaleTable, global_scale: float) -> float:
    """Sum of (w - q)^2 over a rank's share of a matrix that was moved: its codes are the same, some scales are not.

    Args:
        part: The matrix.
        codes: This rank's share of its codes.
        scales: Likewise of its scales.
        counts: i64 [256], how often each scale byte occurs there.
        table: Of its scales.
        global_scale: Of the device matrix.
    """
    if part.format.name == "nf3":
        return 0.0
    changes = np.where(counts > 0, scale_changes(part, table, global_scale), 0.0)
    if not changes.any():
        return 0.0
    energy = np.zeros(256, np.float64)
    for first in range(0, codes.count, CHUNK_ROWS):
        count = min(CHUNK_ROWS, codes.count - first)
        of_scales = scales.rows(first, count).matrix()
        pairs = _ENERGY[codes.rows(first, count).matrix()].reshape(count, scales.width, -1)
        groups = pairs.sum(axis=2, dtype=np.int64) / 4
        energy += np.bincount(of_scales.reshape(-1), weights=groups.reshape(-1), minlength=256)
    return float(energy @ changes**2)


def all_flushed(counts: Iterable[Counts], tables: Iterable[ScaleTable]) -> bool:
    """Whether a matrix that was moved has nothing but zeros on the ranks, and had more.

    Args:
        counts: For each rank, i64 [256], how often each scale byte occurs in its share; of MXFP4, whose zeros have
            scales too, as ``weighty`` gives them.
        tables: For each rank.
    """
    flushed = left = 0
    for count, table in zip(counts, tables, strict=True):
        flushed += int(count[table.flushed].sum())
        left += int(count[(table.device > 0) & ~table.flushed].sum())
    return flushed > 0 and left == 0


def weighty(part: Part, codes: Rows, scales: Rows, counts: Counts, table: ScaleTable) -> Counts:
    """Counts of scale bytes without those of MXFP4 groups that are zero by their codes, where it makes a difference.

    Args:
        part: The matrix, in the format of its tier.
        codes: A rank's share of its codes.
        scales: Likewise of its scales.
        counts: i64 [256], how often each scale byte occurs there.
        table: Of its scales.
    """
    if part.format.name != "mxfp4" or not counts[table.flushed].any():
        return counts
    return count_used_scale_bytes(codes, scales)
