"""Threads for downloads, which an interrupt does not wait for: one that is stuck in a read ends with the process."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

PATIENCE = 2.0
"""Seconds that threads get to end after a failure or interrupt; the network's own limits are longer by far."""


class Crew:
    """Like a ``ThreadPoolExecutor`` whose threads are daemons; leaving it after an error waits ``PATIENCE`` at most.

    Args:
        count: Threads at most.
        name: Theirs.
    """

    def __init__(self, count: int, name: str = "hybrid-pack-fetch") -> None:
        self._count, self._name = count, name
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._futures: list[Future[Any]] = []

    def submit(self, call: Callable[..., R], *arguments: Any) -> Future[R]:
        """Have a call carried out."""
        future: Future[R] = Future()

        def carry_out() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(*arguments))
            except BaseException as error:
                future.set_exception(error)

        self._futures = [f for f in self._futures if not f.done()] + [future]
        self._work.put(carry_out)
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._serve, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def _serve(self) -> None:
        while (carry_out := self._work.get()) is not None:
            carry_out()

    def each(self, call: Callable[[T], object], items: Iterable[T]) -> None:
        """Carry out a call for each of some items; the first failure ends it."""
        futures = [self.submit(call, item) for item in items]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future.done():
                future.result()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end(None if kind is None else PATIENCE)

    def end(self, patience: float | None) -> bool:
        """Begin nothing more, and wait for what is at work: so many seconds together, or for ever.

        Returns:
            Whether every thread has ended.
        """
        if patience is not None:
            for future in self._futures:
                future.cancel()
        for _ in self._threads:
            self._work.put(None)
        until = None if patience is None else time.monotonic() + patience
        for thread in self._threads:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))
        ended = not any(thread.is_alive() for thread in self._threads)
        self._threads = []
        return ended
