"""The output folder: who may write there, what of it is done, what is in the way."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hybrid_pack.convert.journal import STATE, Journal
from hybrid_pack.errors import DataError, UsageError
from hybrid_pack.io.config import CONFIG
from hybrid_pack.io.digest import blake3_digest
from hybrid_pack.io.manifest import BASE_INDEX, MANIFEST, README, read_manifest
from hybrid_pack.io.output import PARTIAL, fsync_folder
from hybrid_pack.plan import Plan
from hybrid_pack.schemas.manifest import Manifest

_OURS = re.compile(
    r"experts/tp\d+-ep\d+/rank-\d+/layer-\d+\.safetensors|model-\d{5}-of-\d{5}\.safetensors"
    rf"|{re.escape(MANIFEST)}|{re.escape(BASE_INDEX)}|config\.json"
)


def _inside(path: Path, folder: Path) -> bool:
    return path == folder or folder in path.parents


def refuse_overlap(out: Path, plan: Plan) -> None:
    """Never write into the source.

    Raises:
        UsageError: The output lies in the source, or the source in the output, links followed.
    """
    target = out.resolve()
    homes = {plan.source.root.resolve()} | {f.path.resolve().parent for f in plan.source.shards.files}
    for home in homes:
        if _inside(target, home) or _inside(home, target):
            raise UsageError(
                "the output would lie in the source or around it", where=out, found=home, hint="choose another --out"
            )


def _entries(out: Path) -> list[str]:
    """What counts as content: everything but a model card and dot files such as ``.gitattributes``."""
    return sorted(p.name for p in out.iterdir() if p.name != README and not p.name.startswith("."))


def matches_manifest(manifest: Manifest, fingerprint: dict[str, Any], plan: Plan) -> str | None:
    """The first respect in which a finished pack is of another source or other options, or None."""
    theirs = {
        "format_version": manifest.format_version,
        "abi": manifest.layout.abi,
        "tensor_parallel": manifest.topology.tensor_parallel,
        "expert_parallel": manifest.topology.expert_parallel,
        "layers": [int(layer) for layer in manifest.layers],
        "source_config": manifest.source.config_digest,
        "source_index": manifest.source.index_digest,
    }
    for key, value in theirs.items():
        if value != fingerprint[key]:
            return f"{key} is {value}, now {fingerprint[key]}"
    files = [(f.path, f.bytes, f.digest) for f in manifest.source.files]
    if files != [(plan.source.file_name(f), f.nbytes, f.digest) for f in plan.source.shards.files]:
        return "the source's safetensors files have changed"
    config = next(f.digest for f in manifest.files if f.path == CONFIG)
    if config != blake3_digest(plan.written[CONFIG]):
        return "the bit map has changed"
    if manifest.report.experts_requantized and fingerprint["on_scale_mismatch"] == "refuse":
        return "on_scale_mismatch is requantize, now refuse"
    return None


def _incomplete(out: Path, manifest: Manifest) -> str | None:
    """A file that a finished pack has lost, by its size alone, or None."""
    sizes = {s.path: s.bytes for s in manifest.shards}
    sizes |= {f.path: f.bytes for f in (*manifest.base.files, *manifest.files)}
    return next((path for path, nbytes in sizes.items() if not _is_whole(out / path, nbytes)), None)


def existing_pack(
    out: Path, plan: Plan, fingerprint: dict[str, Any], *, resume: bool, overwrite: bool
) -> Manifest | None:
    """The finished pack of the same source and options that is already there, if the call may go on with it.

    Raises:
        UsageError: Something else is there.
    """
    if not out.is_dir():
        if out.exists() or out.is_symlink():
            raise UsageError("in the way of the output", where=out, expected="a folder or nothing")
        return None
    present = _entries(out)
    if not present or overwrite:
        foreign = present and MANIFEST not in present and STATE not in present
        if foreign:
            raise UsageError(
                "not a pack, so --overwrite will not touch it",
                where=out,
                found=f"{present[0]} among {len(present)} entries",
            )
        return None
    if MANIFEST not in present and STATE not in present:
        raise UsageError(
            "the output folder is not empty and no pack",
            where=out,
            found=f"{present[0]} among {len(present)} entries",
            hint="choose another --out",
        )
    if not resume:
        what = "a finished pack" if MANIFEST in present else "an unfinished conversion"
        raise UsageError(
            f"{what} is already there", where=out, hint="go on with --resume, or start over with --overwrite"
        )
    if MANIFEST not in present:
        return None
    try:
        manifest = read_manifest(out)
    except DataError as error:
        raise UsageError(
            f"the pack there cannot be resumed: {error}", where=out, hint="start over with --overwrite"
        ) from error
    difference = matches_manifest(manifest, fingerprint, plan)
    if difference is not None:
        raise UsageError(
            f"a pack of another source or other options is there: {difference}",
            where=out,
            hint="choose another --out, or --overwrite",
        )
    lost = _incomplete(out, manifest)
    if lost is not None:
        raise UsageError(
            "the pack there is damaged: a file is missing or of another size",
            where=out / lost,
            hint="start over with --overwrite",
        )
    return manifest


def clear(out: Path, plan: Plan, journal: Journal, *, force: bool = False) -> None:
    """Remove what a conversion wrote there, manifest first, and nothing else.

    Args:
        out: The pack.
        plan: What is going to be written there; small files that it will replace are not in the way.
        journal: Told what is going to be removed, so that an interrupted removal is taken up again.
        force: Leave files that no conversion wrote where they are, instead of refusing.

    Raises:
        UsageError: A file that no conversion wrote is among it; nothing was removed.
    """
    ours = {*(journal.clearing or ()), *journal.records, *plan.copied, *plan.written}
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
    if foreign and not force:
        raise UsageError(
            "files no conversion wrote are in the way", where=out, found=", ".join(foreign[:3]), hint="move them away"
        )
    journal.clear(ours)
    (out / MANIFEST).unlink(missing_ok=True)
    fsync_folder(out)
    for path in found:
        path.unlink(missing_ok=True)
    for folder in sorted(folders, reverse=True):
        with contextlib.suppress(OSError):
            folder.rmdir()


def begin(
    out: Path, plan: Plan, journal: Journal, fingerprint: dict[str, Any], *, resume: bool, overwrite: bool
) -> None:
    """Start a journal, or take up one of the same source and options.

    Raises:
        UsageError: The journal is of another source or other options.
    """
    if overwrite or journal.clearing is not None:
        clear(out, plan, journal)
    if overwrite or journal.fingerprint is None:
        journal.begin(fingerprint)
        return
    if not resume:
        raise UsageError(
            "an unfinished conversion is already there",
            where=out,
            hint="go on with --resume, or start over with --overwrite",
        )
    for key in fingerprint:
        theirs = journal.fingerprint.get(key)
        if theirs != fingerprint[key]:
            raise UsageError(
                f"the unfinished conversion there is of another source or other options: {key}",
                where=out,
                expected=fingerprint[key],
                found=theirs,
                hint="give the same options and source, or start over with --overwrite",
            )


def is_done(out: Path, journal: Journal, path: str) -> bool:
    """Whether a file is whole. One that was recorded but not yet renamed gets its name now.

    Raises:
        UsageError: A symbolic link is where a folder should be.
    """
    final = out / path
    _refuse_links(out, final.parent)
    record = journal.records.get(path)
    if record is None:
        return False
    partial = final.with_name(final.name + PARTIAL)
    if not final.exists() and _is_whole(partial, record["bytes"]):
        partial.replace(final)
        fsync_folder(final.parent)
    if _is_whole(final, record["bytes"]):
        return True
    journal.forget(path)
    return False


def _is_whole(path: Path, nbytes: int) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size == nbytes


def _refuse_links(out: Path, folder: Path) -> None:
    for part in (folder, *folder.parents):
        if part == out:
            return
        if part.is_symlink():
            raise UsageError(
                "in the way of the output", where=part, expected="a folder", found="a symbolic link", hint="remove it"
            )


def remove_unfinished(out: Path, paths: Iterable[str]) -> None:
    """Give back the space of what a killed run left of files that are not done."""
    for path in paths:
        final = out / path
        for left in (final.with_name(final.name + PARTIAL), final):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                left.unlink()
