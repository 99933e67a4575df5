"""Shards carried to a device: the same bytes whatever the sizes, in bounded memory, without draining in between."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import hybrid_pack
from hybrid_pack import EnvironmentFailure, UsageError
from hybrid_pack.runtime import LoadBuffers, LoadedRank, Pack, PackedMoELayer, TierWeights
from hybrid_pack.runtime.buffers import Sizes
from hybrid_pack.runtime.load import LoadOptions, stream_shards
from hybrid_pack.runtime.stream.device import Device, HostMemory
from tests.runtime.dialects import MAPPED, MTP, Packs
from tests.runtime.late_device import LateDevice, late_device


@pytest.fixture
def device() -> Iterator[LateDevice]:
    with late_device() as made:
        yield made


def stream(pack: Pack, device: Device, rank: int = 0, layers: Sequence[int] = (), **options: Any) -> LoadedRank:
    """``load_rank`` to any device."""
    wanted = layers or pack.layers
    entries = [s for layer in wanted for s in pack.manifest.shards if (s.layer, s.rank) == (layer, rank)]
    return stream_shards(pack.root, pack.manifest, entries, device, LoadOptions(**options))


def tensors(layer: PackedMoELayer) -> dict[str, torch.Tensor]:
    return {
        f"{tier}.{field.name}": getattr(weights, field.name)
        for tier, weights in (("kept", layer.kept), ("tail", layer.tail))
        if weights is not None
        for field in fields(TierWeights)
    }


def assert_same(pack: Pack, loaded: LoadedRank, rank: int = 0) -> None:
    for number, layer in loaded.items():
        mapped = pack.load_layer(number, rank)
        assert (layer.layer, layer.rank, layer.geometry, layer.tiles) == (number, rank, mapped.geometry, mapped.tiles)
        ours, expected = tensors(layer), tensors(mapped)
        assert set(ours) == set(expected)
        for name, tensor in expected.items():
            assert ours[name].dtype == tensor.dtype and ours[name].is_contiguous() and torch.equal(ours[name], tensor)


def assert_nothing_left(device: LateDevice, live_bytes: int = 0) -> None:
    gc.collect()
    assert device.live_bytes == live_bytes and device.pinned == {}
    for thread in threading.enumerate():
        if thread.name.startswith("hybrid-pack-load"):
            thread.join(5)
            assert not thread.is_alive()


SIZES = [
    Sizes(4096, 4096, 1),
    Sizes(3 * 4096, 4096, 3),
    Sizes(5 * 8192 + 1, 8192, 2),
    Sizes(8 * 65536, 65536, 8),
    Sizes(2 << 20, 1 << 20, 2),
    Sizes(64 << 20, 16 << 20, 4),
]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: f"{sizes.chunk_bytes >> 10}K-{sizes.readers}")
@pytest.mark.parametrize("check", ["structure", "digest"])
@pytest.mark.parametrize("direct", [True, False])
def test_same_bytes_whatever_the_sizes(
    packs: Packs, device: LateDevice, sizes: Sizes, check: str, direct: bool
) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4", 2, 2))
    with LoadBuffers.of(device, sizes) as buffers:
        loaded = stream(pack, device, 3, check=check, direct=direct, buffers=buffers)
    assert_same(pack, loaded, 3)
    assert device.most_pinned <= sizes.host_memory_bytes
    assert loaded.report.checked == check == loaded[MAPPED].checked
    assert loaded.report.direct_files == (2 if direct else 0)
    nbytes = device.live_bytes
    assert nbytes == device.peak_bytes == loaded.report.device_bytes and device.calls["allocate"] == 2
    assert_nothing_left(device, nbytes)
    del loaded
    assert_nothing_left(device)


@pytest.mark.parametrize("name", ["mxfp4", "one_kept", "all_tail"])
def test_every_kind_of_shard(packs: Packs, device: LateDevice, name: str) -> None:
    pack = hybrid_pack.open_pack(packs.pack(name))
    loaded = stream(pack, device)
    assert_same(pack, loaded)
    report = loaded.report
    assert report.layers == pack.layers == tuple(loaded) and len(loaded) == len(pack.layers)
    assert report.checked == "digest" and report.read and report.rank == 0 and report.device == "cpu"
    shards = pack.manifest.shards
    assert report.tensors == sum(len(shard.tensors) for shard in shards)
    assert report.payload_bytes == sum(t.end - t.begin for shard in shards for t in shard.tensors.values())
    assert 0 <= report.device_bytes - report.payload_bytes < 256 * report.tensors
    assert 0 < report.host_bytes <= 256 << 20 and report.seconds > 0 and report.gb_per_s > 0
    assert "GB/s; checked: every digest" in str(report) and str(report) in repr(loaded)


def test_tensors_are_aligned_parts_of_one_allocation(packs: Packs, device: LateDevice) -> None:
    layer = stream(hybrid_pack.open_pack(packs.pack("one_kept")), device, layers=[MAPPED])[MAPPED]
    parts = list(tensors(layer).values())
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
    assert all(part.storage_offset() * part.element_size() % 256 == 0 for part in parts)


def test_late_copies_and_a_small_ring(packs: Packs) -> None:
    """Readers are faster than the device: buffers must not be read into before they are copied."""
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    with late_device(delay=0.0005) as device, LoadBuffers.of(device, Sizes(8 * 32768, 32768, 4)) as buffers:
        assert_same(pack, stream(pack, device, buffers=buffers, check="structure"))
        assert len(device.pinned) == 8


def test_the_buffer_used_last_is_taken_first(packs: Packs) -> None:
    """A device as fast as this one needs one buffer, however many there may be."""
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    loaded = stream(pack, HostMemory(), readers=1, host_memory_bytes=64 << 20)
    assert loaded.report.host_bytes == loaded.report.chunk_bytes == 8 << 20


def test_layers_are_not_waited_for(packs: Packs, device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy of the first layer is done before the second layer is read."""
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    second = next(s for s in pack.manifest.shards if s.layer == MTP)
    preadv, wanted = os.preadv, (pack.root / second.path).stat().st_ino
    device.gate.clear()

    def watched(fd: int, views: Any, offset: int, *rest: Any) -> int:
        if (
            offset >= 4096
            and os.fstat(fd).st_ino == wanted
            and threading.current_thread() is not threading.main_thread()
        ):
            device.gate.set()
        return preadv(fd, views, offset, *rest)

    monkeypatch.setattr(os, "preadv", watched)
    with LoadBuffers.of(device, Sizes(64 << 20, 64 << 10, 1)) as buffers:
        loaded = stream(pack, device, layers=[MAPPED, MTP], buffers=buffers)
    monkeypatch.undo()
    assert_same(pack, loaded)


