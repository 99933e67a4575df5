"""Choosing an expert matrix's scale table and global scale, and refusing scales that mean nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.convert.encode import Part
from hybrid_pack.errors import DataError
from hybrid_pack.formats import e4m3
from hybrid_pack.formats.checks import refused_bytes
from hybrid_pack.formats.source import SourceFormat
from hybrid_pack.io import weights
from hybrid_pack.io.checkpoint import Matrix
from hybrid_pack.layouts import scale_bytes
from hybrid_pack.layouts.scale_bytes import ScaleTable

OnScaleMismatch = Literal["refuse", "requantize"]
Counts = NDArray[np.int64]

_ZERO_E4M3 = np.flatnonzero(e4m3.VALUES == 0)
_NO_BYTES = np.empty(0, np.int64)
_E4M3 = np.nan_to_num(e4m3.VALUES)


@dataclass
class ScaleStats:
    """What happened to block scales; adds up.

    Attributes:
        zero: Groups whose stored scale is zero.
        flushed: Groups with a scale too small for the device byte, or of MXFP4 for the kernel.
        saturated: Groups with a scale too large for the device byte.
        moved_away: Those of the flushed that only moving gate's and up's ratio into them made too small.
        worst_error: Largest relative error of a scale; 0 unless gate and up were requantised.
    """

    zero: int = 0
    flushed: int = 0
    saturated: int = 0
    moved_away: int = 0
    worst_error: float = 0.0

    def add(self, other: ScaleStats) -> None:
        """Add another's counts."""
        self.zero += other.zero
        self.flushed += other.flushed
        self.saturated += other.saturated
        self.moved_away += other.moved_away
        self.worst_error = max(self.worst_error, other.worst_error)


def check_scales(part: Part, counts: Counts, where: str) -> None:
    """Refuse a matrix with scales that mean nothing.

    Args:
        part: Whose scales they are.
        counts: i64 [256], how often each byte occurs.
        where: Layer and expert in words.

    Raises:
        DataError: The first such scale, by tensor and index.
    """
    if (refused_bytes(part.format) & (counts > 0)).any():
        weights.check_scales(part.matrix, part.scales.matrix(), where)
        raise AssertionError(f"{where}: a scale of {part.matrix.name} is refused, and none was found")


def check_second(matrix: Matrix, value: float, where: str) -> None:
    """Refuse a second-level scale that is not finite and positive, or too large for the device's global scale.

    Raises:
        DataError: It is not.
    """
    if not 0 < value < scale_bytes.NVFP4_SECOND_LIMIT:
        raise DataError(
            f"{where}: second-level scale",
            where=matrix.second,
            expected="a finite positive number below 512",
            found=f"{value:g}",
        )


def power_of_two_ratio(a: float, b: float) -> bool:
    """Whether two positive numbers differ by an exact power of two."""
    return math.frexp(a)[0] == math.frexp(b)[0]


@lru_cache(maxsize=2)
def _nf3_table(scale_times_16: bool) -> ScaleTable:
    return scale_bytes.nf3_table(e4m3.VALUES / 16 if scale_times_16 else e4m3.VALUES)


@lru_cache(maxsize=128)
def _mxfp4_table(shift: int) -> ScaleTable:
    return scale_bytes.mxfp4_table(shift)


@lru_cache(maxsize=256)
def _nvfp4_table(ratio: float, factor: float) -> ScaleTable:
    return scale_bytes.nvfp4_table(e4m3.VALUES * ratio, factor)


@dataclass(frozen=True)
class MatrixScales:
    """Tables of the parts of one device matrix, and its global scale.

    Attributes:
        tables: One for each part (gate and up for w13, down for w2).
        global_scale: f32 value.
        stats: Counts of each part.
    """

    tables: tuple[ScaleTable, ...]
    global_scale: float
    stats: tuple[ScaleStats, ...]


def _stats(counts: list[Counts], tables: list[ScaleTable], zero_bytes: NDArray[np.int64]) -> tuple[ScaleStats, ...]:
    return tuple(
        ScaleStats(
            zero=int(count[zero_bytes].sum()),
            flushed=int(count[table.flushed].sum()),
            saturated=int(count[table.saturated].sum()),
            worst_error=float(table.error[(count > 0) & ~table.saturated].max(initial=0.0)),
        )
        for count, table in zip(counts, tables, strict=True)
    )


def choose(forms: list[SourceFormat], counts: list[Counts], seconds: list[float]) -> MatrixScales:
    """Tables and global scale of one device matrix of one rank.

    Args:
        forms: Stored format of each part.
        counts: i64 [256] for each part: how often each scale byte occurs in this rank's share.
        seconds: Second-level scale of each part; 1.0 where the format has none.
    """
    if forms[0].name == "nf3":
        tables = [_nf3_table(form.scale_times_16) for form in forms]
        return MatrixScales(tuple(tables), scale_bytes.NF3_GLOBAL_SCALE, _stats(counts, tables, _ZERO_E4M3))
    if forms[0].name == "mxfp4":
        largest = max(int(np.flatnonzero(count)[-1]) for count in counts)
        shift = scale_bytes.mxfp4_shift(largest)
        tables = [_mxfp4_table(shift)] * len(forms)
        return MatrixScales(tuple(tables), scale_bytes.mxfp4_global_scale(shift), _stats(counts, tables, _NO_BYTES))
    second = max(seconds)
    ratios = [own / second for own in seconds]
    largest_scale = max(float(_E4M3[count > 0].max(initial=0.0)) * r for r, count in zip(ratios, counts, strict=True))
    factor = scale_bytes.nvfp4_factor(largest_scale)
    tables = [_nvfp4_table(ratio, factor) for ratio in ratios]
    stats = _stats(counts, tables, _ZERO_E4M3)
    unmoved = _nvfp4_table(1.0, factor).flushed
    for own, count, table in zip(stats, counts, tables, strict=True):
        own.moved_away = int(count[table.flushed & ~unmoved].sum())
    return MatrixScales(tuple(tables), scale_bytes.nvfp4_global_scale(second, factor), stats)
