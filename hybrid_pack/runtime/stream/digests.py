"""Hashing a shard's tensors row by row while they pass, in any order and by any thread."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from hybrid_pack.errors import DataError
from hybrid_pack.io.digest import Hasher, blake3_bytes, new_hasher, rows_digest
from hybrid_pack.runtime.stream.files import AGAIN
from hybrid_pack.runtime.stream.plan import Span, is_by_rows
from hybrid_pack.schemas.manifest import ShardEntry


class ShardDigests:
    """The rows of one shard, each hashed once.

    Args:
        path: Named in errors.
        entry: The digests that must come out.
        spans: From ``spans_of``.
    """

    def __init__(self, path: Path, entry: ShardEntry, spans: Sequence[Span]) -> None:
        self.spans = tuple(spans)
        self.rows = [[b""] * span.rows for span in spans]
        self._begins = [span.begin for span in spans]
        self._path, self._entry = path, entry

    def walk(self, begin: int) -> RowWalker:
        """Hash from the row on that begins at an offset of the file."""
        tensor = bisect_right(self._begins, begin) - 1
        return RowWalker(self, tensor, (begin - self._begins[tensor]) // self.spans[tensor].row_bytes)

    def check(self) -> None:
        """Compare with the manifest, once all rows are hashed.

        Raises:
            DataError: A tensor is not the one that was written.
        """
        names = sorted(self._entry.tensors, key=lambda name: self._entry.tensors[name].begin)
        for name, rows in zip(names, self.rows, strict=True):
            found = rows_digest(rows) if is_by_rows(name) else f"blake3:{rows[0].hex()}"
            expected = self._entry.tensors[name].digest
            if found != expected:
                problem = f"the bytes of {name} are not the ones that were written"
                raise DataError(problem, where=self._path, expected=expected, found=found, hint=AGAIN)


class RowWalker:
    """Hashes consecutive bytes of a file, whatever the pieces they come in."""

    def __init__(self, shard: ShardDigests, tensor: int, row: int) -> None:
        self._shard, self._tensor, self._row = shard, tensor, row
        self._size = self._left = shard.spans[tensor].row_bytes
        self._hasher: Hasher | None = None

    def feed(self, data: memoryview) -> None:
        """Hash the bytes that follow those fed before."""
        at = 0
        while at < len(data):
            piece = data[at : at + self._left]
            at += len(piece)
            self._left -= len(piece)
            if self._hasher is None and not self._left:
                self._next(blake3_bytes(piece))
                continue
            self._hasher = self._hasher or new_hasher()
            self._hasher.update(piece)
            if not self._left:
                self._next(self._hasher.digest())

    def _next(self, digest: bytes) -> None:
        spans = self._shard.spans
        self._shard.rows[self._tensor][self._row] = digest
        self._hasher = None
        self._row += 1
        if self._row == spans[self._tensor].rows and self._tensor + 1 < len(spans):
            self._tensor, self._row = self._tensor + 1, 0
            self._size = spans[self._tensor].row_bytes
        self._left = self._size


class Countdown:
    """Says who is last.

    Args:
        count: How many are to come.
    """

    def __init__(self, count: int) -> None:
        self._left, self._lock = count, threading.Lock()

    def is_last(self) -> bool:
        """Count one; whether it was the last."""
        with self._lock:
            self._left -= 1
            return not self._left
