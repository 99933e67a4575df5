"""The CUDA device's own lines, run with a stand-in for ``torch.cuda`` whose signatures are the real ones."""

from __future__ import annotations

import ctypes
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import hybrid_pack
from hybrid_pack import EnvironmentFailure, UsageError
from hybrid_pack.runtime import LoadBuffers
from hybrid_pack.runtime.stream import cuda as cuda_module
from hybrid_pack.runtime.stream import driver, session
from tests.runtime.dialects import MAPPED, MTP, Packs
from tests.runtime.test_stream_load import assert_same

DEVICE = torch.device("cuda", 0)


def real(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Holds every call against the signature of a function of torch."""

    def decorate(fake: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            inspect.signature(function).bind(*args, **kwargs)
            return fake(self, *args, **kwargs)

        return call

    return decorate


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.waited, self.synchronized = cuda, 0, 0
        self.cuda_stream = 0x57 + len(cuda.streams)

    def wait_stream(self, other: FakeStream) -> None:
        assert other is self.cuda.main
        self.waited += 1

    def synchronize(self) -> None:
        self.synchronized += 1
        self.cuda.fail("synchronize")


class FakeEvent:
    """Like torch's, it has a handle once it was recorded."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.cuda_event = cuda, 0

    def record(self) -> None:
        self.cuda.fail("event")
        assert self.cuda.local.stream in self.cuda.streams and self.cuda.local.device == DEVICE
        self.cuda_event = len(self.cuda.events) + 1
        self.cuda.events.append(self)

    def synchronize(self) -> None:
        pass


class FakeDriver:
    """The driver's library; a thread has the context it chose.

    Attributes:
        codes: What a function returns instead of 0.
    """

    CONTEXT = 0xC0

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.codes: dict[str, int] = {}

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("cu") and callable(found):

            def call(*args: Any) -> int:
                assert len(args) == len(driver._ARGUMENTS[name]) and None not in args
                return self.codes.get(name, 0) or found(*args) or 0

            return call
        return found

    def cuStreamGetCtx(self, stream: int, context: Any) -> None:
        assert stream == self.cuda.streams[-1].cuda_stream
        context._obj.value = self.CONTEXT

    def cuCtxSetCurrent(self, context: int) -> None:
        self.cuda.local.context = context

    def cuMemcpyHtoDAsync_v2(self, target: int, host: int, nbytes: int, stream: int) -> None:
        assert self.cuda.local.context == self.CONTEXT and stream == self.cuda.streams[-1].cuda_stream
        assert any(at <= host and host + nbytes <= at + size for at, size in self.cuda.pinned.items())
        ctypes.memmove(target, host, nbytes)

    def cuEventRecord(self, event: int, stream: int) -> None:
        assert self.cuda.local.context == self.CONTEXT and stream == self.cuda.streams[-1].cuda_stream
        assert 0 < event <= len(self.cuda.events)

    def cuEventQuery(self, event: int) -> None:
        assert 0 < event <= len(self.cuda.events)

    def cuGetErrorName(self, code: int, name: Any) -> None:
        name._obj.value = f"CUDA_ERROR_{code}".encode()


class FakeCuda:
    """What ``cuda.py`` uses of ``torch.cuda``.

    Attributes:
        streams: Those made.
        events: Those recorded for the first time.
        driver: The library below.
        pinned: Bytes at each registered address.
        free: What the driver says.
        errors: What fails, and how.
        cleared: How often a left error was asked for.
    """

    OutOfMemoryError = torch.cuda.OutOfMemoryError

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.events: list[FakeEvent] = []
        self.main, self.local, self.driver = FakeStream(self), threading.local(), FakeDriver(self)
        self.pinned: dict[int, int] = {}
        self.errors: dict[str, Exception] = {}
        self.free, self.cleared, self.capturing = 1 << 30, 0, False
        self._success = object()

    def fail(self, name: str) -> None:
        if name in self.errors:
            raise self.errors[name]

    @real(torch.cuda.current_device)
    def current_device(self) -> int:
        return 0

    @real(torch.cuda.is_current_stream_capturing)
    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    @real(torch.cuda.mem_get_info)
    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, 2 << 30

    @real(torch.cuda.memory_reserved)
    def memory_reserved(self, device: torch.device) -> int:
        return 5 << 20

    @real(torch.cuda.memory_allocated)
    def memory_allocated(self, device: torch.device) -> int:
        return 2 << 20

    @real(torch.cuda.current_stream)
    def current_stream(self, device: torch.device) -> FakeStream:
        return self.main

    @real(torch.cuda.set_device)
    def set_device(self, device: torch.device) -> None:
        self.local.device = device

    @real(torch.cuda.set_stream)
    def set_stream(self, stream: FakeStream) -> None:
        self.local.stream = stream

    def Stream(self, device: torch.device) -> FakeStream:
        self.fail("stream")
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def Event(self, blocking: bool) -> FakeEvent:
        return FakeEvent(self)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        assert device == DEVICE
        yield

    @real(torch.cuda.cudart)
    def cudart(self) -> Any:
        codes = SimpleNamespace(success=self._success)
        return SimpleNamespace(
            cudaError=codes,
            cudaHostRegister=self._register,
            cudaHostUnregister=lambda at: self.pinned.pop(at) and self._success,
        )

    def _register(self, at: int, size: int, flags: int) -> object:
        assert flags == 0 and self.local.device == DEVICE
        if "pin" in self.errors:
            return "cudaError.memory"
        self.pinned[at] = size
        return self._success


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()

    def empty(nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device == DEVICE
        fake.fail("empty")
        return torch.empty(nbytes, dtype=dtype)

    def ones(size: int, device: torch.device) -> None:
        fake.cleared += 1
        raise RuntimeError("the error that was left")

    stand_in = SimpleNamespace(
        cuda=fake, empty=empty, ones=ones, device=torch.device, uint8=torch.uint8, inference_mode=torch.inference_mode
    )
    monkeypatch.setattr(cuda_module, "torch", stand_in)
    monkeypatch.setattr(driver, "library", lambda: fake.driver)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return fake


def test_load(packs: Packs, cuda: FakeCuda) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    loaded = pack.load_rank(device="cuda", readers=2)
    assert_same(pack, loaded)
    assert loaded.report.device == "cuda:0" and loaded.report.checked == "digest"
    assert cuda.streams[0].waited == 2 and cuda.streams[0].synchronized == 1 and cuda.pinned == {}
    layer = pack.load_layer(MTP, device="cuda:0", check="structure", host_memory_bytes=1 << 20)
    assert layer.checked == "structure"


def test_buffers(packs: Packs, cuda: FakeCuda) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    with LoadBuffers("cuda", 4 << 20, readers=2) as buffers:
        assert pack.load_layer(MAPPED, device="cuda", buffers=buffers).layer == MAPPED
        assert cuda.pinned and len(cuda.streams) == 1
        buffers.device = torch.device("cuda", 3)
        with pytest.raises(UsageError, match=r"cuda:0: buffers of another device \(found cuda:3\)"):
            pack.load_layer(MAPPED, device="cuda", buffers=buffers)
    assert cuda.pinned == {}


def test_free_memory(packs: Packs, cuda: FakeCuda) -> None:
    cuda.free = 100_000 - (3 << 20)
    with pytest.raises(EnvironmentFailure, match=r"cuda:0: not enough memory .*found 100000 bytes"):
        hybrid_pack.open_pack(packs.pack("nvfp4")).load_rank(device="cuda")


FAILURES = [
    ("event", RuntimeError("CUDA error: no event"), r"cuda:0: the GPU failed \(found CUDA error: no event\)"),
    ("cuEventRecord", 719, r"cuda:0: the GPU failed \(found CUDA error: CUDA_ERROR_719\)"),
    ("cuEventQuery", 719, r"cuda:0: the GPU failed \(found CUDA error: CUDA_ERROR_719\)"),
    ("cuMemcpyHtoDAsync_v2", 1, r"cuda:0: the GPU failed \(found CUDA error: CUDA_ERROR_1\)"),
    ("cuCtxSetCurrent", 201, r"cuda:0: the GPU failed \(found CUDA error: CUDA_ERROR_201\)"),
    ("cuStreamGetCtx", 400, r"cuda:0: the GPU failed \(found CUDA error: CUDA_ERROR_400\)"),
    (
        "empty",
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried"),
        r"cuda:0: out of GPU memory \(expected \d+ bytes",
    ),
    (
        "empty",
        RuntimeError("CUDA error: uncorrectable\nmore"),
        r"cuda:0: the GPU failed \(found CUDA error: uncorrectable\)",
    ),
    ("stream", RuntimeError("CUDA error: no"), r"cuda:0: the GPU failed \(found CUDA error: no\)"),
    ("synchronize", RuntimeError("CUDA error: gone"), r"the GPU failed \(found CUDA error: gone\)"),
    (
        "pin",
        RuntimeError(),
        r"cuda:0: cannot pin \d+ bytes of host memory \(found cudaError.memory\); lower host_memory_bytes",
    ),
]


@pytest.mark.parametrize(("name", "error", "message"), FAILURES)
def test_failures(packs: Packs, cuda: FakeCuda, name: str, error: Any, message: str) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    (cuda.driver.codes if name.startswith("cu") else cuda.errors)[name] = error
    with pytest.raises(EnvironmentFailure, match=message):
        pack.load_rank(0, "cuda", [MAPPED], chunk_bytes=65536, readers=1)
    assert cuda.pinned == {} and cuda.cleared >= (name == "pin")
    cuda.errors.clear()
    cuda.driver.codes.clear()
    assert pack.load_layer(MAPPED, device="cuda").layer == MAPPED


def test_not_while_capturing(packs: Packs, cuda: FakeCuda) -> None:
    cuda.capturing = True
    with pytest.raises(UsageError, match="cannot be loaded while a CUDA graph is captured"):
        hybrid_pack.open_pack(packs.pack("nvfp4")).load_layer(MAPPED, device="cuda")


def test_a_copy_that_is_late(packs: Packs, cuda: FakeCuda) -> None:
    """Events are not passed when they are asked: buffers are waited for one after the other."""
    cuda.driver.codes["cuEventQuery"] = driver.NOT_READY
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    assert_same(pack, pack.load_rank(device="cuda", readers=2, chunk_bytes=8192))
    assert len(cuda.events) == 4


def test_no_driver(packs: Packs, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(driver, "LIBRARY", "libno-such-driver.so.1")
    driver.library.cache_clear()
    with pytest.raises(EnvironmentFailure, match=r"libno-such-driver.so.1: the CUDA driver is not there"):
        driver.library()


def test_a_reader_lets_go_of_the_interpreter_lock_to_read_only(
    packs: Packs, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch lets go of it whenever it works on a tensor, so that no chunk may ask it for more than an address."""
    asked, carry = set(), session.Session._carry

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.add(func)
            return func(*args, **(kwargs or {}))

    def watched(self: Any, *args: Any) -> None:
        with Watch():
            carry(self, *args)

    monkeypatch.setattr(session.Session, "_carry", watched)
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    assert_same(pack, pack.load_rank(device="cuda", readers=1, chunk_bytes=8192))
    once_a_buffer = {torch.frombuffer, torch.Tensor.nbytes.__get__}  # type: ignore[attr-defined]
    assert asked - once_a_buffer == {torch.Tensor.data_ptr}
