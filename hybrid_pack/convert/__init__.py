"""Carries out a plan: reads every stored expert once, packs it for all ranks, writes, hashes and records as it goes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_pack.convert.clearing import clear, removal
from hybrid_pack.convert.device import require_device
from hybrid_pack.convert.files import is_done, remove_empty, remove_unfinished
from hybrid_pack.convert.finish import write_manifest
from hybrid_pack.convert.journal import STATE, Journal
from hybrid_pack.convert.repair import begin_repair, end_repair, put_back
from hybrid_pack.convert.resources import Resources, raise_open_files, require_disk, resources
from hybrid_pack.convert.scales import OnScaleMismatch
from hybrid_pack.convert.seconds import second_scales, wanted_experts
from hybrid_pack.convert.survey import Survey, survey, weight_sizes
from hybrid_pack.convert.unchanged import require_same_headers, source_times
from hybrid_pack.convert.warmup import compile_kernels
from hybrid_pack.convert.work import fill, layer_jobs
from hybrid_pack.errors import DISK_FULL, DataError, EnvironmentFailure, HybridPackError
from hybrid_pack.io.config import CONFIG
from hybrid_pack.io.digest import blake3_digest
from hybrid_pack.io.progress import Progress, Silent
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.supply import Here, Supply
from hybrid_pack.plan import Plan
from hybrid_pack.schemas.manifest import Manifest

__all__ = [
    "Conversion", "OnScaleMismatch", "Progress", "Resources", "Survey", "check", "convert", "require_disk", "resources",
]  # fmt: skip


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        manifest: Of the finished pack.
        files_written: Files written by this run, the manifest among them, the model card aside.
        files_kept: Those an earlier run had finished.
        source_bytes: Source bytes read by this run.
        seconds: Its duration.
        workers: Threads used.
    """

    manifest: Manifest
    files_written: int
    files_kept: int
    source_bytes: int
    seconds: float
    workers: int


def convert(
    plan: Plan,
    out: Path,
    *,
    workers: int | None = None,
    max_ram: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_scale_mismatch: OnScaleMismatch = "refuse",
    progress: Progress | None = None,
    supply: Supply | None = None,
) -> Conversion:
    """Write the pack a plan describes.

    The same source and options give the same bytes, whatever the number of workers and however often it was resumed.

    Args:
        plan: From ``make_plan``.
        out: Folder of the pack; must be new, empty, or hold what ``resume`` or ``overwrite`` may go on with.
        workers: Threads; by default two a core, one with Hessians.
        max_ram: Limit in bytes on resident memory; fewer workers are used to keep it.
        resume: Go on with an unfinished conversion of the same source and options, finished files are not redone (but
            for layers whose importances or Hessians have changed); write what a finished pack of them has lost.
        overwrite: Remove the pack or unfinished conversion that is there first.
        on_scale_mismatch: What to do where gate and up have second-level scales that are no power of two apart.
        progress: Told how it goes on.
        supply: Brings the source's files as they are needed; by default they are all there.

    Raises:
        DataError: The source holds something a pack cannot hold exactly.
        UsageError: The output is in the way, or in use.
        EnvironmentFailure: Disk full, no permission and the like; finished files are kept for ``resume``.
    """
    began = time.monotonic()
    raise_open_files()
    out = out.absolute()
    try:
        fingerprint = _fingerprint(plan, on_scale_mismatch)
        require_device(plan.quantization.device)
        require_same_headers(plan)
        found = survey(out, plan, fingerprint, resume=resume, overwrite=overwrite)
        run = _Conversion(plan, out, fingerprint, on_scale_mismatch, progress or Silent(), supply or Here())
        run.workers = resources(plan, out, workers, max_ram).workers
        if found.manifest is not None and found.complete and not (out / STATE).exists():
            return run.nothing_to_do(found.manifest, began)
        with claimed(out) as journal:
            found = survey(out, plan, fingerprint, resume=resume, overwrite=overwrite, state=journal)
            if found.manifest is not None and found.complete:
                journal.remove()
                return run.nothing_to_do(found.manifest, began)
            return run.go(journal, found, began)
    except OSError as error:
        raise _environment(error, out, plan) from error


def check(
    plan: Plan,
    out: Path,
    *,
    workers: int | None = None,
    max_ram: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_scale_mismatch: OnScaleMismatch = "refuse",
    headers_only: bool = False,
) -> tuple[Resources, Survey]:
    """What ``convert`` would need and find; refuses what it would refuse, but for the disk and the source's payload.

    Of the payload second-level scales are read, since they refuse whole checkpoints; not of stand-ins, which have none.

    Args:
        plan: From ``make_plan``.
        out: Folder of the pack; nothing is written to it.
        workers: As for ``convert``, like all that follow.
        max_ram: Likewise.
        resume: Likewise.
        overwrite: Likewise.
        on_scale_mismatch: Likewise.
        headers_only: The source's files are stand-ins for those of the Hub, whose times say nothing.
    """
    out = out.absolute()
    try:
        fingerprint = _fingerprint(plan, on_scale_mismatch)
        require_device(plan.quantization.device)
        if headers_only:
            del fingerprint["source_times"]
        found = survey(out, plan, fingerprint, resume=resume, overwrite=overwrite)
        if not headers_only and not found.complete:
            with TensorReader() as reader:
                second_scales(plan, wanted_experts(plan, found.done), reader, on_scale_mismatch)
        return resources(plan, out, workers, max_ram), found
    except OSError as error:
        raise _environment(error, out, plan) from error


