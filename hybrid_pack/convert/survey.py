"""Everything about an output folder that can be checked without writing to it."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_pack.convert.clearing import Removal, removal, require_ours
from hybrid_pack.convert.files import disk_bytes, left_over, looks_done
from hybrid_pack.convert.finish import rehearse_manifest
from hybrid_pack.convert.journal import State, manifest_records, peek
from hybrid_pack.convert.repair import lost_files, require_repairable
from hybrid_pack.convert.resources import Space, existing, free_bytes
from hybrid_pack.convert.target import changed_layers, check_state, existing_pack, refuse_overlap
from hybrid_pack.errors import UsageError
from hybrid_pack.io.manifest import MANIFEST, decode_manifest
from hybrid_pack.plan import Plan
from hybrid_pack.schemas.manifest import Manifest


@dataclass(frozen=True)
class Survey:
    """What is there, and what a conversion would do about it.

    Attributes:
        manifest: Of the finished pack of the same source and options; None where there is none.
        complete: That pack has all its files: there is nothing to do.
        done: Shards and base files that are kept.
        stale: Finished shards that are written anew, since their layers' importances or Hessians have changed.
        removal: What is removed first; None where nothing is cleared.
        space: On the disk.
    """

    manifest: Manifest | None
    complete: bool
    done: frozenset[str]
    stale: frozenset[str]
    removal: Removal | None
    space: Space


def weight_sizes(plan: Plan) -> dict[str, int]:
    """Bytes of every shard and base file."""
    return {s.path: s.nbytes for s in plan.shards} | {b.path: b.nbytes for b in plan.base}


def _require_writable(out: Path) -> None:
    """Raise what the system would say."""
    above = existing(out)
    if not above.is_dir():
        if above != out:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(out))
    elif not os.access(above, os.W_OK | os.X_OK):
        code = errno.EROFS if os.statvfs(above).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(code, os.strerror(code), str(out))


def survey(
    out: Path, plan: Plan, fingerprint: dict[str, Any], *, resume: bool, overwrite: bool, state: State | None = None
) -> Survey:
    """Look, and refuse what a conversion would have to refuse; nothing is written.

    Args:
        out: The output folder.
        plan: What is to be written.
        fingerprint: Of source and options.
        resume: As for ``convert``.
        overwrite: As for ``convert``.
        state: Its journal, if that is held already.

    Raises:
        UsageError: The output is in the way, or in use.
        OSError: It cannot be written to.
    """
    if resume and overwrite:
        raise UsageError("--resume goes on with what is there, --overwrite removes it: give one of them")
    refuse_overlap(out, plan)
    if state is None:
        rehearse_manifest(plan)
        state = peek(out)
    manifest = existing_pack(out, plan, fingerprint, begun=state.begun, resume=resume, overwrite=overwrite)
    sizes = weight_sizes(plan)
    if manifest is not None and not lost_files(out, manifest):
        return Survey(manifest, True, frozenset(sizes), frozenset(), None, Space(0, 0, free_bytes(out)))
    _require_writable(out)
    records = state.records
    if manifest is not None:
        require_repairable(out, plan, manifest)
        records = manifest_records((out / MANIFEST).read_text("utf-8"))
    else:
        check_state(out, state, fingerprint, resume=resume, overwrite=overwrite)
        if state.manifest is not None and not overwrite:
            require_repairable(out, plan, decode_manifest(state.manifest.encode("utf-8"), out / MANIFEST))
    found = None
    done: frozenset[str] = frozenset()
    stale: frozenset[str] = frozenset()
    if overwrite or state.clearing is not None:
        found = removal(out, plan, state)
        require_ours(out, found)
        leftover = list(found.files)
    else:
        if state.manifest is None:
            changed = changed_layers(state, fingerprint)
            stale = frozenset(s.path for s in plan.shards if s.layer in changed and s.path in records)
        done = frozenset(path for path in sizes if path not in stale and looks_done(out, records, path))
        leftover = list(left_over(out, (path for path in sizes if path not in done)))
    needed = plan.nbytes - sum(sizes[path] for path in done)
    return Survey(manifest, False, done, stale, found, Space(needed, disk_bytes(leftover), free_bytes(out)))
