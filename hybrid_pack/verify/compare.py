"""One layer's packed experts against the stored ones, by decoders only: codes bit for bit, scales as exact values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.io.checkpoint import Expert, Layer, Matrix
from hybrid_pack.io.manifest import rank_geometry, rank_tiers, topology_of
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.safetensors import TensorHeader
from hybrid_pack.io.shards import Located
from hybrid_pack.layouts.shard import Matrix as MatrixName
from hybrid_pack.layouts.shard import Tier
from hybrid_pack.schemas.manifest import Manifest, ShardEntry
from hybrid_pack.verify.pool import Buffers
from hybrid_pack.verify.report import Recorder
from hybrid_pack.verify.scale_rules import expected_global_scale, scale_rule

EXPERTS = "experts against the source"

U8 = NDArray[np.uint8]


@dataclass
class Counts:
    """What a comparison came to; adds up.

    Attributes:
        source_bytes: Bytes of codes and scales of the source that were held against the pack.
        read_bytes: Bytes read of both.
        zero: Groups whose stored scale is zero.
        flushed: Groups too small for the kernel.
        saturated: Groups too large for it.
    """

    source_bytes: int = 0
    read_bytes: int = 0
    zero: int = 0
    flushed: int = 0
    saturated: int = 0

    def add(self, other: Counts) -> None:
        """Add another's."""
        self.source_bytes += other.source_bytes
        self.read_bytes += other.read_bytes
        self.zero += other.zero
        self.flushed += other.flushed
        self.saturated += other.saturated


