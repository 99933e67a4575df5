"""Every packed expert against the stored one, through decoders only: codes bit for bit, scales as exact values."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.errors import DataError
from hybrid_pack.io.checkpoint import Checkpoint, Expert, Matrix
from hybrid_pack.io.manifest import MANIFEST, rank_geometry, rank_tiers, topology_of
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.safetensors import TensorHeader
from hybrid_pack.io.shards import Located
from hybrid_pack.layouts.shard import MATRICES, Tier
from hybrid_pack.layouts.shard import Matrix as MatrixName
from hybrid_pack.schemas.manifest import Manifest, ShardEntry
from hybrid_pack.verify.pool import Buffers, Pool
from hybrid_pack.verify.progress import Progress
from hybrid_pack.verify.report import Recorder, Tally
from hybrid_pack.verify.scale_rules import scale_rule
from hybrid_pack.verify.scope import Scope

EXPERTS = "experts against the source"

U8 = NDArray[np.uint8]


@dataclass
class Counts:
    """What the comparison came to; adds up.

    Attributes:
        source_bytes: Bytes of codes and scales of the source that were held against the pack.
        zero: Groups whose stored scale is zero.
        flushed: Groups too small for the kernel.
        saturated: Groups too large for it.
    """

    source_bytes: int = 0
    zero: int = 0
    flushed: int = 0
    saturated: int = 0

    def add(self, other: Counts) -> None:
        """Add another's."""
        self.source_bytes += other.source_bytes
        self.zero += other.zero
        self.flushed += other.flushed
        self.saturated += other.saturated


@dataclass(frozen=True)
class Part:
    """A rank's share of one stored matrix.

    Attributes:
        role: ``gate``, ``up`` or ``down``.
        matrix: What it is a share of.
        second: Second-level scale; 1.0 where there is none.
        codes: u8 [rows, bytes].
        scales: u8 [rows, groups].
    """

    role: str
    matrix: Matrix
    second: float
    codes: U8
    scales: U8


@dataclass(frozen=True)
class PackedShard:
    """A shard of the layer that is compared.

    Attributes:
        entry: Its entry in the manifest.
        path: The file.
        tp_rank: Which slice of I it holds.
        rows: Tier and row of each expert it holds.
    """

    entry: ShardEntry
    path: Path
    tp_rank: int
    rows: Mapping[int, tuple[Tier, int]]


