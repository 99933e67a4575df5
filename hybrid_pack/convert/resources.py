"""What a conversion needs: threads, memory, disk."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from dataclasses import dataclass
from pathlib import Path

from hybrid_pack.convert.base import CHUNK_BYTES
from hybrid_pack.convert.encode import CHUNK_ROWS
from hybrid_pack.convert.gptq import HELD
from hybrid_pack.errors import EnvironmentFailure, UsageError
from hybrid_pack.plan import Plan

PROCESS_BYTES = 180 << 20
"""Python, numpy and numba, with room; measured 170 MiB."""

HEADER_BYTES = 13_000
"""The headers and the plan of one expert, measured."""

HESSIAN_BYTES = 36
"""For each pair of channels: as read, in float64, its factor, and what factoring needs."""

HELD_BYTES = 16
"""For each pair of channels of a Hessian that is kept: itself and its factor, in float64."""

TORCH_BYTES = 400 << 20
"""What importing torch and its first products take."""

MAX_WORKERS = 1024


@dataclass(frozen=True)
class Resources:
    """An estimate for a plan.

    Attributes:
        workers: Threads that read, pack, hash and write, one expert each.
        memory_bytes: Peak resident memory, estimated.
        disk_bytes: Size of the finished pack.
        free_bytes: Free where the output goes.
    """

    workers: int
    memory_bytes: int
    disk_bytes: int
    free_bytes: int


def _worker_bytes(plan: Plan) -> int:
    """One worker's buffers: an expert as stored and its packed rows for one rank; or a piece of a base file.

    Where experts are quantised also the expert in its new form; by GPTQ a matrix as float32 and a factored Hessian.
    """
    packed = max(
        sum(t.row_bytes for t in shard.tensors if t.tier == tier) for shard in plan.shards for tier in ("kept", "tail")
    )
    made = 0
    if plan.quantizes:
        hidden, inner = plan.source.hidden, plan.intermediate
        made = 2 * hidden * inner + CHUNK_ROWS * 4 * max(hidden, inner)  # three matrices of at most 4.5 bits a weight
        if plan.quantization.hessians is not None:
            made += 4 * hidden * inner + HESSIAN_BYTES * max(hidden, inner) ** 2
        elif plan.quantization.device != "cpu":
            made += 4 * hidden * inner
    return max(plan.expert_bytes + packed + made, CHUNK_BYTES)


def _process_bytes(plan: Plan) -> int:
    """What does not depend on the workers: the program, and the headers of every expert."""
    experts = sum(len(layer.experts) for layer in plan.source.layers.values())
    process = PROCESS_BYTES + experts * HEADER_BYTES
    if plan.quantization.hessians is not None:
        process += TORCH_BYTES + HELD * HELD_BYTES * max(plan.source.hidden, plan.intermediate) ** 2
    elif plan.quantization.device != "cpu":
        process += TORCH_BYTES
    return process


def raise_open_files() -> None:
    """Allow as many open files as the system lets us: a rank's file each, and those of the source."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that is there."""
    while not path.exists():
        path = path.parent
    return path


def free_bytes(out: Path) -> int:
    """Free where the output goes."""
    return int(shutil.disk_usage(existing(out)).free)


def default_workers() -> int:
    """Two threads a usable core, so that one computes while another waits for the disk."""
    return 2 * len(os.sched_getaffinity(0))


def resources(plan: Plan, out: Path, workers: int | None = None, max_ram: int | None = None) -> Resources:
    """Estimate, and fit the number of workers into a memory limit.

    Args:
        plan: What will be written.
        out: Where.
        workers: Threads; by default two a core, or one where the tail is quantised by GPTQ.
        max_ram: Limit in bytes on resident memory.

    Raises:
        UsageError: Not even one worker fits the limit.
    """
    wanted = default_workers() if workers is None else workers
    if workers is None and plan.quantization.hessians is not None:
        # Memory decides: a worker has a Hessian's worth of its own, and on two cores gains nothing. Two matrices of
        # 1024x2048 took 3.8 s of CPU with one worker, 2.2 of them in its own thread and the rest in torch's; with two
        # workers of one thread each 4.0. Many cores may want more: that is for the user.
        wanted = 1
    if not 1 <= wanted <= MAX_WORKERS:
        raise UsageError("not a number of workers", where="--workers", expected=f"1 to {MAX_WORKERS}", found=workers)
    each, process = _worker_bytes(plan), _process_bytes(plan)
    if max_ram is not None:
        fitting = (max_ram - process) // each
        if fitting < 1:
            raise UsageError(
                "not even one worker fits",
                where="--max-ram",
                expected=f"{-(-(process + each) // 2**20)} MiB or more",
                found=f"{max_ram / 2**20:.0f} MiB",
            )
        wanted = min(wanted, fitting)
    return Resources(wanted, process + wanted * each, plan.nbytes, free_bytes(out))


@dataclass(frozen=True)
class Space:
    """Room on the disk of the output.

    Attributes:
        needed: Bytes that will be written.
        reclaimed: Bytes there now that will be removed first.
        free: Bytes free.
    """

    needed: int
    reclaimed: int
    free: int

    @property
    def enough(self) -> bool:
        """Whether the conversion fits."""
        return self.needed <= self.free + self.reclaimed


def require_disk(space: Space, out: Path, *, kept: bool) -> None:
    """Refuse a conversion the disk cannot hold, before it starts.

    Args:
        space: Needed and free.
        out: Where.
        kept: Whether files of an earlier run are kept.

    Raises:
        EnvironmentFailure: Too little is free.
    """
    if not space.enough:
        more = f" and {space.reclaimed:,} to be removed first" if space.reclaimed else ""
        raise EnvironmentFailure(
            "not enough disk space",
            where=out,
            expected=f"{space.needed:,} bytes",
            found=f"{space.free:,} free{more}",
            hint="free some, or choose another --out" + ("; finished files are kept for --resume" if kept else ""),
        )
