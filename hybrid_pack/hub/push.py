"""A pack to the Hub: exactly its files, the manifest last, and nothing of an earlier pack left beside them."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_pack.errors import DataError, EnvironmentFailure, HybridPackError, UsageError
from hybrid_pack.hub.branch import Branch, card_warning, look
from hybrid_pack.hub.errors import errors, retrying
from hybrid_pack.hub.listing import Remote, find_remote, list_files, open_remote
from hybrid_pack.hub.sending import counting
from hybrid_pack.io.manifest import MANIFEST, README, read_manifest
from hybrid_pack.io.progress import Progress, Silent
from hybrid_pack.io.remote import RemoteFile
from hybrid_pack.schemas.manifest import Manifest


@dataclass(frozen=True)
class PushPlan:
    """What a push would do; nothing was changed.

    Attributes:
        new_repository: It would be made first.
        new_branch: The branch would be.
        send: Files that are not there yet, or differ, with their bytes.
        there: Files that are there already, byte for byte.
        stale: Files of another pack that go in the same push.
        overwritten: Its weight files that get other bytes.
        foreign: Files nobody knows here; they are left alone.
        keeps_card: README.md was edited on the Hub and stays as it is there.
        refused: Why the push would be refused, or None.
    """

    new_repository: bool
    new_branch: bool
    send: Mapping[str, int]
    there: Mapping[str, int]
    stale: tuple[str, ...]
    overwritten: tuple[str, ...]
    foreign: tuple[str, ...]
    keeps_card: bool
    refused: str | None


@dataclass(frozen=True)
class Pushed:
    """What a push did.

    Attributes:
        commit: The commit that has the whole pack.
        commit_url: Its page.
        pr_url: The pull request's page, or None.
        revision: Branch or reference the pack is on now.
        private: Whether not everybody sees the repository.
        files_sent: Files that were not there before.
        bytes_sent: Their bytes.
        bytes_moved: Of them, bytes that went over the network in large files; fewer where the Hub had stored some, as
            after an interrupted push. None where this huggingface_hub does not tell.
        bytes_large: Of them, bytes of large files.
        files_there: Files that were there already.
        bytes_there: Their bytes.
        removed: Files of another pack that are gone.
        foreign: Files of neither that were left alone.
        card_kept: README.md was edited on the Hub and stays as it is there.
    """

    commit: str
    commit_url: str
    pr_url: str | None
    revision: str
    private: bool
    files_sent: int
    bytes_sent: int
    bytes_moved: int | None
    bytes_large: int
    files_there: int
    bytes_there: int
    removed: tuple[str, ...]
    foreign: tuple[str, ...]
    card_kept: bool


def pack_sizes(root: Path, manifest: Manifest) -> dict[str, int]:
    """Bytes of every file that goes: the manifest's, itself, and README.md if there is one."""
    sizes = manifest.sizes()
    for name in (README, MANIFEST):
        if (root / name).is_file():
            sizes[name] = (root / name).stat().st_size
    return sizes


def _open(repo_id: str, revision: str | None) -> tuple[Remote | None, bool]:
    """(the repository at a revision or None, whether there is a repository at all)."""
    found = find_remote(repo_id, revision)
    if found is not None or revision is None:
        return found, found is not None
    return None, find_remote(repo_id, None) is not None


def _foreign(files: Mapping[str, RemoteFile], known: Iterable[str]) -> tuple[str, ...]:
    left = {README, *known}
    return tuple(sorted(file.shown() for path, file in files.items() if path not in left and path[:1] != "."))


def _warn_of_card(root: Path, manifest: Manifest, progress: Progress) -> None:
    warning = card_warning(root, manifest)
    if warning is not None:
        progress.note(f"warning: {warning}")


def plan_push(
    root: Path, repo_id: str, *, revision: str | None = None, replace: bool = False, progress: Progress | None = None
) -> PushPlan:
    """What ``push`` would do: files that are there in their size are hashed and compared. Changes nothing.

    Raises:
        DataError: The folder has no valid manifest.
        EnvironmentFailure: No network, no access.
    """
    manifest = read_manifest(root)
    sizes = pack_sizes(root, manifest)
    watch = progress or Silent()
    _warn_of_card(root, manifest, watch)
    remote, exists = _open(repo_id, revision)
    if remote is None and exists:  # a new branch starts as the main one is
        remote, new_branch = _open(repo_id, None)[0], True
    else:
        new_branch = False
    branch = look(remote, root, manifest, sizes, replace=replace)
    files = branch.files
    if branch.keeps_card:
        del sizes[README]
    same_size = [path for path, nbytes in sizes.items() if path in files and files[path].nbytes == nbytes]
    if same_size:
        watch.start(sum(sizes[path] for path in same_size), 0)
    there = set()
    for path in same_size:
        _, expected, found = files[path].digest_of(root / path, watch.advance)
        if expected == found:
            there.add(path)
    refusal = None if remote is None else branch.refusal(remote.name, replace=replace)
    return PushPlan(
        new_repository=not exists,
        new_branch=new_branch,
        send={path: nbytes for path, nbytes in sizes.items() if path not in there},
        there={path: nbytes for path, nbytes in sizes.items() if path in there},
        stale=branch.stale,
        overwritten=branch.overwritten,
        foreign=_foreign(files, (*sizes, *branch.stale)),
        keeps_card=branch.keeps_card,
        refused=None if refusal is None else str(refusal),
    )


