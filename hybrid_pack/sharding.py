"""Integers only: which rows, columns and experts a rank owns, and which sizes are legal.

Terms: H is the width the experts read and write, I their intermediate size, E their number. Tensor parallelism (tp)
splits I, expert parallelism (ep) splits E into contiguous blocks; rank = ep_rank * tp + tp_rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hybrid_pack.errors import UsageError

ROW_BLOCK = 64
"""Rows per block of every device layout; a rank's share of I must be a multiple of it (b12x 1.1.0)."""

QUANTISED_GROUP = 32
"""Columns of a group of NF3 and MXFP4. NF3 has no code for zero, so that zeros cannot fill up a group that I cuts."""

Tiles = tuple[int, int, int, int]
"""(fc1_tile_k, fc1_tile_n, fc2_tile_k, fc2_tile_n), b12x's ``force_tile_config``."""

TILE_CANDIDATES: tuple[Tiles, ...] = ((64, 256, 64, 256), (64, 128, 64, 128))
"""Tried in this order; both tiers of a layer are launched with the same tiles."""

TILE_EXCEPTIONS: dict[tuple[int, int], Tiles] = {(3584, 192): (128, 64, 64, 128)}
"""(H, I per rank) whose tiles are not the first candidate that fits: Kimi-K3's latent experts at TP16."""


@dataclass(frozen=True)
class Topology:
    """How many ways experts are split."""

    tensor_parallel: int = 1
    expert_parallel: int = 1

    def __post_init__(self) -> None:
        for name, value in (("tp", self.tensor_parallel), ("ep", self.expert_parallel)):
            if value < 1:
                raise UsageError("a parallel size must be at least 1", where=f"--{name}", found=value)

    @property
    def ranks(self) -> int:
        """Number of ranks, tp * ep."""
        return self.tensor_parallel * self.expert_parallel

    @property
    def folder(self) -> str:
        """Folder name of this topology inside a pack, ``tp<T>-ep<P>``."""
        return f"tp{self.tensor_parallel}-ep{self.expert_parallel}"

    def tp_rank(self, rank: int) -> int:
        """Which slice of I this rank holds."""
        return rank % self.tensor_parallel

    def ep_rank(self, rank: int) -> int:
        """Which block of experts this rank holds."""
        return rank // self.tensor_parallel

    def experts(self, rank: int, num_experts: int) -> range:
        """Global ids of the experts this rank holds, a contiguous block."""
        block = num_experts // self.expert_parallel
        first = self.ep_rank(rank) * block
        return range(first, first + block)


def tiles_for(hidden: int, intermediate_rank: int, gated: bool = True) -> Tiles | None:
    """The kernel tiles for a rank's geometry, or None where b12x 1.1.0 has none that fits.

    Args:
        hidden: H.
        intermediate_rank: The rank's share of I.
        gated: Whether w13 holds gate and up, or up alone.
    """
    rows = (2 if gated else 1) * intermediate_rank
    exception = TILE_EXCEPTIONS.get((hidden, intermediate_rank)) if gated else None
    if exception is not None:
        return exception
    for tiles in TILE_CANDIDATES:
        fc1_k, fc1_n, fc2_k, fc2_n = tiles
        if not (hidden % fc1_k or rows % fc1_n or intermediate_rank % fc2_k or hidden % fc2_n):
            return tiles
    return None


def why_not_hidden(hidden: int) -> str | None:
    """The reason no intermediate size whatever suits a hidden size, or None if some do."""
    if any(hidden % fc1_k == 0 and hidden % fc2_n == 0 for fc1_k, _, _, fc2_n in TILE_CANDIDATES):
        return None
    multiple = min(math.lcm(fc1_k, fc2_n) for fc1_k, _, _, fc2_n in TILE_CANDIDATES)
    return f"no kernel tile fits hidden size {hidden}, which is not a multiple of {multiple}"


