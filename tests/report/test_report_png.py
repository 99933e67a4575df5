"""The picture of the tiers, pixel by pixel through a decoder of its own."""

from __future__ import annotations

from itertools import pairwise

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_pack.report.font import ADVANCE, GLYPHS, SCALE, text_width
from hybrid_pack.report.labels import POWERS, ROUND, labelled
from hybrid_pack.report.png import HEIGHT, WIDTH, encode, tier_map_png
from tests.report.manifests import GLM
from tests.report.pixels import Pixel, chunks, decode

PAPER, TAIL, KEPT, INK = (255, 255, 255), (0xF0, 0xDC, 0xAE), (0x0B, 0x5C, 0xAD), (0x4A, 0x50, 0x58)


def bands(rows: list[list[Pixel]]) -> list[int]:
    """First rows of the bands that hold colour: one for each layer, and the key."""
    colored = {y for y, row in enumerate(rows) if any(pixel in (TAIL, KEPT) for pixel in row)}
    return sorted(y for y in colored if y - 1 not in colored)


def cells(rows: list[list[Pixel]]) -> list[list[Pixel]]:
    """Colours of the map from its pixels alone: bands of rows and columns that hold nothing but cells."""
    found = []
    for y in bands(rows)[:-1]:
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
    lines = [colored[y] for y in bands(rows)[:-1]]
    assert len(lines) == len(GLM)
    for line, (kept, _) in zip(lines, GLM.values(), strict=True):
        width = len(line) // 256
        assert [e for e in range(256) if line[e * width] == KEPT] == kept


def test_the_same_map_is_the_same_bytes() -> None:
    """A golden digest: packs made on two machines have the same picture."""
    data = tier_map_png(4, {3: [0, 2], 12: [1], 78: range(4)})
    assert blake3(data).hexdigest() == "d329b176d2e38389d31549ac1ebce7bd8df76fc1a7c0db4809495216dfbd0a3b"
    assert [kind for kind, _ in chunks(data)] == [b"IHDR", b"PLTE", b"IDAT", b"IEND"]


def written(rows: list[list[Pixel]], left: int, top: int) -> str:
    """The line of text whose first letter has that corner, read letter by letter up to the first that is none."""
    shapes = {"".join(line.ljust(ADVANCE, ".") for line in glyph[:7]): letter for letter, glyph in GLYPHS.items()}
    shapes["." * 7 * ADVANCE] = " "
    text = ""
    while left + ADVANCE * SCALE <= len(rows[0]):
        shape = "".join(
            "#" if rows[top + y * SCALE][left + x * SCALE] == INK else "." for y in range(7) for x in range(ADVANCE)
        )
        if shape not in shapes or text.endswith("  "):
            break
        text, left = text + shapes[shape], left + ADVANCE * SCALE
    return text.rstrip()


def test_no_two_digits_look_alike() -> None:
    """At least four pixels of each differ from every other's, so that no 8 is taken for a 6."""
    marks = {
        letter: {(x, y) for y, line in enumerate(glyph) for x, mark in enumerate(line) if mark == "#"}
        for letter, glyph in GLYPHS.items()
    }
    assert all(len(line) == 5 for glyph in GLYPHS.values() for line in glyph)
    assert len(set(GLYPHS.values())) == len(GLYPHS)
    assert min(len(marks[a] ^ marks[b]) for a in "0123456789" for b in "0123456789" if a < b) >= 4


@pytest.mark.parametrize(("experts", "kept"), [(8, {3: [1], 40: [0]}), (256, {layer: [5] for layer in range(3, 79)})])
def test_axes_have_titles_numbers_and_the_colors_a_key(experts: int, kept: dict[int, list[int]]) -> None:
    rows = decode(tier_map_png(experts, kept))
    tops = bands(rows)
    left = next(x for x, pixel in enumerate(rows[tops[0]]) if pixel in (TAIL, KEPT))
    assert written(rows, left, 8) == "expert"
    assert written(rows, left - 8 - text_width("layer"), 30).startswith("layer")
    assert written(rows, left if experts > 99 else left + 7, 30)[0] == "0"
    height = tops[1] - tops[0]
    for place, layer in ((0, min(kept)), (len(kept) - 1, max(kept))):
        top = tops[0] + place * height + (height - 1 - 14) // 2
        assert written(rows, left - 8 - text_width(str(layer)), top).startswith(str(layer))
    key = rows[tops[-1]]
    for color, text in ((KEPT, "kept: 4 bits"), (TAIL, "tail: 3 bits")):
        swatch = [x for x, pixel in enumerate(key) if pixel == color]
        assert len(swatch) == 14
        assert written(rows, swatch[-1] + 9, tops[-1]) == text


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 1000), st.lists(st.integers(0, 9999), min_size=1, max_size=120, unique=True).map(sorted))
def test_no_ink_is_on_a_cell_or_cut(experts: int, layers: list[int]) -> None:
    """Whatever the size: the border stays paper, and no cell has ink of a number or a title."""
    rows = decode(tier_map_png(experts, {layer: [0] for layer in layers}))
    assert {pixel for row in (rows[0], rows[-1]) for pixel in row} == {PAPER}
    assert {row[x] for row in rows for x in (0, -1)} == {PAPER}
    tops = bands(rows)
    assert len(tops) == len(layers) + 1
    left = next(x for x, pixel in enumerate(rows[tops[0]]) if pixel in (TAIL, KEPT))
    assert INK not in {pixel for row in rows[tops[0] : tops[-1]] for pixel in row[left:]}


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