def push(
    root: Path,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    create_pr: bool = False,
    message: str | None = None,
    replace: bool = False,
    bars: bool = False,
    progress: Progress | None = None,
) -> Pushed:
    """Put a pack on the Hub; the caller has verified it.

    Two commits or more: weights and small files first, in which an earlier pack's manifest and files go, then the
    manifest and README.md. A repository between them has no manifest, and is no pack. Calling again after a failure
    sends what is missing.

    Args:
        root: The pack.
        repo_id: ``org/name``; made if it is not there.
        private: A repository that is made is private; one that is public is refused.
        revision: Branch, made if it is not there; by default main.
        create_pr: On a new pull request instead.
        message: Title of the commits.
        replace: Weights of another pack, and a README.md that was edited on the Hub, may go.
        bars: Let huggingface_hub show its progress bars on stderr.
        progress: Told of waits, and without bars of bytes that went out.

    Raises:
        UsageError: The call cannot be right; weights of something else are there.
        DataError: No valid manifest; or the Hub does not hold afterwards what was sent.
        EnvironmentFailure: No network, no access; what was sent is kept on the Hub.
    """
    if create_pr and revision is not None:
        raise UsageError(
            "a new pull request is always against the main branch", where="--create-pr",
            hint="to go on with one, give its --revision refs/pr/N alone",
        )  # fmt: skip
    if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
        raise UsageError("a commit cannot be added to", where="--revision", expected="a branch", found=revision)
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not bars:
        disable_progress_bars()
    manifest = read_manifest(root)
    watch = progress or Silent()
    _warn_of_card(root, manifest, watch)
    return _Push(root, repo_id, manifest, watch).go(private, revision, create_pr, message, replace=replace, bars=bars)


