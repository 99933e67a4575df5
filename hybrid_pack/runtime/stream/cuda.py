"""A CUDA device: thin, so that everything else can be tested without one."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from hybrid_pack.errors import EnvironmentFailure, UsageError
from hybrid_pack.runtime.stream import driver


def with_index(device: torch.device) -> torch.device:
    """``cuda`` alone means the calling thread's current device."""
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device


def failed(error: RuntimeError, device: torch.device) -> EnvironmentFailure:
    """An error of torch or CUDA as one of ours; torch's go on for many lines."""
    return EnvironmentFailure("the GPU failed", where=device, found=(str(error) or repr(error)).splitlines()[0])


class CudaEvent:
    """An event that a waiting thread sleeps on rather than spins; see ``Event``.

    Args:
        device: Named in errors.
        stream: Handle of the stream of the copies, which is the calling thread's current one.
    """

    def __init__(self, device: torch.device, stream: int) -> None:
        self._device, self._stream = device, stream
        self._driver = driver.library()
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        try:
            self._event.record()  # torch makes it now, on the current device
            self._handle = int(self._event.cuda_event)
        except RuntimeError as error:
            raise failed(error, device) from None

    def record(self) -> None:
        """On the stream of the copies."""
        self._require(self._driver.cuEventRecord(self._handle, self._stream))

    def query(self) -> bool:
        """Whether it is passed."""
        code = int(self._driver.cuEventQuery(self._handle))
        if code != driver.NOT_READY:
            self._require(code)
        return not code

    def synchronize(self) -> None:
        """Wait until it is."""
        try:
            self._event.synchronize()
        except RuntimeError as error:
            raise failed(error, self._device) from None

    def _require(self, code: int) -> None:
        try:
            driver.require(code)
        except RuntimeError as error:
            raise failed(error, self._device) from None


class CudaDevice:
    """Copies on a stream of their own.

    Args:
        device: ``cuda`` with or without an index; it exists.

    Attributes:
        device: With its index.

    Raises:
        UsageError: The calling thread is capturing a CUDA graph.
        EnvironmentFailure: The device does not work.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        try:
            self.device = with_index(device)
            if torch.cuda.is_current_stream_capturing():
                raise UsageError("layers cannot be loaded while a CUDA graph is captured", where=self.device)
            self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._handle = int(self._stream.cuda_stream)
            self._driver, self._context = driver.library(), driver.context_of(self._handle)
        except RuntimeError as error:
            raise failed(error, self.device) from None

    def free_bytes(self) -> int | None:
        """What the driver has, and what torch keeps without using it."""
        try:
            free, _ = torch.cuda.mem_get_info(self.device)
        except RuntimeError as error:
            raise failed(error, self.device) from None
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """u8 [nbytes]; see ``Device``."""
        try:
            # Not an inference tensor, whatever the caller is in: the readers, outside of it, write in place.
            with torch.inference_mode(False):
                tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            # The caller's stream may still use memory that torch hands out again.
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            return tensor
        except torch.cuda.OutOfMemoryError:
            found = f"{self.free_bytes()} bytes"
            raise EnvironmentFailure(
                "out of GPU memory", where=self.device, expected=f"{nbytes} bytes free in one piece", found=found,
                hint="load fewer layers, or free memory on this GPU",
            ) from None  # fmt: skip
        except RuntimeError as error:
            raise failed(error, self.device) from None

    def enter(self) -> None:
        """Make this thread's current device and stream the ones of the copies."""
        try:
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(self._stream)
            # torch leaves that to the first call of its own that needs it.
            driver.require(self._driver.cuCtxSetCurrent(self._context))
        except RuntimeError as error:
            raise failed(error, self.device) from None

    def pin(self, host: torch.Tensor) -> None:
        """Register memory that was mapped before, rather than take it from torch, which would keep it."""
        code = self._runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)
        if code != self._runtime.cudaError.success:
            self._clear_error()
            raise EnvironmentFailure(
                f"cannot pin {host.nbytes} bytes of host memory", where=self.device, found=str(code),
                hint="lower host_memory_bytes",
            )  # fmt: skip

    def unpin(self, host: torch.Tensor) -> None:
        """Undo ``pin``, on whatever device the calling thread is; of a GPU that failed nothing can be undone."""
        with contextlib.suppress(RuntimeError), torch.cuda.device(self.device):
            code = self._runtime.cudaHostUnregister(host.data_ptr())
            if code != self._runtime.cudaError.success:
                self._clear_error()

    def event(self) -> CudaEvent:
        """A new event, for a thread that has entered."""
        return CudaEvent(self.device, self._handle)

    def copy(self, host: torch.Tensor, begin: int, target: torch.Tensor, to: int, nbytes: int) -> None:
        """Start a copy on the stream of the copies; see ``Device``."""
        try:
            driver.require(
                self._driver.cuMemcpyHtoDAsync_v2(target.data_ptr() + to, host.data_ptr() + begin, nbytes, self._handle)
            )
        except RuntimeError as error:
            raise failed(error, self.device) from None

    def synchronize(self) -> None:
        """Wait for the stream of the copies, and for nothing else."""
        try:
            self._stream.synchronize()
        except RuntimeError as error:
            raise failed(error, self.device) from None

    def _clear_error(self) -> None:
        """The runtime remembers an error, and torch would raise it at the next kernel; let it be raised here."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self.device)
