"""Loading to a real GPU: the same bytes, no memory beyond them, all of it back after a failure."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hybrid_pack
from hybrid_pack import DataError, EnvironmentFailure, UsageError
from hybrid_pack.convert import convert
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.plan import make_plan
from hybrid_pack.runtime import LoadBuffers, Pack, PackedMoELayer
from hybrid_pack.runtime.stream.cuda import CudaDevice
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec, write_checkpoint
from tests.runtime.dialects import MAPPED, MTP, Packs
from tests.runtime.test_runtime_load import descriptors
from tests.runtime.test_stream_failures import Reads
from tests.runtime.test_stream_load import tensors

pytestmark = pytest.mark.gpu

LARGE = Spec(
    hidden=2048, intermediate=512, num_experts=64, kept=16, moe_layers=(3, 4), dense_layers=(), mtp_layer=False
)
"""Two layers of about 90 MB."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    root = tmp_path_factory.mktemp("large")
    write_checkpoint(root / "source", LARGE)
    convert(make_plan(open_checkpoint(root / "source"), Topology(1, 1)), root / "pack")
    return hybrid_pack.open_pack(root / "pack")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch.zeros(1, device="cuda")
    collect()
    yield
    collect()


def collect() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * sum(
        int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem", "VmLck", "VmPin"))
    )


def assert_same(pack: Pack, number: int, layer: PackedMoELayer, rank: int = 0) -> None:
    expected = tensors(pack.load_layer(number, rank))
    ours = tensors(layer)
    assert set(ours) == set(expected)
    for name, tensor in expected.items():
        assert ours[name].is_cuda and ours[name].dtype == tensor.dtype and ours[name].data_ptr() % 256 == 0
        assert torch.equal(ours[name].cpu(), tensor), name


@pytest.mark.parametrize("check", ["structure", "digest"])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"readers": 1, "host_memory_bytes": 512 << 10},
        {"readers": 8, "host_memory_bytes": 8 << 20, "chunk_bytes": 65536},
    ],
    ids=["default", "tiny", "small chunks"],
)
def test_same_bytes(large: Pack, check: str, direct: bool, sizes: dict[str, int]) -> None:
    loaded = large.load_rank(0, "cuda", check=check, direct=direct, **sizes)  # type: ignore[arg-type]
    report = loaded.report
    print(report)
    assert report.checked == check and report.direct_files == 2 * direct and report.device == "cuda:0"
    assert report.host_bytes <= sizes.get("host_memory_bytes", 256 << 20)
    for number, layer in loaded.items():
        assert_same(large, number, layer)


@pytest.mark.parametrize("dialect", ["nvfp4", "mxfp4", "one_kept", "all_tail"])
def test_every_rank_and_kind(packs: Packs, dialect: str) -> None:
    pack = hybrid_pack.open_pack(packs.pack(dialect, 2, 2))
    for rank in range(4):
        for number, layer in pack.load_rank(rank, "cuda").items():
            assert_same(pack, number, layer, rank)


def test_no_memory_beyond_the_tensors(large: Pack) -> None:
    large.load_rank(0, "cuda")  # torch, the driver and the page cache are warm
    collect()
    torch.cuda.reset_peak_memory_stats()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    free, resident = torch.cuda.mem_get_info()[0], resident_bytes()
    loaded = large.load_rank(0, "cuda")
    final = sum(t.nbytes for layer in loaded.values() for t in tensors(layer).values())
    assert final == loaded.report.payload_bytes <= loaded.report.device_bytes < final + 256 * loaded.report.tensors
    # torch asks the driver for multiples of 2 MiB and leaves up to 1 MiB at the end of a large piece
    assert torch.cuda.memory_allocated() - before <= loaded.report.device_bytes + (1 << 20) * len(loaded)
    assert torch.cuda.max_memory_allocated() - before <= final + (2 << 20) * len(loaded)
    assert torch.cuda.max_memory_reserved() - reserved <= final + (8 << 20)
    assert free - torch.cuda.mem_get_info()[0] <= final + (64 << 20)
    assert resident_bytes() - resident < 16 << 20, "pinned memory is given back"
    del loaded
    collect()
    assert torch.cuda.memory_allocated() == before and torch.cuda.mem_get_info()[0] >= free - (2 << 20)


def test_ready_for_any_stream_on_return(large: Pack) -> None:
    expected = {number: tensors(large.load_layer(number)) for number in large.layers}
    for _ in range(3):
        loaded = large.load_rank(0, "cuda", check="structure")
        with torch.cuda.stream(torch.cuda.Stream()):
            copies = {n: {name: t.clone() for name, t in tensors(layer).items()} for n, layer in loaded.items()}
        torch.cuda.synchronize()
        for number, parts in copies.items():
            assert all(torch.equal(part.cpu(), expected[number][name]) for name, part in parts.items())


def test_memory_the_caller_still_reads_is_not_overwritten(large: Pack) -> None:
    """torch hands out freed memory at once to the stream that freed it, which may not have come to its last read."""
    nbytes = large.load_rank(0, "cuda", large.layers[:1]).report.device_bytes
    collect()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            value = torch.full((nbytes,), 77, dtype=torch.uint8, device="cuda")
            copy = torch.zeros_like(value)
            address = value.data_ptr()
            torch.cuda._sleep(400_000_000)
            copy.copy_(value)
            del value
            layer = large.load_layer(large.layers[0], device="cuda", check="structure")
            assert layer.tail is not None
            assert min(t.data_ptr() for t in tensors(layer).values()) == address, "the test needs the same memory"
            torch.cuda.synchronize()
            assert bool((copy == 77).all())
            assert_same(large, large.layers[0], layer)
            del layer, copy


