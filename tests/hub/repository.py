"""Repositories of a Hub in memory: commits of files, and what listings say of a file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass(frozen=True)
class Entry:
    """A file of a commit; ``listed_bytes`` is what listings say, right or wrong."""

    data: bytes
    lfs: bool
    xet_hash: str | None = None
    listed_bytes: int | None = None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def nbytes(self) -> int:
        return len(self.data) if self.listed_bytes is None else self.listed_bytes

    @property
    def etag(self) -> str:
        return self.sha256 if self.lfs else git_sha1(self.data)

    def listing(self, path: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": path, "size": self.nbytes, "oid": git_sha1(self.data)}
        if self.lfs:
            entry["lfs"] = {"oid": self.sha256, "size": self.nbytes, "pointerSize": 134}
        return entry


Files = dict[str, Entry]


@dataclass
class Repo:
    private: bool
    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    log: list[tuple[str, str, list[str]]] = field(default_factory=list)
    """(branch, title, what it did) of every commit."""

    def commit(self, branch: str, title: str, files: Files, did: list[str]) -> str:
        oid = hashlib.sha1(f"{len(self.commits)} {branch} {title}".encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        self.log.append((branch, title, did))
        return oid

    def find(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)
