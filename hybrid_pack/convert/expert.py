"""One expert: read its stored tensors once, pack its encoded matrices for every tensor-parallel rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.convert.encode import Encoding, Part
from hybrid_pack.convert.moved import all_flushed, moved_error, weighty
from hybrid_pack.convert.scales import Counts, MatrixScales, ScaleStats, check_scales, choose
from hybrid_pack.io.checkpoint import Expert
from hybrid_pack.io.output import aligned_buffer
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.safetensors import ALIGNMENT
from hybrid_pack.layouts.rows import Rows
from hybrid_pack.layouts.scales import BlockScales, count_scale_bytes
from hybrid_pack.layouts.shard import MATRICES, RankGeometry, Tier

Buffer = NDArray[np.uint8]

Groups = Mapping[str, list[Part]]
Slices = Mapping[str, list[tuple[Rows, Rows]]]
RankCounts = Mapping[str, list[Counts]]
Chosen = Mapping[str, MatrixScales]
"""By device matrix: its parts; of one rank, each part's codes and scales, how often its scale bytes occur, and what
becomes of them."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class PackedRank:
    """One expert packed for one tensor-parallel rank.

    Attributes:
        rows: Bytes of its row in ``w13``, ``w2``, ``w13_scale``, ``w2_scale``; valid until the next expert is packed.
        global_scales: Of w13 and w2.
        stats: What happened to the scales of matrices that were moved or cast.
        made: What happened to those that were quantised.
        moved_error: Sum of (w - q)^2 over the matrices of an expert with quantised ones that were moved, on all ranks
            together; 0 where nothing was quantised.
        lost: Roles of the expert's matrices that are nothing but zeros on all ranks, and were not in the source.
    """

    rows: Mapping[str, Buffer]
    global_scales: Mapping[str, float]
    stats: ScaleStats
    made: ScaleStats
    moved_error: float
    lost: tuple[str, ...]


