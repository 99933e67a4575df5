"""Files of the output: which are whole, which were left by a killed run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hybrid_pack.convert.journal import Journal, Record
from hybrid_pack.errors import UsageError
from hybrid_pack.io.output import PARTIAL, fsync_folder


def looks_done(out: Path, records: Mapping[str, Record], path: str) -> bool:
    """Whether a file is whole, or would be once it had its name; nothing is changed.

    Raises:
        UsageError: A symbolic link is where a folder should be.
    """
    final = out / path
    refuse_links(out, final.parent)
    if path not in records:
        return False
    nbytes = records[path]["bytes"]
    return is_whole(final, nbytes) or (not final.exists() and is_whole(_partial(final), nbytes))


def is_done(out: Path, journal: Journal, path: str) -> bool:
    """Whether a file is whole. One that was recorded but not yet renamed gets its name now.

    Raises:
        UsageError: A symbolic link is where a folder should be.
    """
    final = out / path
    refuse_links(out, final.parent)
    record = journal.records.get(path)
    if record is None:
        return False
    partial = _partial(final)
    if not final.exists() and is_whole(partial, record["bytes"]):
        partial.replace(final)
        fsync_folder(final.parent)
    if is_whole(final, record["bytes"]):
        return True
    journal.forget(path)
    return False


def is_whole(path: Path, nbytes: int) -> bool:
    """Whether it is a file of that size and no link."""
    return path.is_file() and not path.is_symlink() and path.stat().st_size == nbytes


def refuse_links(out: Path, folder: Path) -> None:
    """Refuse a folder of the output that is reached through a symbolic link.

    Raises:
        UsageError: It is.
    """
    for part in (folder, *folder.parents):
        if part == out:
            return
        if part.is_symlink():
            raise UsageError(
                "in the way of the output", where=part, expected="a folder", found="a symbolic link", hint="remove it"
            )


def _partial(final: Path) -> Path:
    return final.with_name(final.name + PARTIAL)


def left_over(out: Path, paths: Iterable[str]) -> Iterator[Path]:
    """What a killed run left of files that are not done."""
    for path in paths:
        for left in (_partial(out / path), out / path):
            if left.is_symlink() or left.is_file():
                yield left


def disk_bytes(paths: Iterable[Path]) -> int:
    """What their removal would give back."""
    states = [path.lstat() for path in paths]
    return sum(512 * s.st_blocks for s in states if s.st_nlink == 1)


def remove_unfinished(out: Path, paths: Iterable[str]) -> None:
    """Give back the space of what a killed run left of files that are not done."""
    for left in left_over(out, paths):
        left.unlink(missing_ok=True)


def remove_empty(folders: Iterable[Path]) -> None:
    """Remove those that are there and empty, deepest first."""
    for folder in sorted(folders, key=lambda f: len(f.parts), reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()
