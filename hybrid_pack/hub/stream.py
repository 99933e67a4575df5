"""A checkpoint of the Hub while it is converted: each shard is fetched when it is needed and dropped after use.

The folder has every shard as a stand-in, a sparse file of its true size with nothing but the header. A shard that is
needed arrives beside it, is held against the SHA-256 the Hub has for it and against what was read of the stand-in, and
takes its place; when nothing needs it any more it becomes a stand-in again. ``.whole/<name>`` says that a shard is
whole, so that a killed conversion goes on with what it had, once its hash was seen again. One process at a time holds a
lock on the folder, from before it touches anything in it until the conversion is over.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import BinaryIO

from hybrid_pack.errors import DataError, EnvironmentFailure, UsageError, system_failure
from hybrid_pack.hub.crew import PATIENCE, Crew
from hybrid_pack.hub.download import abort, download, forget
from hybrid_pack.hub.errors import Stopped, errors, retrying
from hybrid_pack.hub.fetch import copy_small_files, hub_files, write_stub
from hybrid_pack.hub.listing import Remote, list_files, open_remote
from hybrid_pack.io.output import fsync_folder, write_small
from hybrid_pack.io.progress import Progress, Silent
from hybrid_pack.io.remote import RemoteFile
from hybrid_pack.io.safetensors import read_header
from hybrid_pack.io.shards import Located
from hybrid_pack.io.supply import A, Group, Task
from hybrid_pack.plan import Plan

WHOLE = ".whole"
ARRIVING = ".arriving"
TOGETHER = 4
"""Shards fetched at a time."""

GAP_BYTES = 1 << 18
"""Small tensors so near each other are asked for together."""


def stream_checkpoint(
    repo_id: str, revision: str | None, folder: Path, *, progress: Progress | None = None
) -> HubSupply:
    """Prepare a folder of stand-ins for a checkpoint's shards; its small files are copied.

    Args:
        repo_id: ``org/name``.
        revision: Branch, tag or commit; by default the main branch.
        folder: New, or that of an earlier run: shards that are whole and still the Hub's are used again.
        progress: Told what is worth a line.

    Raises:
        UsageError: No such repository or revision; the folder is something else.
        DataError: A listing that cannot be.
        EnvironmentFailure: No network, no access, no room.
    """
    remote = open_remote(repo_id, revision)
    files = {p: f for p, f in list_files(remote).items() if p.endswith(".safetensors") and "/" not in p}
    lock = _Lock(folder)
    try:
        _require_ours(folder)
        with errors(remote.name, nor_folder=True):
            shutil.rmtree(folder / ARRIVING, ignore_errors=True)  # of a run that was killed
            for name in (WHOLE, ARRIVING):
                (folder / name).mkdir(exist_ok=True)
            retrying(lambda: copy_small_files(repo_id, remote.commit, folder))
            supply = HubSupply(remote, folder, files, progress or Silent(), lock)
            wanted = [name for name in files if not supply.is_still_whole(name)]
            with Crew(2 * TOGETHER) as crew:
                crew.each(supply.stub, wanted)
    except BaseException:
        lock.release()
        raise
    return supply


class _Lock:
    """The folder, made if need be and locked; let go with the process at the latest.

    Raises:
        UsageError: Another process has it, or it is no folder.
    """

    def __init__(self, folder: Path) -> None:
        self._fd = -1
        while True:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:  # the other one removed it just now
                continue
            except (FileExistsError, NotADirectoryError):
                raise _in_the_way(folder) from None
            except OSError as error:
                if folder.is_symlink():
                    raise _in_the_way(folder) from None
                raise system_failure(error, folder, problem="cannot make the folder") from error
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.release()
                raise UsageError("another conversion is writing here", where=folder, hint="wait for it") from None
            try:
                there = folder.lstat()
            except FileNotFoundError:
                there = None
            held = os.fstat(self._fd)
            if there is not None and (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino):
                return
            self.release()  # of a folder that is gone

    def release(self) -> None:
        """Let another process have it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    __del__ = release


def _in_the_way(path: Path) -> UsageError:
    return UsageError("in the way of the shards", where=path, hint="remove it, or choose another --out")


def _require_ours(folder: Path) -> None:
    """Empty, or of an earlier run, with nothing in it that leads elsewhere.

    Raises:
        UsageError: It is something else.
    """
    names = [entry.name for entry in os.scandir(folder)]
    if names and WHOLE not in names:
        raise _in_the_way(folder)
    for at, folders, files in os.walk(folder):
        for name in (*folders, *files):
            status = (Path(at) / name).lstat()
            plain = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
            if not plain and not stat.S_ISDIR(status.st_mode):
                raise UsageError("a link, or no regular file, is in the way", where=Path(at) / name, hint="remove it")
    if names and not (folder / WHOLE).is_dir():
        raise _in_the_way(folder)


