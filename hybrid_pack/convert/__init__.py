"""Carries out a plan: reads every stored expert once, packs it for all ranks, writes, hashes and records as it goes."""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hybrid_pack.convert.base import copy_base
from hybrid_pack.convert.expert import ExpertPacker
from hybrid_pack.convert.finish import write_manifest
from hybrid_pack.convert.journal import STATE, Journal
from hybrid_pack.convert.layer import LayerJob
from hybrid_pack.convert.resources import Resources, require_disk, resources
from hybrid_pack.convert.scales import OnScaleMismatch, check_pair, check_second
from hybrid_pack.convert.target import begin, clear, existing_pack, is_done, refuse_overlap, remove_unfinished
from hybrid_pack.convert.unchanged import require_same_headers, source_times
from hybrid_pack.convert.warmup import compile_kernels
from hybrid_pack.errors import DataError, EnvironmentFailure, HybridPackError, UsageError
from hybrid_pack.io.checkpoint import Layer
from hybrid_pack.io.config import CONFIG
from hybrid_pack.io.digest import blake3_digest
from hybrid_pack.io.manifest import MANIFEST
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.plan import Plan
from hybrid_pack.schemas.manifest import Manifest

__all__ = ["Conversion", "OnScaleMismatch", "Progress", "Resources", "convert", "resources"]

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class Progress(Protocol):
    """Told how a conversion goes on; called from several threads."""

    def start(self, total_bytes: int, done_bytes: int) -> None:
        """Source bytes in all, and those whose files were finished before."""

    def advance(self, nbytes: int) -> None:
        """Source bytes read and done since the last call."""

    def note(self, text: str) -> None:
        """Something worth a line."""


class Silent:
    """Progress that nobody sees."""

    def start(self, total_bytes: int, done_bytes: int) -> None:
        """Nothing."""

    def advance(self, nbytes: int) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        manifest: Of the finished pack.
        files_written: Shards and base files written by this run.
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


Task = Callable[[ExpertPacker], int]


def _second_scales(
    layer: Layer, wanted: list[int], reader: TensorReader, on_mismatch: OnScaleMismatch
) -> Mapping[int, list[float]]:
    """Second-level scales of gate, up and down of each expert, checked before any expert is packed."""
    seconds: dict[int, list[float]] = {}
    value = np.empty(4, np.uint8)
    for expert in wanted:
        matrices = layer.experts[expert]
        where = f"layer {layer.index} expert {expert}"
        seconds[expert] = [1.0, 1.0, 1.0]
        for i, matrix in enumerate(matrices.matrices):
            if matrix.second is not None:
                reader.read(matrix.second, value)
                seconds[expert][i] = float(value.view("<f4")[0])
                check_second(matrix, seconds[expert][i], where)
        check_pair(matrices, seconds[expert][0], seconds[expert][1], where, on_mismatch)
    return seconds


def _jobs(
    out: Path, plan: Plan, journal: Journal, reader: TensorReader, on_mismatch: OnScaleMismatch
) -> list[LayerJob]:
    jobs = []
    for index in plan.layers:
        shards = [s for s in plan.shards if s.layer == index and not is_done(out, journal, s.path)]
        if shards:
            layer = plan.source.layers[index]
            wanted = sorted({e for s in shards for e in (*s.kept, *s.tail)})
            jobs.append(LayerJob(out, plan, layer, shards, _second_scales(layer, wanted, reader, on_mismatch)))
    return jobs


def _layer_bytes(plan: Plan, index: int, experts: list[int]) -> int:
    return sum(
        at.header.nbytes
        for e in experts
        for m in plan.source.layers[index].experts[e].matrices
        for at in (m.codes, m.scales)
    )


def _sizes(plan: Plan) -> dict[str, int]:
    """Bytes of every shard and base file."""
    return {s.path: s.nbytes for s in plan.shards} | {b.path: b.nbytes for b in plan.base}


class _Run:
    """The worker threads of one conversion, and the first thing that went wrong in them."""

    def __init__(self, plan: Plan, workers: int) -> None:
        self.plan = plan
        self.workers = workers
        self.stopped = threading.Event()
        self._lock = threading.Lock()

    def all(self, tasks: Iterator[Task]) -> int:
        """Carry out tasks in order of their start; the first failure stops the others.

        Returns:
            Source bytes read.
        """

        def work() -> int:
            packer = ExpertPacker(self.plan.geometry, self.plan.topology.tensor_parallel)
            total = 0
            try:
                while not self.stopped.is_set():
                    with self._lock:
                        task = next(tasks, None)
                    if task is None:
                        break
                    total += task(packer)
            except BaseException:
                self.stopped.set()
                raise
            return total

        with ThreadPoolExecutor(self.workers, "hybrid-pack") as pool:
            futures = [pool.submit(work) for _ in range(self.workers)]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
            except BaseException:
                self.stopped.set()
                raise
        failures = [f.exception() for f in futures if f.exception() is not None]
        if failures:
            raise failures[0]  # type: ignore[misc]
        return sum(f.result() for f in futures)


