"""The fast forward of each layout: stored bytes in, device words out.

All work on blocks of 64 rows x 512 codes so that every intermediate stays in the first-level cache. A 16-column,
64-row tile is where the layouts and the stored rows meet: c = 0..3 picks columns (2c, 2c+1, 2c+8, 2c+9) of it and
r = 0..7 picks rows (r, r+8, ..., r+56). First every row is split so that one 32-bit word holds, byte c by byte c,
what the four positions c need of it; then words of the rows r+8m are transposed bytewise. numba would widen 32-bit
arithmetic to 64 bits, hence the casts. The readable definition of the same bytes is in the layout modules' pictures,
in FORMAT.md and in the tests' slow decoders, which these kernels are compared with.
"""

from __future__ import annotations

import numpy as np
from numba import uint32 as u32
from numba import uintp

from hybrid_pack.jit import inline, kernel


@inline
def _spread(word):  # type: ignore[no-untyped-def]
    """Four 6-bit fields of a 24-bit word to the four bytes of a word. Bits 24..31 of the input are ignored.

    0b........ddddddccccccbbbbbbaaaaaa -> 0b00dddddd_00cccccc_00bbbbbb_00aaaaaa
    """
    return u32(
        u32(word & u32(0x3F))
        | u32(u32(word & u32(0xFC0)) << u32(2))
        | u32(u32(word & u32(0x3F000)) << u32(4))
        | u32(u32(word & u32(0xFC0000)) << u32(6))
    )


@inline
def _low(fields):  # type: ignore[no-untyped-def]
    """The low two bits of both codes in each byte: 0b00HllHll -> 0b0000llll."""
    return u32(u32(fields & u32(0x03030303)) | u32(u32(fields >> u32(1)) & u32(0x0C0C0C0C)))


@inline
def _high(fields):  # type: ignore[no-untyped-def]
    """The top bit of both codes in each byte: 0b00HxxGxx -> 0b000000HG."""
    return u32(u32(u32(fields >> u32(2)) & u32(0x01010101)) | u32(u32(fields >> u32(4)) & u32(0x02020202)))


@inline
def _transpose(a, b, c, d):  # type: ignore[no-untyped-def]
    """4x4 bytes: word i of the result holds byte i of a, b, c, d, from low to high."""
    even, odd = u32(0x00FF00FF), u32(0xFF00FF00)
    ab0 = u32(u32(a & even) | u32(u32(b & even) << u32(8)))
    ab1 = u32(u32(u32(a >> u32(8)) & even) | u32(b & odd))
    cd0 = u32(u32(c & even) | u32(u32(d & even) << u32(8)))
    cd1 = u32(u32(u32(c >> u32(8)) & even) | u32(d & odd))
    low, high = u32(0x0000FFFF), u32(0xFFFF0000)
    return (
        u32(u32(ab0 & low) | u32(cd0 << u32(16))),
        u32(u32(ab1 & low) | u32(cd1 << u32(16))),
        u32(u32(ab0 >> u32(16)) | u32(cd0 & high)),
        u32(u32(ab1 >> u32(16)) | u32(cd1 & high)),
    )


