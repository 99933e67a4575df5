"""Which bytes of a shard are read together, and where each goes: integers only, no I/O and no torch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hybrid_pack.io.manifest import ROW_TENSORS
from hybrid_pack.io.safetensors import ALIGNMENT
from hybrid_pack.schemas.manifest import ShardEntry

DEVICE_ALIGNMENT = 256
"""Every tensor starts at a multiple of this within its shard's device memory, as if it had been allocated alone."""

Chunk = tuple[int, int]
"""Absolute offsets (begin, end) of the bytes that one buffer carries."""

Task = tuple[Chunk, ...]
"""Chunks that one reader carries one after the other. Of a plan by rows, a task holds whole rows."""


def page_floor(offset: int) -> int:
    """The multiple of 4096 at or below an offset: where a read that is to deliver this byte begins."""
    return offset // ALIGNMENT * ALIGNMENT


def align(offset: int, to: int) -> int:
    """The multiple of ``to`` at or above an offset."""
    return -(-offset // to) * to


@dataclass(frozen=True)
class Span:
    """A tensor's bytes ``begin .. end`` in its file, as rows that are hashed one by one.

    Attributes:
        begin: Absolute offset.
        end: Absolute offset after the last byte.
        rows: Experts, for a tensor with a ``blake3-rows`` digest; 1 for one that is hashed as a whole.
    """

    begin: int
    end: int
    rows: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return (self.end - self.begin) // self.rows


@dataclass(frozen=True)
class Move:
    """Bytes of a file and where in device memory they go.

    Attributes:
        begin: Absolute offset in the file.
        end: Absolute offset after the last byte.
        to: Offset in the shard's device memory.
    """

    begin: int
    end: int
    to: int


@dataclass(frozen=True)
class Layout:
    """Tensors of one shard in the file and on the device.

    Attributes:
        spans: Tensors in file order, without holes.
        places: Where each begins in the shard's device memory, a multiple of ``DEVICE_ALIGNMENT``.
        nbytes: Device memory of the shard: its tensors and less than ``DEVICE_ALIGNMENT`` bytes after each.
    """

    spans: tuple[Span, ...]
    places: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Layout:
        """Place tensors one after the other."""
        places, at = [], 0
        for span in spans:
            places.append(at)
            at = align(at + span.end - span.begin, DEVICE_ALIGNMENT)
        return cls(tuple(spans), tuple(places), at)

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """As few as can be: neighbours that stay neighbours move together (in real geometries, the whole shard)."""
        moves: list[Move] = []
        for span, place in zip(self.spans, self.places, strict=True):
            if moves and place - span.begin == moves[-1].to - moves[-1].begin:
                moves[-1] = Move(moves[-1].begin, span.end, moves[-1].to)
            else:
                moves.append(Move(span.begin, span.end, place))
        return tuple(moves)

    @cached_property
    def _begins(self) -> list[int]:
        return [move.begin for move in self.moves]

    def moves_of(self, begin: int, end: int) -> list[Move]:
        """What to copy of the bytes ``begin .. end`` of the file."""
        found = []
        for move in self.moves[max(bisect_right(self._begins, begin) - 1, 0) :]:
            first, last = max(begin, move.begin), min(end, move.end)
            if first >= last:
                break
            found.append(Move(first, last, move.to + first - move.begin))
        return found


def spans_of(entry: ShardEntry) -> tuple[Span, ...]:
    """The tensors of a shard in file order."""
    tensors = sorted(entry.tensors.items(), key=lambda item: item[1].begin)
    return tuple(Span(t.begin, t.end, t.shape[0] if is_by_rows(name) else 1) for name, t in tensors)


def is_by_rows(name: str) -> bool:
    """Whether a tensor, such as ``kept.w13``, is hashed expert by expert."""
    return name.split(".", 1)[1] in ROW_TENSORS


def plan_bytes(begin: int, end: int, chunk_bytes: int) -> list[Task]:
    """Tasks of one chunk each that together are the bytes ``begin .. end``: for loads that hash nothing.

    Args:
        begin: Absolute offset in the file.
        end: Absolute offset after the last byte.
        chunk_bytes: Size of a buffer, a multiple of 4096. A buffer is filled from the multiple of 4096 at or below the
            chunk's begin, and the chunk ends within it.
    """
    return [(chunk,) for chunk in _cut(begin, end, chunk_bytes)]


def plan_rows(spans: Sequence[Span], chunk_bytes: int) -> list[Task]:
    """Tasks of whole rows: as many to a chunk as fit, and a row that does not fit is a task of several chunks.

    Args:
        spans: Tensors in file order, without holes.
        chunk_bytes: As in ``plan_bytes``.
    """
    tasks: list[Task] = []
    begin = end = spans[0].begin if spans else 0  # of the chunk being filled
    for span in spans:
        size = span.row_bytes
        while end < span.end:
            rows = min(span.end - end, page_floor(begin) + chunk_bytes - end) // size
            if rows:
                end += rows * size
                continue
            if end > begin:  # full: the row starts a new chunk
                tasks.append(((begin, end),))
            else:  # empty, and the row does not fit
                end += size
                tasks.append(tuple(_cut(begin, end, chunk_bytes)))
            begin = end
    if end > begin:
        tasks.append(((begin, end),))
    return tasks


def _cut(begin: int, end: int, chunk_bytes: int) -> list[Chunk]:
    chunks = []
    while begin < end:
        stop = min(end, page_floor(begin) + chunk_bytes)
        chunks.append((begin, stop))
        begin = stop
    return chunks
