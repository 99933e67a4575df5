"""Whether a file that arrived is the one its manifest lists: size, header, every digest."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from hybrid_pack.errors import DataError, EnvironmentFailure
from hybrid_pack.io.digest import blake3_bytes, new_hasher, rows_digest
from hybrid_pack.io.manifest import expected_tensors, shard_header
from hybrid_pack.schemas.manifest import FileEntry, Manifest, ShardEntry, TensorEntry

READ_BYTES = 4 << 20


class _Reader:
    """Reads a file by position into one buffer."""

    def __init__(self, fd: int, where: Path) -> None:
        self._fd, self._where = fd, where
        self._buffer = np.empty(READ_BYTES, np.uint8)

    def take(self, begin: int, size: int) -> memoryview:
        """Bytes of the file, valid until the next call; at most ``READ_BYTES``."""
        view = self._buffer.data[:size]
        done = 0
        while done < size:
            got = os.preadv(self._fd, [view[done:]], begin + done)
            if not got:
                raise DataError("became shorter while it was read", where=self._where)
            done += got
        return view

    def digest(self, begin: int, end: int) -> bytes:
        """BLAKE3 of a range."""
        hasher = new_hasher()
        for at in range(begin, end, READ_BYTES):
            hasher.update(self.take(at, min(READ_BYTES, end - at)))
        return hasher.digest()


def _tensor_digest(reader: _Reader, entry: TensorEntry) -> str:
    if not entry.digest.startswith("blake3-rows:"):
        return f"blake3:{reader.digest(entry.begin, entry.end).hex()}"
    count = entry.shape[0]
    row = (entry.end - entry.begin) // count
    together = max(1, READ_BYTES // row)
    digests: list[bytes] = []
    for first in range(0, count, together):
        some = min(together, count - first)
        if row > READ_BYTES:
            digests.append(reader.digest(entry.begin + first * row, entry.begin + (first + 1) * row))
            continue
        part = reader.take(entry.begin + first * row, some * row)
        digests += [blake3_bytes(part[i * row : (i + 1) * row]) for i in range(some)]
    return rows_digest(digests)


def _shard(reader: _Reader, manifest: Manifest, entry: ShardEntry) -> str | None:
    header = shard_header(expected_tensors(manifest, entry.layer, entry.rank))
    if len(header) > READ_BYTES or reader.take(0, len(header)) != header:
        return "its header is not the one the manifest implies"
    for name, tensor in entry.tensors.items():
        found = _tensor_digest(reader, tensor)
        if found != tensor.digest:
            return f"{name} has digest {found}, not {tensor.digest}"
    return None


def what_is_wrong(path: Path, manifest: Manifest, entry: ShardEntry | FileEntry) -> str | None:
    """Why a file is not the one a manifest lists, or None if it is, to the last byte.

    Args:
        path: The file, wherever it is.
        manifest: The checked manifest.
        entry: Its entry in it.

    Raises:
        EnvironmentFailure: It cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size != entry.bytes:
                return f"it has {size} bytes, not {entry.bytes}"
            reader = _Reader(fd, path)
            if isinstance(entry, ShardEntry):
                return _shard(reader, manifest, entry)
            found = f"blake3:{reader.digest(0, entry.bytes).hex()}"
            return None if found == entry.digest else f"it has digest {found}, not {entry.digest}"
        finally:
            os.close(fd)
    except OSError as error:
        raise EnvironmentFailure("cannot read", where=path, found=error.strerror) from error
