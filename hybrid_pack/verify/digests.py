"""Payload digests: every byte of every file against the manifest."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.errors import DataError, EnvironmentFailure
from hybrid_pack.io.digest import blake3_bytes, blake3_digest, finish, new_hasher, rows_digest
from hybrid_pack.io.progress import Progress
from hybrid_pack.layouts.scale_bytes import MXFP4_MAX_BYTE, NF3_MAX_BYTE, NVFP4_BYTES
from hybrid_pack.schemas.manifest import FileEntry, Manifest, ShardEntry, TensorEntry
from hybrid_pack.verify.pool import Buffers, Pool, Task
from hybrid_pack.verify.reading import PackFile, opened
from hybrid_pack.verify.report import Recorder, Tally
from hybrid_pack.verify.scope import Scope

TENSORS = "tensor digests"
FILES = "file digests"
SCALES = "scale bytes"
DIFFERS = "its bytes are not the ones that were written; get the file again, or delete it and run convert --resume"
BUFFER_BYTES = 1 << 20
"""Read and hashed at a time; fits the second-level cache."""

TASK_BYTES = 64 << 20
"""About what one task reads of a shard."""


@dataclass
class _Tensor:
    """A tensor while its rows are hashed, by any thread in any order."""

    shard: ShardEntry
    name: str
    entry: TensorEntry
    scales: tuple[int, int] | None
    rows: list[bytes]
    left: int
    failed: bool = False
    highest: int = 0
    lowest: int = 256
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def row_bytes(self) -> int:
        return (self.entry.end - self.entry.begin) // len(self.rows)


class _Job:
    def __init__(self, root: Path, pool: Pool, recorder: Recorder, progress: Progress) -> None:
        self.root, self.pool, self.recorder, self.progress = root, pool, recorder, progress
        self.buffers = Buffers()
        self.scales = Tally()

    def file(self, entry: FileEntry, tally: Tally) -> None:
        """Hash a plain file."""
        hasher = new_hasher()
        try:
            with opened(self.root, entry.path) as file:
                for offset in range(0, entry.bytes, BUFFER_BYTES):
                    if self.pool.stopped.is_set():
                        return
                    size = min(BUFFER_BYTES, entry.bytes - offset)
                    part = self.buffers.take("read", size)
                    file.read(part, offset)
                    hasher.update(part)
                    tally.add(0, size)
                    self.progress.advance(size)
        except (DataError, EnvironmentFailure) as error:
            self.recorder.find_error(FILES, entry.path, error)
            self.recorder.spoil(entry.path)
            return
        tally.add(1)
        digest = finish(hasher)
        if digest != entry.digest and not self.recorder.was_told(entry.path):
            self.recorder.find(FILES, entry.path, DIFFERS, expected=entry.digest, found=digest)

    def rows(self, tensor: _Tensor, first: int, last: int, tally: Tally) -> None:
        """Hash rows ``first .. last`` of a tensor; whoever hashes the last ones compares the digest."""
        try:
            with opened(self.root, tensor.shard.path) as file:
                self._hash_rows(file, tensor, first, last, tally)
        except (DataError, EnvironmentFailure) as error:
            with tensor.lock:
                repeated, tensor.failed = tensor.failed, True
            if not repeated:
                self.recorder.find_error(TENSORS, tensor.shard.path, error, tensor.name)
            self.recorder.spoil(tensor.shard.path)
        with tensor.lock:
            tensor.left -= last - first
            done = not tensor.left and not tensor.failed
        if done:
            tally.add(1)
            self._compare(tensor)

    def _hash_rows(self, file: PackFile, tensor: _Tensor, first: int, last: int, tally: Tally) -> None:
        size = tensor.row_bytes
        together = max(1, BUFFER_BYTES // size)
        for row in range(first, last, together):
            if self.pool.stopped.is_set():
                return
            count = min(together, last - row)
            begin = tensor.entry.begin + row * size
            if count * size <= BUFFER_BYTES:
                part = self.buffers.take("read", count * size)
                file.read(part, begin)
                for i in range(count):
                    tensor.rows[row + i] = blake3_bytes(part[i * size : (i + 1) * size])
                self._note_highest(tensor, part)
            else:
                hasher = new_hasher()
                for offset in range(0, size, BUFFER_BYTES):
                    part = self.buffers.take("read", min(BUFFER_BYTES, size - offset))
                    file.read(part, begin + offset)
                    hasher.update(part)
                    self._note_highest(tensor, part)
                tensor.rows[row] = hasher.digest()
            tally.add(0, count * size)
            self.progress.advance(count * size)

    @staticmethod
    def _note_highest(tensor: _Tensor, part: NDArray[np.uint8]) -> None:
        if tensor.scales is not None:
            highest, lowest = int(part.max()), int((part - np.uint8(1)).min()) + 1  # of those that are not zero
            with tensor.lock:
                tensor.highest, tensor.lowest = max(tensor.highest, highest), min(tensor.lowest, lowest)

    def _compare(self, tensor: _Tensor) -> None:
        path = tensor.shard.path
        digest = rows_digest(tensor.rows)
        if digest != tensor.entry.digest:
            self.recorder.find(TENSORS, path, DIFFERS, where=tensor.name, expected=tensor.entry.digest, found=digest)
        elif tensor.scales is not None:
            self.scales.add(1)
            least, most = tensor.scales
            if tensor.lowest < least or tensor.highest > most:
                self.recorder.find(
                    SCALES,
                    path,
                    "a scale byte that no pack holds",
                    where=tensor.name,
                    expected=f"zero or 0x{least:02X}..0x{most:02X}",
                    found=f"0x{tensor.lowest if tensor.lowest < least else tensor.highest:02X}",
                )

    def whole(self, shard: ShardEntry, name: str, entry: TensorEntry, tally: Tally) -> None:
        """Hash a small tensor: expert ids or global scales."""
        try:
            with opened(self.root, shard.path) as file:
                data = file.take(entry.begin, entry.end)
        except (DataError, EnvironmentFailure) as error:
            self.recorder.find_error(TENSORS, shard.path, error, name)
            return
        tally.add(1, len(data))
        self.progress.advance(len(data))
        digest = blake3_digest(data)
        if digest != entry.digest and not self.recorder.was_told(shard.path, name):
            self.recorder.find(TENSORS, shard.path, DIFFERS, where=name, expected=entry.digest, found=digest)


def _scale_range(manifest: Manifest, shard: ShardEntry, name: str) -> tuple[int, int] | None:
    """Smallest and largest scale byte, zero aside, that a tensor of scales may hold; None for other tensors."""
    if not name.endswith("_scale"):
        return None
    if name.startswith("tail."):
        return 1, NF3_MAX_BYTE
    mxfp4 = manifest.layers[str(shard.layer)].kept_scale_format == "e8m0_k32"
    return (1, MXFP4_MAX_BYTE) if mxfp4 else NVFP4_BYTES


def _shard_tasks(job: _Job, manifest: Manifest, shard: ShardEntry, tally: Tally) -> Iterator[Task]:
    for name, entry in shard.tensors.items():
        if not entry.digest.startswith("blake3-rows:"):
            yield partial(job.whole, shard, name, entry, tally)
            continue
        count = entry.shape[0]
        tensor = _Tensor(shard, name, entry, _scale_range(manifest, shard, name), [b""] * count, count)
        together = max(1, TASK_BYTES // tensor.row_bytes)
        for first in range(0, count, together):
            yield partial(job.rows, tensor, first, min(first + together, count), tally)


def payload_bytes(manifest: Manifest, scope: Scope) -> int:
    """Bytes that ``check_digests`` reads."""
    plain = sum(file.bytes for file in scope.plain(manifest))
    return plain + sum(t.end - t.begin for shard in scope.shards(manifest) for t in shard.tensors.values())


def check_digests(
    root: Path, manifest: Manifest, scope: Scope, pool: Pool, recorder: Recorder, progress: Progress
) -> None:
    """Hash every plain file, and every tensor of the shards of the scope, that is there in its right size."""
    job = _Job(root, pool, recorder, progress)
    plain = sorted(scope.plain(manifest), key=lambda file: -file.bytes)
    with (
        recorder.checking(SCALES, "tensors", threads=True) as job.scales,
        recorder.checking(TENSORS, "tensors", threads=True) as tensors,
        recorder.checking(FILES, "files", threads=True) as files,
    ):
        of_files = (partial(job.file, file, files) for file in plain if file.path not in recorder.bad_paths)
        shards = [shard for shard in scope.shards(manifest) if shard.path not in recorder.bad_paths]
        of_shards = (task for shard in shards for task in _shard_tasks(job, manifest, shard, tensors))
        pool.run(chain(of_files, of_shards))