class HubSupply:
    """Brings shards and drops them; made by ``stream_checkpoint``."""

    def __init__(
        self, remote: Remote, folder: Path, files: dict[str, RemoteFile], progress: Progress, lock: _Lock
    ) -> None:
        self.remote, self.folder, self.files, self.progress, self._held = remote, folder, files, progress, lock
        self._read: dict[str, list[tuple[int, int]]] = {}
        """Ranges of each stand-in that are filled and were, or may have been, read."""
        self._lock = threading.Lock()

    def _marker(self, name: str) -> Path:
        return self.folder / WHOLE / name

    def is_whole(self, name: str) -> bool:
        """Whether a shard is there to the last byte, as the Hub has it now."""
        try:
            mark = self._marker(name).read_text()
            return mark == self._identity(name) and (self.folder / name).stat().st_size == self.files[name].nbytes
        except OSError:
            return False

    def is_still_whole(self, name: str) -> bool:
        """The same of one that an earlier run left: its hash is seen again, for much may have happened since."""
        if not self.is_whole(name):
            return False
        self.progress.note(f"{name} is there from an earlier run; its hash is compared")
        _, expected, digest = self.files[name].digest_of(self.folder / name)
        if digest != expected:
            self.progress.note(f"{name} was damaged and is fetched again")
        return digest == expected

    def _identity(self, name: str) -> str:
        file = self.files[name]
        return file.sha256 or file.git_sha1 or ""

    def _open(self, name: str) -> BinaryIO:
        """A stand-in or shard of ours, to be changed in place."""
        return os.fdopen(os.open(self.folder / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+b")

    def _settle(self, name: str) -> None:
        """Give a file a time that says which file it is: ``--resume`` then takes it for the one it was, or not."""
        stamp = int(self._identity(name)[:14] or "0", 16)
        os.utime(self.folder / name, ns=(stamp, stamp))

    def stub(self, name: str) -> None:
        """Write a shard's stand-in: the header, and nothing else that takes room."""
        self._marker(name).unlink(missing_ok=True)
        write_stub(hub_files(), self.remote.repo_id, self.remote.commit, name, self.files[name].nbytes, self.folder)
        self._settle(name)

    def fetch(self, tensors: Iterable[Located]) -> None:
        """Fill in small tensors; those of one file that lie near each other by one request."""
        wanted: dict[str, list[tuple[int, int]]] = {}
        for at in tensors:
            wanted.setdefault(at.path.name, []).append((at.header.begin, at.header.end))
        with errors(self.remote.name), Crew(2 * TOGETHER) as crew:
            work = [(name, r) for name, found in wanted.items() if not self.is_whole(name) for r in _merged(found)]
            crew.each(lambda item: self._fill(*item), work)

    def _fill(self, name: str, span: tuple[int, int]) -> None:
        begin, end = span
        data = retrying(
            lambda: hub_files().cat_file(f"{self.remote.repo_id}@{self.remote.commit}/{name}", start=begin, end=end),
            tell=self.progress.note,
        )
        if len(data) != end - begin:
            raise DataError(
                "the Hub sends another number of bytes than were asked for", where=f"{self.remote.name}: {name}",
                expected=end - begin, found=len(data),
            )  # fmt: skip
        with self._lock, self._open(name) as file:
            file.seek(begin)
            file.write(data)
            self._read.setdefault(name, []).append(span)
        self._settle(name)

    def _bring(self, name: str, stop: threading.Event) -> None:
        """Put a whole shard in the place of its stand-in.

        Raises:
            DataError: It arrived wrong twice, or is not what was read of it before.
        """
        staging, file = self.folder / ARRIVING, self.files[name]
        for again in (False, True):
            found = download(
                self.remote.repo_id, self.remote.commit, name, file.nbytes, staging, again=again, stop=stop,
                tell=self.progress.note,
            )  # fmt: skip
            kind, expected, digest = file.digest_of(found)
            if digest == expected and found.stat().st_size == file.nbytes:
                break
            forget(staging, name)
            if again:
                raise DataError(
                    "arrived wrong twice", where=f"{self.remote.name}: {name}", expected=f"{kind} {expected}",
                    found=digest, hint="try later or from another network; --resume keeps what is finished",
                )  # fmt: skip
            self.progress.note(f"{name} arrived wrong and is fetched once more")
        self._require_same(name, found)
        if stop.is_set():  # nobody may be waiting any more
            raise Stopped
        with found.open("rb") as arrived:
            os.fsync(arrived.fileno())
        found.replace(self.folder / name)
        forget(staging, name)
        self._settle(name)
        fsync_folder(self.folder)
        write_small(self._marker(name), self._identity(name).encode())  # only now: nothing of it can get lost

    def _require_same(self, name: str, arrived: Path) -> None:
        """The header a plan was made from, and the small tensors that were read, are those of the whole file."""
        header = read_header(self.folder / name)
        with (self.folder / name).open("rb") as one, arrived.open("rb") as other:
            for begin, end in ((0, header.data_begin), *self._read.get(name, [])):
                one.seek(begin), other.seek(begin)
                if one.read(end - begin) != other.read(end - begin):
                    raise DataError(
                        "what was read of it before was wrong", where=f"{self.remote.name}: {name}",
                        found=f"other bytes at {begin}..{end}", hint="run again",
                    )  # fmt: skip

    def _drop(self, name: str) -> None:
        """Make a shard a stand-in again."""
        begin = read_header(self.folder / name).data_begin
        self._marker(name).unlink(missing_ok=True)
        with self._open(name) as file:
            file.truncate(begin)
            file.truncate(self.files[name].nbytes)
        self._settle(name)

    def most_bytes(self, groups: Sequence[Group[A]]) -> int:
        """Room that shards take at most, while one group is worked on, the one before ends and the next arrives."""
        return _most(_in_order(groups), lambda path: self.files[path.name].nbytes)

    def schedule(self, groups: Sequence[Group[A]], stopped: threading.Event) -> Iterator[Task[A]]:
        """Tasks in the order their files arrive; the next group's are fetched meanwhile."""
        ordered = _in_order(groups)
        there = sum(self.files[name].nbytes for name in self.files if self.is_whole(name))
        needed, free = self.most_bytes(groups) - there, shutil.disk_usage(self.folder).free
        if needed > free:
            raise EnvironmentFailure(
                "not enough disk space for the shards that are in use at one time", where=self.folder,
                expected=f"{needed:,} bytes", found=f"{free:,} free",
            )  # fmt: skip
        return self._tasks(ordered, stopped)

    def _tasks(self, groups: list[Group[A]], stopped: threading.Event) -> Iterator[Task[A]]:
        uses = Counter(path for group in groups for path in group.files)
        arriving: dict[Path, Future[None]] = {}
        for path in [self.folder / name for name in self.files]:
            if not uses[path] and self.is_whole(path.name):  # its layers were finished before the run was killed
                self._drop(path.name)
        with Crew(TOGETHER) as crew:

            def order(group: Group[A]) -> None:
                for path in sorted(group.files):
                    if path not in arriving and not self.is_whole(path.name):
                        arriving[path] = crew.submit(self._bring, path.name, stopped)

            try:
                for i, group in enumerate(groups):
                    order(group)
                    if i + 1 < len(groups):
                        order(groups[i + 1])
                    for path in group.files:
                        if path in arriving:
                            _await(arriving[path], stopped)
                    left = [len(group.tasks)]
                    for task in group.tasks:
                        if stopped.is_set():
                            return
                        yield partial(self._work, task, group, left, uses)
            except Stopped:  # something else went wrong, and says so
                return
            except BaseException:
                stopped.set()
                raise
            finally:
                if stopped.is_set():
                    abort()
                    crew.end(PATIENCE)

    def _work(self, task: Task[A], group: Group[A], left: list[int], uses: Counter[Path], given: A) -> int:
        """One task; the last of a group drops the files nobody needs any more."""
        nbytes = task(given)
        with self._lock:
            left[0] -= 1
            gone = []
            if not left[0]:
                uses.subtract(group.files)
                gone = [path.name for path in group.files if not uses[path]]
        for name in gone:
            self._drop(name)
        return nbytes

    def close(self) -> None:
        """Remove the folder: the conversion is done."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Leave the folder as it is to a later run."""
        self._held.release()

    @property
    def holds_work(self) -> bool:
        """Whether a later run has whole shards to go on with."""
        return any(self.is_whole(name) for name in self.files)


def _await(arriving: Future[None], stopped: threading.Event) -> None:
    """Wait for a shard.

    Raises:
        Stopped: The conversion ends early.
    """
    while not wait([arriving], timeout=0.1).done:
        if stopped.is_set():
            raise Stopped
    arriving.result()


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans joined where little lies between them."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if joined and begin - joined[-1][1] <= GAP_BYTES:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _in_order(groups: Sequence[Group[A]]) -> list[Group[A]]:
    """By the last file each needs: then every file is needed for a short while only."""
    return sorted(groups, key=lambda group: max((path.name for path in group.files), default=""))


def window_bytes(plan: Plan, done: Collection[str]) -> int:
    """Room that shards of the source will take at most beside the pack, from the plan alone.

    Args:
        plan: Of a source that is on the Hub; its files are stand-ins of their size.
        done: Files of the pack that are finished.
    """
    read = [frozenset(t.path for t in b.tensors) for b in plan.base if b.path not in done]
    for index in plan.layers:
        shards = [s for s in plan.shards if s.layer == index and s.path not in done]
        experts = {expert for s in shards for expert in (*s.kept, *s.tail)}
        read.append(frozenset(t.path for e in experts for t in plan.source.layers[index].experts[e].tensors))
    groups: list[Group[None]] = [Group(files, ()) for files in read if files]
    return _most(_in_order(groups), lambda path: path.stat().st_size)


def _most(groups: Sequence[Group[A]], size: Callable[[Path], int]) -> int:
    first = {path: i for i, group in reversed(list(enumerate(groups))) for path in group.files}
    last = {path: i for i, group in enumerate(groups) for path in group.files}
    # Fetched as soon as the group before its first begins; dropped when the one after its last has begun.
    return max((sum(size(p) for p in first if first[p] - 1 <= i <= last[p] + 1) for i in range(len(groups))), default=0)