class ExpertPacker:
    """Packs experts one after another in two reused buffers. One for each thread.

    Args:
        geometry: Sizes of one rank's share.
        tp: Tensor-parallel size.
        intermediate: I of the source; what the ranks have more is padding.
    """

    def __init__(self, geometry: RankGeometry, tp: int, intermediate: int) -> None:
        self._geometry = geometry
        self._tp = tp
        self._intermediate = intermediate
        self._source = aligned_buffer(0)
        self._packed = aligned_buffer(0)

    def read(self, expert: Expert, reader: TensorReader) -> dict[str, Buffer]:
        """Read all codes and scales of an expert, by name; valid until the next call."""
        tensors = expert.tensors
        needed = sum(_aligned(at.header.nbytes) for at in tensors)
        if needed > self._source.nbytes:
            self._source = aligned_buffer(needed)
        parts: dict[str, Buffer] = {}
        begin = 0
        for at in tensors:
            part = self._source[begin : begin + at.header.nbytes]
            reader.read(at, part)
            parts[at.header.name] = part
            begin += _aligned(at.header.nbytes)
        return parts

    def pack(self, expert: Encoding, where: str) -> Iterator[PackedRank]:
        """Pack an expert for each tensor-parallel rank in turn.

        Args:
            expert: In the form of its tier.
            where: Layer and expert in words, for errors.

        Raises:
            DataError: A scale that is refused.
        """
        groups = {"w13": expert.w13, "w2": expert.w2}
        slices = [
            {name: [self._slices(part, name == "w13", rank) for part in parts] for name, parts in groups.items()}
            for rank in range(self._tp)
        ]
        counts = [{name: [count_scale_bytes(s) for _, s in rows] for name, rows in ours.items()} for ours in slices]
        for name, parts in groups.items():
            for i, part in enumerate(parts):
                check_scales(part, np.sum([ours[name][i] for ours in counts], axis=0), where)
        chosen = [
            {
                name: choose([p.format for p in parts], ours[name], [p.second for p in parts])
                for name, parts in groups.items()
            }
            for ours in counts
        ]
        used = [self._weighty(groups, *ours) for ours in zip(slices, counts, chosen, strict=True)]
        lost = self._lost(expert, used, chosen)
        error = self._moved_error(groups, slices, counts, chosen) if expert.stats is not None else 0.0
        for tp_rank in range(self._tp):
            for name, matrix in chosen[tp_rank].items():
                for own, count, table in zip(matrix.stats, used[tp_rank][name], matrix.tables, strict=True):
                    own.flushed = int(count[table.flushed].sum())
            padding = self._padding_groups(expert, tp_rank)
            packed = self._pack_rank(groups, slices[tp_rank], chosen[tp_rank], padding)
            yield PackedRank(*packed, error, lost)

    @staticmethod
    def _weighty(groups: Groups, slices: Slices, counts: RankCounts, chosen: Chosen) -> RankCounts:
        """Of one rank, how often scale bytes occur; see ``weighty``."""
        return {
            name: [
                weighty(part, *rows, count, table)
                for part, rows, count, table in zip(parts, slices[name], counts[name], chosen[name].tables, strict=True)
            ]
            for name, parts in groups.items()
        }

    @staticmethod
    def _lost(expert: Encoding, counts: Sequence[RankCounts], chosen: Sequence[Chosen]) -> tuple[str, ...]:
        """See ``PackedRank``."""
        places = [*(("w13", i) for i in range(len(expert.w13))), ("w2", 0)]
        return tuple(
            role
            for role, part, (name, i) in zip(expert.roles, expert.parts, places, strict=True)
            if part.lost or all_flushed([ours[name][i] for ours in counts], [ours[name].tables[i] for ours in chosen])
        )

    @staticmethod
    def _moved_error(
        groups: Groups, slices: Sequence[Slices], counts: Sequence[RankCounts], chosen: Sequence[Chosen]
    ) -> float:
        """Of all ranks; see ``PackedRank``."""
        return math.fsum(
            moved_error(part, *rows[name][i], count[name][i], scales[name].tables[i], scales[name].global_scale)
            for rows, count, scales in zip(slices, counts, chosen, strict=True)
            for name, parts in groups.items()
            for i, part in enumerate(parts)
            if not part.made
        )

    def _padding_groups(self, expert: Encoding, tp_rank: int) -> int:
        """Groups of a rank's share of each matrix that are no groups of the source; MXFP4 has no scale for them."""
        share, form = self._geometry.intermediate, expert.w2[0].format
        if form.name == "mxfp4":
            return 0
        return min(max((tp_rank + 1) * share - self._intermediate, 0), share) * self._geometry.hidden // form.group

    def _pack_rank(
        self,
        groups: Groups,
        slices: Slices,
        chosen: Chosen,
        padding: int,
    ) -> tuple[Mapping[str, Buffer], Mapping[str, float], ScaleStats, ScaleStats]:
        """The first four of ``PackedRank``."""
        form = groups["w2"][0].format
        tier: Tier = "tail" if form.name == "nf3" else "kept"
        scales = BlockScales(form.group)
        rows = self._rows(tier, scales)
        global_scales: dict[str, float] = {}
        stats, made = ScaleStats(), ScaleStats()
        for name in MATRICES:
            n, k = self._geometry.size(name)
            codes = self._geometry.codes(tier, name)
            first_row = 0
            for (code_rows, scale_rows), table in zip(slices[name], chosen[name].tables, strict=True):
                codes.pack_rows(code_rows, n, k, first_row, rows[name].view(np.uint32))
                scales.pack_rows(scale_rows, n, k, first_row, table.device, rows[f"{name}_scale"])
                first_row += code_rows.count
            global_scales[name] = chosen[name].global_scale
            for part, own in zip(groups[name], chosen[name].stats, strict=True):
                own.zero -= padding
                (made if part.made else stats).add(own)
        return rows, global_scales, stats, made

    def _rows(self, tier: Tier, scales: BlockScales) -> dict[str, Buffer]:
        """Page-aligned parts of the reused output buffer, one for each tensor's row."""
        sizes: dict[str, int] = {}
        for name in MATRICES:
            n, k = self._geometry.size(name)
            sizes[name] = math.prod(self._geometry.codes(tier, name).shape(n, k)) * 4
            sizes[f"{name}_scale"] = math.prod(scales.shape(n, k))
        needed = sum(map(_aligned, sizes.values()))
        if needed > self._packed.nbytes:
            self._packed = aligned_buffer(needed)
        rows: dict[str, Buffer] = {}
        begin = 0
        for tensor, nbytes in sizes.items():
            rows[tensor] = self._packed[begin : begin + nbytes]
            begin += _aligned(nbytes)
        return rows

    def _slices(self, part: Part, by_rows: bool, tp_rank: int) -> tuple[Rows, Rows]:
        """This rank's rows of gate or up, or its columns of down: (codes, scales)."""
        share, form = self._geometry.intermediate, part.format
        if by_rows:
            return part.codes.rows(tp_rank * share, share), part.scales.rows(tp_rank * share, share)
        width, scale_width = form.code_bytes(share), share // form.group
        return part.codes.columns(tp_rank * width, width), part.scales.columns(tp_rank * scale_width, scale_width)
