"""From a shard's tensors to a ``PackedMoELayer``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch

from hybrid_pack.io.manifest import rank_geometry, rank_tiers
from hybrid_pack.layouts.shard import Tier
from hybrid_pack.runtime.layer import Check, LayerGeometry, PackedMoELayer, TierWeights
from hybrid_pack.schemas.manifest import Manifest, ShardEntry

DTYPES = {"I32": torch.int32, "U8": torch.uint8, "F32": torch.float32}


def layer_geometry(manifest: Manifest, layer: int) -> LayerGeometry:
    """The sizes and formats of a rank's experts of a layer, from the manifest alone."""
    geometry = rank_geometry(manifest)
    return LayerGeometry(
        hidden_size=geometry.hidden,
        intermediate_size=geometry.intermediate,
        num_experts=manifest.geometry.num_experts,
        top_k=manifest.geometry.top_k,
        kept_scale_format=manifest.layers[str(layer)].kept_scale_format,
        nf3_levels=manifest.layout.nf3_levels,
        activation=manifest.layout.activation,
        gated=geometry.gated,
        expert_biases=manifest.layout.expert_biases,
    )


def build_layer(
    manifest: Manifest, entry: ShardEntry, tensor: Callable[[str], torch.Tensor], checked: Check
) -> PackedMoELayer:
    """One rank's experts of one layer.

    Args:
        manifest: Of the pack.
        entry: The shard's entry in it.
        tensor: Gives the tensor of a name, such as ``kept.w13``.
        checked: What was held against the manifest.
    """
    kept, tail = rank_tiers(manifest, entry.layer, entry.rank)

    def tier(name: Tier, ids: tuple[int, ...]) -> TierWeights | None:
        if not ids:
            return None
        return TierWeights(**{field.name: tensor(f"{name}.{field.name}") for field in fields(TierWeights)})

    return PackedMoELayer(
        layer=entry.layer,
        rank=entry.rank,
        kept=tier("kept", kept),
        tail=tier("tail", tail),
        geometry=layer_geometry(manifest, entry.layer),
        tiles=manifest.layout.tiles,
        checked=checked,
    )
