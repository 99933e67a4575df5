"""A folder whose files get their names however the folders below it are swapped meanwhile: no link is followed."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hybrid_pack.errors import UsageError
from hybrid_pack.io.output import PARTIAL

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Stamp:
    """What tells a file from any other, and from itself before it was changed; a new name does not change it."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int


def read_plain(path: Path, most: int) -> bytes:
    """At most so many bytes of a regular file, which is no link; of anything else none.

    Raises:
        OSError: It cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        return file.read(most) if stat.S_ISREG(os.fstat(fd).st_mode) else b""


class Place:
    """Names below an open folder, reached one component at a time.

    Args:
        root: Its path, for messages.
        fd: Its descriptor, of which this keeps a copy until ``close``.
    """

    def __init__(self, root: Path, fd: int) -> None:
        self.root, self._fd = root, os.dup(fd)

    def close(self) -> None:
        """Close the descriptor: no thread needs it any more."""
        os.close(self._fd)

    @contextlib.contextmanager
    def _folder(self, parts: tuple[str, ...]) -> Iterator[int]:
        """Descriptor of a folder below the root.

        Raises:
            UsageError: A component is a link or no folder.
            FileNotFoundError: There is none.
        """
        fd = os.dup(self._fd)
        try:
            for i, part in enumerate(parts):
                try:
                    below = os.open(part, _FOLDER, dir_fd=fd)
                except FileNotFoundError:
                    raise
                except OSError as error:  # ELOOP or ENOTDIR
                    raise UsageError(
                        "a link, or no folder, is in the way", where=self.root.joinpath(*parts[: i + 1]),
                        hint="remove it",
                    ) from error  # fmt: skip
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    def _require_here(self) -> None:
        """The path still leads to the open folder, so that who goes by the path comes to it."""
        there, held = self.root.stat(), os.fstat(self._fd)
        if (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino):
            raise UsageError("another folder is in its place now", where=self.root, hint="move nothing meanwhile")

    @staticmethod
    def _split(path: str) -> tuple[tuple[str, ...], str]:
        *folders, name = path.split("/")
        return tuple(folders), name

    def require_plain(self, folder: str, path: str) -> None:
        """What is there of the way to a file below a folder is made of folders.

        Raises:
            UsageError: It is not.
        """
        self._require_here()
        with contextlib.suppress(FileNotFoundError), self._folder((folder, *self._split(path)[0])):
            pass

    def stamp(self, path: str) -> Stamp | None:
        """Of a regular file; None if there is none.

        Raises:
            UsageError: A link is on the way.
        """
        folders, name = self._split(path)
        try:
            with self._folder(folders) as fd:
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return Stamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def take_from(self, staging: str, path: str) -> None:
        """Give a file below the staging folder its name, durably.

        Raises:
            UsageError: A link is on the way to either.
        """
        folders, name = self._split(path)
        with self._folder((staging, *folders)) as source, self._folder(folders) as target:
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=source)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(name, name, src_dir_fd=source, dst_dir_fd=target)
            os.fsync(target)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file at the top, whole or not at all, durably."""
        new = name + PARTIAL
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new, dir_fd=self._fd)
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=self._fd)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(fd)
            os.replace(new, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new, dir_fd=self._fd)
            raise
        os.fsync(self._fd)

    def remove_folder(self, name: str) -> None:
        """Remove a folder at the top with all that is in it; a link in its place is left alone."""
        self._require_here()
        if not (self.root / name).is_symlink():
            shutil.rmtree(self.root / name)
        os.fsync(self._fd)
