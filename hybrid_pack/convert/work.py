"""The work of a conversion: experts and base files, carried out by threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from hybrid_pack.convert.base import copy_base
from hybrid_pack.convert.encode import Encoder
from hybrid_pack.convert.expert import ExpertPacker
from hybrid_pack.convert.gptq import HessianCache
from hybrid_pack.convert.journal import Journal
from hybrid_pack.convert.layer import LayerJob
from hybrid_pack.convert.scales import OnScaleMismatch
from hybrid_pack.convert.seconds import second_scales, second_tensors, wanted_experts
from hybrid_pack.io.progress import Progress
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.supply import Group, Supply
from hybrid_pack.plan import BasePlan, Plan


@dataclass(frozen=True)
class Worker:
    """What each thread has for itself."""

    encoder: Encoder
    packer: ExpertPacker


Task = Callable[[Worker], int]


def layer_jobs(
    out: Path, plan: Plan, done: Collection[str], reader: TensorReader, on_mismatch: OnScaleMismatch, supply: Supply
) -> list[LayerJob]:
    """The layers with files that are not done, their second-level scales checked."""
    wanted = wanted_experts(plan, done)
    supply.fetch(second_tensors(plan, wanted))
    seconds = second_scales(plan, wanted, reader, on_mismatch)
    jobs = []
    for index in wanted:
        shards = [s for s in plan.shards if s.layer == index and s.path not in done]
        jobs.append(LayerJob(out, plan, plan.source.layers[index], shards, seconds[index], on_mismatch))
    return jobs


def _files(job: LayerJob) -> frozenset[Path]:
    """Files of the source that hold a layer's experts."""
    return frozenset(at.path for e in job.experts for at in job.layer.experts[e].tensors)


def _layer_bytes(plan: Plan, index: int, experts: list[int]) -> int:
    return sum(plan.source.layers[index].experts[e].nbytes for e in experts)


class Run:
    """The worker threads of one conversion, and the first thing that went wrong in them."""

    def __init__(self, plan: Plan, workers: int) -> None:
        self.plan = plan
        self.workers = workers
        given = plan.quantization.hessians
        self._hessians = None if given is None else HessianCache(given, plan.quantization.device)
        self.stopped = threading.Event()
        self._lock = threading.Lock()

    def worker(self) -> Worker:
        """What a new thread has for itself."""
        plan = self.plan
        packer = ExpertPacker(plan.geometry, plan.topology.tensor_parallel, plan.source.intermediate)
        return Worker(Encoder(plan, self._hessians), packer)

    def all(self, tasks: Iterator[Task]) -> int:
        """Carry out tasks in order of their start; the first failure stops the others.

        Returns:
            Source bytes read.
        """

        def work() -> int:
            worker = self.worker()
            total = 0
            try:
                while not self.stopped.is_set():
                    with self._lock:
                        task = next(tasks, None)
                    if task is None:
                        break
                    total += task(worker)
            except BaseException:
                self.stopped.set()
                raise
            return total

        with ThreadPoolExecutor(self.workers, "hybrid-pack") as pool:
            try:  # an interrupt may come while threads are still being started
                futures = [pool.submit(work) for _ in range(self.workers)]
                wait(futures, return_when=FIRST_EXCEPTION)
            except BaseException:
                self.stopped.set()
                raise
        failures = [f.exception() for f in futures if f.exception() is not None]
        if failures:
            raise failures[0]  # type: ignore[misc]
        return sum(f.result() for f in futures)


def fill(
    out: Path,
    plan: Plan,
    journal: Journal,
    workers: int,
    base: list[BasePlan],
    jobs: list[LayerJob],
    reader: TensorReader,
    progress: Progress,
    supply: Supply,
) -> int:
    """Write shards and base files.

    Returns:
        Source bytes read.
    """
    todo = sum(_layer_bytes(plan, job.layer.index, job.experts) for job in jobs)
    todo += sum(t.header.nbytes for b in base for t in b.tensors)
    progress.start(plan.source_bytes, plan.source_bytes - todo)
    run = Run(plan, workers)

    def base_task(number: int) -> Task:
        def task(_: Worker) -> int:
            copy_base(out, base[number], reader, journal, progress.advance, run.stopped.is_set)
            return sum(t.header.nbytes for t in base[number].tensors)

        return task

    def expert_task(job: LayerJob, at: int) -> Task:
        def task(worker: Worker) -> int:
            if at + workers < len(job.experts):
                for tensor in job.layer.experts[job.experts[at + workers]].tensors:
                    reader.prefetch(tensor)
            nbytes = job.pack(job.experts[at], worker.encoder, worker.packer, reader, journal)
            progress.advance(nbytes)
            return nbytes

        return task

    groups = [Group(frozenset(t.path for t in base[i].tensors), [base_task(i)]) for i in range(len(base))]
    groups += [Group(_files(job), [expert_task(job, at) for at in range(len(job.experts))]) for job in jobs]
    try:
        return run.all(supply.schedule(groups, run.stopped))
    finally:
        for job in jobs:
            job.discard()
