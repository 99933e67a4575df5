"""Opening packs and mapping layers: what is read, what is refused, and that nothing is copied."""

from __future__ import annotations

import gc
import json
import mmap
import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

import hybrid_pack
from hybrid_pack import DataError, EnvironmentFailure, UsageError
from hybrid_pack.runtime import TierWeights
from tests.runtime.dialects import MAPPED, MTP, Packs

Copy = Callable[..., Path]
SHARD = "experts/tp1-ep1/rank-0/layer-001.safetensors"


def mappings(path: Path) -> list[tuple[int, int, str]]:
    """(first address, end, permissions) of this process's mappings of a file."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            span, flags = line.split()[:2]
            first, end = (int(part, 16) for part in span.split("-"))
            found.append((first, end, flags))
    return found


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_only_the_manifest_is_read(packs: Packs, tmp_path: Path) -> None:
    shutil.copy(packs.pack("nvfp4", 2, 2) / "hybrid_pack.json", tmp_path)
    for path in (tmp_path, str(tmp_path)):
        pack = hybrid_pack.open_pack(path)
        assert pack.root == tmp_path and pack.layers == (MAPPED, MTP) and pack.tiles == (64, 256, 64, 256)
        assert (pack.topology.tensor_parallel, pack.topology.expert_parallel) == (2, 2)
        assert str(tmp_path) in repr(pack) and len(repr(pack)) < 300


def test_no_pack(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not a pack: it has no manifest"):
        hybrid_pack.open_pack(tmp_path)
    with pytest.raises(UsageError, match=r"nowhere: no such folder"):
        hybrid_pack.open_pack(tmp_path / "nowhere")


def test_tensors_are_those_of_the_file(packs: Packs) -> None:
    safetensors_torch = pytest.importorskip("safetensors.torch")
    for name in ("nvfp4", "mxfp4"):
        pack = hybrid_pack.open_pack(packs.pack(name, 2, 2))
        for shard in pack.manifest.shards:
            layer = pack.load_layer(shard.layer, shard.rank)
            official = safetensors_torch.load_file(pack.root / shard.path)
            ours = {
                f"{tier}.{field.name}": getattr(weights, field.name)
                for tier, weights in (("kept", layer.kept), ("tail", layer.tail))
                if weights is not None
                for field in fields(TierWeights)
            }
            assert set(ours) == set(official)
            for key, tensor in official.items():
                assert ours[key].dtype == tensor.dtype and ours[key].shape == tensor.shape and ours[key].is_contiguous()
                assert torch.equal(ours[key], tensor)
            assert layer.layer == shard.layer and layer.rank == shard.rank and layer.device == torch.device("cpu")
            assert layer.geometry.intermediate_size == 256 and layer.geometry.num_experts == 8


def test_views_lie_in_a_private_mapping(copy: Copy) -> None:
    root = copy("nvfp4")
    path = (root / SHARD).resolve()
    before = path.read_bytes()
    path.chmod(0o400)
    pack = hybrid_pack.open_pack(root)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = pack.load_layer(MAPPED)
    (first, end, flags) = mappings(path)[0]
    assert flags == "rw-p" and end - first >= len(before)
    entries = next(s for s in pack.manifest.shards if s.layer == MAPPED).tensors
    for tier in ("kept", "tail"):
        for field in fields(TierWeights):
            tensor = getattr(getattr(layer, tier), field.name)
            assert tensor.data_ptr() - first == entries[f"{tier}.{field.name}"].begin
            assert tensor.nbytes == entries[f"{tier}.{field.name}"].end - entries[f"{tier}.{field.name}"].begin
    assert layer.tail is not None
    layer.tail.w13.fill_(-1)
    layer.tail.w13_global_scale.zero_()
    assert path.read_bytes() == before
    again = pack.load_layer(MAPPED)
    assert again.tail is not None and bool(again.tail.w13_global_scale.all())


def test_the_mapping_lives_as_long_as_any_tensor(copy: Copy) -> None:
    root = copy("nvfp4")
    path = (root / SHARD).resolve()
    layer = hybrid_pack.open_pack(root).load_layer(MAPPED)
    assert layer.tail is not None
    scale = layer.tail.w2_scale[2]
    expected = scale.clone()
    del layer
    gc.collect()
    assert len(mappings(path)) == 1 and torch.equal(scale, expected)
    del scale
    gc.collect()
    assert mappings(path) == []


def test_a_refused_file_leaves_no_mapping_and_no_descriptor(copy: Copy) -> None:
    root = copy("nvfp4")
    with (root / SHARD).open("ab") as file:
        file.write(b"x")
    before = descriptors()
    with pytest.raises(DataError):
        hybrid_pack.open_pack(root).load_layer(MAPPED)
    gc.collect()
    assert mappings((root / SHARD).resolve()) == [] and descriptors() == before


def test_a_hub_cache_of_links_is_read(copy: Copy) -> None:
    root = copy("nvfp4")
    blob = root.parent / "blob"
    (root / SHARD).rename(blob)
    (root / SHARD).symlink_to(os.path.relpath(blob, (root / SHARD).parent))
    assert hybrid_pack.open_pack(root).load_layer(MAPPED).expert_ids == tuple(range(8))


def edit(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(change(path.read_bytes())) and None


def header_text(change: Callable[[str], str]) -> Callable[[Path], None]:
    def change_bytes(data: bytes) -> bytes:
        end = 8 + int.from_bytes(data[:8], "little")
        text = change(data[8:end].decode())
        assert len(text) == end - 8
        return data[:8] + text.encode() + data[end:]

    return edit(change_bytes)


def reordered(text: str) -> str:
    entries = json.loads(text)
    return json.dumps(dict(reversed(entries.items())), separators=(",", ":")).ljust(len(text))


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def remove_folder(path: Path) -> None:
    shutil.rmtree(path.parent)
    path.parent.write_text("a file where the folder was")


def swap_ids(path: Path) -> None:
    data = bytearray(path.read_bytes())
    entry = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["kept.expert_ids"]
    begin = 8 + int.from_bytes(data[:8], "little") + entry["data_offsets"][0]
    data[begin : begin + 8] = data[begin + 4 : begin + 8] + data[begin : begin + 4]
    path.write_bytes(data)


MUTATIONS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (Path.unlink, r"no such file \(expected a file of \d+ bytes, found nothing\)"),
    "folder missing": (remove_folder, r"no such file \(expected a file of \d+ bytes, found nothing\)"),
    "dangling link": (make_dangling, r"no such file \(expected .*, found a link to a file that is not there\)"),
    "a folder": (make_folder, r"not a regular file"),
    "empty": (edit(lambda data: b""), r"the file is truncated \(expected \d+ bytes, found 0 bytes\)"),
    "one byte short": (edit(lambda data: data[:-1]), r"the file is truncated \(expected \d+ bytes, found \d+ bytes\)"),
    "header only": (edit(lambda data: data[:4096]), r"the file is truncated \(expected \d+ bytes, found 4096 bytes\)"),
    "one byte long": (edit(lambda data: data + b"\0"), r"the file is too long \(expected \d+ bytes, found \d+ bytes\)"),
    "length": (edit(lambda data: bytes([data[0] ^ 8]) + data[1:]), r"byte 0 of the header is not the one"),
    "dtype": (header_text(lambda text: text.replace("I32", "U32", 1)), r"of the header .*expected .*I32.*found .*U32"),
    "name": (header_text(lambda text: text.replace("tail.w13", "kept.w13", 1)), r"byte \d+ of the header"),
    "order": (header_text(reordered), r"byte \d+ of the header"),
    "padding": (edit(lambda data: data[:4095] + b"\0" + data[4096:]), r"byte 4095 of the header"),
    "expert ids": (swap_ids, r"kept\.expert_ids\[0\] is not the manifest's \(expected \d, found \d\)"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_damaged_files_are_refused(copy: Copy, name: str) -> None:
    mutate, message = MUTATIONS[name]
    root = copy("nvfp4")
    pack = hybrid_pack.open_pack(root)
    mutate(root / SHARD)
    with pytest.raises(DataError, match=message) as caught:
        pack.load_layer(MAPPED)
    assert caught.value.where == str(root / SHARD) and caught.value.hint
    assert "\n" not in str(caught.value)
    if (root / SHARD).parent.is_dir():
        assert pack.load_layer(MTP).expert_ids == tuple(range(8)), "other layers are not affected"


CALLS = [
    ((0,), r"layer 0 is not in this pack \(expected one of 1, 2, found 0\)"),
    ((-1,), r"layer -1 is not in this pack"),
    (("1",), r"layer '1' is not in this pack"),
    ((None,), r"layer None is not in this pack"),
    ((1, 4), r"this pack is for tp 2 x ep 2 \(expected rank 0\.\.3, found rank 4\)"),
    ((1, -1), r"expected rank 0\.\.3, found rank -1"),
    ((1, None), r"expected rank 0\.\.3, found rank None"),
    ((1, 0, "gpu"), r"not a device \(expected such as cpu or cuda:0, found 'gpu'\)"),
    ((1, 0, None), r"not a device"),
]


@pytest.mark.parametrize(("arguments", "message"), CALLS)
def test_wrong_calls(packs: Packs, arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hybrid_pack.open_pack(packs.pack("nvfp4", 2, 2)).load_layer(*arguments)  # type: ignore[arg-type]


def test_long_lists_of_layers_are_not_spelled_out(packs: Packs) -> None:
    from hybrid_pack.runtime.pack import _named

    assert _named((3, 4, 78)) == "one of 3, 4, 78"
    assert _named(tuple(range(3, 79))) == "one of the 76 layers 3..78"


def test_no_such_gpu(packs: Packs) -> None:
    index = torch.cuda.device_count()
    with pytest.raises(EnvironmentFailure, match=rf"cuda:{index} is not available \(found {index} CUDA devices\)"):
        hybrid_pack.open_pack(packs.pack("nvfp4")).load_layer(MAPPED, device=f"cuda:{index}")


def test_the_system_fails(packs: Packs, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*args: object, **kwargs: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    monkeypatch.setattr(mmap, "mmap", out_of_memory)
    with pytest.raises(EnvironmentFailure, match=r"layer-001.safetensors: cannot read .*Cannot allocate memory"):
        pack.load_layer(MAPPED)


def test_big_endian_machines_are_refused(packs: Packs, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    monkeypatch.setattr("sys.byteorder", "big")
    with pytest.raises(EnvironmentFailure, match="little-endian"):
        pack.load_layer(MAPPED)


def test_ids_are_those_of_the_manifest(packs: Packs) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4", 2, 2))
    tiers = pack.manifest.layers[str(MAPPED)]
    found: dict[str, list[int]] = {"kept": [], "tail": []}
    for rank in range(4):
        layer = pack.load_layer(MAPPED, rank)
        for tier in ("kept", "tail"):
            weights = getattr(layer, tier)
            found[tier] += [] if weights is None else weights.expert_ids.tolist()
    assert np.array_equal(np.unique(found["kept"]), tiers.kept) and np.array_equal(np.unique(found["tail"]), tiers.tail)
    assert len(found["kept"]) + len(found["tail"]) == 16
