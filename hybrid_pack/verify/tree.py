"""The files of a pack folder, held against the manifest's list: both ways, sizes, links."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hybrid_pack.errors import EnvironmentFailure
from hybrid_pack.io.bitmap import spans
from hybrid_pack.io.manifest import MANIFEST, README
from hybrid_pack.schemas.manifest import Manifest
from hybrid_pack.verify.report import Recorder
from hybrid_pack.verify.scope import Scope

FILE_SET = "file set"
PARTIAL = ".partial"


@dataclass(frozen=True)
class Found:
    """A name in the folder.

    Attributes:
        problem: Why it cannot be read as a file of the pack, or None.
        nbytes: Its size; 0 where it has a problem.
        detail: What it is instead.
        unread: Why it, a file or a folder, cannot be looked at.
    """

    problem: str | None
    nbytes: int
    detail: str | None = None
    unread: str | None = None


def _allowed(root: Path) -> tuple[Path, ...]:
    """Folders that links may lead to: the pack, and the blobs of its own repository in the Hugging Face cache."""
    real = root.resolve()
    home = real.parent.parent
    hub = real.parent.name == "snapshots" and home.name.startswith("models--")
    return (real, home / "blobs") if hub else (real,)


def _look(path: Path, allowed: tuple[Path, ...]) -> Found:
    is_link = path.is_symlink()
    if is_link:
        target = Path(os.path.realpath(path))
        if not any(folder in target.parents for folder in allowed):
            return Found("a symbolic link that leads out of the pack", 0, os.fspath(path.readlink()))
    try:
        status = path.stat()
    except FileNotFoundError:
        return Found("a symbolic link to a file that is not there", 0, os.fspath(path.readlink()) if is_link else None)
    except OSError as error:
        if error.errno != errno.ELOOP:
            return Found(None, 0, unread=error.strerror)
        return Found("a symbolic link to itself", 0)
    if stat.S_ISREG(status.st_mode):
        return Found(None, status.st_size)
    return Found(
        "not a regular file", 0, "a link to a folder" if stat.S_ISDIR(status.st_mode) else stat.filemode(status.st_mode)
    )


def _walk(folder: Path, prefix: str, allowed: tuple[Path, ...]) -> Iterator[tuple[str, Found]]:
    try:
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        if not prefix:
            raise
        yield prefix, Found(None, 0, unread=error.strerror)
        return
    for entry in listed:
        name = prefix + entry.name
        partial = entry.name.endswith(PARTIAL)
        if not prefix and entry.name.startswith(".") and not partial:
            continue
        if entry.is_dir(follow_symlinks=False) and not partial:
            yield from _walk(Path(entry.path), f"{name}/", allowed)
        else:
            yield name, Found(None, 0) if partial else _look(Path(entry.path), allowed)


def scan(root: Path) -> Mapping[str, Found]:
    """Everything below a folder by its path in it, but top-level names that begin with a dot.

    A folder is in it, with a slash at its end, only where it cannot be listed.

    Raises:
        EnvironmentFailure: The folder itself cannot be listed.
    """
    try:
        return dict(_walk(root, "", _allowed(root)))
    except OSError as error:
        raise EnvironmentFailure("cannot read", where=error.filename or root, found=error.strerror) from error


def check_partial(present: Mapping[str, Found], recorder: Recorder) -> None:
    """Leftovers of a conversion that did not finish."""
    for name in present:
        if name.endswith(PARTIAL):
            message = "left by an unfinished conversion; finish it with convert --resume, or remove the file"
            recorder.find(FILE_SET, name, message)


def _all_outside(name: str, listed: Iterable[str], outside: Collection[str]) -> bool:
    """Whether a file, or all that should be in a folder, is left out on purpose."""
    held = [path for path in listed if path == name or (name.endswith("/") and path.startswith(name))]
    return bool(held) and all(path in outside for path in held)


def _absent_ranks(manifest: Manifest, present: Mapping[str, Found], scope: Scope) -> dict[str, int]:
    """Rank by path of the shards of ranks that are wholly absent, where others are there and none was asked for."""
    if scope.ranks is not None:
        return {}
    here = {shard.rank for shard in manifest.shards if shard.path in present}
    return {s.path: s.rank for s in manifest.shards if s.rank not in here and scope.covers(s)} if here else {}


def check_tree(root: Path, manifest: Manifest, present: Mapping[str, Found], scope: Scope, recorder: Recorder) -> None:
    """Hold the folder against the manifest.

    Args:
        root: The pack.
        manifest: The manifest.
        present: From ``scan``.
        scope: Files outside it may be missing.
        recorder: Gets the findings; files that cannot be read as listed are spoiled.
    """
    sizes = manifest.sizes()
    outside = {shard.path for shard in manifest.shards if not scope.covers(shard)}
    outside |= set() if scope.base else {file.path for file in manifest.base.files}
    unread = {
        name: found.unread
        for name, found in present.items()
        if found.unread is not None and not _all_outside(name, sizes, outside)
    }
    closed = tuple(name for name in unread if name.endswith("/"))
    absent = _absent_ranks(manifest, present, scope) if not unread else {}
    with recorder.checking(FILE_SET, "files") as tally:
        for path, nbytes in sizes.items():
            if path in outside or path in absent:
                continue
            found = present.get(path)
            tally.add(1)
            if path in unread or (found is None and path.startswith(closed)):
                pass
            elif found is None:
                recorder.find(FILE_SET, path, "missing; get it again, or convert again")
            elif found.problem:
                recorder.find(FILE_SET, path, found.problem, expected="a file", found=found.detail)
            elif found.nbytes != nbytes:
                message = "truncated" if found.nbytes < nbytes else "longer than it should be"
                recorder.find(
                    FILE_SET, path, f"{message}; get it again", expected=f"{nbytes} bytes", found=found.nbytes
                )
            else:
                continue
            recorder.spoil(path)
        if absent:
            here = {shard.rank for shard in manifest.shards} - set(absent.values())
            asked = " ".join(f"--rank {rank}" for rank in sorted(here))
            recorder.find(
                FILE_SET, next(iter(absent)), f"missing, as every file of rank {spans(sorted(set(absent.values())))} "
                f"is; if only some ranks were pulled, verify them alone: {asked}; else get the others too",
            )  # fmt: skip
            for path in absent:
                recorder.spoil(path)
        for name, reason in unread.items():
            where = root / name
            recorder.cannot_read(FILE_SET, name, EnvironmentFailure("cannot read", where=where, found=reason))
        for name, found in present.items():
            if found.unread is not None or name in sizes or name in (MANIFEST, README) or name.endswith(PARTIAL):
                continue
            tally.add(1)
            recorder.find(
                FILE_SET,
                name,
                f"not in the manifest{f': {found.problem}' if found.problem else ''}; remove it",
                found=found.detail,
            )
