"""A finished pack that has lost files: those are written anew, and its manifest proves that they are the same."""

from __future__ import annotations

from pathlib import Path

from hybrid_pack.convert.files import is_done, is_whole
from hybrid_pack.convert.journal import Journal, manifest_records
from hybrid_pack.errors import DataError, UsageError
from hybrid_pack.io.digest import blake3_digest
from hybrid_pack.io.manifest import MANIFEST, decode_manifest
from hybrid_pack.io.output import fsync_folder, make_folder, write_small
from hybrid_pack.plan import Plan
from hybrid_pack.schemas.manifest import Manifest


def lost_files(out: Path, manifest: Manifest) -> list[str]:
    """Files of a pack that are missing or of another size."""
    sizes = {s.path: s.bytes for s in manifest.shards}
    sizes |= {f.path: f.bytes for f in (*manifest.base.files, *manifest.files)}
    return [path for path, nbytes in sizes.items() if not is_whole(out / path, nbytes)]


def _content(plan: Plan, name: str) -> bytes | None:
    """Of a small file, or None where the source has none of that name."""
    if name in plan.written:
        return plan.written[name]
    return plan.copied[name].read_bytes() if name in plan.copied else None


def require_repairable(out: Path, plan: Plan, manifest: Manifest) -> None:
    """Whether the source has what the pack has lost, as far as that can be told before packing it.

    Raises:
        UsageError: It has not; nothing was changed.
    """
    lost = set(lost_files(out, manifest))
    if [(b.path, b.nbytes) for b in plan.base] != [(b.path, b.bytes) for b in manifest.base.files]:
        raise UsageError(
            "the pack there has other base files than would be written now", where=out, hint="use --overwrite"
        )
    for file in manifest.files:
        if file.path in lost:
            content = _content(plan, file.path)
            found = "no such file" if content is None else blake3_digest(content)
            if found != file.digest:
                raise UsageError(
                    "the pack has lost this file, and the source has no longer the one it was copied from",
                    where=out / file.path,
                    expected=file.digest,
                    found=found,
                    hint="put the file back into the source, or replace the pack with --overwrite",
                )


def begin_repair(out: Path, journal: Journal, fingerprint: dict[str, object]) -> None:
    """Make an unfinished conversion of a finished pack: the journal keeps its manifest, which goes."""
    journal.begin(fingerprint, (out / MANIFEST).read_text("utf-8"))
    (out / MANIFEST).unlink()
    fsync_folder(out)


def end_repair(out: Path, plan: Plan, journal: Journal) -> tuple[Manifest, int]:
    """Write the small files that are missing, hold all that was written against the manifest and put that back.

    Args:
        out: The pack.
        plan: Of the same source and options.
        journal: Has the manifest, and records of all weight files.

    Returns:
        The manifest, the number of small files written.

    Raises:
        DataError: A file is not what it was: the source has changed. Such files are removed again.
    """
    assert journal.manifest is not None
    manifest = decode_manifest(journal.manifest.encode("utf-8"), out / MANIFEST)
    require_repairable(out, plan, manifest)
    small = 0
    for file in manifest.files:
        if not is_whole(out / file.path, file.bytes):
            content = _content(plan, file.path)
            assert content is not None
            make_folder(out, (out / file.path).parent)
            write_small(out / file.path, content)
            small += 1
    wrong = put_back(out, journal)
    if wrong is not None:
        path, expected, found = wrong
        raise DataError(
            "the source is no longer what the pack there was made from: this file would differ",
            where=out / path,
            expected=expected,
            found=found,
            hint="bring the source back and use --resume, or replace the pack with --overwrite",
        )
    return manifest, small


def put_back(out: Path, journal: Journal) -> tuple[str, str, str] | None:
    """Put the manifest back and end the journal: what is still missing is for the next repair.

    Returns:
        A file that was written and is not what it was, if there is one, with its digest then and now. All such files
        are removed.
    """
    assert journal.manifest is not None
    wanted = manifest_records(journal.manifest)
    wrong = None
    for path, record in list(journal.records.items()):
        if is_done(out, journal, path) and record["digest"] != wanted[path]["digest"]:
            wrong = (path, wanted[path]["digest"], record["digest"])
            journal.forget(path)
            (out / path).unlink()
    write_small(out / MANIFEST, journal.manifest.encode("utf-8"))
    journal.remove()
    return wrong
