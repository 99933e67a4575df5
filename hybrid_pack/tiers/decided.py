"""What is needed where the tiers are decided: by a checkpoint with a bit map, or by a pack. Headers only."""

from __future__ import annotations

from pathlib import Path

from hybrid_pack.errors import DataError
from hybrid_pack.io.checkpoint import Checkpoint
from hybrid_pack.io.config import read_config
from hybrid_pack.io.manifest import rank_geometry, topology_of
from hybrid_pack.io.pack_base import pack_base
from hybrid_pack.plan import SCALE_FORMATS
from hybrid_pack.schemas.manifest import Manifest
from hybrid_pack.sharding import Topology
from hybrid_pack.tiers.needs import Needs, needs_of
from hybrid_pack.tiers.sizing import Split, geometry_of
from hybrid_pack.tiers.source import base_tensors, decoder_config

_FORMATS = {scale_format: name for name, scale_format in SCALE_FORMATS.items()}


def checkpoint_needs(checkpoint: Checkpoint, topology: Topology, *, pad: bool = False) -> Needs:
    """What a checkpoint would need, converted as it is.

    Args:
        checkpoint: The source, opened with its map.
        topology: tp and ep to convert for.
        pad: As ``convert --pad``.

    Raises:
        DataError: It has no bit map. (One that has packs the layers it names, so that there is one.)
        UsageError: An illegal topology.
    """
    if checkpoint.config.bit_map is None:
        squeezed = any(layer.tail for layer in checkpoint.layers.values())
        raise DataError(
            "there is no bit map, so no sizes to hold against cards",
            where=checkpoint.root,
            hint="give the map with --bit-map"
            if squeezed
            else "hybrid-pack plan chooses the tiers and shows what fits, or give a map with --bit-map",
        )
    config = checkpoint.config
    return needs_of(
        geometry_of(
            checkpoint.hidden, checkpoint.intermediate, config.num_experts, topology, gated=checkpoint.gated, pad=pad
        ),
        topology,
        config.num_experts,
        {index: Split(layer.kept, layer.kept_format) for index, layer in checkpoint.layers.items()},
        base_tensors(checkpoint.base),
        decoder_config(config.raw),
        config.num_layers,
    )


def pack_needs(root: Path, manifest: Manifest) -> Needs:
    """What a pack needs on the ranks it was made for.

    Args:
        root: Its folder.
        manifest: Its manifest, checked, so that the sizes of its shards are those of its own geometry and tiers.

    Raises:
        DataError: The header of a base file, or config.json, is missing or not right.
    """
    config = read_config(root)
    return needs_of(
        rank_geometry(manifest),
        topology_of(manifest),
        manifest.geometry.num_experts,
        {int(index): Split(tiers.kept, _FORMATS[tiers.kept_scale_format]) for index, tiers in manifest.layers.items()},
        base_tensors(pack_base(root, manifest)),
        decoder_config(config.raw),
        config.num_layers,
    )
