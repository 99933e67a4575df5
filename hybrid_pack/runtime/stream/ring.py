"""Host buffers that files are read into and that the device copies from; few, and used again and again."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import deque
from dataclasses import dataclass

import torch

from hybrid_pack.errors import EnvironmentFailure, UsageError
from hybrid_pack.io.safetensors import ALIGNMENT
from hybrid_pack.runtime.stream.device import Device, Event


@dataclass(eq=False)
class Buffer:
    """One of a ring's buffers.

    Attributes:
        view: Its bytes, from a page boundary on.
        tensor: The same, u8.
        event: Passed when the device has copied from it.
        pinned: Whether the device has it pinned.
    """

    view: memoryview
    tensor: torch.Tensor
    event: Event
    pinned: bool = False


class Ring:
    """Buffers of one size. A buffer is free, held by one reader, or flying: being copied from.

    They are made when first needed, and pinned after the first read into them: that read brings the pages in, many
    threads at once, while pinning takes a lock. The one used last is taken first, since it may still be in a cache.

    Args:
        device: Copies from them.
        nbytes: Most host memory to use.
        chunk_bytes: Size of one, a multiple of 4096; one at least is made.
    """

    def __init__(self, device: Device, nbytes: int, chunk_bytes: int) -> None:
        assert chunk_bytes % ALIGNMENT == 0 and 0 < chunk_bytes <= nbytes
        self.device = device
        self.chunk_bytes = chunk_bytes
        self.buffers = nbytes // chunk_bytes
        self._free: list[Buffer] = []
        self._flying: deque[Buffer] = deque()
        self._made: list[Buffer] = []
        self._lock = threading.Lock()
        self._busy = threading.Lock()
        try:  # private, since shared memory is seldom given large pages
            self._region: mmap.mmap | None = mmap.mmap(
                -1, self.buffers * chunk_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except OSError as error:
            problem = f"cannot map {self.buffers * chunk_bytes} bytes of host memory"
            raise EnvironmentFailure(problem, found=error.strerror, hint="lower host_memory_bytes") from error
        with contextlib.suppress(OSError):  # only advice
            self._region.madvise(mmap.MADV_HUGEPAGE)

    @property
    def used_bytes(self) -> int:
        """Host memory of the buffers made so far."""
        return len(self._made) * self.chunk_bytes

    def borrow(self) -> None:
        """Take the ring for one load.

        Raises:
            UsageError: Another load has it, or it is closed.
        """
        if self._region is None:
            raise UsageError("these load buffers are closed", where=self.device.device)
        if not self._busy.acquire(blocking=False):
            hint = "give each thread buffers of its own"
            raise UsageError("these load buffers are in use by another load", where=self.device.device, hint=hint)

    def give_back(self) -> None:
        """End of a load: no reader holds a buffer, and no copy is under way."""
        self._flying.clear()
        self._free = list(self._made)
        self._busy.release()

    def take(self) -> Buffer:
        """A buffer to read into; waits for the oldest copy if there is none.

        There must not be more readers than buffers, and none may take a second one before it has let the first fly.
        """
        with self._lock:
            while self._flying and self._flying[0].event.query():
                self._free.append(self._flying.popleft())
            if self._free:
                return self._free.pop()
            if len(self._made) < self.buffers:
                return self._make()
            oldest = self._flying.popleft()  # there is one: the other readers hold at most all buffers but one
        oldest.event.synchronize()
        return oldest

    def pin(self, buffer: Buffer) -> None:
        """Called after the first read into a buffer and before the first copy from it."""
        if not buffer.pinned:
            self.device.pin(buffer.tensor)
            buffer.pinned = True

    def fly(self, buffer: Buffer) -> None:
        """Let a buffer go; it is free again when the copies started so far are done."""
        buffer.event.record()
        with self._lock:
            self._flying.append(buffer)

    def close(self) -> None:
        """Give the memory back. No copy is under way. Done twice, it does nothing."""
        self._free = []
        self._flying.clear()
        while self._made:
            self._drop(self._made.pop())
        region, self._region = self._region, None
        if region is not None:
            with contextlib.suppress(BufferError):  # somebody still looks at it: the last one to do so unmaps it
                region.close()

    def __del__(self) -> None:
        if hasattr(self, "_region"):
            self.close()

    def _drop(self, buffer: Buffer) -> None:
        if buffer.pinned:
            buffer.pinned = False
            self.device.unpin(buffer.tensor)
        buffer.view.release()

    def _make(self) -> Buffer:
        assert self._region is not None
        first = len(self._made) * self.chunk_bytes
        tensor = torch.frombuffer(self._region, dtype=torch.uint8, count=self.chunk_bytes, offset=first)
        view = memoryview(self._region)[first : first + self.chunk_bytes]
        buffer = Buffer(view, tensor, self.device.event())
        self._made.append(buffer)
        return buffer
