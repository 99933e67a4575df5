"""From expert shards on disk to tensors: all checked against the manifest before anything is allocated.

On the CPU a shard is mapped without a copy. To a CUDA device its bytes travel once, through a bounded ring of pinned
buffers, straight to where they stay.
"""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from hybrid_pack.errors import EnvironmentFailure, UsageError
from hybrid_pack.runtime.buffers import HOST_MEMORY_BYTES, LoadBuffers, choose_sizes
from hybrid_pack.runtime.build import DTYPES, build_layer
from hybrid_pack.runtime.layer import Check, PackedMoELayer
from hybrid_pack.runtime.report import CHECK_DEFAULT, LoadedRank, LoadReport
from hybrid_pack.runtime.stream.device import Device, HostMemory
from hybrid_pack.runtime.stream.digests import ShardDigests
from hybrid_pack.runtime.stream.files import Direct, ShardFile
from hybrid_pack.runtime.stream.plan import Layout, plan_bytes, plan_rows, spans_of
from hybrid_pack.runtime.stream.session import Progress, Session, Source
from hybrid_pack.schemas.manifest import Manifest, ShardEntry


@dataclass(frozen=True)
class LoadOptions:
    """How to load; ``Pack.load_rank`` says what each means. None is the default."""

    check: Check | None = None
    host_memory_bytes: int | None = None
    readers: int | None = None
    chunk_bytes: int | None = None
    direct: Direct = "auto"
    buffers: LoadBuffers | None = None
    progress: Progress | None = None

    def __post_init__(self) -> None:
        if self.check not in (None, "structure", "digest"):
            raise UsageError("no such check", where="check", expected="structure or digest", found=repr(self.check))
        if self.direct not in ("auto", True, False):
            raise UsageError("no such choice", where="direct", expected="auto, True or False", found=repr(self.direct))
        if self.buffers is not None and (self.host_memory_bytes, self.readers, self.chunk_bytes) != (None, None, None):
            raise UsageError("host_memory_bytes, readers and chunk_bytes are those of the buffers", where="buffers")


@dataclass(frozen=True)
class _Traffic:
    """The part of a report that tells how bytes were read."""

    readers: int = 0
    chunk_bytes: int = 0
    host_bytes: int = 0
    device_bytes: int = 0
    direct_files: int = 0


def load_shards(
    root: Path, manifest: Manifest, entries: Sequence[ShardEntry], device: str | torch.device, options: LoadOptions
) -> LoadedRank:
    """Layers of one rank; ``Pack.load_rank`` says what is checked and what is copied.

    Args:
        root: The pack.
        manifest: Its manifest.
        entries: Shards of one rank, at least one.
        device: Where the tensors shall be.
        options: How.
    """
    target = target_of(device)
    if target.type == "cuda":
        return stream_shards(root, manifest, entries, open_device(target, options.buffers), options)
    if options.buffers is not None:
        raise UsageError("buffers are for loads to a CUDA device", where=target)
    began = time.perf_counter()
    checked = options.check or "structure"
    with _opened(root, manifest, entries) as files:
        traffic = _Traffic()
        if checked == "digest":  # by way of the page cache, where the mapping finds the bytes again
            plain = replace(options, direct=False) if options.direct == "auto" else options
            _, traffic = _read(files, HostMemory(discard=True), checked, plain)
        layers = [_map(manifest, file, target, checked) for file in files]
    read = checked == "digest" or target.type != "cpu"
    return LoadedRank(layers, _report(entries, target, checked, read, traffic, began))


def stream_shards(
    root: Path, manifest: Manifest, entries: Sequence[ShardEntry], device: Device, options: LoadOptions
) -> LoadedRank:
    """``load_shards`` for a device that is open."""
    began = time.perf_counter()
    checked = options.check or CHECK_DEFAULT
    with _opened(root, manifest, entries) as files:
        memory, traffic = _read(files, device, checked, options)
    with torch.inference_mode(False):  # views made in it are inference tensors to some versions of torch
        layers = [_build(manifest, entry, flat, checked) for entry, flat in zip(entries, memory, strict=True)]
    return LoadedRank(layers, _report(entries, device.device, checked, True, traffic, began))


def target_of(device: str | torch.device) -> torch.device:
    """The device a caller names, which exists.

    Raises:
        UsageError: No such kind of device.
        EnvironmentFailure: This machine does not have it.
    """
    if sys.byteorder != "little":
        raise EnvironmentFailure("shards are read in place, which needs a little-endian machine", found=sys.byteorder)
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError("not a device", expected="such as cpu or cuda:0", found=repr(device)) from error
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise EnvironmentFailure(f"{target} is not available", found=f"{torch.cuda.device_count()} CUDA devices")
    return target


