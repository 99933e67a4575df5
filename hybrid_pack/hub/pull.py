"""Part of a pack from the Hub: manifest first, then the files asked for, each checked before it gets its name."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass
from pathlib import Path

from hybrid_pack.errors import DataError, EnvironmentFailure, UsageError
from hybrid_pack.hub.arrival import what_is_wrong
from hybrid_pack.hub.crew import PATIENCE, Crew
from hybrid_pack.hub.download import TooLong, abort, download, forget
from hybrid_pack.hub.errors import Stopped
from hybrid_pack.hub.listing import Remote, fetch_manifest, look_up, open_remote
from hybrid_pack.hub.place import Place, Stamp, read_plain
from hybrid_pack.hub.staging import open_staging, remember, same_commit
from hybrid_pack.io.manifest import MANIFEST, PULL_STAGING, STATE, decode_manifest, topology_of
from hybrid_pack.io.output import make_folder, write_small
from hybrid_pack.io.progress import Progress, Silent
from hybrid_pack.schemas.manifest import FileEntry, Manifest, ShardEntry

STAGING = PULL_STAGING
"""Folder inside DIR where files arrive; removed at the end."""

DEFAULT_WORKERS = 4
MAX_WORKERS = 64

Entry = ShardEntry | FileEntry


@dataclass(frozen=True)
class Pulled:
    """What ``pull`` did.

    Attributes:
        commit: Of the repository, that everything came from.
        manifest: Of the pack.
        ranks: That were asked for; all where none was named.
        files_fetched: Files that arrived now.
        bytes_fetched: Their bytes.
        files_kept: Files that were there and are right, to the last byte.
        bytes_kept: Their bytes.
        replaced: Files that were there and were not.
    """

    commit: str
    manifest: Manifest
    ranks: tuple[int, ...]
    files_fetched: int
    bytes_fetched: int
    files_kept: int
    bytes_kept: int
    replaced: tuple[str, ...]


def wanted_entries(manifest: Manifest, ranks: Iterable[int], *, experts_only: bool = False) -> list[Entry]:
    """Entries of the files some ranks need, small files first.

    Args:
        manifest: The checked manifest.
        ranks: Of the pack.
        experts_only: Leave out the base tensors.

    Raises:
        UsageError: The pack has no such rank.
    """
    held, count = set(ranks), topology_of(manifest).ranks
    for rank in held:
        if not 0 <= rank < count:
            raise UsageError("the pack has no such rank", where="--rank", expected=f"0..{count - 1}", found=rank)
    base = () if experts_only else manifest.base.files
    return [*manifest.files, *base, *(shard for shard in manifest.shards if shard.rank in held)]


def pull(
    repo_id: str,
    out: Path,
    *,
    ranks: Iterable[int] | None = None,
    revision: str | None = None,
    experts_only: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Pulled:
    """Bring some ranks' files of a pack into a folder, which then is a pack of those ranks.

    No name a repository lists reaches the file system: only paths of the manifest do, after all its rules were checked.
    A file gets its name when size and every digest are the manifest's; one that arrives wrong is fetched once more.
    ``hybrid_pack.json`` comes last, so that a folder of an interrupted pull is no pack; the same call goes on with it.

    Args:
        repo_id: ``org/name``.
        out: New or empty, or holds an earlier pull or the same pack.
        ranks: By default all.
        revision: Branch, tag or commit; by default the main branch.
        experts_only: Leave out the base tensors.
        workers: Files fetched at a time.
        progress: Told how it goes on.

    Raises:
        UsageError: No such repository, revision or rank; something else is in the folder.
        DataError: No pack, or a file that arrived wrong twice.
        EnvironmentFailure: No network, no access, no room; finished files are kept.
    """
    threads = DEFAULT_WORKERS if workers is None else workers
    if not 1 <= threads <= MAX_WORKERS:
        raise UsageError("not a number of workers", where="--workers", expected=f"1 to {MAX_WORKERS}", found=workers)
    watch = progress or Silent()
    remote = same_commit(out / STAGING, open_remote(repo_id, revision), watch.note)
    text = fetch_manifest(remote, watch.note)
    manifest = decode_manifest(text, f"{remote.name}: {MANIFEST}")
    chosen = tuple(range(topology_of(manifest).ranks)) if ranks is None else tuple(sorted(set(ranks)))
    entries = wanted_entries(manifest, chosen, experts_only=experts_only)
    _require_listed(remote, entries)
    out = out.absolute()
    try:
        _require_ours(out, text)
        out = out.resolve()  # once: a link or ".." on the way to it is the user's own
        with _claimed(out) as fd:
            _require_ours(out, text)
            job = _Pull(remote, manifest, Place(out, fd), watch)
            try:
                job.prepare(text, entries)
                job.run(entries, threads)
                job.finish(text)
            finally:
                if job.idle:  # else the folder stays locked: a thread that is stuck may still write
                    job.place.close()
    except OSError as error:
        raise EnvironmentFailure(
            "the system failed", where=error.filename or out, found=error.strerror or error,
            hint="put that right and run the same command again: finished files are kept",
        ) from error  # fmt: skip
    return job.done(chosen)


def _require_listed(remote: Remote, entries: Iterable[Entry]) -> None:
    """The repository has every file, in its size: seen before anything large is fetched."""
    sizes = {entry.path: entry.bytes for entry in entries}
    listed = look_up(remote, sizes)
    for path, nbytes in sizes.items():
        file = listed.get(path)
        if file is None or file.nbytes != nbytes:
            raise DataError(
                "the repository does not have a file as its manifest lists it", where=f"{remote.name}: {path}",
                expected=f"{nbytes} bytes", found="no such file" if file is None else f"{file.nbytes} bytes",
                hint="whoever pushed it should push it again",
            )  # fmt: skip


def _require_ours(out: Path, text: bytes) -> None:
    """Nothing but this pack, or an earlier pull of it, may be in the folder.

    Raises:
        UsageError: Something else is.
    """
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise UsageError("not a folder", where=out, hint="choose another --out")
    if (out / STATE).exists():
        raise UsageError("an unfinished conversion is there", where=out, hint="choose another --out")
    if (out / STAGING).is_symlink():
        raise UsageError("a symbolic link is in the way", where=out / STAGING, hint="remove it")
    staged = [out / STAGING / MANIFEST] if (out / STAGING).is_dir() else []
    for known in (out / MANIFEST, *staged):
        size = _size_of(known)  # before it is opened: a pipe or device would be read for ever
        if size is not None:
            if size != len(text) or read_plain(known, size) != text:
                raise UsageError(
                    "another pack, or another revision of it, is there", where=known,
                    hint="choose another --out, or the --revision it came from",
                )  # fmt: skip
            return
    left = [path.name for path in out.iterdir() if path.name != STAGING]
    if left:
        raise UsageError("not empty, and not a pull", where=out, found=sorted(left)[0], hint="choose another --out")


@contextlib.contextmanager
def _claimed(out: Path) -> Iterator[int]:
    """Descriptor of the folder, made and locked; folders that were made go again if nothing came into them."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    out.mkdir(parents=True, exist_ok=True)
    fd = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError("another pull is writing here", where=out, hint="wait for it") from None
        yield fd
    finally:
        os.close(fd)
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _size_of(path: Path) -> int | None:
    """Size of a regular file, or None where there is no file.

    Raises:
        UsageError: A link or a folder is there.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no regular file"
        raise UsageError(f"{what} is in the way", where=path, hint="remove it")
    return status.st_size


class _Pull:
    """One call of ``pull``."""

    def __init__(self, remote: Remote, manifest: Manifest, place: Place, progress: Progress) -> None:
        self.remote, self.manifest, self.place, self.progress = remote, manifest, place, progress
        self.out = place.root
        self.staging = self.out / STAGING
        self.stop = threading.Event()
        self.idle = True
        self._lock = threading.Lock()
        self._fetched: list[Entry] = []
        self._kept: list[Entry] = []
        self._replaced: list[str] = []
        self._stamps: dict[str, Stamp] = {}

    def prepare(self, text: bytes, entries: list[Entry]) -> None:
        """Folders and room. What a killed pull left in the staging folder is taken up, if it is whole.

        Raises:
            UsageError: A link is in the way.
            EnvironmentFailure: Too little room.
        """
        open_staging(self.staging, self.manifest.paths())
        if not (self.staging / MANIFEST).exists():
            write_small(self.staging / MANIFEST, text)
        remember(self.staging, self.remote)
        needed = 0
        for entry in entries:
            final, staged = self.out / entry.path, self.staging / entry.path
            make_folder(self.out, final.parent)
            if _size_of(final) != entry.bytes:
                needed += entry.bytes - (_size_of(staged) or 0)
        free = shutil.disk_usage(self.out).free
        if needed > free:
            raise EnvironmentFailure(
                "not enough disk space", where=self.out, expected=f"{needed:,} bytes", found=f"{free:,} free",
                hint="free some and run the same command again: finished files are kept",
            )  # fmt: skip

    def run(self, entries: list[Entry], workers: int) -> None:
        """Fetch what is not there; the first failure, or an interrupt, stops the others."""
        self.progress.start(sum(entry.bytes for entry in entries), 0)

        def work(entry: Entry) -> None:
            try:
                if not self.stop.is_set():
                    self._one(entry)
            except BaseException:
                self.stop.set()
                raise

        crew = Crew(workers, "hybrid-pack-pull")
        try:  # an interrupt may come while threads are still being started
            futures = [crew.submit(work, entry) for entry in entries]
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            self.stop.set()
            abort()
            raise
        finally:
            self.idle = crew.end(PATIENCE if self.stop.is_set() else None)
        failures = [f.exception() for f in futures if f.done() and not f.cancelled() and f.exception() is not None]
        for failure in sorted(failures, key=lambda e: isinstance(e, Stopped)):  # the cause before its consequences
            assert failure is not None
            raise failure

    def _one(self, entry: Entry) -> None:
        """Keep, or fetch, check and name one file."""
        final = self.out / entry.path
        there = _size_of(final)
        if there is not None:
            known = self.place.stamp(entry.path)
            if known is not None and what_is_wrong(final, self.manifest, entry) is None:
                self.progress.advance(entry.bytes)
                with self._lock:
                    self._kept.append(entry)
                    self._stamps[entry.path] = known
                return
        known = self._arrive(entry)
        if self.stop.is_set():
            raise Stopped
        self.place.take_from(STAGING, entry.path)
        forget(self.staging, entry.path)
        with self._lock:
            self._fetched.append(entry)
            self._stamps[entry.path] = known
            if there is not None:
                self._replaced.append(entry.path)

    def finish(self, text: bytes) -> None:
        """Make a pack of it: every file is still the one that was checked, and the manifest comes last.

        Raises:
            EnvironmentFailure: Somebody changed a file meanwhile.
        """
        for path, known in self._stamps.items():
            if self.place.stamp(path) != known:
                raise EnvironmentFailure(
                    "was changed by somebody else after it had been checked", where=self.out / path,
                    hint="run the same command again: it is fetched anew",
                )  # fmt: skip
        if self.place.stamp(MANIFEST) is None:
            self.place.write(MANIFEST, text)
        self.place.remove_folder(STAGING)

    def _arrive(self, entry: Entry) -> Stamp:
        """See to it that the file is in the staging folder, right to the last byte.

        Returns:
            What tells it from any other file.

        Raises:
            DataError: It arrived wrong twice.
        """
        why: str | None = None
        for again in (False, True):
            try:
                self.place.require_plain(STAGING, entry.path)
                found = download(
                    self.remote.repo_id, self.remote.commit, entry.path, entry.bytes, self.staging, again=again,
                    stop=self.stop, advance=self.progress.advance, tell=self.progress.note,
                )  # fmt: skip
            except TooLong:
                why = f"more than its {entry.bytes} bytes came"
            else:
                known = self.place.stamp(f"{STAGING}/{entry.path}")
                why = "it is gone" if known is None else what_is_wrong(found, self.manifest, entry)
                if known is not None and why is None:
                    return known
                self.progress.advance(-found.stat().st_size)
            forget(self.staging, entry.path)
            if not again:
                self.progress.note(f"{entry.path} arrived wrong ({why}) and is fetched once more")
        raise DataError(
            f"arrived wrong twice: {why}", where=f"{self.remote.name}: {entry.path}",
            hint="it was not kept. Try later or from another network; if it stays, report it to the publisher, whose "
            "good copy proves what the Hub has: hybrid-pack verify --remote ... --against COPY",
        )  # fmt: skip

    def done(self, ranks: tuple[int, ...]) -> Pulled:
        """The summary."""
        return Pulled(
            commit=self.remote.commit,
            manifest=self.manifest,
            ranks=ranks,
            files_fetched=len(self._fetched),
            bytes_fetched=sum(entry.bytes for entry in self._fetched),
            files_kept=len(self._kept),
            bytes_kept=sum(entry.bytes for entry in self._kept),
            replaced=tuple(sorted(self._replaced)),
        )
