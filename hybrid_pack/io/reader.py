"""Reading stored tensors: whole, by position, by any thread."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.errors import DataError, EnvironmentFailure
from hybrid_pack.io.shards import Located


class TensorReader:
    """Keeps the files of a source open and reads tensors into given buffers. Safe for many threads."""

    def __init__(self) -> None:
        self._fds: dict[Path, int] = {}
        self._lock = threading.Lock()

    def _fd(self, path: Path) -> int:
        with self._lock:
            fd = self._fds.get(path)
            if fd is None:
                try:
                    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise EnvironmentFailure("cannot read", where=path, found=error.strerror) from error
                self._fds[path] = fd
            return fd

    def read(self, tensor: Located, out: NDArray[np.uint8], begin: int = 0) -> None:
        """Read bytes ``begin .. begin + out.nbytes`` of a tensor.

        Args:
            tensor: Where it lies.
            out: u8 [bytes], contiguous; filled.
            begin: First byte within the tensor.

        Raises:
            DataError: The file is shorter than its header says.
            EnvironmentFailure: The system could not read.
        """
        fd, view, offset = self._fd(tensor.path), out.data, tensor.header.begin + begin
        while view.nbytes:
            try:
                got = os.preadv(fd, [view], offset)
            except OSError as error:
                raise EnvironmentFailure("cannot read", where=tensor, found=error.strerror) from error
            if not got:
                raise DataError(
                    "the file became shorter while it was read",
                    where=tensor,
                    expected=f"{tensor.header.end} bytes",
                    found=offset,
                )
            view, offset = view[got:], offset + got

    def prefetch(self, tensor: Located) -> None:
        """Ask the system to read a tensor ahead; only a hint."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._fd(tensor.path), tensor.header.begin, tensor.header.nbytes, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