@kernel
def pack_nf3_2p1(src, start, stride, blocks, k_tiles, out, first_block, half_tile):  # type: ignore[no-untyped-def]
    """Pack blocks of 64 rows of stored NF3 codes.

    Args:
        src: u32 [words]; a row is k_tiles * 3 / 2 words of little-endian 24-bit words with eight codes each.
        start: First word of the first row.
        stride: Words from one row to the next.
        blocks: Number of 64-row blocks.
        k_tiles: K / 16, even.
        out: u32 [k_tiles * N/2 * 3], the expert's whole tensor.
        first_block: Index among the tensor's 64-row blocks of the first one.
        half_tile: tile_n / 2, units of one K block in one N tile.
    """
    lows = np.empty((64, 32), np.uint32)  # [row, k tile]: byte c = low bits of the four codes at position c
    highs = np.empty((64, 32), np.uint32)  # [row, k tile]: nibble of byte c = their top bits
    for block in range(blocks):
        unit = 32 * (first_block + block)
        base = (unit // half_tile) * k_tiles * half_tile + unit % half_tile
        for k0 in range(0, k_tiles, 32):
            tiles = min(32, k_tiles - k0)
            for row in range(64):
                begin = start + (64 * block + row) * stride + k0 * 3 // 2
                words = src[begin : begin + 48]
                low_row, high_row = lows[row], highs[row]
                for pair in range(uintp(tiles // 2)):
                    x0, x1, x2 = words[uintp(3 * pair)], words[uintp(3 * pair + 1)], words[uintp(3 * pair + 2)]
                    left = _spread(x0)  # columns 0..7 of the first k tile
                    right = _spread(u32(u32(x0 >> u32(24)) | u32(x1 << u32(8))))  # columns 8..15
                    low_row[uintp(2 * pair)] = u32(_low(left) | u32(_low(right) << u32(4)))
                    high_row[uintp(2 * pair)] = u32(_high(left) | u32(_high(right) << u32(2)))
                    left = _spread(u32(u32(x1 >> u32(16)) | u32(x2 << u32(16))))
                    right = _spread(u32(x2 >> u32(8)))
                    low_row[uintp(2 * pair + 1)] = u32(_low(left) | u32(_low(right) << u32(4)))
                    high_row[uintp(2 * pair + 1)] = u32(_high(left) | u32(_high(right) << u32(2)))
            step = uintp(half_tile * 3)
            for r in range(8):
                l0, l1, l2, l3 = lows[r], lows[r + 8], lows[r + 16], lows[r + 24]
                l4, l5, l6, l7 = lows[r + 32], lows[r + 40], lows[r + 48], lows[r + 56]
                h0, h1, h2, h3 = highs[r], highs[r + 8], highs[r + 16], highs[r + 24]
                h4, h5, h6, h7 = highs[r + 32], highs[r + 40], highs[r + 48], highs[r + 56]
                units = out[(base + k0 * half_tile + 4 * r) * 3 :]
                for i in range(uintp(tiles)):
                    a0, a1, a2, a3 = _transpose(l0[i], l1[i], l2[i], l3[i])
                    b0, b1, b2, b3 = _transpose(l4[i], l5[i], l6[i], l7[i])
                    t0, t1, t2, t3 = _transpose(
                        u32(h0[i] | u32(h1[i] << u32(4))),
                        u32(h2[i] | u32(h3[i] << u32(4))),
                        u32(h4[i] | u32(h5[i] << u32(4))),
                        u32(h6[i] | u32(h7[i] << u32(4))),
                    )
                    at = i * step
                    units[at], units[at + uintp(1)], units[at + uintp(2)] = a0, b0, t0
                    units[at + uintp(3)], units[at + uintp(4)], units[at + uintp(5)] = a1, b1, t1
                    units[at + uintp(6)], units[at + uintp(7)], units[at + uintp(8)] = a2, b2, t2
                    units[at + uintp(9)], units[at + uintp(10)], units[at + uintp(11)] = a3, b3, t3


@kernel
def pack_fp4(src, start, stride, blocks, k_tiles, out, first_block, n_blocks):  # type: ignore[no-untyped-def]
    """Pack blocks of 64 rows of stored FP4 codes.

    Args:
        src: u32 [words]; a row is k_tiles * 2 words of nibbles, low nibble first.
        start: First word of the first row.
        stride: Words from one row to the next.
        blocks: Number of 64-row blocks.
        k_tiles: K / 16.
        out: u32 [k_tiles * n_blocks * 128], the expert's whole tensor.
        first_block: Index among the tensor's 64-row blocks of the first one.
        n_blocks: N / 64.
    """
    evens = np.empty((64, 32), np.uint32)  # [row, k tile]: byte c = codes (2c, 2c + 8)
    odds = np.empty((64, 32), np.uint32)  # [row, k tile]: byte c = codes (2c + 1, 2c + 9)
    nibbles = u32(0x0F0F0F0F)
    for block in range(blocks):
        for k0 in range(0, k_tiles, 32):
            tiles = min(32, k_tiles - k0)
            for row in range(64):
                begin = start + (64 * block + row) * stride + k0 * 2
                words = src[begin : begin + 64]
                even_row, odd_row = evens[row], odds[row]
                for i in range(uintp(tiles)):
                    x0, x1 = words[uintp(2 * i)], words[uintp(2 * i + 1)]
                    even_row[i] = u32(u32(x0 & nibbles) | u32(u32(x1 & nibbles) << u32(4)))
                    odd_row[i] = u32(u32(u32(x0 >> u32(4)) & nibbles) | u32(x1 & u32(0xF0F0F0F0)))
            step = uintp(n_blocks * 128)
            for r in range(8):
                e0, e1, e2, e3 = evens[r], evens[16 + r], evens[32 + r], evens[48 + r]
                f0, f1, f2, f3 = evens[8 + r], evens[24 + r], evens[40 + r], evens[56 + r]
                o0, o1, o2, o3 = odds[r], odds[16 + r], odds[32 + r], odds[48 + r]
                q0, q1, q2, q3 = odds[8 + r], odds[24 + r], odds[40 + r], odds[56 + r]
                tile = out[(k0 * n_blocks + first_block + block) * 128 + 16 * r :]
                for i in range(uintp(tiles)):  # sixteen words, a whole cache line, of the four warps at a time
                    a0, a1, a2, a3 = _transpose(e0[i], f0[i], o0[i], q0[i])
                    b0, b1, b2, b3 = _transpose(e1[i], f1[i], o1[i], q1[i])
                    c0, c1, c2, c3 = _transpose(e2[i], f2[i], o2[i], q2[i])
                    d0, d1, d2, d3 = _transpose(e3[i], f3[i], o3[i], q3[i])
                    at = i * step
                    tile[at], tile[at + uintp(1)], tile[at + uintp(2)], tile[at + uintp(3)] = a0, b0, c0, d0
                    tile[at + uintp(4)], tile[at + uintp(5)], tile[at + uintp(6)], tile[at + uintp(7)] = a1, b1, c1, d1
                    tile[at + uintp(8)], tile[at + uintp(9)], tile[at + uintp(10)], tile[at + uintp(11)] = (
                        a2,
                        b2,
                        c2,
                        d2,
                    )
                    tile[at + uintp(12)], tile[at + uintp(13)], tile[at + uintp(14)], tile[at + uintp(15)] = (
                        a3,
                        b3,
                        c3,
                        d3,
                    )


@kernel
def pack_scales(src, start, stride, blocks, groups, table, out, first_block, n_rows, row_order):  # type: ignore[no-untyped-def]
    """Recode and transpose scale bytes of 64-row blocks.

    Args:
        src: u8 [bytes]; a row is ``groups`` scale bytes.
        start: First byte of the first row.
        stride: Bytes from one row to the next.
        blocks: Number of 64-row blocks.
        groups: Scales of a row.
        table: u8 [256], device byte of each stored byte.
        out: u8 [groups * n_rows], the expert's whole tensor.
        first_block: Index among the tensor's 64-row blocks of the first one.
        n_rows: N.
        row_order: i64 [64], source row at each position of a block.
    """
    offsets = np.empty(64, np.uintp)
    for position in range(64):
        offsets[position] = uintp(row_order[position] * stride)
    for block in range(blocks):
        rows = src[start + 64 * block * stride :]
        for g in range(uintp(groups)):
            column = out[g * n_rows + 64 * (first_block + block) :]
            for position in range(uintp(64)):
                column[position] = table[rows[offsets[position] + g]]


@kernel
def count_bytes(src, start, stride, rows, width, counts):  # type: ignore[no-untyped-def]
    """Add the number of times each byte occurs in rows to counts, i64 [256]."""
    partial = np.zeros((4, 256), np.int64)
    c0, c1, c2, c3 = partial[0], partial[1], partial[2], partial[3]  # runs of one byte do not wait for each other
    quads = uintp(width // 4)
    for row in range(rows):
        begin = start + row * stride
        scales = src[begin : begin + width]
        for i in range(quads):
            c0[scales[uintp(4 * i)]] += 1
            c1[scales[uintp(4 * i + 1)]] += 1
            c2[scales[uintp(4 * i + 2)]] += 1
            c3[scales[uintp(4 * i + 3)]] += 1
        for i in range(uintp(4 * quads), uintp(width)):
            c0[scales[i]] += 1
    for i in range(256):
        counts[i] += c0[i] + c1[i] + c2[i] + c3[i]


@kernel
def count_used_bytes(codes, code_start, code_stride, src, start, stride, rows, groups, width, counts):  # type: ignore[no-untyped-def]
    """As ``count_bytes`` of E2M1 groups' scales, without groups of ``width`` bytes of codes that are all zero."""
    for row in range(rows):
        begin = code_start + row * code_stride
        for g in range(groups):
            for i in range(begin + g * width, begin + (g + 1) * width):
                if codes[i] & 0x77:
                    counts[src[start + row * stride + g]] += 1
                    break
