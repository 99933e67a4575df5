"""One load: readers take tasks, read, hash and start copies, while the next shard's memory is already allocated."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol

import torch

from hybrid_pack.errors import EnvironmentFailure
from hybrid_pack.runtime.stream.digests import Countdown, ShardDigests
from hybrid_pack.runtime.stream.files import ShardFile
from hybrid_pack.runtime.stream.plan import Layout, Task, page_floor
from hybrid_pack.runtime.stream.ring import Buffer, Ring

PROGRESS_SECONDS = 0.1
"""How often progress is told."""

ABORT_SECONDS = 0.001
"""How often a load that failed looks whether its readers have ended."""


class Progress(Protocol):
    """Told how a load goes on, by the thread that called."""

    def start(self, total_bytes: int, done_bytes: int) -> None:
        """Bytes in all; none are done before."""

    def advance(self, nbytes: int) -> None:
        """Bytes read, and on their way to the device, since the last call."""


@dataclass(frozen=True, eq=False)
class Source:
    """A shard to load.

    Attributes:
        file: Open and checked; stays open.
        layout: Where its bytes go.
        tasks: All of its bytes; whole rows where there are digests.
        digests: To be checked, or None.
    """

    file: ShardFile
    layout: Layout
    tasks: Sequence[Task]
    digests: ShardDigests | None
    left: Countdown = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "left", Countdown(len(self.tasks)))


Job = tuple[Source, torch.Tensor, Task]


class Session:
    """Carries shards to a device.

    A failure, or an interrupt, anywhere stops the others after the chunk they are at; then all memory is given back,
    also what a kept exception would still refer to.

    Args:
        ring: Buffers, borrowed for this session.
        readers: Threads; at most as many as the ring has buffers.
    """

    def __init__(self, ring: Ring, readers: int) -> None:
        assert 0 < readers <= ring.buffers
        self._ring, self._device = ring, ring.device
        self._readers = readers
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._ended: SimpleQueue[None] = SimpleQueue()  # since Thread.join, once interrupted, takes a thread for ended
        self._done = [0] * readers
        self._errors: list[BaseException] = []
        self._memory: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._stopped = False
        self._working = 0

    def run(self, sources: Sequence[Source], progress: Progress | None = None) -> list[torch.Tensor]:
        """Load all of them.

        Args:
            sources: The shards, in the order they are wanted.
            progress: Told how it goes on.

        Returns:
            Device memory of each, u8 [layout.nbytes], complete.

        Raises:
            DataError: A file is not what its manifest says.
            EnvironmentFailure: The system or the device failed.
        """
        self._ring.borrow()
        try:
            self._feed(sources)
            self._wait(sum(move.end - move.begin for s in sources for move in s.layout.moves), progress)
            if self._errors:
                raise self._errors.pop(0)
            self._device.synchronize()
            memory, self._memory = self._memory, []
            return memory
        except BaseException as error:
            self._abort()
            forget_frames(error)
            raise
        finally:
            self._ring.give_back()

    def _feed(self, sources: Sequence[Source]) -> None:
        """Start the readers and hand out tasks, each as soon as there is memory for it."""
        try:
            for number in range(self._readers):
                name = f"hybrid-pack-load-{number}"
                threading.Thread(target=self._read, args=(number,), name=name, daemon=True).start()
        except RuntimeError as error:
            raise EnvironmentFailure("cannot start a thread", found=error, hint="use fewer readers") from None
        for source in sources:
            if self._stopped:
                break
            self._memory.append(self._device.allocate(source.layout.nbytes))
            for task in source.tasks:
                self._jobs.put((source, self._memory[-1], task))
        self._dismiss()

    def _dismiss(self) -> None:
        for _ in range(self._readers):
            self._jobs.put(None)

    def _wait(self, total_bytes: int, progress: Progress | None) -> None:
        """Until all readers have ended."""
        told = ended = 0
        if progress is not None:
            progress.start(total_bytes, 0)
        while ended < self._readers:
            try:
                self._ended.get(timeout=None if progress is None else PROGRESS_SECONDS)
                ended += 1
            except Empty:
                pass
            done = sum(self._done)
            if progress is not None and done > told:
                progress.advance(done - told)
                told = done

    def _abort(self) -> None:
        """Stop, and give device memory back once nothing reads into buffers or copies from them any more."""
        self._stop()
        while self._working:
            with contextlib.suppress(KeyboardInterrupt):  # one is enough; memory in use cannot be given back
                time.sleep(ABORT_SECONDS)
        with contextlib.suppress(Exception):  # the failure that counts is another one
            self._device.synchronize()
        self._memory.clear()
        while not self._jobs.empty():
            self._jobs.get()
        self._errors.clear()

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
        self._dismiss()

    def _read(self, number: int) -> None:
        """A reader."""
        with self._lock:
            if self._stopped:  # before it came up: nobody waits for it any more
                return
            self._working += 1
        try:
            self._work(number)
        except BaseException as error:
            self._errors.append(error)
            self._stop()
        with self._lock:
            self._working -= 1
        self._ended.put(None)

    def _work(self, number: int) -> None:
        self._device.enter()
        while (job := self._jobs.get()) is not None and not self._stopped:
            source, memory, task = job
            self._carry(source, memory, task, number)
            if source.left.is_last() and source.digests is not None and not self._stopped:
                source.digests.check()

    def _carry(self, source: Source, memory: torch.Tensor, task: Task, number: int) -> None:
        """Read a task's chunks, hash them, and start their copies."""
        walker = None if source.digests is None else source.digests.walk(task[0][0])
        for begin, end in task:
            if self._stopped:
                return
            buffer = self._ring.take()
            base = page_floor(begin)
            source.file.read(buffer.view, base, end)
            if walker is not None:
                walker.feed(buffer.view[begin - base : end - base])
            self._copy(source, memory, buffer, begin, end)
            self._done[number] += end - begin

    def _copy(self, source: Source, memory: torch.Tensor, buffer: Buffer, begin: int, end: int) -> None:
        base = page_floor(begin)
        self._ring.pin(buffer)
        for move in source.layout.moves_of(begin, end):
            self._device.copy(buffer.tensor, move.begin - base, memory, move.to, move.end - move.begin)
        self._ring.fly(buffer)


def forget_frames(error: BaseException | None) -> None:
    """Drop the local variables that an exception's tracebacks keep, and with them memory; the lines stay."""
    seen: set[int] = set()
    errors = [error]
    while errors:
        one = errors.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            errors += [one.__cause__, one.__context__]
