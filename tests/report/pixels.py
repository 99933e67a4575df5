"""A slow PNG decoder of its own: grey, palette, RGB and RGBA, any bit depth up to 8, all filters, no interlacing."""

from __future__ import annotations

import struct
import zlib

Pixel = tuple[int, int, int]
CHANNELS = {0: 1, 2: 3, 3: 1, 6: 4}


def chunks(data: bytes) -> list[tuple[bytes, bytes]]:
    """(type, content) of every chunk, checksums held."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, found = 8, []
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind, content = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", data, at + 8 + length) == (zlib.crc32(kind + content),)
        found.append((kind, content))
        at += 12 + length
    assert found[0][0] == b"IHDR"
    assert found[-1] == (b"IEND", b"")
    return found


def _paeth(a: int, b: int, c: int) -> int:
    distances = [abs(a + b - c - a), abs(a + b - c - b), abs(a + b - c - c)]
    return (a, b, c)[distances.index(min(distances))]


def decode(data: bytes) -> list[list[Pixel]]:
    """Rows of (red, green, blue)."""
    found = chunks(data)
    width, height, depth, kind, *rest = struct.unpack(">IIBBBBB", found[0][1])
    assert rest == [0, 0, 0]
    palette = next((content for name, content in found if name == b"PLTE"), b"")
    raw = zlib.decompress(b"".join(content for name, content in found if name == b"IDAT"))
    step = max(1, CHANNELS[kind] * depth // 8)
    stride = -(-width * CHANNELS[kind] * depth // 8)
    assert len(raw) == height * (stride + 1)
    above = bytearray(stride)
    rows = []
    for y in range(height):
        method, line = raw[y * (stride + 1)], bytearray(raw[y * (stride + 1) + 1 : (y + 1) * (stride + 1)])
        for i in range(stride):
            left, corner = (line[i - step], above[i - step]) if i >= step else (0, 0)
            add = (0, left, above[i], (left + above[i]) // 2, _paeth(left, above[i], corner))[method]
            line[i] = (line[i] + add) % 256
        above = line
        rows.append(_pixels(line, width, depth, kind, palette))
    return rows


def _pixels(line: bytearray, width: int, depth: int, kind: int, palette: bytes) -> list[Pixel]:
    if kind == 3:
        each = 8 // depth
        numbers = [line[x // each] >> (8 - depth * (x % each + 1)) & (1 << depth) - 1 for x in range(width)]
        return [(palette[3 * n], palette[3 * n + 1], palette[3 * n + 2]) for n in numbers]
    step = CHANNELS[kind]
    parts = [tuple(line[step * x : step * x + step]) for x in range(width)]
    return [(p[0], p[0], p[0]) if step == 1 else (p[0], p[1], p[2]) for p in parts]