def _fill(
    out: Path, plan: Plan, journal: Journal, workers: int, on_mismatch: OnScaleMismatch, progress: Progress
) -> int:
    """Write every shard and base file that is not done.

    Returns:
        Source bytes read.
    """
    with TensorReader() as reader:
        base = [b for b in plan.base if not is_done(out, journal, b.path)]
        jobs = _jobs(out, plan, journal, reader, on_mismatch)
        todo = sum(_layer_bytes(plan, job.layer.index, job.experts) for job in jobs)
        todo += sum(t.header.nbytes for b in base for t in b.tensors)
        sizes = _sizes(plan)
        missing = [path for path in sizes if path not in journal.records]
        remove_unfinished(out, missing)
        require_disk(sum(sizes[path] for path in missing), out)
        progress.start(plan.source_bytes, plan.source_bytes - todo)
        run = _Run(plan, workers)

        def base_task(number: int) -> Task:
            def task(_: ExpertPacker) -> int:
                copy_base(out, base[number], reader, journal, progress.advance, run.stopped.is_set)
                return sum(t.header.nbytes for t in base[number].tensors)

            return task

        def expert_task(job: LayerJob, at: int) -> Task:
            def task(packer: ExpertPacker) -> int:
                if at + workers < len(job.experts):
                    for matrix in job.layer.experts[job.experts[at + workers]].matrices:
                        reader.prefetch(matrix.codes)
                        reader.prefetch(matrix.scales)
                nbytes = job.pack(job.experts[at], packer, reader, journal)
                progress.advance(nbytes)
                return nbytes

            return task

        tasks = itertools.chain(
            (base_task(i) for i in range(len(base))),
            (expert_task(job, at) for job in jobs for at in range(len(job.experts))),
        )
        try:
            return run.all(tasks)
        finally:
            for job in jobs:
                job.discard()


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
) -> Conversion:
    """Write the pack a plan describes.

    The same source and options give the same bytes, whatever the number of workers and however often it was resumed.

    Args:
        plan: From ``make_plan``.
        out: Folder of the pack; must be new, empty, or hold what ``resume`` or ``overwrite`` may go on with.
        workers: Threads; by default two a core.
        max_ram: Limit in bytes on resident memory; fewer workers are used to keep it.
        resume: Go on with an unfinished conversion of the same source and options; finished files are not redone.
        overwrite: Remove the pack or unfinished conversion that is there first.
        on_scale_mismatch: What to do where gate and up have second-level scales that are no power of two apart.
        progress: Told how it goes on.

    Raises:
        DataError: The source holds something a pack cannot hold exactly.
        UsageError: The output is in the way, or in use.
        EnvironmentFailure: Disk full, no permission and the like; finished files are kept for ``resume``.
    """
    began = time.monotonic()
    report = progress or Silent()
    out = out.absolute()
    files = len(plan.shards) + len(plan.base)
    try:
        fingerprint = _fingerprint(plan, on_scale_mismatch)
        require_same_headers(plan)
        refuse_overlap(out, plan)
        finished = existing_pack(out, plan, fingerprint, resume=resume, overwrite=overwrite)
        threads = resources(plan, out, workers, max_ram).workers
        out.mkdir(parents=True, exist_ok=True)
        if finished is not None and not (out / STATE).exists():
            return Conversion(finished, 0, files, 0, time.monotonic() - began, threads)
        journal = Journal(out)
        try:
            if finished is not None:
                journal.remove()
                return Conversion(finished, 0, files, 0, time.monotonic() - began, threads)
            if (out / MANIFEST).exists() and not overwrite:  # looked for before, but not yet under the lock
                raise UsageError("another conversion has just finished here", where=out, hint="choose another --out")
            begin(out, plan, journal, fingerprint, resume=resume, overwrite=overwrite)
            for line in compile_kernels():
                report.note(line)
            kept = sum(is_done(out, journal, path) for path in _sizes(plan))
            read = _fill(out, plan, journal, threads, on_scale_mismatch, report)
            if source_times(plan) != fingerprint["source_times"]:
                clear(out, plan, journal, force=True)  # nothing written from a moving source may be taken up again
                raise DataError(
                    "the source changed while it was read: what was written is removed",
                    where=plan.source.root,
                    hint="run again with --resume once nothing writes to it",
                )
            manifest = write_manifest(out, plan, journal)
            journal.remove()
        finally:
            if not journal.begun:  # refused before anything was begun: leave no trace
                journal.remove()
            journal.close()
    except OSError as error:
        raise _environment(error, out, plan) from error
    return Conversion(manifest, files - kept, kept, read, time.monotonic() - began, threads)


def _fingerprint(plan: Plan, on_scale_mismatch: OnScaleMismatch) -> dict[str, Any]:
    """What must be equal for an unfinished conversion to be taken up again."""
    shared = plan.fingerprint()
    shared["bit_map"] = blake3_digest(f"{shared['bit_map']} {blake3_digest(plan.written[CONFIG])}".encode())
    return {**shared, "on_scale_mismatch": on_scale_mismatch, "source_times": source_times(plan)}


def _environment(error: OSError, out: Path, plan: Plan) -> HybridPackError:
    """A system error as a message that says what was kept."""
    names = list(_sizes(plan))
    done = sum((out / name).is_file() for name in names)
    full = error.errno in DISK_FULL
    what, remedy = ("the disk is full", "make room") if full else ("the system failed", "put that right")
    return EnvironmentFailure(
        what,
        where=error.filename or out,
        found=error.strerror or error,
        hint=f"{done} of {len(names)} files are finished and kept: {remedy} and run again with --resume",
    )
