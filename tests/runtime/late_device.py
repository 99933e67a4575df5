"""A device that copies late, one copy after the other, and is strict about everything a GPU would suffer silently."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hybrid_pack.errors import EnvironmentFailure


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._passed = threading.Event()
        self._passed.set()

    def record(self) -> None:
        self._device.step("record")
        assert self._passed.is_set(), "recorded again before it was passed"
        passed = self._passed = threading.Event()
        self._device.work.put(passed.set)

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        assert self._passed.wait(30)


class LateDevice:
    """Counts what it is asked for.

    Attributes:
        live_bytes: Memory allocated and not given back.
        peak_bytes: Most of it.
        pinned: Bytes pinned at each address.
        most_pinned: Most bytes pinned at a time.
        calls: How often each thing was asked for.
        failing: By thing, at which of its calls it fails, counted from 1, and how.
        gate: Copies wait for it.
    """

    def __init__(self, limit: int | None = None, delay: float = 0.0) -> None:
        self.device = torch.device("cpu")
        self.limit, self.delay = limit, delay
        self.live_bytes = self.peak_bytes = self.most_pinned = 0
        self.pinned: dict[int, int] = {}
        self.calls: dict[str, int] = {}
        self.failing: dict[str, tuple[int, BaseException]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.flying: dict[int, int] = {}
        self._lock = threading.Lock()
        self._entered = threading.local()
        self._worker = threading.Thread(target=self._copy_all, daemon=True)
        self._worker.start()

    def _copy_all(self) -> None:
        while (action := self.work.get()) is not None:
            assert self.gate.wait(30)
            if self.delay:
                time.sleep(self.delay)
            action()

    def stop(self) -> None:
        self.work.put(None)
        self._worker.join()

    def step(self, name: str) -> None:
        with self._lock:
            self.calls[name] = count = self.calls.get(name, 0) + 1
        at, error = self.failing.get(name, (0, None))
        if error is not None and count == at:
            raise error

    def free_bytes(self) -> int | None:
        return None if self.limit is None else self.limit - self.live_bytes

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.step("allocate")
        if self.limit is not None and self.live_bytes + nbytes > self.limit:
            raise EnvironmentFailure("out of late memory")
        tensor = torch.full((nbytes,), 0xA5, dtype=torch.uint8)
        self._grow(nbytes)
        weakref.finalize(tensor.untyped_storage(), self._grow, -nbytes)
        return tensor

    def _grow(self, nbytes: int) -> None:
        with self._lock:
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def enter(self) -> None:
        self.step("enter")
        self._entered.yes = True

    def pin(self, host: torch.Tensor) -> None:
        self.step("pin")
        with self._lock:
            assert host.data_ptr() not in self.pinned, "pinned twice"
            assert host.data_ptr() % 4096 == 0 and host.nbytes % 4096 == 0
            self.pinned[host.data_ptr()] = host.nbytes
            self.most_pinned = max(self.most_pinned, sum(self.pinned.values()))

    def unpin(self, host: torch.Tensor) -> None:
        self.step("unpin")
        with self._lock:
            assert not self.flying.get(host.data_ptr()), "unpinned under a copy"
            del self.pinned[host.data_ptr()]

    def event(self) -> LateEvent:
        self.step("event")
        return LateEvent(self)

    def copy(self, host: torch.Tensor, begin: int, target: torch.Tensor, to: int, nbytes: int) -> None:
        self.step("copy")
        host, target = host[begin : begin + nbytes], target[to : to + nbytes]
        assert getattr(self._entered, "yes", False), "copied by a thread that had not entered"
        first = host.data_ptr()
        assert host.shape == target.shape and host.nbytes
        with self._lock:
            base = next(at for at, size in self.pinned.items() if at <= first and first + host.nbytes <= at + size)
            self.flying[base] = self.flying.get(base, 0) + 1
        target_ref, kept = weakref.ref(target.untyped_storage()), [host, target]

        def act() -> None:
            assert target_ref() is not None
            kept[1].copy_(kept[0])
            kept.clear()
            with self._lock:
                self.flying[base] -= 1

        self.work.put(act)

    def synchronize(self) -> None:
        self.step("synchronize")
        done = threading.Event()
        self.work.put(done.set)
        assert done.wait(30)


@contextmanager
def late_device(**arguments: Any) -> Iterator[LateDevice]:
    device = LateDevice(**arguments)
    try:
        yield device
    finally:
        device.gate.set()
        device.stop()
