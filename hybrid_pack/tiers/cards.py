"""What fits on cards of which size."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hybrid_pack.errors import UsageError
from hybrid_pack.sharding import Topology
from hybrid_pack.tiers.kv import KvCache

MIB = 1 << 20

CARDS: Mapping[int, int] = {
    24: 23028 * MIB,  # A10
    32: 32607 * MIB,  # RTX 5090
    48: 46068 * MIB,  # L40S, A40
    80: 81559 * MIB,  # H100
    96: 97887 * MIB,  # RTX PRO 6000 Blackwell
    141: 143771 * MIB,  # H200
    192: 183359 * MIB,  # B200
}
"""Name in GB to bytes: the total that nvidia-smi shows for the smallest card sold by that name."""

OTHER_CARD = 0.93
"""A card that is not in the table is taken for this share of its name in GiB, as the least generous ones there."""

WORKING_ROOM = 4 << 30
"""An assumption: what weights and KV cache leave for the CUDA context, NCCL, activations, workspaces, CUDA graphs."""

_GIVEN = re.compile(r"(\d{1,4})\s*[xX×]\s*(\d{1,5})\s*(?:GB|gb|G|g)?")


@dataclass(frozen=True)
class Fit:
    """One size of card, one for each rank.

    Attributes:
        cards: How many.
        name_gb: The size by its name.
        memory: Bytes it really has.
        needed: Weights of the largest rank and the working room.
        tokens_bf16: Tokens of KV cache in what is left, over all sequences; None where not estimated or not fitting.
        tokens_fp8: Likewise with an FP8 cache.
    """

    cards: int
    name_gb: int
    memory: int
    needed: int
    tokens_bf16: int | None
    tokens_fp8: int | None

    @property
    def fits(self) -> bool:
        """Whether weights and working room fit."""
        return self.needed <= self.memory

    @property
    def left(self) -> int:
        """Bytes left for the KV cache; negative: missing."""
        return self.memory - self.needed


def parse_cards(text: str) -> tuple[int, int]:
    """(how many, GB by name) of ``4x96GB``.

    Raises:
        UsageError: It is not of that form.
    """
    match = _GIVEN.fullmatch(text.strip())
    if match is None or not int(match[1]) or not int(match[2]):
        raise UsageError("not a number and a size of cards", where="--cards", expected="such as 4x96GB", found=text)
    return int(match[1]), int(match[2])


def ranks_for(cards: str | None, tp: int | None, ep: int) -> tuple[Topology, tuple[int, ...]]:
    """(topology, sizes of card to show) of what was asked for: one card for each rank.

    Args:
        cards: Such as ``4x96GB``; None shows every size of the table.
        tp: Tensor-parallel size; None is what the number of cards leaves, or 1.
        ep: Expert-parallel size.

    Raises:
        UsageError: The number of cards is not tp * ep.
    """
    if cards is None:
        return Topology(1 if tp is None else tp, ep), tuple(CARDS)
    count, name_gb = parse_cards(cards)
    topology = Topology(max(1, count // max(ep, 1)) if tp is None else tp, ep)
    if topology.ranks != count:
        expected = f"tp * ep = {topology.ranks} cards" if tp is not None else f"a multiple of ep = {ep}"
        raise UsageError("one card holds one rank", where="--cards", expected=expected, found=count)
    return topology, (name_gb,)


def memory_of(name_gb: int) -> int:
    """Bytes of a card of that name."""
    return CARDS.get(name_gb) or int(name_gb * (1 << 30) * OTHER_CARD)


def fits(weights: int, cards: int, kv: KvCache, room: int | None, sizes: Iterable[int]) -> tuple[Fit, ...]:
    """Hold a rank's weights against cards.

    Args:
        weights: Bytes of the largest rank.
        cards: Number of ranks.
        kv: Bytes of a token.
        room: Working room; None is ``WORKING_ROOM``.
        sizes: Cards by name in GB.
    """
    result = []
    for name in sizes:
        memory, needed = memory_of(name), weights + (WORKING_ROOM if room is None else room)
        known = kv.kind is not None and needed <= memory
        result.append(
            Fit(
                cards=cards,
                name_gb=name,
                memory=memory,
                needed=needed,
                tokens_bf16=(memory - needed) // kv.bf16 if known else None,
                tokens_fp8=(memory - needed) // kv.fp8 if known else None,
            )
        )
    return tuple(result)
