"""Reading a shard: opened and held against the manifest once, then read in parts by any thread, never mapped.

A mapped file that shrinks kills the process; here it is an error.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Literal

import numpy as np

from hybrid_pack.errors import DataError, EnvironmentFailure
from hybrid_pack.io.manifest import expected_tensors, rank_tiers, shard_header
from hybrid_pack.runtime.stream.cached import cached_share
from hybrid_pack.runtime.stream.plan import align
from hybrid_pack.schemas.manifest import Manifest, ShardEntry

Direct = Literal["auto"] | bool
"""Whether to read past the page cache: yes, no, or for files most of which are not in it."""

AGAIN = "get the file again or convert again; `hybrid-pack verify` checks every byte"
PAGE = 4096
"""Multiple that direct reads need of offset, length and address."""


class ShardFile:
    """An open shard whose size, header and expert ids are those of the manifest.

    Args:
        root: The pack.
        manifest: Its manifest.
        entry: The shard's entry in it.

    Attributes:
        path: The file. Links are followed, since the Hub's cache consists of them; the name is fixed by layer and rank.
        entry: The shard's entry.
        data_begin: Offset of the first byte after the header, a multiple of 4096.
        direct: Whether reads go past the page cache.

    Raises:
        DataError: The file is missing, or has another size, header or expert ids.
        EnvironmentFailure: It cannot be read.
    """

    def __init__(self, root: Path, manifest: Manifest, entry: ShardEntry) -> None:
        self.path = root / entry.path
        self.entry = entry
        self._fd = self._direct_fd = -1
        header = shard_header(expected_tensors(manifest, entry.layer, entry.rank))
        self.data_begin = len(header)
        try:
            self._fd = self._open()
            self._check(header, manifest)
        except OSError as error:
            self.close()
            raise self._failed(error) from error
        except BaseException:
            self.close()
            raise

    @property
    def fd(self) -> int:
        """The descriptor."""
        return self._fd

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache."""
        return self._direct_fd >= 0

    def choose(self, direct: Direct) -> None:
        """Decide how to read from now on; until then reads go through the page cache.

        Raises:
            EnvironmentFailure: ``direct`` is True, and the file system cannot do that.
        """
        if direct is False or (direct == "auto" and cached_share(self._fd, self.entry.bytes) >= 0.5):
            return
        try:
            self._direct_fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            if direct is True:
                raise EnvironmentFailure(
                    "no direct reads here", where=self.path, found=error.strerror, hint="leave out direct"
                ) from error

    def read(self, view: memoryview, begin: int, end: int) -> None:
        """Fill a buffer with the bytes ``begin .. end`` of the file. Safe for many threads.

        Args:
            view: Of at least ``end - begin`` bytes. Direct reads need its address and size, and ``begin``, to be
                multiples of 4096, and may write up to the next such multiple.
            begin: Absolute offset.
            end: Absolute offset after the last byte.

        Raises:
            DataError: The file is shorter than its manifest says.
            EnvironmentFailure: The system could not read.
        """
        done, want = 0, end - begin
        fd, span = self._fd, want
        if self.direct:
            fd, span = self._direct_fd, align(want, PAGE)
        while done < want:
            try:
                got = os.preadv(fd, [view[done:span]], begin + done)
            except InterruptedError:  # Python itself goes on after a signal, unless its handler raises
                continue
            except OSError as error:
                if error.errno == errno.EINVAL and fd != self._fd:  # it opened for direct reads and cannot do them
                    fd, span = self._fd, want
                    continue
                raise self._failed(error, begin + done) from error
            if got <= 0:
                size = os.fstat(self._fd).st_size
                raise DataError(
                    "the file became shorter while it was read", where=self.path, expected=f"{self.entry.bytes} bytes",
                    found=f"{size} bytes, and none at offset {begin + done}", hint=AGAIN,
                )  # fmt: skip
            done += got
            if got % PAGE and fd != self._fd:  # a short direct read: the rest begins where direct reads cannot
                fd, span = self._fd, want

    def close(self) -> None:
        """Close; done twice, it does nothing."""
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct_fd = -1

    def _open(self) -> int:
        expected = f"a file of {self.entry.bytes} bytes"
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):
                raise DataError("not a regular file", where=self.path, expected=expected, hint=AGAIN)
            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            found = "a link to a file that is not there" if self.path.is_symlink() else "nothing"
            raise DataError("no such file", where=self.path, expected=expected, found=found, hint=AGAIN) from None

    def _check(self, header: bytes, manifest: Manifest) -> None:
        """Everything that a few kilobytes tell."""
        size, wanted = os.fstat(self._fd).st_size, self.entry.bytes
        if size != wanted:
            problem = "the file is truncated" if size < wanted else "the file is too long"
            raise DataError(problem, where=self.path, expected=f"{wanted} bytes", found=f"{size} bytes", hint=AGAIN)
        found = self._take(0, len(header))
        if found != header:
            at = next(i for i, pair in enumerate(zip(header, found, strict=True)) if pair[0] != pair[1])
            raise DataError(
                f"byte {at} of the header is not the one its manifest implies", where=self.path,
                expected=repr(header[at : at + 24]), found=repr(found[at : at + 24]), hint=AGAIN,
            )  # fmt: skip
        for tier, ids in zip(("kept", "tail"), rank_tiers(manifest, self.entry.layer, self.entry.rank), strict=True):
            if ids:  # wrong ones would route tokens to other experts
                self._check_ids(f"{tier}.expert_ids", ids)

    def _check_ids(self, name: str, expected: tuple[int, ...]) -> None:
        at = self.entry.tensors[name]
        found = np.frombuffer(self._take(at.begin, at.end), "<i4").tolist()
        for row, pair in enumerate(zip(expected, found, strict=True)):
            if pair[0] != pair[1]:
                problem = f"{name}[{row}] is not the manifest's"
                raise DataError(problem, where=self.path, expected=pair[0], found=pair[1], hint=AGAIN)

    def _take(self, begin: int, end: int) -> bytes:
        part = bytearray(end - begin)
        self.read(memoryview(part), begin, end)
        return bytes(part)

    def _failed(self, error: OSError, offset: int | None = None) -> EnvironmentFailure:
        found = error.strerror or str(error)
        at = "" if offset is None else f" at offset {offset}"
        return EnvironmentFailure(f"cannot read{at}", where=self.path, found=found)