def test_kept_buffers(large: Pack, packs: Packs) -> None:
    small = hybrid_pack.open_pack(packs.pack("nvfp4"))
    resident = resident_bytes()
    with LoadBuffers("cuda", host_memory_bytes=32 << 20) as buffers:
        for number in large.layers * 2:
            assert_same(large, number, large.load_layer(number, device="cuda", buffers=buffers))
        for number in (MAPPED, MTP):
            assert_same(small, number, small.load_layer(number, device="cuda:0", buffers=buffers))
    assert resident_bytes() - resident < 16 << 20
    with pytest.raises(UsageError, match="closed"):
        large.load_layer(large.layers[0], device="cuda", buffers=buffers)


@pytest.fixture
def broken(large: Pack, tmp_path: Path) -> Pack:
    """A copy with a flipped bit in the last large tensor of the last shard."""
    for path in large.root.rglob("*"):
        if path.is_file():
            target = tmp_path / path.relative_to(large.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    shard = large.manifest.shards[-1]
    with (tmp_path / shard.path).open("r+b") as file:
        file.seek(shard.tensors["kept.w2_scale"].end - 1)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 16]))
    return hybrid_pack.open_pack(tmp_path)


def fails(pack: Pack, error: type[BaseException], message: str, **options: Any) -> None:
    """Nothing may hang on the exception, which is kept."""
    collect()
    before, free, opened = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0], descriptors()
    with pytest.raises(error, match=message) as caught:
        pack.load_rank(0, "cuda", **options)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == before and caught.value is not None
    assert torch.cuda.mem_get_info()[0] >= free - (4 << 20) and descriptors() == opened
    deadline = time.monotonic() + 5
    while any(thread.name.startswith("hybrid-pack-load") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
    del caught
    assert float((torch.ones(64, device="cuda") * 2).sum()) == 128, "the GPU still works"


def test_a_flipped_bit(broken: Pack, large: Pack) -> None:
    fails(broken, DataError, "the bytes of kept.w2_scale are not the ones that were written")
    loaded = broken.load_rank(0, "cuda", check="structure")
    assert loaded.report.checked == "structure"
    assert_same(large, large.layers[0], broken.load_rank(0, "cuda", large.layers[:1])[large.layers[0]])


@pytest.mark.parametrize("at", [1, 5, 20])
def test_system_errors(large: Pack, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    def act(call: int, *_: Any) -> None:
        if call == at:
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        Reads(patch, act)
        fails(large, EnvironmentFailure, r"cannot read at offset \d+ \(found Input/output error\)")
    assert_same(large, large.layers[0], large.load_layer(large.layers[0], device="cuda"))


def test_interrupt(large: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    def act(call: int, *_: Any) -> None:
        if call == 10:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.05)

    with monkeypatch.context() as patch:
        Reads(patch, act)
        fails(large, KeyboardInterrupt, "^$", readers=2, chunk_bytes=65536)
    assert_same(large, large.layers[0], large.load_layer(large.layers[0], device="cuda"))


def test_out_of_memory(large: Pack) -> None:
    """Free as far as the driver knows, and yet not to be had: seen when it is allocated."""
    collect()
    nbytes = large.load_rank(0, "cuda").report.device_bytes
    collect()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + nbytes * 3 // 4) / total)
    try:
        fails(large, EnvironmentFailure, r"cuda:0: out of GPU memory \(expected \d+ bytes free")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert_same(large, large.layers[1], large.load_rank(0, "cuda")[large.layers[1]])


def test_too_little_memory_is_seen_before(large: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDevice, "free_bytes", lambda self: 1000)
    monkeypatch.setattr(CudaDevice, "allocate", None)
    fails(large, EnvironmentFailure, r"cuda:0: not enough memory \(expected \d+ bytes free, found 1000 bytes\)")


def test_memory_that_cannot_be_pinned() -> None:
    """The error is told, and not left for the next kernel to trip over."""
    device = CudaDevice(torch.device("cuda"))
    host = torch.empty(3 * 4096, dtype=torch.uint8)
    page = host[-host.data_ptr() % 4096 :][:4096]
    device.pin(page)
    with pytest.raises(
        EnvironmentFailure, match=r"cannot pin 4096 bytes of host memory \(found .*\); lower host_memory"
    ):
        device.pin(page)
    device.unpin(page)
    device.unpin(page)
    assert float((torch.ones(64, device="cuda") * 2).sum()) == 128


def in_inference_mode() -> Any:
    return torch.inference_mode()


def in_another_stream() -> Any:
    return torch.cuda.stream(torch.cuda.Stream())


def in_a_default_device() -> Any:
    return torch.device("cuda")


@pytest.mark.parametrize("context", [in_inference_mode, in_another_stream, in_a_default_device])
def test_callers_context_does_not_matter(large: Pack, context: Callable[[], Any]) -> None:
    with context():
        layer = large.load_layer(large.layers[0], device="cuda")
    assert not any(tensor.is_inference() for tensor in tensors(layer).values())
    assert_same(large, large.layers[0], layer)


def test_not_while_capturing(large: Pack) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(UsageError, match="while a CUDA graph is captured"):
        large.load_layer(large.layers[0], device="cuda")


def test_the_callers_thread_is_left_as_it_was(large: Pack) -> None:
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream()
    large.load_layer(large.layers[0], device="cuda")
    assert torch.cuda.current_device() == device and torch.cuda.current_stream() == stream
