"""Worker threads: the kernels, BLAKE3 and reads all let go of the GIL."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.errors import UsageError

Task = Callable[[], None]

MAX_WORKERS = 1024
"""More threads than any machine has use for."""


def worker_count(workers: int | None) -> int:
    """Threads to use; by default one a usable core.

    Raises:
        UsageError: Fewer than one, or more than ``MAX_WORKERS``.
    """
    if workers is not None and not 1 <= workers <= MAX_WORKERS:
        raise UsageError("not a number of workers", where="--workers", expected=f"1 to {MAX_WORKERS}", found=workers)
    return workers or len(os.sched_getaffinity(0))


class Pool:
    """Runs tasks on threads; the first failure, or an interrupt, stops the others.

    Args:
        workers: Number of threads.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.stopped = threading.Event()
        self._lock = threading.Lock()

    def run(self, tasks: Iterable[Task]) -> None:
        """Carry out tasks, started in order.

        Raises:
            Exception: The first that a task raised.
        """
        iterator = iter(tasks)

        def work() -> None:
            try:
                while not self.stopped.is_set():
                    with self._lock:
                        task = next(iterator, None)
                    if task is None:
                        return
                    task()
            except BaseException:
                self.stopped.set()
                raise

        with ThreadPoolExecutor(self.workers, "hybrid-pack-verify") as threads:
            try:  # an interrupt may come while threads are still being started
                futures = [threads.submit(work) for _ in range(self.workers)]
                wait(futures, return_when=FIRST_EXCEPTION)
            except BaseException:
                self.stopped.set()
                raise
        for future in futures:
            future.result()


class Buffers(threading.local):
    """Reused buffers of the current thread, by use."""

    def __init__(self) -> None:
        self._held: dict[str, NDArray[np.uint32]] = {}

    def take(self, use: str, nbytes: int) -> NDArray[np.uint8]:
        """u8 [nbytes], aligned to words; overwritten by the next call for the same use in this thread."""
        held = self._held.get(use)
        if held is None or held.nbytes < nbytes:
            held = self._held[use] = np.empty(-(-nbytes // 4), np.uint32)
        return held.view(np.uint8)[:nbytes]
