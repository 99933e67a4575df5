"""Writing files that are whole or not there: direct I/O where it fits, fsync, then rename."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.errors import UsageError
from hybrid_pack.io.safetensors import ALIGNMENT

PARTIAL = ".partial"


def aligned_buffer(nbytes: int) -> NDArray[np.uint8]:
    """u8 [nbytes] that starts on a page, as direct I/O needs; given back to the system when dropped."""
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)[:nbytes]


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(root: Path, folder: Path) -> None:
    """Create a folder below ``root`` without ever going through a symbolic link.

    Raises:
        UsageError: Something on the way is a link or no folder.
    """
    at = root
    for part in folder.relative_to(root).parts:
        above, at = at, at / part
        try:
            at.mkdir()
        except FileExistsError:
            if at.is_symlink() or not at.is_dir():
                raise UsageError("in the way of the output", where=at, expected="a folder", hint="remove it") from None
        else:
            fsync_folder(above)


class OutputFile:
    """A file under its temporary name, written at any offset by any thread.

    Parts whose offset, length and address are multiples of 4096 go past the page cache where the file system allows;
    the others go through it. The two never share a page as long as parts do not overlap.

    Args:
        path: Final path; the file is ``<path>.partial`` until ``publish``.
        nbytes: Its size; the space is taken at once, so that a full disk shows before the work.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self.partial = path.with_name(path.name + PARTIAL)
        with contextlib.suppress(FileNotFoundError):
            self.partial.unlink()
        self._fd = os.open(self.partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._direct: int | None = None
        try:
            if nbytes:
                os.posix_fallocate(self._fd, 0, nbytes)
            with contextlib.suppress(OSError):
                self._direct = os.open(self.partial, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except BaseException:
            self.discard()
            raise

    def write(self, offset: int, data: NDArray[np.uint8] | bytes) -> None:
        """Write bytes at an offset.

        Raises:
            OSError: The system's own error, such as ENOSPC.
        """
        view = memoryview(data) if isinstance(data, bytes) else data.data
        if self._direct is not None and self._fits(offset, view):
            try:
                _write_all(self._direct, view, offset)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:  # a file system that opens for direct I/O but does not take it
                    raise
        _write_all(self._fd, view, offset)

    @staticmethod
    def _fits(offset: int, view: memoryview) -> bool:
        if offset % ALIGNMENT or view.nbytes % ALIGNMENT or not view.nbytes:
            return False
        return np.frombuffer(view, np.uint8).ctypes.data % ALIGNMENT == 0

    def sync(self) -> None:
        """Make the bytes durable."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close; the temporary file stays."""
        for fd in (self._fd, self._direct):
            if fd is not None and fd >= 0:
                os.close(fd)
        self._fd, self._direct = -1, None

    def publish(self) -> None:
        """Close and give the file its name, durably. ``sync`` comes first."""
        self.close()
        self.partial.replace(self.path)
        fsync_folder(self.path.parent)

    def discard(self) -> None:
        """Close and remove the temporary file."""
        self.close()
        with contextlib.suppress(FileNotFoundError):
            self.partial.unlink()


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    while view.nbytes:
        written = os.pwrite(fd, view, offset)
        if written <= 0:
            raise OSError(errno.EIO, "the system wrote nothing")
        view, offset = view[written:], offset + written


def write_small(path: Path, data: bytes) -> None:
    """Write a small file atomically and durably."""
    file = OutputFile(path, len(data))
    try:
        file.write(0, data)
        file.sync()
        file.publish()
    except BaseException:
        file.discard()
        raise
