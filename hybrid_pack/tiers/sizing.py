"""Bytes of experts on a rank: the very shapes and headers that ``convert`` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hybrid_pack.layouts.shard import RankGeometry, shard_tensors
from hybrid_pack.plan import SCALE_FORMATS, ShardPlan
from hybrid_pack.sharding import Topology, padded_intermediate, require_legal


@dataclass(frozen=True)
class Split:
    """The tiers of one layer.

    Attributes:
        kept: Kept expert ids, ascending.
        kept_format: ``nvfp4`` or ``mxfp4``; None where no expert is kept.
    """

    kept: tuple[int, ...]
    kept_format: str | None


@dataclass(frozen=True)
class RankBytes:
    """What a rank loads.

    Attributes:
        rank: ep_rank * tp + tp_rank.
        kept: Tensors of the kept tier.
        tail: Tensors of the tail.
        headers: Headers of its files.
        base: Base tensors, as ``tiers.base`` counts them.
    """

    rank: int
    kept: int
    tail: int
    headers: int
    base: int

    @property
    def experts(self) -> int:
        """Its expert files, whole."""
        return self.kept + self.tail + self.headers

    @property
    def total(self) -> int:
        """All its weights."""
        return self.experts + self.base


def geometry_of(
    hidden: int, intermediate: int, num_experts: int, topology: Topology, *, gated: bool = True, pad: bool = False
) -> RankGeometry:
    """Sizes of a rank's share.

    Raises:
        UsageError: The topology cannot be.
    """
    tp = topology.tensor_parallel
    if pad:
        intermediate = padded_intermediate(hidden, intermediate, tp, gated) or intermediate
    tiles = require_legal(hidden, intermediate, num_experts, topology, gated)
    return RankGeometry(hidden, intermediate // tp, tiles, gated)


def kept_cost(geometry: RankGeometry, kept_format: str) -> int:
    """Bytes by which a rank grows when an expert it holds moves from the tail to the kept tier."""

    def row(kept: int, tail: int) -> int:
        return sum(tensor.row_bytes for tensor in shard_tensors(geometry, kept, tail, SCALE_FORMATS[kept_format]))

    return row(1, 0) - row(0, 1)


def _file(geometry: RankGeometry, kept: int, tail: int, kept_format: str | None) -> tuple[int, int, int]:
    """(kept, tail, header) bytes of the file of a rank and layer; which experts they are changes no size."""
    tensors = shard_tensors(geometry, kept, tail, SCALE_FORMATS[kept_format])
    header = ShardPlan("", 0, 0, (), (), tensors).header
    tiers = {"kept": 0, "tail": 0}
    for tensor in tensors:
        tiers[tensor.tier] += tensor.nbytes
    return tiers["kept"], tiers["tail"], len(header)


def rank_bytes(
    geometry: RankGeometry, topology: Topology, num_experts: int, layers: Mapping[int, Split], base: int
) -> tuple[RankBytes, ...]:
    """Bytes of every rank.

    Args:
        geometry: Sizes of a rank's share.
        topology: tp and ep.
        num_experts: Experts in each layer.
        layers: Every layer that is packed.
        base: Base bytes of a rank.
    """
    ranks = []
    for rank in range(topology.ranks):
        held = topology.experts(rank, num_experts)
        counts = ((sum(expert in held for expert in split.kept), split.kept_format) for split in layers.values())
        files = [_file(geometry, kept, len(held) - kept, kept_format) for kept, kept_format in counts]
        kept, tail, headers = (sum(parts) for parts in zip(*files, strict=True))
        ranks.append(RankBytes(rank, kept, tail, headers, base))
    return tuple(ranks)
