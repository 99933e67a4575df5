"""A pack opened for reading: its manifest, checked; layers are read when asked for. Needs no torch until then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid_pack.errors import UsageError
from hybrid_pack.io.manifest import read_manifest, topology_of
from hybrid_pack.schemas.manifest import Manifest, ShardEntry
from hybrid_pack.sharding import Tiles, Topology

if TYPE_CHECKING:
    import torch

    from hybrid_pack.runtime.buffers import LoadBuffers
    from hybrid_pack.runtime.layer import Check, PackedMoELayer
    from hybrid_pack.runtime.report import LoadedRank
    from hybrid_pack.runtime.stream.files import Direct
    from hybrid_pack.runtime.stream.session import Progress

_LISTED = 8
"""Longest list of layers spelled out in a message."""


def open_pack(path: str | Path, *, expect_tp: int | None = None, expect_ep: int | None = None) -> Pack:
    """Open a pack: its manifest is read and checked, nothing else is read.

    Args:
        path: The pack's folder.
        expect_tp: Tensor-parallel size it must have been made for, if given.
        expect_ep: Expert-parallel size likewise.

    Raises:
        UsageError: No such folder, or it was made for other sizes.
        DataError: No manifest, or it is not right.
        EnvironmentFailure: It cannot be read.
    """
    root = Path(path)
    pack = Pack(root, read_manifest(root))
    pack.require(expect_tp, expect_ep)
    return pack


@dataclass(frozen=True, eq=False)
class Pack:
    """An opened pack; make one with ``open_pack``.

    Attributes:
        root: Its folder.
        manifest: The checked manifest.
    """

    root: Path
    manifest: Manifest = field(repr=False)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Packed layers, ascending."""
        return tuple(int(layer) for layer in self.manifest.layers)

    @cached_property
    def topology(self) -> Topology:
        """How experts are split over ranks."""
        return topology_of(self.manifest)

    @property
    def tiles(self) -> Tiles:
        """(fc1_tile_k, fc1_tile_n, fc2_tile_k, fc2_tile_n) the kernel must be launched with."""
        return self.manifest.layout.tiles

    @cached_property
    def _shards(self) -> Mapping[tuple[int, int], ShardEntry]:
        return {(shard.layer, shard.rank): shard for shard in self.manifest.shards}

    def require(self, tp: int | None = None, ep: int | None = None) -> None:
        """Refuse a pack of another topology than the caller runs with; no pack is ever narrowed or padded to fit.

        Args:
            tp: Tensor-parallel size wanted; None is any.
            ep: Expert-parallel size wanted; None is any.

        Raises:
            UsageError: The pack was made for another one.
        """
        made = self.topology.tensor_parallel, self.topology.expert_parallel
        wanted = made[0] if tp is None else tp, made[1] if ep is None else ep
        if wanted != made:
            raise UsageError(
                "this pack was made for other ranks", where=self.root, expected=f"tp {wanted[0]} x ep {wanted[1]}",
                found=f"tp {made[0]} x ep {made[1]}",
                hint=f"convert {self.manifest.source.name} again with --tp {wanted[0]} --ep {wanted[1]} "
                "and the options it was made with",
            )  # fmt: skip

    def load_layer(
        self,
        layer: int,
        rank: int = 0,
        device: str | torch.device = "cpu",
        *,
        check: Check | None = None,
        host_memory_bytes: int | None = None,
        readers: int | None = None,
        direct: Direct = "auto",
        buffers: LoadBuffers | None = None,
    ) -> PackedMoELayer:
        """One rank's experts of one layer; ``load_rank`` loads several faster, and says more.

        Args:
            layer: One of ``layers``.
            rank: As in ``load_rank``, and so are the others.
            device: Where the tensors shall be.
            check: What to hold against the manifest; ``checked`` of the result says what was.
            host_memory_bytes: Most host memory for buffers.
            readers: Threads that read.
            direct: Whether to read past the page cache.
            buffers: Kept from load to load, which saves making them each time.

        Raises:
            UsageError: No such layer, rank, device or choice.
            DataError: The file is missing, or is not the one the manifest describes.
            EnvironmentFailure: The file cannot be read, or the device is not available or has not enough memory.
        """
        loaded = self.load_rank(
            rank, device, (layer,), check=check, host_memory_bytes=host_memory_bytes, readers=readers, direct=direct,
            buffers=buffers,
        )  # fmt: skip
        return loaded[layer]

    def load_rank(
        self,
        rank: int = 0,
        device: str | torch.device = "cpu",
        layers: Iterable[int] | None = None,
        *,
        check: Check | None = None,
        host_memory_bytes: int | None = None,
        readers: int | None = None,
        chunk_bytes: int | None = None,
        direct: Direct = "auto",
        buffers: LoadBuffers | None = None,
        progress: Progress | None = None,
        expect_tp: int | None = None,
        expect_ep: int | None = None,
    ) -> LoadedRank:
        """One rank's experts of several layers, as a mapping from layer to ``PackedMoELayer`` with a ``report``.

        Size, header and expert ids of every shard, the device and its free memory are checked before anything is
        allocated. No file is opened but the shards asked for.

        On the CPU the tensors are views into a private mapping of the file: pages are read when touched, a write to a
        tensor changes only this process's memory, and the mapping lives as long as any of the tensors. The file must
        not be truncated meanwhile, and a system that forbids overcommit counts the mapping as memory in use.

        To a CUDA device the bytes travel once: several threads read them into a ring of pinned buffers, and copies on
        a stream of their own take them to where they stay. A layer's tensors are parts of one allocation, each at a
        multiple of 256 bytes. When the call returns, every copy is done: any stream may use them. The memory beyond
        the tensors is the ring, which is given back unless it is the caller's (``buffers``). If anything fails, an
        interrupt included, all memory is given back, and the call can be repeated.

        To other devices each mapped tensor is copied with ``.to(device)``.

        Args:
            rank: 0 .. ``topology.ranks`` - 1; rank = ep_rank * tensor_parallel + tp_rank.
            device: Where the tensors shall be.
            layers: Some of ``layers``, in the order they shall be loaded; all by default.
            check: ``structure``, or ``digest`` for every byte; by default ``digest`` on CUDA devices and ``structure``
                elsewhere.
            host_memory_bytes: Most host memory for buffers, at least 512 KiB; by default 256 MiB.
            readers: Threads that read; by default one a usable core, at most 12.
            chunk_bytes: Most bytes of one read and one copy; by default 8 MiB.
            direct: Whether to read past the page cache. ``auto``: for files most of which are not in it. Files read
                that way are not in it afterwards either.
            buffers: Kept from load to load, instead of the three sizes.
            progress: Told how it goes on, by the calling thread.
            expect_tp: Tensor-parallel size the pack must have been made for, if given.
            expect_ep: Expert-parallel size likewise.

        Raises:
            UsageError: No such layer, rank, device or choice; or the pack was made for other ranks.
            DataError: A file is missing, or is not the one the manifest describes.
            EnvironmentFailure: A file cannot be read, or the device is not available or has not enough memory.
        """
        self.require(expect_tp, expect_ep)
        wanted = self.layers if layers is None else tuple(layers)
        self._check_layers(wanted)
        ranks = self.topology.ranks
        if rank not in range(ranks):
            sizes = f"tp {self.topology.tensor_parallel} x ep {self.topology.expert_parallel}"
            raise UsageError(
                f"this pack is for {sizes}", where=self.root, expected=f"rank 0..{ranks - 1}", found=f"rank {rank!r}"
            )
        from hybrid_pack.runtime.load import LoadOptions, load_shards

        options = LoadOptions(check, host_memory_bytes, readers, chunk_bytes, direct, buffers, progress)
        entries = [self._shards[layer, rank] for layer in wanted]
        return load_shards(self.root, self.manifest, entries, device, options)

    def _check_layers(self, wanted: tuple[int, ...]) -> None:
        for layer in wanted:
            if layer not in self.layers:
                raise UsageError(
                    f"layer {layer!r} is not in this pack", where=self.root, expected=_named(self.layers), found=layer,
                    hint="dense layers and layers left out by --layers have no packed experts",
                )  # fmt: skip
        if not wanted or len(set(wanted)) != len(wanted):
            raise UsageError("layers must be at least one, each once", where=self.root, found=list(wanted))


def _named(layers: tuple[int, ...]) -> str:
    """``one of 3, 4, 78``, or the ends of a long list."""
    if len(layers) <= _LISTED:
        return f"one of {', '.join(map(str, layers))}"
    return f"one of the {len(layers)} layers {layers[0]}..{layers[-1]}"
