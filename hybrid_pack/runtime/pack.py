"""A pack opened for reading: its manifest, checked; layers are read when asked for. Needs no torch until then."""

from __future__ import annotations

from collections.abc import Mapping
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

    from hybrid_pack.runtime.layer import PackedMoELayer

_LISTED = 8
"""Longest list of layers spelled out in a message."""


def open_pack(path: str | Path) -> Pack:
    """Open a pack: its manifest is read and checked, nothing else is read.

    Args:
        path: The pack's folder.

    Raises:
        DataError: No manifest, or it is not right.
        EnvironmentFailure: It cannot be read.
    """
    root = Path(path)
    return Pack(root, read_manifest(root))


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

    def load_layer(self, layer: int, rank: int = 0, device: str | torch.device = "cpu") -> PackedMoELayer:
        """One rank's experts of one layer.

        File size and header are held against the manifest; digests are not computed (``hybrid-pack verify`` does that).
        On the CPU the tensors are views into a private mapping of the file: pages are read when touched, a write to a
        tensor changes only this process's memory, and the mapping lives as long as any of the tensors. The file must
        not be truncated meanwhile, and a system that forbids overcommit counts the mapping as memory in use. On other
        devices each mapped tensor is copied with ``.to(device)``, one after the other through pageable memory; a fast
        loader is not part of this version.

        Args:
            layer: One of ``layers``.
            rank: 0 .. ``topology.ranks`` - 1; rank = ep_rank * tensor_parallel + tp_rank.
            device: Where the tensors shall be.

        Raises:
            UsageError: No such layer, rank or device.
            DataError: The file is missing, or has another size or header than the manifest says.
            EnvironmentFailure: The file cannot be read, or the device is not available.
        """
        if layer not in self.layers:
            raise UsageError(
                f"layer {layer!r} is not in this pack", where=self.root, expected=_named(self.layers), found=layer,
                hint="dense layers and layers left out by --layers have no packed experts",
            )  # fmt: skip
        ranks = self.topology.ranks
        if rank not in range(ranks):
            sizes = f"tp {self.topology.tensor_parallel} x ep {self.topology.expert_parallel}"
            raise UsageError(
                f"this pack is for {sizes}", where=self.root, expected=f"rank 0..{ranks - 1}", found=f"rank {rank!r}"
            )
        from hybrid_pack.runtime.load import load_shard

        return load_shard(self.root, self.manifest, self._shards[layer, rank], device)


def _named(layers: tuple[int, ...]) -> str:
    """``one of 3, 4, 78``, or the ends of a long list."""
    if len(layers) <= _LISTED:
        return f"one of {', '.join(map(str, layers))}"
    return f"one of the {len(layers)} layers {layers[0]}..{layers[-1]}"
