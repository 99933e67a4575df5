"""Selection against a brute force that looks at every subset, and the laws it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_pack.tiers.select import count_of, overall, per_layer, retained, shares

Layers = dict[int, tuple[float, ...]]
Keys = frozenset[tuple[int, int]]

few = st.integers(0, 3).map(float)  # few values, so that many are equal
any_score = st.floats(0, 1e300, allow_subnormal=True)


def layers_of(values: st.SearchStrategy[float], most_layers: int, most_experts: int) -> st.SearchStrategy[Layers]:
    def sized(experts: int) -> st.SearchStrategy[Layers]:
        layer = st.lists(values, min_size=experts, max_size=experts).map(tuple)
        return st.dictionaries(st.integers(0, 9), layer, min_size=1, max_size=most_layers)

    return st.integers(1, most_experts).flatmap(sized)


small = layers_of(few, 3, 4)
large = layers_of(st.one_of(few, any_score), 6, 16)


def keys(kept: dict[int, tuple[int, ...]]) -> Keys:
    return frozenset((layer, expert) for layer, experts in kept.items() for expert in experts)


def choose(scores: Layers, floor: int, room: list[int]) -> Keys:
    block = len(next(iter(scores.values()))) // len(room)
    return keys(dict(overall(scores, floor, room, lambda expert: expert // block).kept))


def value(scores: Layers, chosen: Keys) -> Fraction:
    return sum((Fraction(scores[layer][expert]) for layer, expert in chosen), Fraction(0))


def feasible(scores: Layers, floor: int, size: int) -> Iterator[Keys]:
    """Every set of a size with the floor in each layer."""
    everything = [(layer, expert) for layer, values in scores.items() for expert in range(len(values))]
    for subset in combinations(everything, size):
        if all(sum(at == layer for at, _ in subset) >= floor for layer in scores):
            yield frozenset(subset)


def best(scores: Layers, floor: int, size: int) -> Keys:
    """The set of the largest sum; of several the one whose sorted keys come first."""
    return min(feasible(scores, floor, size), key=lambda chosen: (-value(scores, chosen), sorted(chosen)))


@given(small, st.data())
def test_overall_is_the_best_of_all_subsets(scores: Layers, data: st.DataObject) -> None:
    experts = len(next(iter(scores.values())))
    floor = data.draw(st.integers(0, experts))
    room = data.draw(st.integers(floor * len(scores), experts * len(scores) + 2))
    size = min(room, experts * len(scores))
    assert choose(scores, floor, [room]) == best(scores, floor, size)


@given(small, st.data())
def test_per_layer_is_the_best_of_each_layer(scores: Layers, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(next(iter(scores.values())))))
    kept = dict(per_layer(scores, count).kept)
    for layer, values in scores.items():
        assert keys({layer: kept[layer]}) == best({layer: values}, 0, count)
        assert kept[layer] == tuple(sorted(kept[layer]))


def blocks_of(experts: int) -> st.SearchStrategy[int]:
    return st.sampled_from([n for n in range(1, experts + 1) if experts % n == 0])


@given(large, st.data())
def test_room_of_every_rank_is_kept_and_filled(scores: Layers, data: st.DataObject) -> None:
    experts = len(next(iter(scores.values())))
    ep = data.draw(blocks_of(experts))
    block = experts // ep
    floor = data.draw(st.integers(0, experts))
    room = [data.draw(st.integers(0, block * len(scores) + 1)) for _ in range(ep)]
    try:
        kept = choose(scores, floor, room)
    except ValueError:
        first = {(i, e) for i, v in scores.items() for e in sorted(range(experts), key=lambda e: (-v[e], e))[:floor]}
        assert any(sum(e // block == r for _, e in first) > free for r, free in enumerate(room))
        return
    for layer in scores:
        assert sum(at == layer for at, _ in kept) >= floor
    for rank, free in enumerate(room):
        held = [key for key in kept if key[1] // block == rank]
        assert len(held) == min(free, block * len(scores))  # nothing that would still fit is left out


@given(large, st.data())
def test_more_room_only_adds(scores: Layers, data: st.DataObject) -> None:
    experts = len(next(iter(scores.values())))
    floor = data.draw(st.integers(0, experts))
    least = floor * len(scores)
    small_room = data.draw(st.integers(least, experts * len(scores)))
    large_room = data.draw(st.integers(small_room, experts * len(scores) + 3))
    assert choose(scores, floor, [small_room]) <= choose(scores, floor, [large_room])


@given(large, st.data())
def test_a_higher_count_only_adds(scores: Layers, data: st.DataObject) -> None:
    experts = len(next(iter(scores.values())))
    low = data.draw(st.integers(0, experts))
    high = data.draw(st.integers(low, experts))
    assert keys(dict(per_layer(scores, low).kept)) <= keys(dict(per_layer(scores, high).kept))


@given(st.data())
def test_renumbered_experts_are_chosen_alike(data: st.DataObject) -> None:
    """Where no two are equal, ids do not matter: by shares too, whose sums must not depend on the order."""
    experts, count = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    values = st.lists(st.floats(1e-3, 1e3), min_size=experts * count, max_size=experts * count, unique=True)
    flat = data.draw(values)
    scores = {layer: tuple(flat[layer * experts : (layer + 1) * experts]) for layer in range(count)}
    by_share = shares(scores)
    order = data.draw(st.permutations(range(experts)))
    moved = {layer: tuple(values[old] for old in order) for layer, values in scores.items()}
    room = data.draw(st.integers(0, experts * count))
    moved_share = shares(moved)
    assert moved_share == {layer: tuple(values[old] for old in order) for layer, values in by_share.items()}
    everything = [value for values in by_share.values() for value in values]
    if len(set(everything)) < len(everything):
        return
    kept, again = choose(by_share, 0, [room]), choose(moved_share, 0, [room])
    assert frozenset((layer, order[new]) for layer, new in again) == kept


@given(large, st.data())
def test_order_of_the_file_does_not_matter(scores: Layers, data: st.DataObject) -> None:
    shuffled = {layer: scores[layer] for layer in data.draw(st.permutations(sorted(scores)))}
    room = data.draw(st.integers(0, 20))
    assert choose(scores, 0, [room]) == choose(shuffled, 0, [room])
    assert per_layer(scores, 1) == per_layer(shuffled, 1)


def test_equal_ones_go_by_layer_then_id() -> None:
    scores = {5: (1.0, 2.0, 1.0), 2: (1.0, 0.0, 1.0)}
    first = [(5, 1), (2, 0), (2, 2), (5, 0), (5, 2), (2, 1)]
    for room in range(7):
        assert choose(scores, 0, [room]) == frozenset(first[:room])


@pytest.mark.parametrize(
    ("room", "floor", "tied"),
    [
        (0, 0, ()),
        (1, 0, ()),
        (2, 0, ((2, 2), (5, 0), (5, 2))),
        (4, 0, ((5, 2),)),
        (5, 0, ()),
        (6, 0, ()),
        (2, 1, ((2, 2),)),  # layer 2's floor cut between equals, layer 5's did not
        (3, 1, ((5, 0), (5, 2))),
    ],
)
def test_ties_cut(room: int, floor: int, tied: tuple[tuple[int, int], ...]) -> None:
    scores = {5: (1.0, 2.0, 1.0), 2: (1.0, 0.0, 1.0)}
    assert overall(scores, floor, [room], lambda _: 0).tied == tied


def test_ties_cut_in_a_layer() -> None:
    choice = per_layer({1: (3.0, 2.0, 2.0, 2.0), 2: (1.0, 2.0, 3.0, 4.0)}, 2)
    assert choice.kept == {1: (0, 1), 2: (2, 3)}
    assert choice.tied == ((1, 2), (1, 3))
    assert per_layer({1: (1.0, 1.0)}, 0).tied == ()
    assert per_layer({1: (1.0, 1.0)}, 2).tied == ()


@given(large, st.data())
def test_ties_are_tail_experts_equal_to_a_kept_one(scores: Layers, data: st.DataObject) -> None:
    choice = overall(scores, 0, [data.draw(st.integers(0, 40))], lambda _: 0)
    kept = keys(dict(choice.kept))
    worth = {scores[layer][expert] for layer, expert in kept}
    left = {(layer, e) for layer, values in scores.items() for e in range(len(values))} - kept
    assert set(choice.tied) == {key for key in left if scores[key[0]][key[1]] in worth}


@pytest.mark.parametrize(
    ("text", "experts", "count"),
    [("0", 8, 0), ("1", 8, 8), ("0.25", 256, 64), ("0.3", 256, 77), ("1/3", 16, 5), ("0.5", 5, 3), ("0.1", 5, 1),
     ("0.0999", 5, 0), ("0.3", 5, 2), ("1/2", 1, 1), ("0.499", 1, 0), ("0.125", 4, 1), ("0.29", 50, 15)],
)  # fmt: skip
def test_fraction(text: str, experts: int, count: int) -> None:
    assert count_of(Fraction(text), experts) == count


@given(st.fractions(0, 1), st.integers(1, 1000))
def test_fraction_is_the_nearest(fraction: Fraction, experts: int) -> None:
    count = count_of(fraction, experts)
    assert 0 <= count <= experts
    assert -Fraction(1, 2) < count - fraction * experts <= Fraction(1, 2)


@given(large)
def test_shares_sum_to_one(scores: Layers) -> None:
    for layer, values in shares(scores).items():
        assert sum(values) == pytest.approx(1 if any(scores[layer]) else 0)
        assert all(0 <= value <= 1 for value in values)


def test_retained() -> None:
    scores = {1: (1.0, 3.0, 0.0), 2: (0.0, 0.0, 0.0), 3: (2.0, 2.0, 4.0)}
    assert retained(scores, {1: (1,), 2: (0,), 3: (0, 2)}) == {1: 0.75, 2: None, 3: 0.75}
    assert retained(scores, {1: (), 2: (), 3: (0, 1, 2)}) == {1: 0.0, 2: None, 3: 1.0}
