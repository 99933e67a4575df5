"""Verification: decoders only, nothing that packs. Returns a report, prints nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from hybrid_pack.errors import DataError, EnvironmentFailure, UsageError
from hybrid_pack.io.checkpoint import Checkpoint
from hybrid_pack.io.declared import declared
from hybrid_pack.io.manifest import MANIFEST, PULL_STAGING, README, STATE, read_manifest
from hybrid_pack.io.progress import Progress, Silent
from hybrid_pack.report.card import is_ours
from hybrid_pack.schemas.manifest import Manifest
from hybrid_pack.verify.base import check_base, check_config
from hybrid_pack.verify.digests import check_digests, payload_bytes
from hybrid_pack.verify.experts import check_experts, source_bytes
from hybrid_pack.verify.pool import Pool, worker_count
from hybrid_pack.verify.remote import verify_remote
from hybrid_pack.verify.report import Check, Finding, NotChecked, Recorder, VerifyReport
from hybrid_pack.verify.scope import Scope, make_scope
from hybrid_pack.verify.shards import check_shards
from hybrid_pack.verify.source import (
    check_base_bytes,
    check_identity,
    check_small_files,
    comparable_layers,
    open_source,
)
from hybrid_pack.verify.tree import Found, check_partial, check_tree, scan
from hybrid_pack.verify.warmup import compile_kernels

__all__ = ["Check", "Finding", "NotChecked", "Progress", "VerifyReport", "verify_pack", "verify_remote"]

RULES = "manifest"
PULLING = "not there: an interrupted pull, or one that is running: run the pull again, which keeps finished files"
UNFINISHED = "not there: an unfinished conversion, or one that is running: finish it with convert --resume"


def verify_pack(
    root: str | os.PathLike[str],
    *,
    source: Checkpoint | str | os.PathLike[str] | None = None,
    bit_map_file: str | os.PathLike[str] | None = None,
    quick: bool = False,
    rank: int | Iterable[int] | None = None,
    layers: Iterable[int] | None = None,
    experts_only: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a pack: manifest and its rules, files, headers, indexes, digests of every byte, and the source if given.

    Args:
        root: Folder of the pack.
        source: What it was made from, or its folder: every expert of every rank is decoded and compared.
        bit_map_file: The map given to the conversion, instead of the one the pack says it was made with.
        quick: Structure and identity only: no payload is read, of the pack or of the source. Manifest, config.json,
            index, headers, expert ids and global scales still are.
        rank: Only this rank's shards, or these ranks', and what all share; other ranks' shards may be missing.
        layers: Only these layers' shards, and what all layers share; other layers' shards may be missing.
        experts_only: Not the base tensors; their files may be missing.
        workers: Threads; by default one a usable core.
        progress: Told how it goes on.

    Returns:
        What was checked, what was not, what is wrong.

    Raises:
        UsageError: No such folder, rank or layer.
        EnvironmentFailure: The folder cannot be listed. A file of it that cannot be read is in the report's ``unread``.
    """
    root = Path(root)
    recorder, pool, watch = Recorder(root), Pool(worker_count(workers)), progress or Silent()
    if not root.is_dir():
        raise UsageError("no such folder", where=root, hint="give the folder of a pack")
    present = scan(root)
    if MANIFEST in present:
        check_partial(present, recorder)
    manifest = _manifest(root, present, recorder)
    if manifest is None:
        recorder.skip("everything else", "there is no valid manifest")
        return recorder.report(root)
    recorder.declared = declared(manifest.report)
    scope = make_scope(manifest, rank, layers, base=not experts_only)
    _say_what_is_left_out(root, manifest, scope, quick, source is not None, recorder)
    check_tree(root, manifest, present, scope, recorder)
    check_config(root, manifest, recorder)
    base = check_base(root, manifest, recorder) if scope.base else {}
    check_shards(root, manifest, scope, pool, recorder)

    opened, comparable = None, []
    if source is not None:
        given = None if bit_map_file is None else Path(bit_map_file)
        opened = (
            source if isinstance(source, Checkpoint) else open_source(root, manifest, Path(source), recorder, given)
        )
    if opened is not None:
        check_identity(manifest, opened, recorder)
        comparable = comparable_layers(manifest, opened, scope, recorder)
    elif source is not None:
        recorder.skip("everything against the source", "it could not be opened")
    total = 0 if quick else payload_bytes(manifest, scope)
    if opened is not None and not quick:
        total += (2 * sum(at.header.nbytes for at in opened.base) if scope.base else 0) + 2 * source_bytes(
            opened, comparable
        )
        for line in compile_kernels() if comparable else ():
            watch.note(line)
    if total:
        watch.start(total, 0)
    if not quick:
        check_digests(root, manifest, scope, pool, recorder, watch)
    if opened is not None:
        check_small_files(root, manifest, opened, recorder, quick=quick)
        if scope.base:
            check_base_bytes(manifest, opened, base, pool, recorder, watch, quick=quick)
    if opened is not None and not quick:
        check_experts(root, manifest, opened, comparable, scope, pool, recorder, watch)
    return recorder.report(root)


def _manifest(root: Path, present: Mapping[str, Found], recorder: Recorder) -> Manifest | None:
    """The manifest if it is valid, never through a link that leads out."""
    link = present.get(MANIFEST)
    if link is None and (root / PULL_STAGING).is_dir():
        recorder.find(RULES, MANIFEST, PULLING)
        return None
    if link is None and STATE in present:
        recorder.find(RULES, MANIFEST, UNFINISHED)
        return None
    with recorder.checking(RULES, "files") as tally:
        try:
            if link is not None and link.problem:
                raise DataError(link.problem, where=MANIFEST, found=link.detail)
            manifest = read_manifest(root)
        except (DataError, EnvironmentFailure) as error:
            recorder.find_error(RULES, MANIFEST, error)
            return None
        tally.add(1, (root / MANIFEST).stat().st_size)
        return manifest


def _say_what_is_left_out(
    root: Path, manifest: Manifest, scope: Scope, quick: bool, with_source: bool, recorder: Recorder
) -> None:
    if scope.ranks is not None:
        chosen = ", ".join(map(str, sorted(scope.ranks)))
        why = "only one rank was asked for" if len(scope.ranks) == 1 else "only these ranks were asked for"
        recorder.skip(f"shards of ranks other than {chosen}", why)
    if scope.layers is not None:
        chosen = ", ".join(map(str, sorted(scope.layers)))
        recorder.skip(f"shards of layers other than {chosen}", "only these layers were asked for")
    if not scope.base:
        recorder.skip("base tensors", "only the experts were asked for")
    if manifest.report.layers_omitted:
        omitted = ", ".join(map(str, manifest.report.layers_omitted))
        recorder.skip(f"experts of layers {omitted}", "the pack was made without them")
    if quick:
        what = ["payload digests", "scale bytes"]
        if with_source:
            what += [
                f"{kind} against the source" for kind in ("experts", "bytes of base tensors", "bytes of small files")
            ]
        for left in what:
            recorder.skip(left, "a quick verification was asked for")
    if not with_source:
        recorder.skip("whether the experts are the source's", "no source was given")
    ignored = sorted(path.name for path in root.iterdir() if _uncovered(path))
    if ignored:
        recorder.skip(", ".join(ignored), "no digest covers them: people and tools may edit them")


def _uncovered(path: Path) -> bool:
    """Whether no digest covers it: dot names, and a model card that is not as it was written."""
    if path.name != README:
        return path.name.startswith(".")
    try:
        return not (path.is_file() and is_ours(path.read_bytes()))
    except OSError:
        return True
