"""What the loader needs of a device, and host memory as one."""

from __future__ import annotations

from typing import Protocol

import torch


class Event(Protocol):
    """A point in the order of a device's copies."""

    def record(self) -> None:
        """Be the point after every copy started so far."""

    def query(self) -> bool:
        """Whether that point is passed."""

    def synchronize(self) -> None:
        """Wait until it is."""


class Device(Protocol):
    """Where tensors go. All methods but ``allocate`` are called by many threads.

    Attributes:
        device: As torch names it.
    """

    device: torch.device

    def free_bytes(self) -> int | None:
        """Bytes that can be allocated, or None where nobody can tell."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """u8 [nbytes], at a multiple of 256, for copies by any thread from now on.

        Raises:
            EnvironmentFailure: There is not enough memory.
        """

    def enter(self) -> None:
        """Prepare the calling thread; comes before ``event``, ``copy`` and ``Event.record``."""

    def pin(self, host: torch.Tensor) -> None:
        """Lock a host buffer in memory so that the device can read it by itself.

        Raises:
            EnvironmentFailure: The system does not allow it.
        """

    def unpin(self, host: torch.Tensor) -> None:
        """Undo ``pin``. No copy from the buffer is under way."""

    def event(self) -> Event:
        """A new event."""

    def copy(self, host: torch.Tensor, begin: int, target: torch.Tensor, to: int, nbytes: int) -> None:
        """Start to copy from a pinned buffer; returns at once.

        Args:
            host: The buffer, u8.
            begin: Of its bytes, the first to copy.
            target: Device memory, u8.
            to: Of its bytes, the first to write.
            nbytes: How many.
        """

    def synchronize(self) -> None:
        """Wait for every copy started so far."""


class Passed:
    """The event of a device whose copies are done when they return."""

    def record(self) -> None:
        """Nothing."""

    def query(self) -> bool:
        """Always."""
        return True

    def synchronize(self) -> None:
        """Nothing."""


class HostMemory:
    """Host memory as a device: copies are done when they return.

    Args:
        discard: Allocate nothing and drop what is copied, for loads that only check.
    """

    def __init__(self, discard: bool = False) -> None:
        self.device = torch.device("cpu")
        self._discard = discard

    def free_bytes(self) -> int | None:
        """Nobody can tell: memory in use by caches can be had, and more than there is can be promised."""
        return None

    def allocate(self, nbytes: int) -> torch.Tensor:
        """u8 [nbytes], or [0] where all is dropped; see ``Device``."""
        with torch.inference_mode(False):
            return torch.empty(0 if self._discard else nbytes, dtype=torch.uint8, device=self.device)

    def enter(self) -> None:
        """Nothing."""

    def pin(self, host: torch.Tensor) -> None:
        """Nothing."""

    def unpin(self, host: torch.Tensor) -> None:
        """Nothing."""

    def event(self) -> Event:
        """One that is always passed."""
        return Passed()

    def copy(self, host: torch.Tensor, begin: int, target: torch.Tensor, to: int, nbytes: int) -> None:
        """Copy, or drop."""
        if not self._discard:
            target[to : to + nbytes].copy_(host[begin : begin + nbytes])

    def synchronize(self) -> None:
        """Nothing."""
