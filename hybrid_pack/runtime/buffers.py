"""How a load uses host memory, and buffers that outlast one load."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import TracebackType

import torch

from hybrid_pack.errors import UsageError
from hybrid_pack.io.safetensors import ALIGNMENT
from hybrid_pack.runtime.stream.device import Device
from hybrid_pack.runtime.stream.ring import Ring

HOST_MEMORY_BYTES = 256 << 20
"""Most host memory for buffers, unless told otherwise."""

CHUNK_BYTES = 8 << 20
"""Most bytes of one read and one copy: enough that starting one costs nothing, few enough that the first is soon."""

LEAST_CHUNK_BYTES = 256 << 10
"""Fewer readers are used rather than smaller chunks."""

MAX_READERS = 12
"""More did not read faster from the page cache of a machine with 16 cores (measured)."""


@dataclass(frozen=True)
class Sizes:
    """What a host memory limit amounts to.

    Attributes:
        host_memory_bytes: Of all buffers together.
        chunk_bytes: Size of a buffer, a multiple of 4096.
        readers: Threads.
    """

    host_memory_bytes: int
    chunk_bytes: int
    readers: int


def choose_sizes(
    host_memory_bytes: int = HOST_MEMORY_BYTES, readers: int | None = None, chunk_bytes: int | None = None
) -> Sizes:
    """Buffer size and number of readers.

    Args:
        host_memory_bytes: Limit, at least 1 MiB.
        readers: Threads wanted; by default one a usable core, at most 12.
        chunk_bytes: Buffer size wanted; by default 8 MiB.

    Raises:
        UsageError: A number below its least.
    """
    least = 2 * LEAST_CHUNK_BYTES
    wanted = (
        ("host_memory_bytes", host_memory_bytes, least),
        ("readers", readers, 1),
        ("chunk_bytes", chunk_bytes, ALIGNMENT),
    )
    for name, value, lowest in wanted:
        if value is not None and (type(value) is not int or value < lowest):
            raise UsageError(f"{name} must be a whole number of at least {lowest}", found=repr(value))
    count = min(MAX_READERS, len(os.sched_getaffinity(0))) if readers is None else readers
    count = min(count, host_memory_bytes // least)
    chunk = min(CHUNK_BYTES if chunk_bytes is None else chunk_bytes, host_memory_bytes // (2 * count))
    chunk = chunk // ALIGNMENT * ALIGNMENT
    # One to fill while the other is copied from. With more, fewer of them are in a cache when they are filled again.
    return Sizes(2 * count * chunk, chunk, count)


class LoadBuffers:
    """Pinned host memory for several loads one after the other, such as a call of ``load_layer`` for each layer.

    Without it every load maps, pins and gives back its own. Use it in a ``with`` statement, or close it::

        with LoadBuffers("cuda") as buffers:
            for number in pack.layers:
                layer = pack.load_layer(number, rank, "cuda", buffers=buffers)

    Args:
        device: CUDA device of the loads.
        host_memory_bytes: Most host memory to use.
        readers: Threads; by default one a usable core, at most 12.
        chunk_bytes: Most bytes of one read; by default 8 MiB.

    Attributes:
        device: The device, with its index.
        sizes: What the limit amounts to.

    Raises:
        UsageError: Not a CUDA device, or a number below its least.
        EnvironmentFailure: The device is not available, or the memory cannot be had.
    """

    def __init__(
        self,
        device: str | torch.device = "cuda",
        host_memory_bytes: int = HOST_MEMORY_BYTES,
        readers: int | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        from hybrid_pack.runtime.load import open_device, target_of

        self.sizes = choose_sizes(host_memory_bytes, readers, chunk_bytes)
        target = target_of(device)
        if target.type != "cuda":
            raise UsageError("buffers are for loads to a CUDA device", found=target)
        self._start(open_device(target))

    @classmethod
    def of(cls, device: Device, sizes: Sizes) -> LoadBuffers:
        """Buffers for a device that is open already."""
        buffers = cls.__new__(cls)
        buffers.sizes = sizes
        buffers._start(device)
        return buffers

    def _start(self, device: Device) -> None:
        self.ring = Ring(device, self.sizes.host_memory_bytes, self.sizes.chunk_bytes)
        self.device = device.device

    def close(self) -> None:
        """Unpin the memory and give it back. Done twice, it does nothing."""
        self.ring.close()

    def __enter__(self) -> LoadBuffers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
