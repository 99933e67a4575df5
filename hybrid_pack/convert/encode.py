"""From the form an expert is stored in to the form of its tier: moved as it is, cast exactly, or quantised."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.errors import DataError
from hybrid_pack.formats.source import MXFP4, NF3, NVFP4, SourceFormat
from hybrid_pack.io.checkpoint import Expert, Layer, Matrix
from hybrid_pack.io.output import aligned_buffer
from hybrid_pack.io.weights import decode_rows, native_rows
from hybrid_pack.layouts.rows import Rows
from hybrid_pack.plan import Plan
from hybrid_pack.quantize import (
    QuantStats, mxfp4_to_nvfp4, nvfp4_second_scale, quantize_mxfp4, quantize_nf3, quantize_nvfp4,
)  # fmt: skip

Buffer = NDArray[np.uint8]
Stored = Mapping[str, Buffer]

CHUNK_ROWS = 64
"""Rows decoded and quantised at a time: their weights stay in the second-level cache."""

TARGETS: Mapping[str, SourceFormat] = {"nvfp4": NVFP4, "mxfp4": MXFP4, "nf3": NF3}


@dataclass(frozen=True)
class Part:
    """One matrix in the form of its tier, all of its rows and columns.

    Attributes:
        matrix: Where it comes from, for messages.
        format: ``nvfp4``, ``mxfp4`` or ``nf3``.
        codes: Stored rows of packed codes.
        scales: Stored rows of block scales.
        second: NVFP4's second-level scale; 1.0 where there is none.
    """

    matrix: Matrix
    format: SourceFormat
    codes: Rows
    scales: Rows
    second: float


@dataclass
class Encoding:
    """An expert in the form of its tier.

    Attributes:
        w13: Gate and up, or up alone.
        w2: Down.
        cast: Whether MXFP4 became NVFP4 without any change of value.
        stats: What quantising came to; None where nothing was quantised.
    """

    w13: list[Part] = field(default_factory=list)
    w2: list[Part] = field(default_factory=list)
    cast: bool = False
    stats: QuantStats | None = None

    @property
    def parts(self) -> list[Part]:
        """Gate, up, down; those there are."""
        return [*self.w13, *self.w2]


class Encoder:
    """Encodes experts one after another in reused buffers. One for each thread.

    Args:
        plan: Says the options of quantising, the levels, and how far matrices are padded.
    """

    def __init__(self, plan: Plan) -> None:
        self._options = plan.quantization
        self._levels = np.asarray(plan.source.config.nf3_levels, np.float32)
        self._intermediate, self._padded = plan.source.intermediate, plan.intermediate
        self._buffers: dict[str, Buffer] = {}
        self._weights = np.empty(0, np.float32)

    def encode(self, layer: Layer, expert: int, stored: Stored, seconds: Sequence[float], where: str) -> Encoding:
        """Bring one expert into the form of its tier.

        Args:
            layer: Its layer.
            expert: Global id.
            stored: Bytes of its tensors by name.
            seconds: Second-level scale of each of its matrices; 1.0 where there is none.
            where: Layer and expert in words, for errors.

        Returns:
            Valid until the next call.

        Raises:
            DataError: A weight that is no number.
        """
        matrices = layer.experts[expert]
        target = "nf3" if expert in layer.tail else str(layer.kept_format)
        one = _One(layer.index, expert, matrices, target, stored, where)
        encoding = Encoding()
        encoding.w13 = self._group(one, "w13", matrices.matrices[:-1], seconds[:-1], encoding)
        encoding.w2 = self._group(one, "w2", matrices.matrices[-1:], seconds[-1:], encoding)
        if self._padded != self._intermediate:
            encoding.w13 = [self._pad(f"{i}", part, self._padded, part.matrix.columns) for i, part in
                            enumerate(encoding.w13)]  # fmt: skip
            encoding.w2 = [self._pad("down", part, part.matrix.rows, self._padded) for part in encoding.w2]
        return encoding

    def _group(
        self, one: _One, name: str, matrices: Sequence[Matrix], seconds: Sequence[float], encoding: Encoding
    ) -> list[Part]:
        """Matrices that share one global scale on the device."""
        target = TARGETS[one.target]
        if target is NVFP4 and all(m.format.name == "mxfp4" for m in matrices):
            cast = self._cast(one, matrices)
            if cast is not None:
                encoding.cast = True
                return cast
        common = self._second(one, matrices, seconds) if target is NVFP4 else 1.0
        parts = []
        for role, (matrix, second) in enumerate(zip(matrices, seconds, strict=True)):
            if matrix.format.name == target.name:
                codes, scales = native_rows(matrix, *one.bytes_of(matrix))
                parts.append(Part(matrix, matrix.format, codes, scales, second))
                continue
            codes_out = self._take(f"{name}{role} codes", matrix.rows * target.code_bytes(matrix.columns))
            scales_out = self._take(f"{name}{role} scales", matrix.rows * matrix.columns // target.group)
            codes2 = codes_out.reshape(matrix.rows, -1)
            scales2 = scales_out.reshape(matrix.rows, -1)
            stats = self._quantize(one, name, matrix, second, common, codes2, scales2)
            encoding.stats = encoding.stats or QuantStats()
            encoding.stats.add(stats)
            parts.append(Part(matrix, target, Rows.of(codes2), Rows.of(scales2), common))
        return parts

    def _cast(self, one: _One, matrices: Sequence[Matrix]) -> list[Part] | None:
        """MXFP4 as NVFP4 with the same codes, if every scale that matters is one that E4M3 has."""
        rows = [native_rows(matrix, *one.bytes_of(matrix)) for matrix in matrices]
        result = mxfp4_to_nvfp4([scales.matrix() for _, scales in rows], [codes.matrix() for codes, _ in rows])
        if result is None:
            return None
        scales, second = result
        return [
            Part(matrix, NVFP4, codes, Rows.of(own), second)
            for matrix, (codes, _), own in zip(matrices, rows, scales, strict=True)
        ]

    def _second(self, one: _One, matrices: Sequence[Matrix], seconds: Sequence[float]) -> float:
        """The second-level scale of the matrices that are quantised.

        A matrix beside them that is NVFP4 already keeps its own, and theirs is that times a power of two, which block
        scales make up for exactly.
        """
        native = [s for m, s in zip(matrices, seconds, strict=True) if m.format.name == "nvfp4"]
        if len(native) == len(matrices):
            return 1.0
        largest = 0.0
        for matrix, second in zip(matrices, seconds, strict=True):
            if matrix.format.name != "nvfp4":
                for _, weights in self._decoded(one, matrix, second):
                    largest = max(largest, float(np.abs(weights).max()))
        if not math.isfinite(largest):
            return 1.0  # the quantiser says which weight it is
        wanted = nvfp4_second_scale(largest)
        return native[0] * 2.0 ** math.ceil(math.log2(wanted / native[0])) if native else wanted

    def _decoded(self, one: _One, matrix: Matrix, second: float) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """(first row, f32 [rows, K]) of consecutive rows; valid until the next."""
        codes, scales = one.bytes_of(matrix)
        if self._weights.size < CHUNK_ROWS * matrix.columns:
            self._weights = np.empty(CHUNK_ROWS * matrix.columns, np.float32)
        for first in range(0, matrix.rows, CHUNK_ROWS):
            count = min(CHUNK_ROWS, matrix.rows - first)
            weights = self._weights[: count * matrix.columns].reshape(count, matrix.columns)
            decode_rows(matrix, codes, scales, second, first, weights)
            yield first, weights

    def _quantize(
        self, one: _One, name: str, matrix: Matrix, second: float, common: float, codes: Buffer, scales: Buffer
    ) -> QuantStats:
        total = QuantStats()
        options = self._options
        importance = None
        if options.importance is not None:
            importance = options.importance.of(one.layer, one.expert, name, matrix.columns)
        for first, weights in self._decoded(one, matrix, second):
            rows = slice(first, first + len(weights))
            try:
                if one.target == "nf3":
                    stats = quantize_nf3(weights, self._levels, options.search, importance, codes[rows], scales[rows])
                elif one.target == "nvfp4":
                    stats = quantize_nvfp4(weights, common, options.search, importance, codes[rows], scales[rows])
                else:
                    stats = quantize_mxfp4(weights, options.search, importance, codes[rows], scales[rows])
            except ValueError:
                raise _no_number(one, matrix, first, weights) from None
            total.add(stats)
        return total

    def _pad(self, role: str, part: Part, rows: int, columns: int) -> Part:
        """Zeros after the last row or column: scale byte 0 makes a group of any code zero; MXFP4 has code 0 for it."""
        made = []
        for what, given, width in (
            ("codes", part.codes, part.format.code_bytes(columns)),
            ("scales", part.scales, columns // part.format.group),
        ):
            whole = self._take(f"padded {role} {what}", rows * width).reshape(rows, width)
            whole[: given.count, : given.width] = given.matrix()
            whole[given.count :] = 0
            whole[:, given.width :] = 0
            made.append(Rows.of(whole))
        return Part(part.matrix, part.format, made[0], made[1], part.second)

    def _take(self, use: str, nbytes: int) -> Buffer:
        """A buffer that is kept for the next expert."""
        buffer = self._buffers.get(use)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._buffers[use] = aligned_buffer(nbytes)
        return buffer[:nbytes]


@dataclass(frozen=True)
class _One:
    """The expert at hand."""

    layer: int
    expert: int
    matrices: Expert
    target: str
    stored: Stored
    where: str

    def bytes_of(self, matrix: Matrix) -> tuple[Buffer, Buffer | None]:
        """Stored codes and scales."""
        scales = None if matrix.scales is None else self.stored[matrix.scales.header.name]
        return self.stored[matrix.codes.header.name], scales


def _no_number(one: _One, matrix: Matrix, first: int, weights: NDArray[np.float32]) -> DataError:
    row, column = map(int, np.argwhere(~np.isfinite(weights))[0])
    return DataError(
        f"{one.where}: weight [{first + row}, {column}] of {matrix.name}",
        where=matrix.codes,
        expected="a finite number",
        found=f"{weights[row, column]:g} ({matrix.format.name.upper()})",
        hint="the export is damaged; export the checkpoint again",
    )
