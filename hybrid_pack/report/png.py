"""The tier map as a PNG, written without any library so that the same map is the same bytes everywhere.

Deflate streams of zlib and its replacements differ, and a pack's files may not: the pixels go into stored blocks.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Mapping, Sequence

from hybrid_pack.report.font import DIGIT, LINE, draw, text_width
from hybrid_pack.report.labels import labelled

TIER_MAP = "tier_map.png"
"""Its name in a pack."""

PAPER, TAIL, KEPT, INK = range(4)
PALETTE = bytes.fromhex("fffffff0dcae0b5cad4a5058")

WIDTH, HEIGHT = 800, 640
"""Pixels of the map that are aimed at: about the width of a model card."""

MARGIN, SWATCH = 8, 14
CELL_MAX = 24
TITLES = ("layer", "expert")
KEY = ((KEPT, "kept: 4 bits"), (TAIL, "tail: 3 bits"))

_STORED_MAX = 65535


def _stored(data: bytes) -> bytes:
    """A zlib stream that holds the bytes as they are."""
    starts = range(0, len(data), _STORED_MAX)
    blocks = []
    for start in starts:
        part = data[start : start + _STORED_MAX]
        blocks.append(struct.pack("<BHH", start == starts[-1], len(part), len(part) ^ 0xFFFF) + part)
    return b"\x78\x01" + b"".join(blocks) + struct.pack(">I", zlib.adler32(data))


def encode(rows: list[bytearray]) -> bytes:
    """A PNG of four colours, two bits a pixel.

    Args:
        rows: Pixels, 0..3, one byte each; all rows of one length.
    """

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    width = len(rows[0])
    lines = []
    for row in rows:
        row = row + bytes(-width % 4)
        line = bytes(a << 6 | b << 4 | c << 2 | d for a, b, c, d in zip(*(row[i::4] for i in range(4)), strict=True))
        lines.append(b"\x00" + line)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, len(rows), 2, 3, 0, 0, 0))
        + chunk(b"PLTE", PALETTE)
        + chunk(b"IDAT", _stored(b"".join(lines)))
        + chunk(b"IEND", b"")
    )


def _frame(num_experts: int, layers: Sequence[int]) -> tuple[int, int, int, int]:
    """(cell width, cell height, left and top edge of the cells), in pixels."""
    cell_w = max(1, min(CELL_MAX, WIDTH // num_experts))
    cell_h = max(3, min(CELL_MAX, HEIGHT // len(layers)))
    left = MARGIN + max(text_width(TITLES[0]), *(text_width(str(layer)) for layer in layers)) + MARGIN
    return cell_w, cell_h, left, MARGIN + LINE + DIGIT + MARGIN


def tier_map_png(num_experts: int, kept: Mapping[int, Collection[int]]) -> bytes:
    """A row for each layer, a column for each expert: dark where it is kept, light where it is in the tail.

    Args:
        num_experts: E.
        kept: Ids of the kept experts, by layer in ascending order; at least one layer.
    """
    layers = list(kept)
    cell_w, cell_h, left, top = _frame(num_experts, layers)
    gap = 1 if cell_w >= 6 else 0
    last = str(num_experts - 1)
    key_left = [left]
    for _, text in KEY:
        key_left.append(key_left[-1] + SWATCH + MARGIN + text_width(text) + 3 * MARGIN)
    cells_right = left + num_experts * cell_w
    width = max(cells_right + text_width(last) // 2, key_left[-1] - 3 * MARGIN, left + text_width(TITLES[1])) + MARGIN
    bottom = top + len(layers) * cell_h
    rows = [bytearray(width) for _ in range(bottom + 2 * MARGIN + SWATCH + MARGIN)]
    for at, ids in enumerate(kept.values()):
        held = set(ids)
        line = bytearray(width)
        for expert in range(num_experts):
            x = left + expert * cell_w
            line[x : x + cell_w - gap] = bytes([KEPT if expert in held else TAIL]) * (cell_w - gap)
        first = top + at * cell_h
        rows[first : first + cell_h - 1] = [bytearray(line) for _ in range(cell_h - 1)]

    draw(rows, TITLES[1], left, MARGIN, INK)
    draw(rows, TITLES[0], left - MARGIN - text_width(TITLES[0]), MARGIN + LINE, INK)
    for at in labelled(range(num_experts), 1.6 * text_width(last) / cell_w):
        number = str(at)
        draw(rows, number, max(left, left + at * cell_w + (cell_w - text_width(number)) // 2), MARGIN + LINE, INK)
    for at in labelled(layers, 1.7 * DIGIT / cell_h):
        number = str(layers[at])
        y = top + at * cell_h + (cell_h - 1 - DIGIT) // 2
        draw(rows, number, left - MARGIN - text_width(number), y, INK)
    for (color, text), x in zip(KEY, key_left, strict=False):
        y = bottom + 2 * MARGIN
        for row in rows[y : y + SWATCH]:
            row[x : x + SWATCH] = bytes([color]) * SWATCH
        draw(rows, text, x + SWATCH + MARGIN, y + (SWATCH - DIGIT) // 2, INK)
    return encode(rows)
