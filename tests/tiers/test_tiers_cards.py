"""Cards: how they are given, and what fits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_pack.errors import UsageError
from hybrid_pack.sharding import Topology
from hybrid_pack.tiers.cards import CARDS, WORKING_ROOM, fits, memory_of, parse_cards, ranks_for
from hybrid_pack.tiers.kv import KvCache

KV = KvCache("GQA", None, 1000, 500)
UNKNOWN = KvCache(None, "why", 0, 0)


@pytest.mark.parametrize("text", ["4x96GB", "4x96", "4X96gb", " 4 x 96 GB ", "4×96G"])
def test_given(text: str) -> None:
    assert parse_cards(text) == (4, 96)


@pytest.mark.parametrize(
    "text", ["", "96GB", "4x", "x96GB", "0x96GB", "4x0GB", "4x96MB", "4x96.5GB", "-4x96GB", "4*96"]
)
def test_not_cards(text: str) -> None:
    with pytest.raises(UsageError, match=r"--cards: not a number and a size of cards \(expected such as 4x96GB"):
        parse_cards(text)


@pytest.mark.parametrize(
    ("cards", "tp", "ep", "topology", "sizes"),
    [
        (None, None, 1, Topology(1, 1), tuple(CARDS)),
        (None, 4, 2, Topology(4, 2), tuple(CARDS)),
        ("4x96GB", None, 1, Topology(4, 1), (96,)),
        ("4x96GB", None, 2, Topology(2, 2), (96,)),
        ("8x80GB", 4, 2, Topology(4, 2), (80,)),
        ("1x40GB", None, 1, Topology(1, 1), (40,)),
    ],
)
def test_topology(cards: str | None, tp: int | None, ep: int, topology: Topology, sizes: tuple[int, ...]) -> None:
    assert ranks_for(cards, tp, ep) == (topology, sizes)


@pytest.mark.parametrize(
    ("cards", "tp", "ep", "message"),
    [
        ("4x96GB", 2, 1, r"--cards: one card holds one rank \(expected tp \* ep = 2 cards, found 4\)"),
        ("4x96GB", 4, 2, r"expected tp \* ep = 8 cards, found 4"),
        ("4x96GB", None, 3, r"expected a multiple of ep = 3, found 4"),
        ("2x96GB", None, 4, r"expected a multiple of ep = 4, found 2"),
        ("4x96GB", 0, 1, r"--tp: a parallel size must be at least 1 \(found 0\)"),
        ("4x96GB", None, 0, r"--ep: a parallel size must be at least 1 \(found 0\)"),
        (None, -1, 1, r"--tp: a parallel size must be at least 1 \(found -1\)"),
    ],
)
def test_wrong_topology(cards: str | None, tp: int | None, ep: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ranks_for(cards, tp, ep)


def test_a_card_has_less_than_its_name_in_gib() -> None:
    for name in (*CARDS, 40, 16, 288):
        assert 0.929 < memory_of(name) / (name << 30) < 1


@given(st.integers(0, 300 << 30), st.integers(0, 20 << 30), st.sampled_from([*CARDS, 40]))
def test_what_fits(weights: int, room: int, name: int) -> None:
    (fit,) = fits(weights, 4, KV, room, [name])
    assert (fit.cards, fit.name_gb, fit.memory, fit.needed) == (4, name, memory_of(name), weights + room)
    assert fit.fits == (weights + room <= memory_of(name)) == (fit.left >= 0)
    if not fit.fits:
        assert (fit.tokens_bf16, fit.tokens_fp8) == (None, None)
        return
    assert fit.tokens_bf16 is not None
    assert fit.tokens_fp8 is not None
    assert 0 <= fit.left - fit.tokens_bf16 * KV.bf16 < KV.bf16
    assert 0 <= fit.left - fit.tokens_fp8 * KV.fp8 < KV.fp8


def test_a_card_can_be_filled_to_the_last_byte() -> None:
    full = memory_of(24) - 100
    (exact,), (over,) = fits(full, 1, KV, 100, [24]), fits(full + 1, 1, KV, 100, [24])
    assert (exact.fits, exact.left, exact.tokens_bf16) == (True, 0, 0)
    assert (over.fits, over.left, over.tokens_bf16) == (False, -1, None)


def test_default_room_and_unknown_cache() -> None:
    (fit,) = fits(10, 1, UNKNOWN, None, [24])
    assert fit.needed == 10 + WORKING_ROOM
    assert fit.fits
    assert (fit.tokens_bf16, fit.tokens_fp8) == (None, None)
    assert fits(10, 1, UNKNOWN, 0, [24])[0].needed == 10
