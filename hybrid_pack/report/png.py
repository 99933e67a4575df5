"""The tier map as a PNG, written without any library so that the same map is the same bytes everywhere.

Deflate streams of zlib and its replacements differ, and a pack's files may not: the pixels go into stored blocks.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Collection, Mapping

from hybrid_pack.report.labels import labelled

TIER_MAP = "tier_map.png"
"""Its name in a pack."""

PAPER, TAIL, KEPT, INK = range(4)
PALETTE = bytes.fromhex("fffffff0dcae0b5cad4a5058")

WIDTH, HEIGHT = 800, 640
"""Pixels of the map that are aimed at: about the width of a model card."""

MARGIN, DIGIT_W, DIGIT_H, SCALE = 8, 3, 5, 2
DIGITS = (
    "111101101101111", "010110010010111", "111001111100111", "111001111001111", "101101111001001",
    "111100111001111", "111100111101111", "111001001001001", "111101111101111", "111101111001111",
)  # fmt: skip
"""Rows of 3 by 5 pixels, from the top."""

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


def _number_width(number: int) -> int:
    return (len(str(number)) * (DIGIT_W + 1) - 1) * SCALE


def _draw_number(rows: list[bytearray], number: int, left: int, top: int) -> None:
    for place, digit in enumerate(str(number)):
        for i, bit in enumerate(DIGITS[int(digit)]):
            if bit == "1":
                x = left + (place * (DIGIT_W + 1) + i % DIGIT_W) * SCALE
                y = top + i // DIGIT_W * SCALE
                for row in rows[y : y + SCALE]:
                    row[x : x + SCALE] = bytes([INK]) * SCALE


def tier_map_png(num_experts: int, kept: Mapping[int, Collection[int]]) -> bytes:
    """A row for each layer, a column for each expert: dark where it is kept, light where it is in the tail.

    Args:
        num_experts: E.
        kept: Ids of the kept experts, by layer in ascending order; at least one layer.
    """
    layers = list(kept)
    cell_w = max(1, min(24, WIDTH // num_experts))
    cell_h = max(3, min(24, HEIGHT // len(layers)))
    gap = 1 if cell_w >= 6 else 0
    left = MARGIN + max(map(_number_width, layers)) + MARGIN
    top = MARGIN + DIGIT_H * SCALE + MARGIN
    width = left + num_experts * cell_w + MARGIN + _number_width(num_experts - 1) // 2
    rows = [bytearray(width) for _ in range(top + len(layers) * cell_h + MARGIN)]
    for at, ids in enumerate(kept.values()):
        held = set(ids)
        line = bytearray(width)
        for expert in range(num_experts):
            x = left + expert * cell_w
            line[x : x + cell_w - gap] = bytes([KEPT if expert in held else TAIL]) * (cell_w - gap)
        first = top + at * cell_h
        rows[first : first + cell_h - 1] = [bytearray(line) for _ in range(cell_h - 1)]
    for at in labelled(range(num_experts), 3 * _number_width(num_experts - 1) / cell_w):
        _draw_number(rows, at, max(left, left + at * cell_w + (cell_w - _number_width(at)) // 2), MARGIN)
    for at in labelled(layers, 2 * DIGIT_H * SCALE / cell_h):
        y = top + at * cell_h + (cell_h - 1 - DIGIT_H * SCALE) // 2
        _draw_number(rows, layers[at], left - MARGIN - _number_width(layers[at]), y)
    return encode(rows)