def open_device(target: torch.device, buffers: LoadBuffers | None = None) -> Device:
    """A CUDA device to load to; that of the buffers where there are any.

    Raises:
        UsageError: The buffers are those of another device.
        EnvironmentFailure: The device does not work.
    """
    from hybrid_pack.runtime.stream.cuda import CudaDevice, with_index

    if buffers is None:
        return CudaDevice(target)
    if buffers.device != with_index(target):
        raise UsageError("buffers of another device", where=with_index(target), found=buffers.device)
    return buffers.ring.device


@contextmanager
def _opened(root: Path, manifest: Manifest, entries: Sequence[ShardEntry]) -> Iterator[list[ShardFile]]:
    """All shards, checked as far as a few kilobytes of each tell; closed at the end."""
    with ExitStack() as stack:
        yield [stack.enter_context(closing(ShardFile(root, manifest, entry))) for entry in entries]


def _read(
    files: Sequence[ShardFile], device: Device, checked: Check, options: LoadOptions
) -> tuple[list[torch.Tensor], _Traffic]:
    """Device memory of each shard, filled."""
    layouts = [Layout.of(spans_of(file.entry)) for file in files]
    wanted = sum(layout.nbytes for layout in layouts)
    free = device.free_bytes()
    if free is not None and wanted > free:
        raise EnvironmentFailure(
            "not enough memory", where=device.device, expected=f"{wanted} bytes free", found=f"{free} bytes",
            hint="load fewer layers, or use a pack for more ranks",
        )  # fmt: skip
    for file in files:
        file.choose(options.direct)
    limit = HOST_MEMORY_BYTES if options.host_memory_bytes is None else options.host_memory_bytes
    with ExitStack() as stack:
        buffers = options.buffers
        if buffers is None:
            sizes = choose_sizes(limit, options.readers, options.chunk_bytes)
            buffers = stack.enter_context(LoadBuffers.of(device, sizes))
        chunk = buffers.sizes.chunk_bytes
        sources = [_source(file, layout, chunk, checked) for file, layout in zip(files, layouts, strict=True)]
        readers = min(buffers.sizes.readers, sum(len(source.tasks) for source in sources))
        memory = Session(buffers.ring, readers).run(sources, options.progress)
        direct = sum(file.direct for file in files)
        return memory, _Traffic(readers, chunk, buffers.ring.used_bytes, sum(map(len, memory)), direct)


def _source(file: ShardFile, layout: Layout, chunk_bytes: int, checked: Check) -> Source:
    if checked == "digest":
        digests = ShardDigests(file.path, file.entry, layout.spans)
        return Source(file, layout, plan_rows(layout.spans, chunk_bytes), digests)
    return Source(file, layout, plan_bytes(file.data_begin, file.entry.bytes, chunk_bytes), None)


def _build(manifest: Manifest, entry: ShardEntry, flat: torch.Tensor, checked: Check) -> PackedMoELayer:
    """A layer whose tensors are parts of one piece of device memory."""
    layout = Layout.of(spans_of(entry))
    begins = {span.begin: place for span, place in zip(layout.spans, layout.places, strict=True)}

    def tensor(name: str) -> torch.Tensor:
        at = entry.tensors[name]
        place = begins[at.begin]
        return flat[place : place + at.end - at.begin].view(DTYPES[at.dtype]).reshape(at.shape)

    return build_layer(manifest, entry, tensor, checked)


def _map(manifest: Manifest, file: ShardFile, target: torch.device, checked: Check) -> PackedMoELayer:
    """A layer whose tensors lie in a private mapping of its shard, or are copied from it one by one.

    ACCESS_COPY rather than ACCESS_READ: torch warns about buffers that cannot be written. The file is opened read-only
    all the same. Each tensor's storage holds a reference to the mapping, so it is unmapped with the last tensor.
    """
    try:
        mapping = mmap.mmap(file.fd, 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise EnvironmentFailure("cannot read", where=file.path, found=error.strerror) from error

    def tensor(name: str) -> torch.Tensor:
        at = file.entry.tensors[name]
        dtype = DTYPES[at.dtype]
        count = (at.end - at.begin) // dtype.itemsize
        mapped = torch.frombuffer(mapping, dtype=dtype, count=count, offset=at.begin).reshape(at.shape)
        return mapped if target.type == "cpu" else mapped.to(target)

    return build_layer(manifest, file.entry, tensor, checked)


def _report(
    entries: Sequence[ShardEntry], device: torch.device, checked: Check, read: bool, traffic: _Traffic, began: float
) -> LoadReport:
    return LoadReport(
        layers=tuple(entry.layer for entry in entries),
        rank=entries[0].rank,
        device=str(device),
        checked=checked,
        read=read,
        tensors=sum(len(entry.tensors) for entry in entries),
        payload_bytes=sum(t.end - t.begin for entry in entries for t in entry.tensors.values()),
        seconds=time.perf_counter() - began,
        **asdict(traffic),
    )
