"""The inverse of each layout, written from its definition unit by unit and sharing nothing with the packers.

numba widens 32-bit arithmetic to 64 bits and checks signs of indices, hence the casts.
"""

from __future__ import annotations

import numpy as np
from numba import uint32 as u32
from numba import uintp

from hybrid_pack.jit import inline, kernel


@inline
def _codes_of_four_rows(lo, top):  # type: ignore[no-untyped-def]
    """Join the bit planes of half a unit; byte m of each word belongs to row m.

    Args:
        lo: u32, low two bits of the codes at columns 0, 1, 8, 9: each byte is 0b99881100.
        top: u32, their top bits in nibbles: each nibble of the low half is 0b9810.

    Returns:
        Codes (0, 1) and codes (8, 9): each byte is 0b00111000 and 0b00999888.
    """
    top = u32(u32(top | u32(top << u32(8))) & u32(0x00FF00FF))
    top = u32(u32(top | u32(top << u32(4))) & u32(0x0F0F0F0F))  # a byte is 0b00009810
    code0 = u32(u32(lo & u32(0x03030303)) | u32(u32(top & u32(0x01010101)) << u32(2)))
    code1 = u32(u32(u32(lo >> u32(2)) & u32(0x03030303)) | u32(u32(top & u32(0x02020202)) << u32(1)))
    code8 = u32(u32(u32(lo >> u32(4)) & u32(0x03030303)) | u32(top & u32(0x04040404)))
    code9 = u32(u32(u32(lo >> u32(6)) & u32(0x03030303)) | u32(u32(top & u32(0x08080808)) >> u32(1)))
    return u32(code0 | u32(code1 << u32(3))), u32(code8 | u32(code9 << u32(3)))


@inline
def _columns(a, b, c, d, m):  # type: ignore[no-untyped-def]
    """The 24-bit word of row m from byte m of four words: a has columns 0 and 1, b columns 2 and 3, and so on."""
    at, six = u32(8 * m), u32(0x3F)
    low = u32(u32(u32(a >> at) & six) | u32(u32(u32(b >> at) & six) << u32(6)))
    return u32(low | u32(u32(u32(u32(c >> at) & six) << u32(12)) | u32(u32(u32(d >> at) & six) << u32(18))))


@kernel
def unpack_nf3_2p1(units, tile_n, out):  # type: ignore[no-untyped-def]
    """NF3 units to stored rows.

    Args:
        units: u32 [K/16 * N/2, 3], (lo0, lo1, hi) of each unit of 32 codes.
        tile_n: Rows of an N tile.
        out: u8 [N, K/8*3], eight codes in a little-endian 24-bit word, code i at bits 3i. Overwritten.
    """
    rows, width = out.shape
    stored = out.view(np.uint16)  # three halfwords hold the 16 codes of a row in one k tile
    k_tiles, half = width // 6, tile_n // 2
    for q in range(rows // 64):  # units u = 32q .. 32q + 31 hold 64 rows
        nt, p = 32 * q // half, 32 * q % half
        for k_tile in range(k_tiles):
            first = nt * k_tiles * half + k_tile * half + p
            at = uintp(3 * k_tile)
            for t in range(8):  # units 4t + c hold rows 64q + t + 8m at columns 2c, 2c+1, 2c+8, 2c+9
                unit = uintp(first + 4 * t)
                a, b, c, d = units[unit], units[unit + uintp(1)], units[unit + uintp(2)], units[unit + uintp(3)]
                for h in range(2):  # rows m = 4h .. 4h + 3 are the bytes of lo0 or lo1, and half of hi
                    word, shift = uintp(h), u32(16 * h)
                    a0, a8 = _codes_of_four_rows(a[word], u32(u32(a[uintp(2)] >> shift) & u32(0xFFFF)))
                    b0, b8 = _codes_of_four_rows(b[word], u32(u32(b[uintp(2)] >> shift) & u32(0xFFFF)))
                    c0, c8 = _codes_of_four_rows(c[word], u32(u32(c[uintp(2)] >> shift) & u32(0xFFFF)))
                    d0, d8 = _codes_of_four_rows(d[word], u32(u32(d[uintp(2)] >> shift) & u32(0xFFFF)))
                    for m in range(4):
                        left = _columns(a0, b0, c0, d0, m)
                        right = _columns(a8, b8, c8, d8, m)
                        row = uintp(64 * q + t + 8 * (4 * h + m))
                        stored[row, at] = left
                        stored[row, at + uintp(1)] = u32(u32(left >> u32(16)) | u32(right << u32(8)))
                        stored[row, at + uintp(2)] = u32(right >> u32(8))


@inline
def _left(word):  # type: ignore[no-untyped-def]
    """The byte of columns 2c, 2c + 1 of row n: nibbles 0 and 4 of a word."""
    return u32(u32(word & u32(0x0F)) | u32(u32(word >> u32(12)) & u32(0xF0)))


@kernel
def unpack_fp4(words, out):  # type: ignore[no-untyped-def]
    """Packed FP4 words to stored rows.

    Args:
        words: u32 [K/16, N/64 * 128].
        out: u8 [N, K/2], low nibble is the even column. Overwritten.
    """
    stored = out.view(np.uint32)  # two words hold the 16 codes of a row in one k tile
    for block in range(words.shape[1] // 128):
        for k_tile in range(words.shape[0]):
            tile = words[k_tile, 128 * block : 128 * block + 128]
            column = uintp(2 * k_tile)
            for warp in range(4):
                for t in range(8):  # words 16t + 4c + warp hold rows n and n + 8 at columns 2c, 2c+1, 2c+8, 2c+9
                    w = uintp(16 * t + warp)
                    a, b, c, d = tile[w], tile[w + uintp(4)], tile[w + uintp(8)], tile[w + uintp(12)]
                    row = uintp(64 * block + 16 * warp + t)
                    for part in range(4):  # nibbles (part, part + 4): row n left, n right, n + 8 left, n + 8 right
                        s = u32(4 * part)
                        eight = u32(
                            u32(_left(u32(a >> s)) | u32(_left(u32(b >> s)) << u32(8)))
                            | u32(u32(_left(u32(c >> s)) << u32(16)) | u32(_left(u32(d >> s)) << u32(24)))
                        )
                        stored[row + uintp(8 * (part // 2)), column + uintp(part % 2)] = eight
