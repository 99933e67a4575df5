"""Which experts are kept: pure functions of the saliency.

Every choice is of the largest first; equal ones go by the lower layer, then the lower expert id. Nothing depends on
the order in which a file lists its layers, on hashing, or on the machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from hybrid_pack.tiers.saliency import Scores

RankBy = Literal["share", "raw"]
Key = tuple[int, int]
"""(layer, expert)."""


@dataclass(frozen=True)
class Choice:
    """A split.

    Attributes:
        kept: Kept expert ids of each layer, ascending.
        tied: Experts left in the tail although a kept one, chosen in the same contest, has the same saliency.
    """

    kept: Mapping[int, tuple[int, ...]]
    tied: tuple[Key, ...]


def shares(scores: Scores) -> Scores:
    """Each number as a share of its layer; all zero where the layer is.

    The sum is exact before it is rounded (``math.fsum``), so that renumbering experts changes no share.
    """
    totals = {layer: math.fsum(values) for layer, values in scores.items()}
    return {
        layer: tuple(value / totals[layer] for value in values) if totals[layer] else values
        for layer, values in scores.items()
    }


def order(scores: Scores) -> list[Key]:
    """All experts, the one to keep first at the front."""
    keys = [(layer, expert) for layer in sorted(scores) for expert in range(len(scores[layer]))]
    return sorted(keys, key=lambda key: (-scores[key[0]][key[1]], key))


def count_of(fraction: Fraction, num_experts: int) -> int:
    """Experts that a fraction of a layer is: the nearest whole number, halves up."""
    return math.floor(fraction * num_experts + Fraction(1, 2))


def _choice(scores: Scores, kept: set[Key], tied: set[Key]) -> Choice:
    by_layer = {layer: tuple(e for e in range(len(scores[layer])) if (layer, e) in kept) for layer in sorted(scores)}
    return Choice(by_layer, tuple(sorted(tied)))


def _tied(scores: Scores, chosen: Sequence[Key], left: Sequence[Key]) -> set[Key]:
    """Those of ``left`` that equal the last of ``chosen``."""
    if not chosen:
        return set()
    last = min(scores[layer][expert] for layer, expert in chosen)
    return {(layer, expert) for layer, expert in left if scores[layer][expert] == last}


def per_layer(scores: Scores, count: int) -> Choice:
    """Keep the first ``count`` of each layer."""
    kept: set[Key] = set()
    tied: set[Key] = set()
    for layer, values in scores.items():
        ranked = order({layer: values})
        kept.update(ranked[:count])
        tied |= _tied(scores, ranked[:count], ranked[count:])
    return _choice(scores, kept, tied)


def floors(scores: Scores, floor: int) -> list[Key]:
    """The experts a floor keeps: the first ``floor`` of each layer."""
    return [key for layer in sorted(scores) for key in order({layer: scores[layer]})[:floor]]


def overall(scores: Scores, floor: int, room: Sequence[int], block_of: Callable[[int], int]) -> Choice:
    """Keep a floor in each layer, then the first of all layers, as many as there is room for.

    Args:
        scores: Numbers that compare between layers.
        floor: Kept experts each layer has at least.
        room: Kept experts that fit each expert-parallel rank, over all layers, those of the floor counted; every kept
            expert costs the same.
        block_of: The expert-parallel rank that holds an expert.

    Raises:
        ValueError: The floor does not fit.
    """
    kept: set[Key] = set()
    tied: set[Key] = set()
    left = list(room)
    for layer, expert in floors(scores, floor):
        kept.add((layer, expert))
        left[block_of(expert)] -= 1
    if min(left) < 0:
        raise ValueError(f"a floor of {floor} does not fit")
    rest = [key for key in order(scores) if key not in kept]
    for block, free in enumerate(left):
        contest = [key for key in rest if block_of(key[1]) == block]
        kept.update(contest[:free])
        tied |= _tied(scores, contest[:free], contest[free:])
    for layer, values in scores.items():  # the floor of a layer may itself have cut between equals
        first = order({layer: values})
        tied |= _tied(scores, first[:floor], [key for key in first[floor:] if key not in kept])
    return _choice(scores, kept, tied)


def retained(scores: Scores, kept: Mapping[int, Sequence[int]]) -> dict[int, float | None]:
    """For each layer the share of its saliency that its kept experts have; None where it has none at all."""
    result: dict[int, float | None] = {}
    for layer, values in scores.items():
        total = math.fsum(values)
        result[layer] = math.fsum(values[e] for e in kept[layer]) / total if total else None
    return result
