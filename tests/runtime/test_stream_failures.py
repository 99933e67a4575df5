"""Everything that can go wrong on the way: a clear error, all memory given back, and a retry that works."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hybrid_pack
from hybrid_pack import DataError, EnvironmentFailure
from hybrid_pack.runtime import LoadBuffers, Pack
from hybrid_pack.runtime.buffers import Sizes
from hybrid_pack.runtime.stream import session
from tests.runtime.dialects import MAPPED, MTP, Packs
from tests.runtime.late_device import LateDevice, late_device
from tests.runtime.test_runtime_load import MUTATIONS, SHARD, Copy, descriptors
from tests.runtime.test_stream_load import assert_nothing_left, assert_same, stream

SMALL_RING = {"host_memory_bytes": 1 << 20, "chunk_bytes": 32 << 10, "readers": 2}


@pytest.fixture
def device() -> Iterator[LateDevice]:
    with late_device(delay=0.0001) as made:
        yield made


def fails(pack: Pack, device: LateDevice, error: type[BaseException], message: str, **options: Any) -> BaseException:
    """The exception is kept, as a caller may: nothing must hang on it."""
    before = descriptors()
    with pytest.raises(error, match=message) as caught:
        stream(pack, device, **{**SMALL_RING, **options})
    assert_nothing_left(device)
    assert descriptors() == before
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", MUTATIONS)
def test_damaged_files_are_refused_before_anything_is_allocated(copy: Copy, device: LateDevice, name: str) -> None:
    mutate, message = MUTATIONS[name]
    root = copy("nvfp4")
    pack = hybrid_pack.open_pack(root)
    mutate(root / SHARD)
    fails(pack, device, DataError, message)
    fails(pack, device, DataError, message, layers=[MTP, MAPPED] if (root / SHARD).parent.is_dir() else [MAPPED])
    assert device.calls == {}


def test_a_flip_in_any_tensor_is_found(copy: Copy) -> None:
    root = copy("nvfp4", 2, 2)
    pack = hybrid_pack.open_pack(root)
    shard = next(s for s in pack.manifest.shards if (s.layer, s.rank) == (MAPPED, 1))
    path, choose = root / shard.path, random.Random(0)
    data = path.read_bytes()
    flipped = 0
    for name, tensor in shard.tensors.items():
        for at in (choose.choice((tensor.begin, tensor.end - 1)), choose.randrange(tensor.begin, tensor.end)):
            wrong = bytearray(data)
            wrong[at] ^= 1 << choose.randrange(8)
            path.write_bytes(wrong)
            message = rf"{name}(\[\d+\])? (are|is) not"
            if not name.endswith("expert_ids"):
                message = rf"layer-001.safetensors: the bytes of {name} are not the ones that were written .*blake3"
                pack.load_layer(MAPPED, 1)
            with late_device() as device:
                fails(
                    pack,
                    device,
                    DataError,
                    message,
                    rank=1,
                    layers=[MAPPED],
                    chunk_bytes=choose.choice([8192, 1 << 18]),
                )
            with pytest.raises(DataError, match=message):
                pack.load_layer(MAPPED, 1, check="digest")
            flipped += 1
    path.write_bytes(data)
    assert flipped == 2 * len(shard.tensors) and pack.load_layer(MAPPED, 1, check="digest").checked == "digest"


def test_structure_does_not_read_digests(copy: Copy, device: LateDevice) -> None:
    """The report must say what was checked, since this is what it means."""
    root = copy("nvfp4")
    with (root / SHARD).open("r+b") as file:
        file.seek(5000)
        file.write(b"\x55\x55\x55")
    pack = hybrid_pack.open_pack(root)
    assert stream(pack, device, check="structure").report.checked == "structure"
    fails(pack, device, DataError, "are not the ones that were written")


class Reads:
    """``os.preadv`` as the readers see it, with something happening at a chosen call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[int, int, Any, int], int | None]) -> None:
        self.calls, self._act, self._real, self._lock = 0, act, os.preadv, threading.Lock()
        monkeypatch.setattr(os, "preadv", self._read)

    def _read(self, fd: int, views: Any, offset: int, *rest: Any) -> int:
        if threading.current_thread() is threading.main_thread():
            return self._real(fd, views, offset, *rest)
        with self._lock:
            self.calls += 1
            call = self.calls
        got = self._act(call, fd, views, offset)
        return self._real(fd, views, offset, *rest) if got is None else got


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("code", "text"), [(5, "Input/output error"), (116, "Stale file handle")])
def test_system_errors_at_any_point(
    packs: Packs, device: LateDevice, monkeypatch: pytest.MonkeyPatch, seed: int, code: int, text: str
) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    at = random.Random(seed).randrange(1, 100)

    def act(call: int, *_: Any) -> None:
        if call == at:
            raise OSError(code, text)

    with monkeypatch.context() as patch:
        reads = Reads(patch, act)
        fails(pack, device, EnvironmentFailure, rf"layer-00\d.safetensors: cannot read at offset \d+ \(found {text}\)")
        assert reads.calls <= at + 2 * SMALL_RING["readers"], "the others stop"
    assert_same(pack, stream(pack, device, **SMALL_RING))


