"""What a repository holds: its commit, its files with sizes and hashes, its manifest. No payload is fetched."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from hybrid_pack.errors import DataError
from hybrid_pack.hub.download import fetch_bytes
from hybrid_pack.hub.errors import at, errors, retrying
from hybrid_pack.hub.logs import announce
from hybrid_pack.io.manifest import MANIFEST
from hybrid_pack.io.remote import RemoteFile

MAX_FILES = 200_000
"""Files of a repository that are listed; a pack of 100 layers and 128 ranks has 13 thousand."""

MAX_MANIFEST_BYTES = 64 << 20
"""A manifest of 1,500 shards has 4 MB; one from outside is not read into memory whatever its size."""

_ASKED_TOGETHER = 200
_COMMIT = re.compile(r"[0-9a-f]{40}")
_HEX = re.compile(r"[0-9a-f]{40,64}")


@dataclass(frozen=True)
class Remote:
    """A repository at one commit.

    Attributes:
        repo_id: ``org/name``.
        revision: As it was asked for.
        commit: 40 hex digits; everything is read from it, whatever is pushed meanwhile.
        private: Whether not everybody sees it.
    """

    repo_id: str
    revision: str | None
    commit: str
    private: bool

    @property
    def name(self) -> str:
        """For messages."""
        return at(self.repo_id, self.revision)


def find_remote(repo_id: str, revision: str | None = None) -> Remote | None:
    """A repository and the commit a revision is now; None if there is no such repository or revision, or none to see.

    Raises:
        DataError: The Hub's answer is none.
        EnvironmentFailure: No network, no access.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    with errors(at(repo_id, revision), "read what is there"):
        try:
            return _remote(repo_id, revision, retrying(lambda: HfApi().model_info(repo_id, revision=revision)))
        except GatedRepoError:
            raise
        except (RepositoryNotFoundError, RevisionNotFoundError):
            return None


def open_remote(repo_id: str, revision: str | None = None) -> Remote:
    """The same, where it has to be there.

    Raises:
        UsageError: No such repository or revision.
        DataError: The Hub's answer is none.
        EnvironmentFailure: No network, no access.
    """
    from huggingface_hub import HfApi

    with errors(at(repo_id, revision), "read what is there"):
        return _remote(repo_id, revision, retrying(lambda: HfApi().model_info(repo_id, revision=revision)))


def _remote(repo_id: str, revision: str | None, info: Any) -> Remote:
    commit = info.sha
    if not isinstance(commit, str) or _COMMIT.fullmatch(commit) is None:
        raise DataError("the Hub names a commit that is none", where=at(repo_id, revision), found=repr(commit)[:60])
    return Remote(repo_id, revision, commit, info.private is True)


def _remote_file(entry: Any, where: str) -> RemoteFile:
    """An entry of a listing, of which nothing is taken for granted.

    Raises:
        DataError: Its path is no text, its size no size, its hash no hash.
    """
    path, nbytes, large = entry.path, entry.size, entry.lfs
    sha256 = None if large is None else large.sha256
    git_sha1 = entry.blob_id if large is None else None
    if not isinstance(path, str) or type(nbytes) is not int or not 0 <= nbytes < 2**63:
        raise DataError("the Hub lists a file that cannot be", where=where, found=f"{path!r} of {nbytes!r} bytes"[:120])
    for digest, length in ((sha256, 64), (git_sha1, 40)):
        if digest is not None and (not isinstance(digest, str) or not _HEX.fullmatch(digest) or len(digest) != length):
            raise DataError("the Hub lists a hash that is none", where=f"{where}: {path!r}", found=repr(digest)[:80])
    return RemoteFile(path, nbytes, sha256, git_sha1)


def _by_path(found: Iterable[RemoteFile], where: str) -> dict[str, RemoteFile]:
    files: dict[str, RemoteFile] = {}
    for file in found:
        if file.path in files:
            raise DataError("the Hub lists a file twice", where=where, found=repr(file.path)[:120])
        files[file.path] = file
    return files


def list_files(remote: Remote) -> dict[str, RemoteFile]:
    """Every file of a repository, by path.

    Raises:
        DataError: A listing that cannot be.
        EnvironmentFailure: No network, no access.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    def ask() -> list[Any]:
        listed = HfApi().list_repo_tree(remote.repo_id, recursive=True, revision=remote.commit)
        return list(islice((entry for entry in listed if isinstance(entry, RepoFile)), MAX_FILES + 1))

    with errors(remote.name, "read what is there"):
        found = retrying(ask)
    if len(found) > MAX_FILES:
        raise DataError("the repository has too many files", where=remote.name, expected=f"at most {MAX_FILES:,}")
    return _by_path((_remote_file(entry, remote.name) for entry in found), remote.name)


def look_up(remote: Remote, paths: Iterable[str]) -> dict[str, RemoteFile]:
    """Those of some files that a repository has, by path; whatever else it answers is left out."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    wanted = list(paths)
    asked = set(wanted)
    found: list[Any] = []
    with errors(remote.name, "read what is there"):
        for i in range(0, len(wanted), _ASKED_TOGETHER):
            some = wanted[i : i + _ASKED_TOGETHER]
            answer = retrying(lambda some=some: HfApi().get_paths_info(remote.repo_id, some, revision=remote.commit))  # type: ignore[misc]
            found += [entry for entry in answer if isinstance(entry, RepoFile) and entry.path in asked]
    return _by_path((_remote_file(entry, remote.name) for entry in found), remote.name)


def fetch_manifest(remote: Remote, tell: Callable[[str], None] = announce) -> bytes:
    """The bytes of a repository's manifest; not checked.

    Raises:
        DataError: It has none, or one that is too large.
        EnvironmentFailure: No network, no access.
    """
    file = look_up(remote, [MANIFEST]).get(MANIFEST)
    where = f"{remote.name}: {MANIFEST}"
    if file is None:
        raise DataError("the repository is not a pack: it has no manifest", where=where)
    if file.nbytes > MAX_MANIFEST_BYTES:
        raise DataError("too large for a manifest", where=where, found=f"{file.nbytes} bytes")
    return fetch_bytes(remote.repo_id, remote.commit, MANIFEST, file.nbytes, tell)
