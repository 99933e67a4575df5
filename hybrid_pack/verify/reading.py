"""Reading a pack's files: never mapped, so that a file that shrinks meanwhile is a finding and not a crash."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.errors import DataError, EnvironmentFailure


class PackFile:
    """An open file of a pack.

    Args:
        root: The pack.
        name: Path in it; links were checked before.

    Raises:
        DataError: It is no longer there.
        EnvironmentFailure: It cannot be opened.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.name, self._path = name, root / name
        try:
            self._fd = os.open(root / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise DataError("removed while the pack was verified", where=name) from None
        except OSError as error:
            raise EnvironmentFailure("cannot read", where=root / name, found=error.strerror) from error

    def read(self, out: NDArray[np.uint8], offset: int) -> None:
        """Fill an array, contiguous, from an offset.

        Raises:
            DataError: The file ends before.
            EnvironmentFailure: The system could not read.
        """
        view = out.data
        while view.nbytes:
            try:
                got = os.preadv(self._fd, [view], offset)
            except OSError as error:
                raise EnvironmentFailure("cannot read", where=self._path, found=error.strerror) from error
            if not got:
                raise DataError("became shorter while the pack was verified", where=self.name, found=f"{offset} bytes")
            view, offset = view[got:], offset + got

    def take(self, begin: int, end: int) -> bytes:
        """Bytes ``begin .. end``, a small part."""
        part = np.empty(end - begin, np.uint8)
        self.read(part, begin)
        return part.tobytes()

    def close(self) -> None:
        """Close."""
        os.close(self._fd)


@contextmanager
def opened(root: Path, name: str) -> Iterator[PackFile]:
    """A file of a pack, closed at the end."""
    file = PackFile(root, name)
    try:
        yield file
    finally:
        file.close()