def why_not_tp(hidden: int, intermediate: int, tp: int, gated: bool = True) -> str | None:
    """The reason a tensor-parallel size is illegal for a geometry, or None if it is legal."""
    if (reason := why_not_hidden(hidden)) is not None:
        return reason
    if intermediate % tp:
        return f"intermediate size {intermediate} is not divisible by {tp}"
    share = intermediate // tp
    if share % ROW_BLOCK:
        return f"a rank's share {intermediate}/{tp} = {share} is not a multiple of {ROW_BLOCK}"
    if tiles_for(hidden, share, gated) is None:
        ungated = "" if gated else " and no gate"
        return f"no kernel tile fits hidden size {hidden} with {share} intermediate rows a rank{ungated}"
    return None


def padded_intermediate(hidden: int, intermediate: int, tp: int, gated: bool = True) -> int | None:
    """The smallest intermediate size from ``intermediate`` on that can be split ``tp`` ways; None where none can.

    Whether tiles fit depends on H and on the share modulo the largest N tile alone, so the next few multiples tell.
    """
    largest = max(tiles[1] for tiles in TILE_CANDIDATES)
    first = -(-intermediate // (tp * ROW_BLOCK)) * tp * ROW_BLOCK
    sizes = range(first, first + largest * tp + 1, tp * ROW_BLOCK)
    return next((size for size in sizes if why_not_tp(hidden, size, tp, gated) is None), None)


def padding_advice(hidden: int, intermediate: int, tp: int, gated: bool = True) -> tuple[str, int] | None:
    """What ``--pad`` would do about an illegal size: (condition, the size it gives); None where it does nothing."""
    padded = padded_intermediate(hidden, intermediate, tp, gated)
    if padded is None:
        return None
    cut = intermediate % QUANTISED_GROUP
    return (
        f"where nothing is quantised ({intermediate} is not a multiple of {QUANTISED_GROUP}), " if cut else "",
        padded,
    )


def why_not_ep(num_experts: int, ep: int) -> str | None:
    """The reason an expert-parallel size is illegal, or None if it is legal."""
    return f"{num_experts} experts are not divisible by {ep}" if num_experts % ep else None


def legal_tp(hidden: int, intermediate: int, limit: int = 64, gated: bool = True) -> list[int]:
    """All legal tensor-parallel sizes up to a limit, ascending."""
    return [tp for tp in range(1, limit + 1) if why_not_tp(hidden, intermediate, tp, gated) is None]


def legal_ep(num_experts: int, limit: int | None = None) -> list[int]:
    """All legal expert-parallel sizes, by default up to one expert a rank, ascending."""
    return [ep for ep in range(1, (limit or num_experts) + 1) if why_not_ep(num_experts, ep) is None]


def require_legal(hidden: int, intermediate: int, num_experts: int, topology: Topology, gated: bool = True) -> Tiles:
    """The kernel tiles of a topology.

    Raises:
        UsageError: The topology cannot be; the message gives the reason and the sizes that can.
    """
    tp, ep = topology.tensor_parallel, topology.expert_parallel
    reason = why_not_tp(hidden, intermediate, tp, gated)
    if reason is not None:
        sizes = ", ".join(map(str, legal_tp(hidden, intermediate, gated=gated))) or "none"
        advice = padding_advice(hidden, intermediate, tp, gated)
        more = "" if advice is None else f"; or {advice[0]}--pad, to {advice[1]}"
        raise UsageError(
            f"tensor-parallel size {tp} is not possible: {reason}", where="--tp", hint=f"legal sizes: {sizes}{more}"
        )
    reason = why_not_ep(num_experts, ep)
    if reason is not None:
        sizes = ", ".join(map(str, legal_ep(num_experts)))
        raise UsageError(
            f"expert-parallel size {ep} is not possible: {reason}", where="--ep", hint=f"legal sizes: {sizes}"
        )
    tiles = tiles_for(hidden, intermediate // tp, gated)
    assert tiles is not None
    return tiles
