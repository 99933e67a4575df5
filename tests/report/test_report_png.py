"""The picture of the tiers, pixel by pixel through a decoder of its own."""

from __future__ import annotations

from itertools import pairwise

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_pack.report.labels import POWERS, ROUND, labelled
from hybrid_pack.report.png import DIGITS, HEIGHT, WIDTH, encode, tier_map_png
from tests.report.manifests import GLM
from tests.report.pixels import Pixel, chunks, decode

PAPER, TAIL, KEPT, INK = (255, 255, 255), (0xF0, 0xDC, 0xAE), (0x0B, 0x5C, 0xAD), (0x4A, 0x50, 0x58)


def cells(rows: list[list[Pixel]]) -> list[list[Pixel]]:
    """Colours of the map from its pixels alone: bands of rows and columns that hold nothing but cells."""
    colored = [y for y, row in enumerate(rows) if any(pixel in (TAIL, KEPT) for pixel in row)]
    tops = [y for y in colored if y - 1 not in colored]
    found = []
    for y in tops:
        row, cell_w = rows[y], None
        at = [x for x, pixel in enumerate(row) if pixel in (TAIL, KEPT)]
        assert row[at[0] : at[-1] + 1].count(INK) == 0
        starts = [x for x in at if row[x - 1] == PAPER]
        cell_w = starts[1] - starts[0] if len(starts) > 1 else None
        found.append([row[x] for x in (starts if cell_w else at)])
    return found


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_cell_has_the_color_of_its_tier(data: st.DataObject) -> None:
    experts = data.draw(st.sampled_from([2, 3, 8, 60]))
    layers = data.draw(st.lists(st.integers(0, 999), min_size=1, max_size=9, unique=True).map(sorted))
    kept = {layer: data.draw(st.sets(st.integers(0, experts - 1))) for layer in layers}
    rows = decode(tier_map_png(experts, kept))
    assert cells(rows) == [[KEPT if e in ids else TAIL for e in range(experts)] for ids in kept.values()]


def test_glm_is_legible_and_small() -> None:
    data = tier_map_png(256, {layer: kept for layer, (kept, _) in GLM.items()})
    rows = decode(data)
    assert len(data) < 200_000
    assert WIDTH * 0.9 < len(rows[0]) < WIDTH * 1.1
    assert HEIGHT * 0.9 < len(rows) < HEIGHT * 1.1
    colored = [[pixel for pixel in row if pixel in (TAIL, KEPT)] for row in rows]
    lines = [row for row, above in zip(colored[1:], colored, strict=False) if row and not above]
    assert len(lines) == len(GLM)
    for line, (kept, _) in zip(lines, GLM.values(), strict=True):
        width = len(line) // 256
        assert [e for e in range(256) if line[e * width] == KEPT] == kept


def test_the_same_map_is_the_same_bytes() -> None:
    """A golden digest: packs made on two machines have the same picture."""
    data = tier_map_png(4, {3: [0, 2], 12: [1], 78: range(4)})
    assert blake3(data).hexdigest() == "c982760006f6b1768a9d95cca1816deb04e637b4959a259a45ffedd96eb98180"
    assert [kind for kind, _ in chunks(data)] == [b"IHDR", b"PLTE", b"IDAT", b"IEND"]


def test_layers_are_written_beside_their_rows() -> None:
    """The ink left of the cells is the digits of the layer."""
    rows = decode(tier_map_png(2, {7: [0], 40: []}))
    ink = [[pixel == INK for pixel in row[: next(x for x, p in enumerate(row) if p in (TAIL, KEPT))]]
           for row in rows if any(p in (TAIL, KEPT) for p in row)]  # fmt: skip
    columns = [x for x in range(len(ink[0])) if any(row[x] for row in ink)]
    lines = [row[columns[0] : columns[-1] + 1] for row in ink if any(row)]
    text = ["".join("#" if bit else "." for bit in row[::2]) for row in lines[::2]]
    seven = ["".join("#" if bit == "1" else "." for bit in DIGITS[7][i : i + 3]) for i in range(0, 15, 3)]
    four_zero = [
        ".".join("".join("#" if bit == "1" else "." for bit in DIGITS[d][i : i + 3]) for d in (4, 0))
        for i in range(0, 15, 3)
    ]
    assert text == [f"....{row}" for row in seven] + four_zero


@given(st.integers(0, 9), st.integers(1, 300), st.floats(0.1, 90))
def test_labels_are_round_and_have_room(first: int, count: int, room: float) -> None:
    numbers = range(first, first + count)
    chosen = labelled(numbers, room)
    assert chosen[0] == 0
    assert all(b - a >= room for a, b in pairwise(chosen))
    between = [numbers[at] for at in chosen if at not in (0, count - 1)]
    assert (
        any(all(number % step == 0 for number in between) for step in (*ROUND, *POWERS) if step >= room) or not between
    )
    assert chosen[-1] == count - 1 or count - 1 - chosen[-1] < room, "the last is left out only for want of room"


@pytest.mark.parametrize("width", range(1, 9))
def test_pixels_at_every_place_of_a_byte(width: int) -> None:
    rows = [bytearray((x + y) % 4 for x in range(width)) for y in range(3)]
    colors = [PAPER, TAIL, KEPT, INK]
    assert decode(encode(rows)) == [[colors[(x + y) % 4] for x in range(width)] for y in range(3)]


def test_a_picture_of_several_stored_blocks() -> None:
    rows = [bytearray(x % 4 for x in range(1200)) for _ in range(300)]
    assert len(encode(rows)) > 65535
    assert len(decode(encode(rows))) == 300
