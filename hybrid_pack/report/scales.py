"""Histograms of block scales, read from the shards that are there: a fixed sample of experts, or all of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.errors import DataError, HybridPackError
from hybrid_pack.io.digest import blake3_digest
from hybrid_pack.io.progress import Progress, Silent
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.safetensors import TensorHeader
from hybrid_pack.io.shards import Located
from hybrid_pack.report.data import KEPT_NAMES, TAIL_NAME, TIERS, Tier, is_here
from hybrid_pack.schemas.manifest import Manifest, ShardEntry

SAMPLE = 256
"""Experts of a rank that are read of each tier and format: about 230 MB of GLM-5.2 for TP4."""

MATRICES = ("w13", "w2")
BINS_PER_OCTAVE: Mapping[str, int] = {"NVFP4": 2, "NF3": 2, "MXFP4": 1}
"""Half an octave holds four of the eight E4M3 steps; E8M0 has whole octaves only."""


@dataclass(frozen=True)
class Histogram:
    """Scales of one matrix in one tier.

    Attributes:
        tier: ``kept`` or ``tail``.
        format: ``NVFP4``, ``MXFP4`` or ``NF3``.
        matrix: ``w13`` or ``w2``.
        per_octave: Bins in a factor of two.
        first: Number of the first bin; bin b holds scales in ``2^(b / per_octave) .. 2^((b + 1) / per_octave)``.
        counts: Groups by bin.
        zero: Groups of scale zero.
        nbytes: Scale bytes read, one a group.
        experts: Experts of a rank read.
        experts_all: Those there are in the pack, on all ranks.
    """

    tier: Tier
    format: str
    matrix: str
    per_octave: int
    first: int
    counts: tuple[int, ...]
    zero: int
    nbytes: int
    experts: int
    experts_all: int


@dataclass(frozen=True)
class Scales:
    """What was read.

    Attributes:
        histograms: Kept before tail, w13 before w2.
        notes: What could not be read, and values no pack may have.
        full: Whether every expert was to be read.
    """

    histograms: tuple[Histogram, ...]
    notes: tuple[str, ...]
    full: bool


def byte_values(kind: str) -> NDArray[np.float64]:
    """f64 [256]: the scale that a byte means, but for the expert's global scale (FORMAT.md, section 12)."""
    byte = np.arange(256)
    if kind == "MXFP4":
        return np.asarray(np.exp2(byte - 127.0))
    e, m = byte // 8, byte % 8
    value: NDArray[np.float64] = np.where(e == 0, m * 2.0**-17, (8 + m) * np.exp2(e - 18.0))
    return value * (2.0**-126 if kind == "NVFP4" else 2.0**-112)


@dataclass(frozen=True)
class _Unit:
    """One expert in one shard."""

    shard: ShardEntry
    tier: Tier
    row: int


@dataclass
class _Totals:
    bins: Counter[int] = field(default_factory=Counter)
    zero: int = 0
    nbytes: int = 0
    experts: int = 0


def _sample(units: Sequence[_Unit], wanted: int | None) -> list[_Unit]:
    """Some of them, the same ones every time: those whose names have the smallest digests."""
    if wanted is None or len(units) <= wanted:
        return list(units)

    def key(number: int) -> str:
        unit = units[number]
        return blake3_digest(f"{unit.shard.path} {unit.tier} {unit.row}".encode())

    return [units[number] for number in sorted(sorted(range(len(units)), key=key)[:wanted])]


def _located(root: Path, shard: ShardEntry, name: str) -> Located:
    entry = shard.tensors[name]
    return Located(root / shard.path, TensorHeader(name, entry.dtype, entry.shape, entry.begin, entry.end))


def _row(reader: TensorReader, at: Located, row: int) -> NDArray[np.uint8]:
    nbytes = at.header.nbytes // at.header.shape[0]
    data = np.empty(nbytes, np.uint8)
    reader.read(at, data, row * nbytes)
    return data


def _add(totals: _Totals, data: NDArray[np.uint8], values: NDArray[np.float64], scale: float, per_octave: int) -> None:
    found = np.bincount(data, minlength=256)
    used = np.flatnonzero((found > 0) & (values > 0))
    # Whole powers of two must not fall below their bin by rounding.
    bins = np.floor((np.log2(values[used]) + np.log2(scale)) * per_octave + 1e-9).astype(int)
    for number, groups in zip(bins.tolist(), found[used].tolist(), strict=True):
        totals.bins[number] += groups
    totals.zero += int(found[values == 0].sum())
    totals.nbytes += data.nbytes
    totals.experts += 1