def test_order_and_choice_of_layers(packs: Packs, device: LateDevice) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    assert list(stream(pack, device, layers=[MTP, MAPPED])) == [MTP, MAPPED]
    assert list(stream(pack, device, layers=[MTP])) == [MTP]


def test_only_the_ranks_own_files_are_opened(packs: Packs, device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4", 2, 2))
    opened, real = [], os.open

    def watched(path: Any, *rest: Any, **more: Any) -> int:
        opened.append(Path(path))
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", watched)
    stream(pack, device, 2, direct=False)
    assert {path.parent for path in opened} == {pack.root / "experts/tp2-ep2/rank-2"}


class Told:
    def __init__(self) -> None:
        self.total = self.done = 0

    def start(self, total_bytes: int, done_bytes: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.total = total_bytes

    def advance(self, nbytes: int) -> None:
        assert nbytes > 0 and threading.current_thread() is threading.main_thread()
        self.done += nbytes


def test_progress(packs: Packs, device: LateDevice) -> None:
    told = Told()
    report = stream(hybrid_pack.open_pack(packs.pack("nvfp4")), device, progress=told).report
    assert told.total == told.done == report.payload_bytes


def test_buffers_outlast_a_load(packs: Packs, device: LateDevice) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    with LoadBuffers.of(device, Sizes(16 << 20, 4 << 20, 2)) as buffers:
        loads = [stream(pack, device, layers=[number], buffers=buffers) for number in (MAPPED, MTP) * 3]
        assert device.calls["pin"] <= 4 and device.calls.get("unpin", 0) == 0 and device.pinned
        for loaded in loads:
            assert_same(pack, loaded)
        buffers.ring.borrow()
        with pytest.raises(UsageError, match="in use by another load"):
            stream(pack, device, buffers=buffers)
        buffers.ring.give_back()
        stream(pack, device, buffers=buffers)
    assert not device.pinned
    with pytest.raises(UsageError, match="these load buffers are closed"):
        stream(pack, device, buffers=buffers)
    buffers.close()


def test_forgotten_buffers_are_given_back(packs: Packs, device: LateDevice) -> None:
    buffers = LoadBuffers.of(device, Sizes(1 << 20, 1 << 19, 1))
    stream(hybrid_pack.open_pack(packs.pack("nvfp4")), device, buffers=buffers)
    assert device.pinned
    del buffers
    assert_nothing_left(device)


def test_inference_mode_does_not_matter(packs: Packs) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    with torch.inference_mode():
        loaded = stream(pack, HostMemory())
    assert_same(pack, loaded)


def test_a_default_device_does_not_matter(packs: Packs, device: LateDevice) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    with torch.device("meta"):
        loaded = stream(pack, HostMemory())
        mapped = pack.load_rank(check="digest")
    assert_same(pack, loaded)
    assert_same(pack, mapped)


def test_on_the_cpu(packs: Packs) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4", 2, 2))
    for check in (None, "structure", "digest"):
        loaded = pack.load_rank(1, check=check)  # type: ignore[arg-type]
        assert_same(pack, loaded, 1)
        report = loaded.report
        assert report.checked == (check or "structure") == loaded[MTP].checked and report.device == "cpu"
        assert report.read == (check == "digest") == (report.readers > 0) and report.device_bytes == 0
        assert ("mapped; checked: sizes, headers and expert ids" in str(report)) == (check != "digest")


OPTIONS = [
    ({"check": "crc"}, "check: no such check .*found 'crc'"),
    ({"direct": "maybe"}, "direct: no such choice"),
    ({"host_memory_bytes": 1000, "check": "digest"}, "host_memory_bytes must be a whole number of at least 524288"),
    ({"readers": 0, "check": "digest"}, "readers must be a whole number of at least 1"),
    ({"layers": []}, r"layers must be at least one, each once"),
    ({"layers": [MAPPED, MAPPED]}, r"layers must be at least one, each once"),
    ({"layers": [0]}, r"layer 0 is not in this pack"),
    ({"rank": 4}, r"this pack is for tp 2 x ep 2"),
    ({"device": "gpu"}, r"not a device"),
    (
        {"expect_tp": 4},
        r"made for other ranks \(expected tp 4 x ep 2, found tp 2 x ep 2\); "
        r"convert \w+ again with --tp 4 --ep 2 and the options it was made with$",
    ),
    ({"expect_ep": 1}, r"expected tp 2 x ep 1, found tp 2 x ep 2.*--tp 2 --ep 1"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_wrong_calls(packs: Packs, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hybrid_pack.open_pack(packs.pack("nvfp4", 2, 2)).load_rank(**options)


def test_expected_topology(packs: Packs) -> None:
    root = packs.pack("nvfp4", 2, 2)
    hybrid_pack.open_pack(root, expect_tp=2, expect_ep=2).load_rank(expect_tp=2, layers=[MAPPED])
    with pytest.raises(UsageError, match=r"made for other ranks \(expected tp 8 x ep 2, found tp 2 x ep 2\)"):
        hybrid_pack.open_pack(root, expect_tp=8)


def test_wrong_buffers(packs: Packs, device: LateDevice) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    with pytest.raises(UsageError, match="buffers are for loads to a CUDA device"):
        LoadBuffers("cpu")
    with LoadBuffers.of(device, SIZES[0]) as buffers:
        with pytest.raises(UsageError, match="buffers are for loads to a CUDA device"):
            pack.load_layer(MAPPED, buffers=buffers)
        with pytest.raises(UsageError, match="are those of the buffers"):
            pack.load_layer(MAPPED, buffers=buffers, readers=2)


def test_more_host_memory_than_there_is(packs: Packs, device: LateDevice) -> None:
    with pytest.raises(EnvironmentFailure, match=r"cannot map \d+ bytes of host memory .*; lower host_memory_bytes"):
        stream(hybrid_pack.open_pack(packs.pack("nvfp4")), device, host_memory_bytes=1 << 50, chunk_bytes=1 << 48)
    assert device.calls == {}


def test_too_little_memory_is_seen_before_anything_is_allocated(packs: Packs) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    with late_device(limit=1000) as device:
        with pytest.raises(
            EnvironmentFailure, match=r"not enough memory \(expected \d+ bytes free, found 1000 bytes\)"
        ):
            stream(pack, device)
        assert device.calls == {}
