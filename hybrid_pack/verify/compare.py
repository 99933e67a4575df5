"""One layer's packed experts against the stored ones, by decoders only: codes bit for bit, scales as exact values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.formats import e8m0
from hybrid_pack.formats.source import MXFP4, NVFP4, SourceFormat
from hybrid_pack.io.checkpoint import Checkpoint, Matrix
from hybrid_pack.io.manifest import MANIFEST, rank_geometry, rank_tiers, topology_of
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.safetensors import TensorHeader
from hybrid_pack.io.shards import Located
from hybrid_pack.layouts.shard import Matrix as MatrixName
from hybrid_pack.layouts.shard import Tier
from hybrid_pack.schemas.manifest import Manifest, ShardEntry
from hybrid_pack.verify.pool import Buffers
from hybrid_pack.verify.quantised import (
    Quality,
    can_be_cast,
    check_part,
    moved_error,
    nvfp4_seconds,
    stored_bytes,
    used_groups,
)
from hybrid_pack.verify.report import Recorder
from hybrid_pack.verify.scale_rules import MXFP4_FLUSH_BELOW, expected_global_scale, nvfp4_values, scale_rule
from hybrid_pack.verify.stored import F32, Share, StoredExpert

EXPERTS = "experts against the source"

U8 = NDArray[np.uint8]


@dataclass
class Counts:
    """What a comparison came to; adds up.

    Attributes:
        weights: Weights of the source that were held against the pack.
        read_bytes: Bytes read of both.
        zero: Groups whose stored scale is zero.
        flushed: Groups too small for the kernel.
        saturated: Groups too large for it.
        cast: Experts of MXFP4 that are NVFP4 now, with the same values.
        quality: Of quantised experts, by layer and expert.
    """

    weights: int = 0
    read_bytes: int = 0
    zero: int = 0
    flushed: int = 0
    saturated: int = 0
    cast: int = 0
    quality: dict[tuple[int, int], Quality] = field(default_factory=dict)

    def add_signal(self, layer: int, expert: int, weights: NDArray[np.float32]) -> None:
        """Count weights that were moved beside quantised ones."""
        quality = self.quality.setdefault((layer, expert), Quality())
        quality.sums[0] += float(np.square(weights, dtype=np.float64).sum())

    def add_error(self, layer: int, expert: int, error: float) -> None:
        """Count what the scales of weights that were moved beside quantised ones lost."""
        self.quality.setdefault((layer, expert), Quality()).sums[1] += error

    def add(self, other: Counts) -> None:
        """Add another's."""
        self.weights += other.weights
        self.read_bytes += other.read_bytes
        self.zero += other.zero
        self.flushed += other.flushed
        self.saturated += other.saturated
        self.cast += other.cast
        for key, quality in other.quality.items():
            self.quality.setdefault(key, Quality()).add(quality)


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
class Packed:
    """One expert's row of one device matrix of one rank, unpacked.

    Attributes:
        path: Of the shard.
        tier: ``kept`` or ``tail``.
        name: ``w13`` or ``w2``.
        row: Its row.
        codes: u8 [N, bytes].
        scales: u8 [N, groups], device bytes.
        global_scale: f32 value.
        columns: K.
    """

    path: str
    tier: Tier
    name: MatrixName
    row: int
    codes: U8
    scales: U8
    global_scale: float
    columns: int

    @property
    def label(self) -> str:
        """Its place in words."""
        return f"{self.tier}.{self.name}[{self.row}]"

    def part(self, index: int, count: int) -> tuple[U8, U8]:
        """(codes, scales) of gate, up or down."""
        rows = len(self.codes) // count
        mine = slice(index * rows, (index + 1) * rows)
        return self.codes[mine], self.scales[mine]

    def width(self, array: U8, columns: int) -> int:
        """Bytes of a row that stand for its first columns."""
        return int(array.shape[1]) * columns // self.columns


Given = tuple[str, Matrix, float]
"""(role, stored matrix, its second-level scale)."""
ROLES = ("gate", "up", "down")
FORMS = {"nvfp4": NVFP4, "mxfp4": MXFP4}