class _Conversion:
    """One call of ``convert``."""

    def __init__(
        self,
        plan: Plan,
        out: Path,
        fingerprint: dict[str, Any],
        on_mismatch: OnScaleMismatch,
        progress: Progress,
        supply: Supply,
    ) -> None:
        self.plan, self.out, self.fingerprint = plan, out, fingerprint
        self.on_mismatch, self.progress, self.supply = on_mismatch, progress, supply
        self.workers = 1

    def nothing_to_do(self, manifest: Manifest, began: float) -> Conversion:
        files = len(manifest.paths()) + 1
        return Conversion(manifest, 0, files, 0, time.monotonic() - began, self.workers)

    def go(self, journal: Journal, found: Survey, began: float) -> Conversion:
        """Check what is left to check, and write."""
        plan, out = self.plan, self.out
        with TensorReader() as reader:
            jobs = layer_jobs(out, plan, found.done, reader, self.on_mismatch, self.supply)
            reader.close()  # what a supply brings is another file of the same name
            require_disk(found.space, out, kept=bool(found.done))
            self._begin(journal, found)
            base = [b for b in plan.base if b.path not in found.done]
            try:
                read = fill(out, plan, journal, self.workers, base, jobs, reader, self.progress, self.supply)
            except BaseException:
                if journal.manifest is not None:
                    with contextlib.suppress(OSError):
                        put_back(out, journal)
                raise
        kept = len(found.done)
        if journal.manifest is None:
            self._require_unchanged(journal)
            manifest = write_manifest(out, plan, journal, self.progress)
            journal.remove()
        else:
            manifest, small = end_repair(out, plan, journal)
            kept += len(manifest.files) - small
        written = len(manifest.paths()) + 1 - kept
        return Conversion(manifest, written, kept, read, time.monotonic() - began, self.workers)

    def _begin(self, journal: Journal, found: Survey) -> None:
        """The first change to the folder."""
        if found.removal is not None:
            clear(self.out, found.removal, journal)
        if found.manifest is not None:
            begin_repair(self.out, journal, self.fingerprint)
        elif found.removal is not None or journal.fingerprint is None:
            journal.begin(self.fingerprint)
        elif journal.manifest is None and journal.fingerprint != self.fingerprint:
            for path in sorted(found.stale):
                journal.forget(path)
            journal.resume(self.fingerprint)
            if found.stale:
                self.progress.note(
                    "finished files that are written anew, since the importances or Hessians of their layers have "
                    f"changed: {len(found.stale)}"
                )
        missing = [path for path in weight_sizes(self.plan) if not is_done(self.out, journal, path)]
        remove_unfinished(self.out, missing)
        for line in compile_kernels(quantize=self.plan.quantizes):
            self.progress.note(line)

    def _require_unchanged(self, journal: Journal) -> None:
        """Nothing written from a moving source may be taken up again."""
        if source_times(self.plan) == self.fingerprint["source_times"]:
            return
        clear(self.out, removal(self.out, self.plan, journal), journal)
        journal.remove()
        raise DataError(
            "the source changed while it was read: what was written is removed",
            where=self.plan.source.root,
            hint="run again once nothing writes to it",
        )


@contextlib.contextmanager
def claimed(out: Path) -> Iterator[Journal]:
    """The locked journal of the output folder; both are gone again afterwards if no file was finished."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    out.mkdir(parents=True, exist_ok=True)
    try:
        journal = Journal(out)
        try:
            yield journal
        finally:
            if not journal.removed and not journal.holds_work:
                with contextlib.suppress(OSError):
                    journal.remove()
                experts = out / "experts"
                remove_empty((experts, *experts.rglob("*")))
            journal.close()
    finally:
        remove_empty(made)


def _fingerprint(plan: Plan, on_scale_mismatch: OnScaleMismatch) -> dict[str, Any]:
    """What must be equal for an unfinished conversion to be taken up again."""
    shared = plan.fingerprint()
    shared["bit_map"] = blake3_digest(f"{shared['bit_map']} {blake3_digest(plan.written[CONFIG])}".encode())
    return {**shared, "on_scale_mismatch": on_scale_mismatch, "source_times": source_times(plan)}


def _environment(error: OSError, out: Path, plan: Plan) -> HybridPackError:
    """A system error as a message that says what was kept."""
    names = list(weight_sizes(plan))
    done = sum(os.path.isfile(out / name) for name in names)  # noqa: PTH113  # never raises
    full = error.errno in DISK_FULL
    what, remedy = ("the disk is full", "make room") if full else ("the system failed", "put that right")
    kept = f"{done} of {len(names)} weight files finished and kept: " if done else ""
    return EnvironmentFailure(
        what,
        where=error.filename or out,
        found=error.strerror or error,
        hint=f"{kept}{remedy} and run again" + (" with --resume" if done else ""),
    )
