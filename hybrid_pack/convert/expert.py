"""One expert: read its stored tensors once, pack them for every tensor-parallel rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.convert.scales import Counts, ScaleStats, check_scales, choose
from hybrid_pack.io.checkpoint import Expert, Matrix
from hybrid_pack.io.output import aligned_buffer
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.safetensors import ALIGNMENT
from hybrid_pack.layouts.rows import Rows
from hybrid_pack.layouts.scales import BlockScales, count_scale_bytes
from hybrid_pack.layouts.shard import MATRICES, RankGeometry, Tier

Buffer = NDArray[np.uint8]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class PackedRank:
    """One expert packed for one tensor-parallel rank.

    Attributes:
        rows: Bytes of its row in ``w13``, ``w2``, ``w13_scale``, ``w2_scale``; valid until the next expert is packed.
        global_scales: Of w13 and w2.
        stats: What happened to its scales.
    """

    rows: Mapping[str, Buffer]
    global_scales: Mapping[str, float]
    stats: ScaleStats


class ExpertPacker:
    """Packs experts one after another in two reused buffers. One for each thread.

    Args:
        geometry: Sizes of one rank's share.
        tp: Tensor-parallel size.
    """

    def __init__(self, geometry: RankGeometry, tp: int) -> None:
        self._geometry = geometry
        self._tp = tp
        self._source = aligned_buffer(0)
        self._packed = aligned_buffer(0)

    def read(self, expert: Expert, reader: TensorReader) -> dict[str, Buffer]:
        """Read all codes and scales of an expert; valid until the next call."""
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

    def pack(
        self, expert: Expert, stored: Mapping[str, Buffer], seconds: list[float], where: str
    ) -> Iterator[PackedRank]:
        """Pack an expert for each tensor-parallel rank in turn.

        Args:
            expert: What was read.
            stored: Its tensors, from ``read``.
            seconds: Second-level scales of gate, up and down; 1.0 where there is none.
            where: Layer and expert in words, for errors.

        Raises:
            DataError: A scale that is refused.
        """
        tier: Tier = "tail" if expert.up.format.name == "nf3" else "kept"
        slices = [
            [self._slices(m, stored, i < 2, rank) for i, m in enumerate(expert.matrices)] for rank in range(self._tp)
        ]
        counts = [[count_scale_bytes(scales) for _, scales in parts] for parts in slices]
        for i, matrix in enumerate(expert.matrices):
            assert matrix.scales is not None  # require_movable
            check_scales(matrix, stored[matrix.scales.header.name], np.sum([c[i] for c in counts], axis=0), where)
        for parts, part_counts in zip(slices, counts, strict=True):
            yield self._pack_rank(expert, parts, part_counts, seconds, tier)

    def _pack_rank(
        self, expert: Expert, slices: list[tuple[Rows, Rows]], counts: list[Counts], seconds: list[float], tier: Tier
    ) -> PackedRank:
        scales = BlockScales(expert.up.format.group)
        rows = self._rows(tier, scales)
        global_scales: dict[str, float] = {}
        stats = ScaleStats()
        for name in MATRICES:
            parts = slice(0, 2) if name == "w13" else slice(2, 3)
            matrices = list(expert.matrices)[parts]
            n, k = self._geometry.size(name)
            codes = self._geometry.codes(tier, name)
            chosen = choose([m.format for m in matrices], counts[parts], seconds[parts])
            first_row = 0
            for (code_rows, scale_rows), table in zip(slices[parts], chosen.tables, strict=True):
                codes.pack_rows(code_rows, n, k, first_row, rows[name].view(np.uint32))
                scales.pack_rows(scale_rows, n, k, first_row, table.device, rows[f"{name}_scale"])
                first_row += code_rows.count
            global_scales[name] = chosen.global_scale
            stats.add(chosen.stats)
        return PackedRank(rows, global_scales, stats)

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

    def _slices(self, matrix: Matrix, stored: Mapping[str, Buffer], by_rows: bool, tp_rank: int) -> tuple[Rows, Rows]:
        """This rank's rows of gate or up, or its columns of down: (codes, scales)."""
        share, form = self._geometry.intermediate, matrix.format
        stride, scale_stride = form.code_bytes(matrix.columns), matrix.columns // form.group
        assert matrix.scales is not None  # require_movable
        codes, scales = stored[matrix.codes.header.name], stored[matrix.scales.header.name]
        if by_rows:
            first = tp_rank * share
            return (
                Rows(codes, first * stride, stride, share, stride),
                Rows(scales, first * scale_stride, scale_stride, share, scale_stride),
            )
        width, scale_width = form.code_bytes(share), share // form.group
        return (
            Rows(codes, tp_rank * width, stride, matrix.rows, width),
            Rows(scales, tp_rank * scale_width, scale_stride, matrix.rows, scale_width),
        )