class _Push:
    """One call of ``push``."""

    def __init__(self, root: Path, repo_id: str, manifest: Manifest, progress: Progress) -> None:
        from huggingface_hub import HfApi

        self.root, self.repo_id, self.manifest, self.progress = root, repo_id, manifest, progress
        self.api: Any = HfApi()
        self.sizes = pack_sizes(root, manifest)
        self._marks = {path: self._mark(path) for path in self.sizes}
        self._seen: tuple[str, Branch] | None = None

    def go(
        self, private: bool, revision: str | None, create_pr: bool, message: str | None, *, replace: bool, bars: bool
    ) -> Pushed:
        """Carry it out."""
        remote, exists = _open(self.repo_id, revision)
        if exists:  # refused before a branch or a pull request is made; both begin as the main branch is
            self._look(remote or open_remote(self.repo_id), replace)
        private_now = self._repository(remote, exists, private)
        title = message or f"Add hybrid-pack of {self.manifest.source.name}"
        target, pr_url = self._target(remote, revision, create_pr, title)
        before_at = open_remote(self.repo_id, target)
        branch = self._look(before_at, replace)
        before, stale = branch.files, branch.stale
        if branch.keeps_card:
            del self.sizes[README]
        gone = [*stale, *self._manifest_that_differs(before)]
        last = {MANIFEST, README}
        if not bars:
            there = {p for p, nbytes in self.sizes.items() if p in before and before[p].nbytes == nbytes}
            self.progress.start(sum(self.sizes.values()), sum(self.sizes[p] for p in there))
        try:
            with counting(lambda n: None if bars else self.progress.advance(n)) as moved:
                self._upload(set(self.sizes) - last, gone, target, title)
                self._require_unchanged()
                info = self._upload(last & set(self.sizes), [], target, f"{title}: manifest")
        except HybridPackError as error:
            if pr_url is None:
                raise
            hint = f"go on with --revision {target}, without --create-pr"
            raise EnvironmentFailure(error.problem, where=error.where, found=error.found, hint=hint) from error
        after_at = open_remote(self.repo_id, target)
        after = list_files(after_at)
        self._require_whole(after, after_at)
        same = {p for p in self.sizes if p in before and before[p].same_content(after[p])}
        sent = set(self.sizes) - same
        return Pushed(
            commit=after_at.commit,
            commit_url=str(info.commit_url),
            pr_url=pr_url,
            revision=target,
            private=private_now,
            files_sent=len(sent),
            bytes_sent=sum(self.sizes[p] for p in sent),
            bytes_moved=moved.nbytes if moved.known else None,
            bytes_large=sum(self.sizes[p] for p in sent if after[p].sha256 is not None),
            files_there=len(same),
            bytes_there=sum(self.sizes[p] for p in same),
            removed=stale,
            foreign=_foreign(after, self.sizes),
            card_kept=branch.keeps_card,
        )

    def _look(self, remote: Remote, replace: bool) -> Branch:
        """What is there.

        Raises:
            UsageError: Something a push does not remove unasked.
        """
        if self._seen is None or self._seen[0] != remote.commit:  # files may be hashed for it
            self._seen = remote.commit, look(remote, self.root, self.manifest, self.sizes, replace=replace)
        refusal = self._seen[1].refusal(remote.name, replace=replace)
        if refusal is not None:
            raise refusal
        return self._seen[1]

    def _call(self, call: Any) -> Any:
        with errors(self.repo_id, "send"):
            return retrying(call, tell=self.progress.note)

    def _repository(self, remote: Remote | None, exists: bool, private: bool) -> bool:
        """Make the repository if need be; whether it is private."""
        if exists:
            found = remote or open_remote(self.repo_id)
            if private and not found.private:
                raise UsageError(
                    "the repository is there and public", where=self.repo_id, expected="a private one, by --private",
                    hint="make it private on the Hub first, or leave out --private",
                )  # fmt: skip
            return found.private
        self._call(lambda: self.api.create_repo(self.repo_id, private=private, exist_ok=True))
        return private

    def _target(
        self, remote: Remote | None, revision: str | None, create_pr: bool, title: str
    ) -> tuple[str, str | None]:
        """(branch or reference to push to, page of the pull request)."""
        if create_pr:  # made here and not by the upload, which might be called twice
            request = self._call(lambda: self.api.create_pull_request(self.repo_id, title=title))
            return str(request.git_reference), str(request.url)
        if revision is not None and remote is None and not revision.startswith("refs/"):
            self._call(lambda: self.api.create_branch(self.repo_id, branch=revision, exist_ok=True))
        return revision or "main", None

    def _manifest_that_differs(self, before: Mapping[str, RemoteFile]) -> list[str]:
        """While files change, no manifest may describe others."""
        if MANIFEST not in before:
            return []
        _, expected, found = before[MANIFEST].digest_of(self.root / MANIFEST)
        return [] if expected == found else [MANIFEST]

    def _upload(self, paths: Iterable[str], gone: Iterable[str], target: str, title: str) -> Any:
        """Send some files of the folder, and remove some of the repository."""
        wanted = set(paths)
        files = (path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if path.is_file())
        other = [path for path in files if path not in wanted]
        few = len(wanted) < len(other)  # every file is matched against every pattern
        return self._call(
            lambda: self.api.upload_folder(
                repo_id=self.repo_id,
                folder_path=self.root,
                revision=target,
                commit_message=title,
                allow_patterns=[glob.escape(path) for path in wanted] if few else None,
                ignore_patterns=None if few else [glob.escape(path) for path in other],
                delete_patterns=[glob.escape(path) for path in gone] or None,
            )
        )

    def _mark(self, path: str) -> tuple[int, int, int]:
        status = (self.root / path).stat()
        return status.st_size, status.st_mtime_ns, status.st_ino

    def _require_unchanged(self) -> None:
        """No manifest may describe other bytes than were sent.

        Raises:
            DataError: A file of the pack was written or replaced while it was sent.
        """
        for path, before in self._marks.items():
            if not (self.root / path).is_file() or self._mark(path) != before:
                raise DataError(
                    "a file of the pack changed while it was sent; the Hub has no manifest of it",
                    where=self.root / path, hint=f"hybrid-pack verify {self.root}, then push again",
                )  # fmt: skip

    def _require_whole(self, after: Mapping[str, RemoteFile], where: Remote) -> None:
        """The commit has every file in its size, and this manifest.

        Raises:
            DataError: One is missing or of another size: nothing that was sent may be lost silently. Or somebody else
                pushed another pack meanwhile.
        """
        for path, nbytes in self.sizes.items():
            file = after.get(path)
            if file is None or file.nbytes != nbytes:
                raise DataError(
                    "the Hub does not have a file that was sent", where=f"{where.name}: {path}",
                    expected=f"{nbytes} bytes", found="no such file" if file is None else f"{file.nbytes} bytes",
                    hint="is it in the repository's .gitignore? else push again",
                )  # fmt: skip
        name, expected, found = after[MANIFEST].digest_of(self.root / MANIFEST)
        if expected != found:
            raise DataError(
                "another manifest than was sent is on the Hub", where=f"{where.name}: {MANIFEST}",
                expected=f"{name} {found}", found=expected, hint="did somebody else push too? verify --remote tells",
            )  # fmt: skip
