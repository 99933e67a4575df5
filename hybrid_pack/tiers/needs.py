"""What serving needs of every rank: expert files, base tensors and a token's KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_pack.io.names import parse
from hybrid_pack.layouts.shard import RankGeometry
from hybrid_pack.sharding import Topology
from hybrid_pack.tiers.base import BaseBytes, base_bytes
from hybrid_pack.tiers.kv import KvCache, kv_cache
from hybrid_pack.tiers.sizing import RankBytes, Split, rank_bytes
from hybrid_pack.tiers.source import BaseTensor


@dataclass(frozen=True)
class Needs:
    """What ranks hold.

    Attributes:
        topology: tp and ep.
        intermediate: I as it is packed, padding counted.
        ranks: Bytes of every rank.
        base: Base tensors in more detail.
        kv: Bytes of KV cache a token needs on a rank.
    """

    topology: Topology
    intermediate: int
    ranks: tuple[RankBytes, ...]
    base: BaseBytes
    kv: KvCache

    @property
    def largest(self) -> RankBytes:
        """The rank with the most bytes."""
        return max(self.ranks, key=lambda rank: rank.total)


def decoder_layers(num_layers: int, packed: Iterable[int], base: Iterable[BaseTensor]) -> int:
    """Decoder layers with the MTP layers that have experts, packed or in the base; 0 where that is not known.

    Args:
        num_layers: Decoder layers without MTP layers; 0 where that is not known.
        packed: Layers whose experts are packed.
        base: Every other tensor.
    """
    with_experts = {*packed, *(name.layer for tensor in base if (name := parse(tensor.name)) is not None)}
    return num_layers and num_layers + sum(layer >= num_layers for layer in with_experts)


def needs_of(
    geometry: RankGeometry,
    topology: Topology,
    num_experts: int,
    layers: Mapping[int, Split],
    base: tuple[BaseTensor, ...],
    config: Mapping[str, Any],
    num_layers: int,
) -> Needs:
    """Count all of it.

    Args:
        geometry: Sizes of a rank's share.
        topology: tp and ep.
        num_experts: Experts in each layer.
        layers: Every layer that is packed.
        base: Every other tensor.
        config: The decoder's configuration.
        num_layers: Decoder layers without MTP layers; 0 where that is not known.
    """
    tp = topology.tensor_parallel
    counted = base_bytes(base, tp, config)
    return Needs(
        topology=topology,
        intermediate=geometry.intermediate * tp,
        ranks=rank_bytes(geometry, topology, num_experts, layers, counted.per_rank),
        base=counted,
        kv=kv_cache(config, decoder_layers(num_layers, layers, base), tp),
    )
