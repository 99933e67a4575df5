"""Removing what an earlier conversion wrote, and nothing else."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from hybrid_pack.convert.files import remove_empty
from hybrid_pack.convert.journal import STATE, Journal, State
from hybrid_pack.errors import DataError, UsageError
from hybrid_pack.io.manifest import BASE_INDEX, MANIFEST, README, read_manifest
from hybrid_pack.io.output import PARTIAL, fsync_folder
from hybrid_pack.plan import Plan

_OURS = re.compile(
    r"experts/tp\d+-ep\d+/rank-\d+/layer-\d+\.safetensors|model-\d{5}-of-\d{5}\.safetensors"
    rf"|{re.escape(MANIFEST)}|{re.escape(BASE_INDEX)}|config\.json|{re.escape(README)}"
)


@dataclass(frozen=True)
class Removal:
    """What is going to be removed.

    Attributes:
        names: Everything a conversion wrote or will write there, present or not.
        files: Those present.
        folders: Of these files.
        foreign: Names of files that no conversion wrote.
    """

    names: frozenset[str]
    files: tuple[Path, ...]
    folders: frozenset[Path]
    foreign: tuple[str, ...]


def removal(out: Path, plan: Plan, state: State) -> Removal:
    """Look at what is there.

    Args:
        out: The pack.
        plan: What is going to be written there; small files that it will replace are not in the way.
        state: What the journal says was written.
    """
    ours = {*(state.clearing or ()), *state.records, *plan.copied, *plan.written}
    if (out / MANIFEST).is_file():
        with contextlib.suppress(DataError):
            ours |= set(read_manifest(out).paths())
    found: list[Path] = []
    folders = {out / "experts"}
    foreign = []
    for path in sorted(out.rglob("*"), reverse=True):
        name = path.relative_to(out).as_posix()
        stem = name.removesuffix(PARTIAL)
        if path.is_dir() and not path.is_symlink():
            if name.startswith("experts/"):
                folders.add(path)
        elif name in (STATE, README) or name.startswith("."):
            continue
        elif stem in ours or _OURS.fullmatch(stem):
            found.append(path)
            folders.update(out / parent for parent in path.relative_to(out).parents[:-1])
        else:
            foreign.append(name)
    return Removal(frozenset(ours), tuple(found), frozenset(folders), tuple(foreign))


def require_ours(out: Path, found: Removal) -> None:
    """Refuse to remove anything beside files of others.

    Raises:
        UsageError: A file that no conversion wrote is among it.
    """
    if found.foreign:
        names = ", ".join(found.foreign[:3])
        raise UsageError("files no conversion wrote are in the way", where=out, found=names, hint="move them away")


def clear(out: Path, found: Removal, journal: Journal) -> None:
    """Remove it, manifest first; the journal is told before, so that an interrupted removal is taken up again."""
    journal.clear(found.names)
    (out / MANIFEST).unlink(missing_ok=True)
    fsync_folder(out)
    for path in found.files:
        path.unlink(missing_ok=True)
    remove_empty(found.folders)