@dataclass(frozen=True)
class Matter:
    """A device matrix of an expert on a rank, at hand.

    Attributes:
        expert: Global id.
        where: Layer and expert in words.
        name: ``w13`` or ``w2``.
        target: Format of its tier.
        method: By which the expert was quantised; None where it was not.
        packed: What the rank has.
        share: What of the source that is.
        counts: Added to.
    """

    expert: int
    where: str
    name: MatrixName
    target: str
    method: str | None
    packed: Packed
    share: Share
    counts: Counts


@dataclass(frozen=True)
class Part:
    """A rank's share of one stored matrix in the format of its tier.

    Attributes:
        role: ``gate``, ``up`` or ``down``.
        form: Of the stored scales.
        second: Second-level scale; 1.0 where there is none.
        codes: u8 [rows, bytes].
        scales: u8 [rows, groups].
    """

    role: str
    form: SourceFormat
    second: float
    codes: U8
    scales: U8


def _cut(share: Share, by_rows: bool, array: NDArray[Any], columns: int) -> NDArray[Any]:
    """A rank's rows of gate or up, or its columns of down, of an array whose row stands for so many columns."""
    first, last = share.first, share.first + share.count
    if by_rows:
        return array[first:last]
    return array[:, first * array.shape[1] // columns : last * array.shape[1] // columns]


class LayerComparison:
    """Compares the experts of one layer, any number at a time.

    Args:
        manifest: Of the pack.
        source: What it was made from.
        index: The layer.
        shards: Those that are to be compared.
        reader: Of source and pack.
        recorder: Gets the findings.
        buffers: Of the threads.
    """

    def __init__(
        self, manifest: Manifest, source: Checkpoint, index: int, shards: list[PackedShard], reader: TensorReader,
        recorder: Recorder, buffers: Buffers,
    ) -> None:  # fmt: skip
        self.layer, self.shards = index, shards
        self._stored, self._reader, self._recorder, self._buffers = source.layers[index], reader, recorder, buffers
        self._geometry = rank_geometry(manifest)
        self._intermediate = source.intermediate
        self._levels = source.config.nf3_levels
        self._levels32 = np.asarray(self._levels, np.float32)
        self._kept_format = manifest.layers[str(index)].kept_scale_format
        requantized = manifest.report.experts_requantized
        self._errors = {r.expert: r.worst_relative_error for r in requantized if r.layer == index}
        quantized = [entry for entry in manifest.report.experts_quantized if entry.layer == index]
        self._methods = {expert: entry.method for entry in quantized for expert in entry.experts}

    def experts(self) -> list[int]:
        """Those that some shard holds."""
        return sorted({expert for shard in self.shards for expert in shard.rows})

    def compare(self, expert: int) -> Counts:
        """Compare one expert on every rank that holds it.

        Raises:
            DataError: A file ended early, or the source holds what is refused.
        """
        counts = Counts()
        matrices = self._stored.experts[expert].matrices
        where = f"layer {self.layer} expert {expert}"
        stored = StoredExpert(self._stored.experts[expert], where, self._reader, self._buffers, self._levels)
        counts.read_bytes += stored.read_bytes
        groups: tuple[tuple[MatrixName, slice], ...] = (("w13", slice(0, -1)), ("w2", slice(-1, None)))
        cast = False
        for name, which in groups:
            ours = list(zip(ROLES[-len(matrices) :], matrices, stored.seconds, strict=True))[which]
            cast = self._group(expert, name, ours, stored, counts) or cast
        counts.cast += cast and expert not in self._methods
        return counts

    def _group(self, expert: int, name: MatrixName, ours: list[Given], stored: StoredExpert, counts: Counts) -> bool:
        """One device matrix on every rank; whether it was cast."""
        shards = [shard for shard in self.shards if expert in shard.rows]
        if not shards:
            return False
        tier = shards[0].rows[expert][0]
        target = "nf3" if tier == "tail" else str(self._stored.kept_format)
        method = self._methods.get(expert)
        where = f"layer {self.layer} expert {expert}"
        made = [not matrix.native_to(target) for _, matrix, _ in ours]
        cast = all(made) and self._is_cast(target, method, ours, stored)
        if any(made) and not cast and method is None:
            found = "+".join(matrix.format.name for _, matrix, _ in ours)
            self._recorder.find(
                EXPERTS, MANIFEST, "the report does not say that this expert was quantised",
                where=f"{where} {name}", expected=target.upper(), found=found.upper(),
            )  # fmt: skip
            return False
        seconds = [second for _, _, second in ours]
        weights: list[F32 | None] = [None] * len(ours)
        if method is not None:  # the expert's error is of all its matrices, those that were moved too
            weights = [stored.weights(role, matrix, second) for role, matrix, second in ours]
            exact = [w for w, quantised in zip(weights, made, strict=True) if w is not None and (cast or not quantised)]
            for own in exact:
                counts.add_signal(self.layer, expert, own)
        largest, native = 0.0, [None if q else second for q, second in zip(made, seconds, strict=True)]
        if any(made) and not cast and target == "nvfp4":
            largest = max(float(np.abs(w).max()) for w, q in zip(weights, made, strict=True) if q and w is not None)
        for shard in shards:
            share = Share.of(shard.tp_rank, self._geometry.intermediate, self._intermediate)
            packed = self._unpacked(shard, expert, name, counts)
            self._padding(packed, name, share, len(ours), where)
            if share.count:
                one = Matter(expert, where, name, target, method, packed, share, counts)
                if cast:
                    self._cast(one, ours, stored)
                elif not any(made):
                    self._moved(one, ours, stored)
                else:
                    if target == "nvfp4":
                        seconds = nvfp4_seconds(largest, native, packed.global_scale)
                    self._mixed(one, ours, stored, made, seconds, weights)
            for _, matrix, _ in ours:
                counts.weights += share.count * (matrix.columns if name == "w13" else matrix.rows)
        return cast

    @staticmethod
    def _is_cast(target: str, method: str | None, ours: list[Given], stored: StoredExpert) -> bool:
        """Whether the matrices must be the source's, with other scale bytes of the same value."""
        if target != "nvfp4" or any(matrix.format.name != "mxfp4" for _, matrix, _ in ours):
            return False
        return method is None or can_be_cast([stored.rows(matrix) for _, matrix, _ in ours])

    def _unpacked(self, shard: PackedShard, expert: int, name: MatrixName, counts: Counts) -> Packed:
        tier, row = shard.rows[expert]
        n, k = self._geometry.size(name)
        words = self._packed(shard, f"{tier}.{name}", row, counts)
        scales = self._packed(shard, f"{tier}.{name}_scale", row, counts)
        global_scale = float(self._packed(shard, f"{tier}.{name}_global_scale", row, counts).view("<f4")[0])
        codes = self._geometry.codes(tier, name).unpack(words.view("<u4"), n, k)
        device = self._geometry.scales(tier, self._kept_format).unpack(scales, n, k)
        return Packed(shard.entry.path, tier, name, row, codes, device, global_scale, k)

    def _padding(self, packed: Packed, name: MatrixName, share: Share, parts: int, where: str) -> None:
        """What a rank has more than the source means zero."""
        if share.count == share.padded:
            return
        for part in range(parts if name == "w13" else 1):
            codes, scales = packed.part(part, parts)
            if name == "w13":
                extra = codes[share.count :], scales[share.count :]
            else:
                extra = codes[:, packed.width(codes, share.count) :], scales[:, packed.width(scales, share.count) :]
            zero = 0 if packed.tier == "tail" or self._kept_format == "e4m3_k16" else self._shift(packed)
            if extra[0].any() or (extra[1] != zero).any():
                self._recorder.find(
                    EXPERTS, packed.path, "padding that does not mean zero", where=f"{where} {packed.label}"
                )

    @staticmethod
    def _shift(packed: Packed) -> int:
        """Device byte of MXFP4's stored byte 0."""
        return round(-math.log2(packed.global_scale)) if packed.global_scale > 0 else 0

    def _part(self, one: Matter, given: Given, stored: StoredExpert) -> Part:
        """A rank's share of a matrix that is stored in the format of its tier."""
        role, matrix, second = given
        form = matrix.format if matrix.format.name == "nf3" else FORMS[matrix.format.name]
        rows, by_rows = stored.rows(matrix), one.name == "w13"
        codes, scales = (_cut(one.share, by_rows, a, matrix.columns) for a in (rows.codes, rows.scales))
        return Part(role, form, second, codes, scales)

    def _moved(self, one: Matter, ours: list[Given], stored: StoredExpert) -> None:
        """Against what the source stores in the same format: codes, scales, and the global scale that follows."""
        packed, parts = one.packed, [self._part(one, given, stored) for given in ours]
        error = self._errors.get(one.expert, 0.0) if one.name == "w13" else 0.0
        seconds = [part.second for part in parts]
        wanted = expected_global_scale(parts[0].form, seconds, [part.scales for part in parts])
        if packed.global_scale != wanted:
            self._recorder.find(
                EXPERTS, packed.path, "not the global scale of these scales",
                where=f"{one.where} ({packed.tier}.{packed.name}_global_scale[{packed.row}])",
                expected=f"{wanted:.9g}", found=f"{packed.global_scale:.9g}",
            )  # fmt: skip
        if error and len({math.frexp(second)[0] for second in seconds}) == 1:
            self._recorder.find(
                EXPERTS, MANIFEST, "the report calls an expert requantised that needs no rounding", where=one.where
            )
            error = 0.0
        for i, part in enumerate(parts):
            self._same(one, part, *packed.part(i, len(parts)), error)

    def _same(self, one: Matter, part: Part, codes: U8, device: U8, error: float) -> None:
        """Codes bit for bit, scales as values."""
        place = f"{one.where} {part.role} ({one.packed.label})"
        self._codes(one.packed.path, place, part.codes, codes[: part.codes.shape[0], : part.codes.shape[1]])
        device = device[: part.scales.shape[0], : part.scales.shape[1]]
        self._scales(one.packed.path, place, part, device, one.packed.global_scale, error, one.counts)
        if one.method is not None and part.form.name != "nf3":
            rule = scale_rule(part.form, part.second, one.packed.global_scale, error)
            one.counts.add_error(self.layer, one.expert, moved_error(part.codes, part.scales, device, rule))

    def _cast(self, one: Matter, ours: list[Given], stored: StoredExpert) -> None:
        """MXFP4 in a tier of NVFP4: the same codes, and scales that mean the same."""
        packed, by_rows = one.packed, one.name == "w13"
        for i, (role, matrix, _) in enumerate(ours):
            rows = stored.rows(matrix)
            codes, device = packed.part(i, len(ours))
            wanted = _cut(one.share, by_rows, rows.codes, matrix.columns)
            scales = np.repeat(_cut(one.share, by_rows, rows.scales, matrix.columns), 2, axis=1)
            device = device[: scales.shape[0], : scales.shape[1]]
            label = f"{one.where} {role} ({packed.label})"
            self._codes(packed.path, label, wanted, codes[: wanted.shape[0], : wanted.shape[1]])
            used = np.repeat(used_groups(wanted), 2, axis=1)
            one.counts.zero += int((~used).sum())
            values = nvfp4_values(packed.global_scale)[device]
            wrong = np.where(used, values != e8m0.VALUES[scales], values != 0)
            if wrong.any():
                at = np.unravel_index(int(wrong.argmax()), wrong.shape)
                self._recorder.find(
                    EXPERTS, packed.path, f"{int(wrong.sum())} scales are not the source's",
                    where=f"{label} row {at[0]} group {at[1]}",
                    expected=f"{e8m0.VALUES[scales[at]] if used[at] else 0.0:.9g}", found=f"{values[at]:.9g}",
                )  # fmt: skip

    def _mixed(
        self, one: Matter, ours: list[Given], stored: StoredExpert, made: list[bool], seconds: list[float],
        weights: list[F32 | None],
    ) -> None:  # fmt: skip
        """A device matrix with parts that were quantised: these against their weights, others as they are stored."""
        packed = one.packed
        quality = one.counts.quality.setdefault((self.layer, one.expert), Quality())
        for i, (given, own) in enumerate(zip(ours, weights, strict=True)):
            role, matrix, _ = given
            codes, device = packed.part(i, len(ours))
            label = f"{one.where} {role} ({packed.label})"
            scales = stored_bytes(one.target, device, packed.global_scale, seconds, i)
            if scales is None:
                self._recorder.find(
                    EXPERTS, packed.path, "not a global scale of these weights", where=label,
                    expected=f"{max(seconds):.9g} * 2^119 over a power of two", found=f"{packed.global_scale:.9g}",
                )  # fmt: skip
                return
            if not made[i]:
                self._same(one, self._part(one, given, stored), codes, device, 0.0)
                continue
            assert own is not None and one.method is not None
            if one.target == "mxfp4":
                one.counts.flushed += int(((device < MXFP4_FLUSH_BELOW) & used_groups(codes)).sum())
            mine = np.ascontiguousarray(_cut(one.share, one.name == "w13", own, matrix.columns))
            codes = np.ascontiguousarray(codes[: mine.shape[0], : packed.width(codes, mine.shape[1])])
            scales = np.ascontiguousarray(scales[: mine.shape[0], : packed.width(scales, mine.shape[1])])
            for fault in check_part(one.target, one.method, mine, codes, scales, seconds[i], self._levels32, quality):
                place = f"{label} row {fault.row} {fault.unit} {fault.column}"
                self._recorder.find(EXPERTS, packed.path, fault.what, where=place)

    def _packed(self, shard: PackedShard, name: str, row: int, counts: Counts) -> U8:
        """One expert's row of a tensor of a shard."""
        located, size = shard.locate(name)
        buffer = self._buffers.take(name, size)
        self._reader.read(located, buffer, row * size)
        counts.read_bytes += size
        return buffer

    def _codes(self, path: str, where: str, wanted: U8, found: U8) -> None:
        if np.array_equal(wanted, found):
            return
        different = wanted != found
        at = np.unravel_index(int(different.argmax()), different.shape)
        self._recorder.find(
            EXPERTS, path, f"{int(different.sum())} bytes of codes are not the source's",
            where=f"{where} row {at[0]} byte {at[1]}", expected=f"0x{wanted[at]:02X}", found=f"0x{found[at]:02X}",
        )  # fmt: skip

    def _scales(
        self, path: str, where: str, part: Part, device: U8, global_scale: float, error: float, counts: Counts
    ) -> None:
        rule = scale_rule(part.form, part.second, global_scale, error)
        pairs = np.bincount((part.scales.astype(np.uint16) << 8 | device).reshape(-1), minlength=1 << 16)
        pairs = pairs.reshape(256, 256)  # [stored byte, device byte]
        counts.zero += int(pairs[rule.zero].sum())
        if pairs[rule.flushed].any():
            flushed = rule.flushed[part.scales, device]
            if part.form.name == "mxfp4":
                flushed &= used_groups(part.codes)
            counts.flushed += int(flushed.sum())
        counts.saturated += int(pairs[rule.saturated].sum())
        if not pairs[~rule.right].any():
            return
        wrong = ~rule.right[part.scales, device]
        at = np.unravel_index(int(wrong.argmax()), wrong.shape)
        self._recorder.find(
            EXPERTS, path, f"{int(wrong.sum())} scales are not the source's",
            where=f"{where} row {at[0]} group {at[1]}", expected=f"{rule.values[part.scales[at]]:.9g}",
            found=f"{rule.device_values[device[at]]:.9g}",
        )  # fmt: skip
