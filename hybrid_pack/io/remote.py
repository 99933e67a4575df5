"""Files of a repository on the Hub as its listing describes them, and local files held against that."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hybrid_pack.errors import EnvironmentFailure

READ_BYTES = 1 << 20


@dataclass(frozen=True)
class RemoteFile:
    """What a listing says of a file; nothing of it is to be trusted.

    Attributes:
        path: In the repository; any text.
        nbytes: Its size.
        sha256: Of its bytes, hex, if it is a large file (LFS or Xet).
        git_sha1: Of a small file: SHA-1 of ``blob <size>`` NUL and its bytes, hex, as git names it.
    """

    path: str
    nbytes: int
    sha256: str | None
    git_sha1: str | None

    def shown(self) -> str:
        """The path as it may be printed: one line, no control characters."""
        return self.path if self.path.isprintable() else ascii(self.path)

    def same_content(self, other: RemoteFile) -> bool:
        """Whether two listings give it the same bytes."""
        return (self.nbytes, self.sha256, self.git_sha1) == (other.nbytes, other.sha256, other.git_sha1)

    def digest_of(self, path: Path, advance: Callable[[int], None] = lambda _: None) -> tuple[str, str, str]:
        """(algorithm, digest the Hub has, digest of a local file).

        Args:
            path: A local file.
            advance: Told the bytes read.

        Raises:
            EnvironmentFailure: It cannot be read.
        """
        if self.sha256 is not None:
            name, hasher, expected = "sha256", hashlib.sha256(), self.sha256
        else:
            name, hasher, expected = "git-sha1", hashlib.sha1(usedforsecurity=False), self.git_sha1 or "none"
        try:
            with path.open("rb", buffering=0) as file:
                if self.sha256 is None:
                    hasher.update(b"blob %d\0" % path.stat().st_size)
                while data := file.read(READ_BYTES):
                    hasher.update(data)
                    advance(len(data))
        except OSError as error:
            raise EnvironmentFailure("cannot read", where=path, found=error.strerror) from error
        return name, expected, hasher.hexdigest()