def test_interrupted_and_short_reads_go_on(packs: Packs, device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    choose, real = random.Random(1), os.preadv

    def act(call: int, fd: int, views: Any, offset: int) -> int | None:
        if (offset % 4096 or len(views[0]) % 4096) and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(5, "what direct reads cannot do")
        if call % 5 == 0:
            raise InterruptedError(4, "Interrupted system call")
        if call % 2:
            return choose.randint(1, real(fd, views, offset))
        return None

    for direct in (False, True):
        with monkeypatch.context() as patch:
            Reads(patch, act)
            loaded = stream(pack, device, direct=direct, **SMALL_RING)
        assert_same(pack, loaded)


@pytest.mark.parametrize("direct", [False, True])
def test_a_file_that_shrinks_meanwhile(
    copy: Copy, device: LateDevice, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    root = copy("nvfp4")
    pack = hybrid_pack.open_pack(root)
    whole = (root / SHARD).read_bytes()

    def act(call: int, *_: Any) -> None:
        if call == 10:
            os.truncate(root / SHARD, 400_000)

    message = (
        rf"layer-001.safetensors: the file became shorter while it was read \(expected {len(whole)} bytes, "
        r"found 400000 bytes, and none at offset \d+\); get the file again"
    )
    with monkeypatch.context() as patch:
        Reads(patch, act)
        fails(pack, device, DataError, message, direct=direct)
    (root / SHARD).write_bytes(whole)
    assert_same(pack, stream(pack, device))


DEVICE_FAILURES = [("allocate", 1), ("allocate", 2), ("pin", 1), ("pin", 2), ("copy", 1), ("copy", 20), ("event", 2)]
DEVICE_FAILURES += [("record", 5), ("enter", 2), ("synchronize", 1)]


@pytest.mark.parametrize(("call", "at"), DEVICE_FAILURES)
def test_the_device_fails(packs: Packs, device: LateDevice, call: str, at: int) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    device.failing[call] = at, EnvironmentFailure(f"no {call}")
    fails(pack, device, EnvironmentFailure, f"no {call}")
    device.failing.clear()
    assert_same(pack, stream(pack, device, **SMALL_RING))


def test_memory_runs_out_though_it_was_there(packs: Packs, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    with late_device() as device:
        wanted = stream(pack, device).report.device_bytes
    with late_device(limit=wanted - 1) as device:
        monkeypatch.setattr(device, "free_bytes", lambda: None)
        fails(pack, device, EnvironmentFailure, "out of late memory")
        assert 0 < device.peak_bytes < wanted
        device.limit = wanted
        assert_same(pack, stream(pack, device))


def test_threads_run_out(packs: Packs, device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    real, started = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        fails(pack, device, EnvironmentFailure, r"cannot start a thread \(found can't start new thread\)")


@pytest.mark.parametrize("signals", [1, 3])
def test_interrupts(packs: Packs, device: LateDevice, monkeypatch: pytest.MonkeyPatch, signals: int) -> None:
    """SIGINT while the readers are at work, and again while they end."""
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    stopped = threading.Event()

    def act(call: int, *_: Any) -> None:
        if call == 12:
            for _ in range(signals):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                stopped.wait(0.05)

    with monkeypatch.context() as patch:
        Reads(patch, act)
        fails(pack, device, KeyboardInterrupt, "^$", host_memory_bytes=512 << 10, chunk_bytes=4096, readers=1)
    assert_same(pack, stream(pack, device))


@pytest.mark.parametrize("at", ["start", "advance"])
def test_progress_that_raises(packs: Packs, device: LateDevice, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    class Raises:
        def start(self, total_bytes: int, done_bytes: int) -> None:
            if at == "start":
                raise ValueError("no terminal")

        def advance(self, nbytes: int) -> None:
            raise ValueError("no terminal")

    monkeypatch.setattr(session, "PROGRESS_SECONDS", 0.001)
    fails(hybrid_pack.open_pack(packs.pack("nvfp4")), device, ValueError, "no terminal", progress=Raises())


def test_kept_buffers_survive_a_failure(copy: Copy, device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    root = copy("nvfp4")
    pack = hybrid_pack.open_pack(root)
    with LoadBuffers.of(device, Sizes(4 * 65536, 65536, 2)) as buffers:
        for at in (1, 3, 30):
            with monkeypatch.context() as patch:
                Reads(patch, lambda call, *_, at=at: os.strerror(os.dup(-1)) and None if call == at else None)
                with pytest.raises(EnvironmentFailure, match="cannot read") as caught:
                    stream(pack, device, buffers=buffers)
            gc.collect()
            assert device.live_bytes == 0 and caught.value
            assert_same(pack, stream(pack, device, buffers=buffers))
        assert len(device.pinned) <= 4
    assert_nothing_left(device)


def test_a_bug_in_a_reader_is_not_hidden(packs: Packs, device: LateDevice) -> None:
    device.failing["copy"] = 7, ZeroDivisionError("a bug")
    error = fails(hybrid_pack.open_pack(packs.pack("nvfp4")), device, ZeroDivisionError, "a bug")
    frames, at = [], error.__traceback__
    while at is not None:
        frames.append(at.tb_frame.f_code.co_name)
        at = at.tb_next
    assert "_copy" in frames, "where it happened is still told"


def test_a_shard_replaced_by_a_link(copy: Copy, device: LateDevice) -> None:
    root = copy("nvfp4")
    blob = root.parent / "blob"
    (root / SHARD).rename(blob)
    (root / SHARD).symlink_to(os.path.relpath(blob, (root / SHARD).parent))
    pack = hybrid_pack.open_pack(root)
    assert_same(pack, stream(pack, device))


def test_a_file_nobody_may_read(copy: Copy, device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    root = copy("nvfp4")
    pack = hybrid_pack.open_pack(root)
    real = os.open

    def denied(path: Any, *rest: Any, **more: Any) -> int:
        if Path(path) == root / SHARD:
            raise PermissionError(13, "Permission denied")
        return real(path, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        fails(pack, device, EnvironmentFailure, r"layer-001.safetensors: cannot read \(found Permission denied\)")
    assert device.calls == {}
