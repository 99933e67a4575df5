"""Letters of five by nine pixels, as many as the tier map needs: no font file, so the same text is the same pixels."""

from __future__ import annotations

GLYPHS = {
    "0": (".###.", "#...#", "#..##", "#.#.#", "##..#", "#...#", ".###."),
    "1": ("..#..", ".##..", "..#..", "..#..", "..#..", "..#..", ".###."),
    "2": (".###.", "#...#", "....#", "...#.", "..#..", ".#...", "#####"),
    "3": ("#####", "...#.", "..#..", "...#.", "....#", "#...#", ".###."),
    "4": ("...#.", "..##.", ".#.#.", "#..#.", "#####", "...#.", "...#."),
    "5": ("#####", "#....", "####.", "....#", "....#", "#...#", ".###."),
    "6": ("..##.", ".#...", "#....", "####.", "#...#", "#...#", ".###."),
    "7": ("#####", "....#", "...#.", "..#..", ".#...", ".#...", ".#..."),
    "8": (".###.", "#...#", "#...#", ".###.", "#...#", "#...#", ".###."),
    "9": (".###.", "#...#", "#...#", ".####", "....#", "...#.", ".##.."),
    "a": (".....", ".....", ".###.", "....#", ".####", "#...#", ".####"),
    "b": ("#....", "#....", "####.", "#...#", "#...#", "#...#", "####."),
    "e": (".....", ".....", ".###.", "#...#", "#####", "#....", ".###."),
    "i": ("..#..", ".....", ".##..", "..#..", "..#..", "..#..", ".###."),
    "k": ("#....", "#....", "#..#.", "#.#..", "##...", "#.#..", "#..#."),
    "l": (".##..", "..#..", "..#..", "..#..", "..#..", "..#..", ".###."),
    "p": (".....", ".....", "####.", "#...#", "#...#", "#...#", "####.", "#....", "#...."),
    "r": (".....", ".....", "#.##.", "##..#", "#....", "#....", "#...."),
    "s": (".....", ".....", ".####", "#....", ".###.", "....#", "####."),
    "t": (".#...", ".#...", "###..", ".#...", ".#...", ".#..#", "..##."),
    "x": (".....", ".....", "#...#", ".#.#.", "..#..", ".#.#.", "#...#"),
    "y": (".....", ".....", "#...#", "#...#", "#...#", "#...#", ".####", "....#", ".###."),
    ":": (".....", "..#..", "..#..", ".....", "..#..", "..#..", "....."),
    " ": (),
}
"""Rows from the top, the eighth and ninth below the line of writing."""

SCALE = 2
"""Pixels of a picture for one of a letter."""

ADVANCE = 6
DIGIT = 7 * SCALE
"""Height of a digit."""

LINE = 11 * SCALE
"""From a line to the next."""


def text_width(text: str) -> int:
    """Pixels from the first letter's left edge to the last one's right edge."""
    return (len(text) * ADVANCE - 1) * SCALE


def draw(rows: list[bytearray], text: str, left: int, top: int, color: int) -> None:
    """Set the pixels of a text.

    Args:
        rows: Of the picture, a byte for each pixel; it must hold all of the text.
        text: Of letters of ``GLYPHS``.
        left: Of its first letter.
        top: Of its letters.
        color: Of its pixels, 0..3.
    """
    for place, letter in enumerate(text):
        for down, line in enumerate(GLYPHS[letter]):
            for across, mark in enumerate(line):
                if mark == "#":
                    x, y = left + (place * ADVANCE + across) * SCALE, top + down * SCALE
                    for row in rows[y : y + SCALE]:
                        row[x : x + SCALE] = bytes([color]) * SCALE
