"""From the form an expert is stored in to the form of its tier: moved as it is, cast exactly, or quantised."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.convert.device import Quantizer
from hybrid_pack.convert.gptq import HessianCache, HessianErrors
from hybrid_pack.errors import DataError
from hybrid_pack.formats.decode import F32
from hybrid_pack.formats.source import MXFP4, NF3, NVFP4, SourceFormat
from hybrid_pack.io.checkpoint import Layer, Matrix
from hybrid_pack.io.output import aligned_buffer
from hybrid_pack.io.weights import canonical_rows, check_scales, decode_stored, pick_rows
from hybrid_pack.layouts.rows import Rows
from hybrid_pack.layouts.scale_bytes import MXFP4_MAX_BYTE, NVFP4_SECOND_LIMIT
from hybrid_pack.plan import Plan
from hybrid_pack.quantize import QuantStats, best_second_scale, mxfp4_to_nvfp4, nvfp4_second_scale
from hybrid_pack.quantize.second import SAMPLE

Buffer = NDArray[np.uint8]
Stored = Mapping[str, Buffer]

CHUNK_ROWS = 64
"""Rows decoded and quantised at a time: their weights stay in the second-level cache."""

GPU_ROWS = 1 << 12
"""Likewise for a GPU, which wants more at once."""

CAST_LOWEST_EXPONENT = -6
"""Of a block scale when MXFP4 becomes NVFP4: beside the largest, 2^8, the device flushes what is below 2^-6."""

ROLES = ("gate", "up", "down")

MXFP4_LIMIT = 6 * 2.0 ** (MXFP4_MAX_BYTE - 127)
"""Weights of this and more are beyond E2M1's largest level at the largest MXFP4 scale the device has."""