@dataclass(frozen=True)
class PackedShard:
    """A shard of the layer.

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

    @classmethod
    def of(cls, root: Path, manifest: Manifest, entry: ShardEntry) -> PackedShard:
        """From the manifest."""
        rows: dict[int, tuple[Tier, int]] = {}
        tiers: tuple[Tier, Tier] = ("kept", "tail")
        for tier, ids in zip(tiers, rank_tiers(manifest, entry.layer, entry.rank), strict=True):
            rows |= {expert: (tier, row) for row, expert in enumerate(ids)}
        return cls(entry, root / entry.path, topology_of(manifest).tp_rank(entry.rank), rows)

    def locate(self, name: str) -> tuple[Located, int]:
        """A tensor, and the bytes of one expert in it."""
        entry = self.entry.tensors[name]
        header = TensorHeader(name, entry.dtype, entry.shape, entry.begin, entry.end)
        return Located(self.path, header), header.nbytes // entry.shape[0]


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


class LayerComparison:
    """Compares the experts of one layer, any number at a time.

    Args:
        manifest: Of the pack.
        stored: The layer in the source.
        shards: Those that are to be compared.
        reader: Of source and pack.
        recorder: Gets the findings.
        buffers: Of the threads.
    """

    def __init__(
        self, manifest: Manifest, stored: Layer, shards: list[PackedShard], reader: TensorReader, recorder: Recorder,
        buffers: Buffers,
    ) -> None:  # fmt: skip
        self.layer, self.shards = stored.index, shards
        self._stored, self._reader, self._recorder, self._buffers = stored, reader, recorder, buffers
        self._geometry = rank_geometry(manifest)
        self._kept_format = manifest.layers[str(stored.index)].kept_scale_format
        requantized = manifest.report.experts_requantized
        self._errors = {r.expert: r.worst_relative_error for r in requantized if r.layer == stored.index}

    def experts(self) -> list[int]:
        """Those that some shard holds."""
        return sorted({expert for shard in self.shards for expert in shard.rows})

    def compare(self, expert: int) -> Counts:
        """Compare one expert on every rank that holds it.

        Raises:
            DataError: A file ended early.
        """
        counts = Counts()
        stored = self._stored.experts[expert]
        seconds = [self._second(matrix) for matrix in stored.matrices]
        down = self._rows("down", stored.down, 0, stored.down.rows, counts)
        for shard in self.shards:
            if expert in shard.rows:
                gate_up = self._gate_up(stored, seconds, shard.tp_rank, counts)
                self._matrix(shard, expert, "w13", gate_up, counts)
                self._matrix(shard, expert, "w2", [self._down(stored.down, seconds[2], down, shard.tp_rank)], counts)
        return counts

    def _second(self, matrix: Matrix) -> float:
        if matrix.second is None:
            return 1.0
        value = np.empty(4, np.uint8)
        self._reader.read(matrix.second, value)
        return float(value.view("<f4")[0])

    def _rows(self, role: str, matrix: Matrix, first: int, rows: int, counts: Counts) -> tuple[U8, U8]:
        """Rows of a stored matrix: codes u8 [rows, bytes] and scales u8 [rows, groups]."""
        code_width, groups = matrix.format.code_bytes(matrix.columns), matrix.columns // matrix.format.group
        read = []
        for use, at, width in (("codes", matrix.codes, code_width), ("scales", matrix.scales, groups)):
            assert at is not None  # what was converted has scales
            buffer = self._buffers.take(f"{role} {use}", rows * width)
            self._reader.read(at, buffer, first * width)
            counts.read_bytes += buffer.nbytes
            read.append(buffer.reshape(rows, width))
        return read[0], read[1]

    def _gate_up(self, stored: Expert, seconds: list[float], tp_rank: int, counts: Counts) -> list[Part]:
        share = self._geometry.intermediate
        return [
            Part(role, matrix, second, *self._rows(role, matrix, tp_rank * share, share, counts))
            for role, matrix, second in zip(("gate", "up"), stored.matrices, seconds, strict=False)
        ]

    def _down(self, matrix: Matrix, second: float, stored: tuple[U8, U8], tp_rank: int) -> Part:
        share, form = self._geometry.intermediate, matrix.format
        codes, scales = (
            whole[:, tp_rank * width : (tp_rank + 1) * width]
            for whole, width in zip(stored, (form.code_bytes(share), share // form.group), strict=True)
        )
        return Part("down", matrix, second, codes, scales)

    def _packed(self, shard: PackedShard, name: str, row: int, counts: Counts) -> U8:
        """One expert's row of a tensor of a shard."""
        located, size = shard.locate(name)
        buffer = self._buffers.take(name, size)
        self._reader.read(located, buffer, row * size)
        counts.read_bytes += size
        return buffer

    def _matrix(self, shard: PackedShard, expert: int, name: MatrixName, parts: list[Part], counts: Counts) -> None:
        tier, row = shard.rows[expert]
        n, k = self._geometry.size(name)
        words = self._packed(shard, f"{tier}.{name}", row, counts)
        scales = self._packed(shard, f"{tier}.{name}_scale", row, counts)
        global_scale = float(self._packed(shard, f"{tier}.{name}_global_scale", row, counts).view("<f4")[0])
        codes = self._geometry.codes(tier, name).unpack(words.view("<u4"), n, k)
        device = self._geometry.scales(tier, self._kept_format).unpack(scales, n, k)
        error = self._errors.get(expert, 0.0) if name == "w13" else 0.0
        seconds = [part.second for part in parts]
        wanted = expected_global_scale(parts[0].matrix.format, seconds, [part.scales for part in parts])
        if global_scale != wanted:
            self._recorder.find(
                EXPERTS, shard.entry.path, "not the global scale of these scales",
                where=f"layer {self.layer} expert {expert} ({tier}.{name}_global_scale[{row}])",
                expected=f"{wanted:.9g}", found=f"{global_scale:.9g}",
            )  # fmt: skip
        if error and len({math.frexp(second)[0] for second in seconds}) == 1:
            self._recorder.find(
                EXPERTS, "hybrid_pack.json", "the report calls an expert requantised that needs no rounding",
                where=f"layer {self.layer} expert {expert}",
            )  # fmt: skip
            error = 0.0
        rows = n // len(parts)
        for i, part in enumerate(parts):
            where = f"layer {self.layer} expert {expert} {part.role} ({tier}.{name}[{row}])"
            mine = slice(i * rows, (i + 1) * rows)
            self._codes(shard, where, part, codes[mine])
            self._scales(shard, where, part, device[mine], global_scale, error, counts)
            counts.source_bytes += part.codes.size + part.scales.size

    def _codes(self, shard: PackedShard, where: str, part: Part, found: U8) -> None:
        if np.array_equal(part.codes, found):
            return
        different = part.codes != found
        at = np.unravel_index(int(different.argmax()), different.shape)
        self._recorder.find(
            EXPERTS, shard.entry.path, f"{int(different.sum())} bytes of codes are not the source's",
            where=f"{where} row {at[0]} byte {at[1]}", expected=f"0x{part.codes[at]:02X}", found=f"0x{found[at]:02X}",
        )  # fmt: skip

    def _scales(
        self, shard: PackedShard, where: str, part: Part, device: U8, global_scale: float, error: float, counts: Counts
    ) -> None:
        rule = scale_rule(part.matrix.format, part.second, global_scale, error)
        pairs = np.bincount((part.scales.astype(np.uint16) << 8 | device).reshape(-1), minlength=1 << 16)
        pairs = pairs.reshape(256, 256)  # [stored byte, device byte]
        counts.zero += int(pairs[rule.zero].sum())
        counts.flushed += int(pairs[rule.flushed].sum())
        counts.saturated += int(pairs[rule.saturated].sum())
        if not pairs[~rule.right].any():
            return
        wrong = ~rule.right[part.scales, device]
        at = np.unravel_index(int(wrong.argmax()), wrong.shape)
        self._recorder.find(
            EXPERTS, shard.entry.path, f"{int(wrong.sum())} scales are not the source's",
            where=f"{where} row {at[0]} group {at[1]}", expected=f"{rule.values[part.scales[at]]:.9g}",
            found=f"{rule.device_values[device[at]]:.9g}",
        )  # fmt: skip