class Comparison:
    """Compares experts of one layer; one object for all threads.

    Args:
        manifest: Of the pack.
        recorder: Gets the findings.
        buffers: Of the threads.
    """

    def __init__(self, manifest: Manifest, recorder: Recorder, buffers: Buffers) -> None:
        self._geometry, self._recorder, self._buffers = rank_geometry(manifest), recorder, buffers
        self._layers = manifest.layers
        self._errors = {(r.layer, r.expert): r.worst_relative_error for r in manifest.report.experts_requantized}

    def expert(
        self, expert: int, stored: Expert, shards: list[PackedShard], reader: TensorReader
    ) -> tuple[Counts, int]:
        """Compare one expert on every rank that holds it.

        Returns:
            (what it came to, bytes read).

        Raises:
            DataError: A file ended early.
        """
        counts, nbytes = Counts(), 0
        seconds = [self._second(matrix, reader) for matrix in stored.matrices]
        down: tuple[U8, U8] | None = None
        for shard in shards:
            if expert not in shard.rows:
                continue
            if down is None:
                down = self._stored("down", stored.down, 0, stored.down.rows, reader)
                nbytes += down[0].nbytes + down[1].nbytes
            for name in MATRICES:
                if name == "w13":
                    parts = self._gate_up(stored, seconds, shard.tp_rank, reader)
                    nbytes += sum(part.codes.nbytes + part.scales.nbytes for part in parts)
                else:
                    parts = [self._down(stored.down, seconds[2], down, shard.tp_rank)]
                nbytes += self._matrix(shard, expert, name, parts, reader, counts)
        return counts, nbytes

    def _second(self, matrix: Matrix, reader: TensorReader) -> float:
        if matrix.second is None:
            return 1.0
        value = np.empty(4, np.uint8)
        reader.read(matrix.second, value)
        return float(value.view("<f4")[0])

    def _stored(self, role: str, matrix: Matrix, first: int, rows: int, reader: TensorReader) -> tuple[U8, U8]:
        """Rows of a stored matrix: codes u8 [rows, bytes] and scales u8 [rows, groups]."""
        read = []
        for use, at, width in (
            ("codes", matrix.codes, matrix.format.code_bytes(matrix.columns)),
            ("scales", matrix.scales, matrix.columns // matrix.format.group),
        ):
            buffer = self._buffers.take(f"{role} {use}", rows * width)
            reader.read(at, buffer, first * width)
            read.append(buffer.reshape(rows, width))
        return read[0], read[1]

    def _gate_up(self, stored: Expert, seconds: list[float], tp_rank: int, reader: TensorReader) -> list[Part]:
        share = self._geometry.intermediate
        return [
            Part(role, matrix, second, *self._stored(role, matrix, tp_rank * share, share, reader))
            for role, matrix, second in zip(("gate", "up"), (stored.gate, stored.up), seconds, strict=False)
        ]

    def _down(self, matrix: Matrix, second: float, stored: tuple[U8, U8], tp_rank: int) -> Part:
        share, form = self._geometry.intermediate, matrix.format
        width, groups = form.code_bytes(share), share // form.group
        codes, scales = stored
        return Part(
            "down",
            matrix,
            second,
            codes[:, tp_rank * width : (tp_rank + 1) * width],
            scales[:, tp_rank * groups : (tp_rank + 1) * groups],
        )

    def _packed(self, shard: PackedShard, name: str, row: int, reader: TensorReader) -> U8:
        """One expert's row of a tensor of a shard."""
        entry = shard.entry.tensors[name]
        size = (entry.end - entry.begin) // entry.shape[0]
        buffer = self._buffers.take(name, size)
        reader.read(
            Located(shard.path, TensorHeader(name, entry.dtype, entry.shape, entry.begin, entry.end)),
            buffer,
            row * size,
        )
        return buffer

    def _matrix(
        self, shard: PackedShard, expert: int, name: MatrixName, parts: list[Part], reader: TensorReader, counts: Counts
    ) -> int:
        tier, row = shard.rows[expert]
        n, k = self._geometry.size(name)
        words = self._packed(shard, f"{tier}.{name}", row, reader)
        scales = self._packed(shard, f"{tier}.{name}_scale", row, reader)
        global_scale = float(self._packed(shard, f"{tier}.{name}_global_scale", row, reader).view("<f4")[0])
        kept_format = self._layers[str(shard.entry.layer)].kept_scale_format
        codes = self._geometry.codes(tier, name).unpack(words.view("<u4"), n, k)
        device = self._geometry.scales(tier, kept_format).unpack(scales, n, k)
        error = self._errors.get((shard.entry.layer, expert), 0.0) if name == "w13" else 0.0
        rows = n // len(parts)
        for i, part in enumerate(parts):
            where = f"layer {shard.entry.layer} expert {expert} {part.role} ({tier}.{name}[{row}])"
            mine = slice(i * rows, (i + 1) * rows)
            self._codes(shard, where, part, codes[mine])
            self._scales(shard, where, part, device[mine], global_scale, error, counts)
            counts.source_bytes += part.codes.size + part.scales.size
        return words.nbytes + scales.nbytes + 4

    def _codes(self, shard: PackedShard, where: str, part: Part, found: U8) -> None:
        if np.array_equal(part.codes, found):
            return
        different = part.codes != found
        row, byte = np.unravel_index(int(different.argmax()), different.shape)
        self._recorder.find(
            EXPERTS, shard.entry.path, f"{int(different.sum())} bytes of codes are not the source's", where=f"{where} row {row} byte {byte}",
            expected=f"0x{part.codes[row, byte]:02X}", found=f"0x{found[row, byte]:02X}",
        )  # fmt: skip

    def _scales(
        self, shard: PackedShard, where: str, part: Part, device: U8, global_scale: float, error: float, counts: Counts
    ) -> None:
        rule = scale_rule(part.matrix.format, part.second, global_scale, error)
        pairs = np.bincount((part.scales.astype(np.uint16) << 8 | device).reshape(-1), minlength=1 << 16).reshape(
            256, 256
        )
        counts.add(
            Counts(0, int(pairs[rule.zero].sum()), int(pairs[rule.flushed].sum()), int(pairs[rule.saturated].sum()))
        )
        if not pairs[~rule.right].any():
            return
        wrong = ~rule.right[part.scales, device]
        row, group = np.unravel_index(int(wrong.argmax()), wrong.shape)
        self._recorder.find(
            EXPERTS, shard.entry.path, f"{int(wrong.sum())} scales are not the source's", where=f"{where} row {row} group {group}",
            expected=f"{rule.values[part.scales[row, group]]:.9g}", found=f"{rule.device_values[device[row, group]]:.9g}",
        )  # fmt: skip


def _shards(root: Path, manifest: Manifest, layer: int, scope: Scope, recorder: Recorder) -> Iterator[PackedShard]:
    for entry in scope.shards(manifest):
        if entry.layer == layer and entry.path not in recorder.bad_paths:
            kept, tail = rank_tiers(manifest, layer, entry.rank)
            rows: dict[int, tuple[Tier, int]] = {e: ("kept", i) for i, e in enumerate(kept)}
            rows |= {e: ("tail", i) for i, e in enumerate(tail)}
            yield PackedShard(entry, root / entry.path, topology_of(manifest).tp_rank(entry.rank), rows)


def source_bytes(source: Checkpoint, layers: list[int]) -> int:
    """Bytes of codes and scales of all experts of some layers."""
    return sum(
        at.header.nbytes
        for layer in layers
        for expert in source.layers[layer].experts.values()
        for matrix in expert.matrices
        for at in (matrix.codes, matrix.scales)
    )


def check_experts(
    root: Path,
    manifest: Manifest,
    source: Checkpoint,
    layers: list[int],
    scope: Scope,
    pool: Pool,
    recorder: Recorder,
    progress: Progress,
) -> None:
    """Compare every expert of some layers, on every rank of the scope, and that no part of the source is left over.

    Args:
        root: The pack.
        manifest: Its manifest.
        source: What it was made from.
        layers: Layers of the scope that have the same structure in both.
        scope: Shards to look at.
        pool: Threads.
        recorder: Gets the findings.
        progress: Told bytes read.
    """
    total, lock, buffers = Counts(), threading.Lock(), Buffers()
    spoiled = False
    with recorder.checking(EXPERTS, "experts") as tally:
        for layer in layers:
            shards = list(_shards(root, manifest, layer, scope, recorder))
            spoiled = spoiled or len(shards) < sum(entry.layer == layer for entry in scope.shards(manifest))
            with TensorReader() as reader:
                comparison = Comparison(manifest, recorder, buffers)

                def compare(
                    expert: int, layer: int, shards: list[PackedShard], comparison: Comparison, reader: TensorReader
                ) -> None:
                    nonlocal spoiled
                    try:
                        counts, nbytes = comparison.expert(expert, source.layers[layer].experts[expert], shards, reader)
                    except DataError as error:
                        spoiled = True
                        recorder.find_error(EXPERTS, f"layer {layer} expert {expert}", error)
                        return
                    with lock:
                        total.add(counts)
                    _account(tally, nbytes)
                    progress.advance(nbytes)

                held = sorted({e for shard in shards for e in shard.rows})
                pool.run(partial(compare, e, layer, shards, comparison, reader) for e in held)
        if not spoiled and scope.rank is None:
            _check_totals(manifest, source, layers, scope, total, recorder)


def _account(tally: Tally, nbytes: int) -> None:
    if nbytes:
        tally.add(1, nbytes)


def _check_totals(
    manifest: Manifest, source: Checkpoint, layers: list[int], scope: Scope, total: Counts, recorder: Recorder
) -> None:
    """The ranks together hold the whole source, and the manifest's report counts what was found."""
    whole = source_bytes(source, layers)
    if total.source_bytes != whole:
        recorder.find(
            EXPERTS,
            MANIFEST,
            "the ranks together do not hold the source",
            expected=f"{whole} bytes",
            found=total.source_bytes,
        )
    if not scope.whole or len(layers) < len(manifest.layers):
        return
    for name, expected, found in (
        ("groups_zero_scale", total.zero, manifest.report.groups_zero_scale),
        ("blocks_flushed", total.flushed, manifest.report.blocks_flushed),
        ("scales_saturated", total.saturated, manifest.report.scales_saturated),
    ):
        if expected != found:
            recorder.find(
                EXPERTS,
                MANIFEST,
                "not what the shards and the source come to",
                where=f"report.{name}",
                expected=expected,
                found=found,
            )