MXFP4_ADVICE = "--kept-format mxfp4 (for all layers: with --overwrite, not --resume)"

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
        stats: What quantising it came to; None if it was moved or cast.
    """

    matrix: Matrix
    format: SourceFormat
    codes: Rows
    scales: Rows
    second: float
    stats: QuantStats | None = None

    @property
    def made(self) -> bool:
        """Whether it was quantised here."""
        return self.stats is not None

    @property
    def lost(self) -> bool:
        """Whether quantising left nothing but zeros of weights that were not all zero."""
        return self.stats is not None and self.stats.signal > 0 and self.stats.zero == self.stats.groups


@dataclass
class Encoding:
    """An expert in the form of its tier.

    Attributes:
        w13: Gate and up, or up alone.
        w2: Down.
        cast: Whether MXFP4 became NVFP4 without any change of value, and nothing was quantised.
        stats: What quantising came to, all matrices together; None where nothing was quantised.
        on_hessians: Errors of matrices quantised by GPTQ.
    """

    w13: list[Part] = field(default_factory=list)
    w2: list[Part] = field(default_factory=list)
    cast: bool = False
    stats: QuantStats | None = None
    on_hessians: HessianErrors = field(default_factory=HessianErrors)

    @property
    def parts(self) -> list[Part]:
        """Gate, up, down; those there are."""
        return [*self.w13, *self.w2]

    @property
    def roles(self) -> tuple[str, ...]:
        """What each of them is."""
        return ROLES[-len(self.parts) :]


class Encoder:
    """Encodes experts one after another in reused buffers. One for each thread.

    Args:
        plan: Says the options of quantising, the levels, and how far matrices are padded.
        hessians: Shared by all threads; None where there are none.
    """

    def __init__(self, plan: Plan, hessians: HessianCache | None = None) -> None:
        self._options = plan.quantization
        self._quantizer = Quantizer(plan.quantization, plan.source.config.nf3_levels)
        self._rows = CHUNK_ROWS if plan.quantization.device == "cpu" else GPU_ROWS
        self._hessians = hessians
        self._levels = plan.source.config.nf3_levels
        self._intermediate, self._padded = plan.source.intermediate, plan.intermediate
        self._buffers: dict[str, Buffer] = {}

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
            DataError: A weight or a scale that is no number.
        """
        matrices = layer.experts[expert].matrices
        target = TARGETS["nf3" if expert in layer.tail else str(layer.kept_format)]
        given = [_Given(m, s, *_bytes_of(m, stored)) for m, s in zip(matrices, seconds, strict=True)]
        one = _One(layer.index, expert, target, where)
        encoding = Encoding()
        encoding.w13 = self._group(one, "gate_up", given[:-1], encoding)
        encoding.w2 = self._group(one, "down", given[-1:], encoding)
        if encoding.stats is not None:
            encoding.cast = False
            self._add_signals(one, given, encoding)
        if self._padded != self._intermediate:
            size = self._padded
            encoding.w13 = [self._pad(f"w13 {i}", p, size, p.matrix.columns) for i, p in enumerate(encoding.w13)]
            encoding.w2 = [self._pad("w2", p, p.matrix.rows, size) for p in encoding.w2]
        return encoding

    def _group(self, one: _One, name: str, given: list[_Given], encoding: Encoding) -> list[Part]:
        """Matrices that share one global scale on the device."""
        if one.target is NVFP4 and all(g.matrix.format.name == "mxfp4" for g in given):
            cast = _cast(one, given)
            if cast is not None:
                encoding.cast = True
                return cast
        common = self._second(one, name, given) if one.target is NVFP4 else 1.0
        parts = []
        for i, each in enumerate(given):
            if each.matrix.native_to(one.target.name):
                parts.append(_moved(one, each))
                continue
            rows, columns = each.matrix.rows, each.matrix.columns
            codes = self._take(f"{name} {i} codes", rows * one.target.code_bytes(columns)).reshape(rows, -1)
            scales = self._take(f"{name} {i} scales", rows * columns // one.target.group).reshape(rows, -1)
            stats = self._quantize(one, name, each, common, codes, scales, encoding)
            encoding.stats = encoding.stats or QuantStats()
            encoding.stats.add(stats)
            parts.append(Part(each.matrix, one.target, Rows.of(codes), Rows.of(scales), common, stats))
        return parts

    def _second(self, one: _One, name: str, given: list[_Given]) -> float:
        """The second-level scale of the matrices that are quantised.

        A matrix beside them that is NVFP4 already keeps its own, and theirs is that times a power of two, which block
        scales make up for exactly.
        """
        made = [each for each in given if not each.matrix.native_to(one.target.name)]
        if not made:
            return 1.0
        sizes, samples = zip(*(self._sample(one, each) for each in made), strict=True)
        largest = max(sizes)
        wanted = nvfp4_second_scale(largest)
        native = [each.second for each in given if each.matrix.native_to(one.target.name)]
        if native:
            second = native[0] * 2.0 ** math.ceil(math.log2(wanted / native[0]))
        else:
            channels = self._channels(one, name)
            best = best_second_scale(np.concatenate(samples), largest, self._options.search, channels)
            second = best if best < NVFP4_SECOND_LIMIT else wanted
        if second >= NVFP4_SECOND_LIMIT:
            raise DataError(
                f"{one.where}: weights too large for the kernel's NVFP4",
                where=made[sizes.index(largest)].matrix.codes,
                expected=f"a second-level scale below {NVFP4_SECOND_LIMIT:g}",
                found=f"{second:g}, for a largest weight of {largest:g}",
                hint=f"{MXFP4_ADVICE} holds them" if largest < MXFP4_LIMIT else "no format of the kept tier holds them",
            )
        return second

    def _sample(self, one: _One, given: _Given) -> tuple[float, F32]:
        """A matrix's largest magnitude, and rows of it at equal distances."""
        step = max(1, given.matrix.rows * given.matrix.columns // SAMPLE)
        largest, picked = 0.0, []
        for first, weights in self._decoded(one, given):
            largest = max(largest, float(np.abs(weights).max()))
            picked.append(weights[-first % step :: step].copy())
        return largest, np.concatenate(picked)

    def _channels(self, one: _One, name: str) -> F32 | None:
        """Importance of the columns of a kind of matrix, if there is one."""
        importance = self._options.importance
        return None if importance is None else importance.read(one.layer, one.expert, name)

    def _decoded(self, one: _One, given: _Given, rows: int = CHUNK_ROWS) -> Iterator[tuple[int, F32]]:
        """(first row, f32 [rows, K]) of consecutive rows; valid until the next."""
        matrix = given.matrix
        buffer = self._take("weights", 4 * min(rows, matrix.rows) * matrix.columns).view(np.float32)
        for first in range(0, matrix.rows, rows):
            count = min(rows, matrix.rows - first)
            weights = buffer[: count * matrix.columns].reshape(count, matrix.columns)
            picked = pick_rows(matrix, given.codes, given.scales, first, count)
            decode_stored(matrix, picked, given.second, one.where, weights, first, self._levels)
            yield first, weights

    def _quantize(
        self, one: _One, name: str, given: _Given, common: float, codes: Buffer, scales: Buffer, encoding: Encoding
    ) -> QuantStats:
        if one.target is NF3 and self._hessians is not None:
            hessian = self._hessians.of(one.layer, one.expert, name)
            ((_, weights),) = self._decoded(one, given, given.matrix.rows)
            stats, errors = hessian.quantize(weights, self._levels, f"{one.where} {name}", codes, scales)
            encoding.on_hessians.add(errors)
            return stats
        channels = self._channels(one, name)
        total = QuantStats()
        for first, weights in self._decoded(one, given, self._rows):
            rows = slice(first, first + len(weights))
            total.add(self._quantizer.rows(one.target, weights, common, channels, codes[rows], scales[rows]))
        return total

    def _add_signals(self, one: _One, given: list[_Given], encoding: Encoding) -> None:
        """The error is told of the whole expert: the weights of matrices that were moved or cast are part of it.

        What they lose where a device's scale byte does not hold a scale, the packer measures: it chooses these bytes.
        """
        assert encoding.stats is not None
        for each, part in zip(given, encoding.parts, strict=True):
            if not part.made:
                for _, weights in self._decoded(one, each):
                    encoding.stats.signal += float(np.square(weights, dtype=np.float64).sum())

    def _pad(self, role: str, part: Part, rows: int, columns: int) -> Part:
        """Zeros after the last row or column: code 0 and scale byte 0, which mean zero in every format."""
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
        return replace(part, codes=made[0], scales=made[1])

    def _take(self, use: str, nbytes: int) -> Buffer:
        """A buffer that is kept for the next expert."""
        buffer = self._buffers.get(use)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = self._buffers[use] = aligned_buffer(nbytes)
        return buffer[:nbytes]


@dataclass(frozen=True)
class _One:
    """The expert at hand, and the form it shall have."""

    layer: int
    expert: int
    target: SourceFormat
    where: str


@dataclass(frozen=True)
class _Given:
    """A matrix as it was read."""

    matrix: Matrix
    second: float
    codes: Buffer
    scales: Buffer | None


def _bytes_of(matrix: Matrix, stored: Stored) -> tuple[Buffer, Buffer | None]:
    scales = None if matrix.scales is None else stored[matrix.scales.header.name]
    return stored[matrix.codes.header.name], scales


def _moved(one: _One, given: _Given) -> Part:
    """Codes and scales as they are stored, row by row."""
    rows = canonical_rows(given.matrix, given.codes, given.scales, one.where)
    form = given.matrix.format if one.target is NF3 else one.target  # NF3 has a dialect with other scale bytes
    assert given.scales is not None  # formats a pack can hold have scales
    codes, scales = Rows.within(given.codes, rows.codes), Rows.within(given.scales, rows.scales)
    return Part(given.matrix, form, codes, scales, given.second)


def _cast(one: _One, given: list[_Given]) -> list[Part] | None:
    """MXFP4 as NVFP4 with the same codes, if every scale that matters is one the device has."""
    moved = [canonical_rows(each.matrix, each.codes, each.scales, one.where) for each in given]
    for each, rows in zip(given, moved, strict=True):
        check_scales(each.matrix, rows.scales, one.where)
    result = mxfp4_to_nvfp4([rows.scales for rows in moved], [rows.codes for rows in moved], CAST_LOWEST_EXPONENT)
    if result is None or result[1] >= NVFP4_SECOND_LIMIT:
        return None
    scales, second = result
    return [
        Part(each.matrix, NVFP4, Rows.within(each.codes, rows.codes), Rows.of(own), second)
        for each, rows, own in zip(given, moved, scales, strict=True)
    ]