def _units(
    root: Path, manifest: Manifest
) -> tuple[dict[tuple[Tier, str], list[_Unit]], Counter[tuple[Tier, str]], int]:
    """(experts that can be read by tier and format, all of them counted, shards that are not here)."""
    units: dict[tuple[Tier, str], list[_Unit]] = defaultdict(list)
    everyone: Counter[tuple[Tier, str]] = Counter()
    missing = 0
    for shard in manifest.shards:
        here = is_here(root / shard.path, shard.bytes)
        missing += not here
        for tier in TIERS:
            if f"{tier}.expert_ids" not in shard.tensors:
                continue
            kept = KEPT_NAMES[manifest.layers[str(shard.layer)].kept_scale_format]
            key = (tier, kept if tier == "kept" else TAIL_NAME)
            rows = shard.tensors[f"{tier}.expert_ids"].shape[0]
            everyone[key] += rows
            if here:
                units[key] += [_Unit(shard, tier, row) for row in range(rows)]
    return units, everyone, missing


def read_scales(root: Path, manifest: Manifest, *, full: bool = False, progress: Progress | None = None) -> Scales:
    """Read block scales of the shards that are there.

    What is read is not held against digests: that is what ``verify`` does.

    Args:
        root: The pack.
        manifest: Its manifest.
        full: Every expert instead of a sample.
        progress: Told how it goes on.
    """
    units, everyone, missing = _units(root, manifest)
    progress = progress or Silent()
    chosen = {key: _sample(found, None if full else SAMPLE) for key, found in sorted(units.items())}
    nbytes = sum(_unit_bytes(unit) for found in chosen.values() for unit in found)
    if nbytes:
        progress.start(nbytes, 0)
    notes = [f"{missing:,} of {len(manifest.shards):,} shards are not here, or not of their size"] if missing else []
    trouble: list[str] = []
    histograms: list[Histogram] = []
    with TensorReader() as reader:
        for (tier, kind), found in chosen.items():
            values = byte_values(kind)
            totals = {matrix: _Totals() for matrix in MATRICES}
            for unit in found:
                for matrix, into in totals.items():
                    try:
                        scale, data = _scales(reader, root, unit, matrix)
                        _add(into, data, values, scale, BINS_PER_OCTAVE[kind])
                    except HybridPackError as error:
                        trouble.append(f"{unit.shard.path}: {error.problem}")
                progress.advance(_unit_bytes(unit))
            histograms += [
                _histogram(tier, kind, matrix, into, everyone[tier, kind])
                for matrix, into in totals.items()
                if into.experts
            ]
    if trouble:
        more = f", and {len(trouble) - 1:,} more" if trouble[1:] else ""
        notes.append(f"left out, run hybrid-pack verify: {trouble[0]}{more}")
    return Scales(tuple(histograms), tuple(notes), full)


def _scales(reader: TensorReader, root: Path, unit: _Unit, matrix: str) -> tuple[float, NDArray[np.uint8]]:
    """(global scale, scale bytes) of an expert's matrix.

    Raises:
        DataError: The global scale is no finite positive number.
        EnvironmentFailure: It cannot be read.
    """
    at = _located(root, unit.shard, f"{unit.tier}.{matrix}_global_scale")
    scale = float(_row(reader, at, unit.row).view("<f4")[0])
    if not (np.isfinite(scale) and scale > 0):
        raise DataError(f"a {at.header.name} is no finite positive number", where=root / unit.shard.path)
    return scale, _row(reader, _located(root, unit.shard, f"{unit.tier}.{matrix}_scale"), unit.row)


def _unit_bytes(unit: _Unit) -> int:
    tensors = (unit.shard.tensors[f"{unit.tier}.{matrix}_scale"] for matrix in MATRICES)
    return sum((tensor.end - tensor.begin) // tensor.shape[0] for tensor in tensors)


def _histogram(tier: Tier, kind: str, matrix: str, found: _Totals, experts_all: int) -> Histogram:
    first = min(found.bins, default=0)
    counts = tuple(found.bins[b] for b in range(first, max(found.bins, default=0) + 1)) if found.bins else ()
    return Histogram(
        tier=tier,
        format=kind,
        matrix=matrix,
        per_octave=BINS_PER_OCTAVE[kind],
        first=first,
        counts=counts,
        zero=found.zero,
        nbytes=found.nbytes,
        experts=found.experts,
        experts_all=experts_all,
    )
