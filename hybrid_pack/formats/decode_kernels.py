"""The loops of ``formats/decode.py`` and ``io/weights.py``: stored bytes to float32, and rows out of columns."""

from __future__ import annotations

from typing import Any

from hybrid_pack.jit import kernel


@kernel
def fp4(codes: Any, scales: Any, table: Any, second: Any, out: Any) -> None:
    """out[r, k] = table[scale of k, code of k] * second, one float32 product.

    Args:
        codes: u8 [rows, K/2], low nibble is the even column.
        scales: u8 [rows, K/group].
        table: f32 [256, 16].
        second: f32.
        out: f32 [rows, K].
    """
    half = codes.shape[1] // scales.shape[1]
    for r in range(codes.shape[0]):
        for g in range(scales.shape[1]):
            values = table[scales[r, g]]
            for b in range(g * half, (g + 1) * half):
                byte = codes[r, b]
                out[r, 2 * b] = values[byte & 15] * second
                out[r, 2 * b + 1] = values[byte >> 4] * second


@kernel
def nf3(codes: Any, scales: Any, table: Any, out: Any) -> None:
    """out[r, k] = table[scale of k, code of k].

    Args:
        codes: u8 [rows, K/8*3], eight codes in a little-endian 24-bit word, code i at bits 3i.
        scales: u8 [rows, K/32].
        table: f32 [256, 8].
        out: f32 [rows, K].
    """
    for r in range(codes.shape[0]):
        for g in range(scales.shape[1]):
            values = table[scales[r, g]]
            for j in range(4):
                at = (4 * g + j) * 3
                word = codes[r, at] | codes[r, at + 1] << 8 | codes[r, at + 2] << 16
                k = 32 * g + 8 * j
                for i in range(8):
                    out[r, k + i] = values[word >> 3 * i & 7]


@kernel
def fp8(
    codes: Any, values: Any, scales: Any, first: int, step: int, row_group: int, col_group: int, out: Any
) -> None:  # fmt: skip
    """out[r, k] = values[code] * scale, one float32 product.

    Args:
        codes: u8 [rows, K].
        values: f32 [256].
        scales: f32 [scale rows, scales of a row].
        first: Stored row of row 0, where rows share a scale.
        step: Stored rows from one row to the next.
        row_group: Stored rows that share a scale; 0 where all do.
        col_group: Columns that share one; 0 where all do.
        out: f32 [rows, K].
    """
    columns = codes.shape[1]
    width = columns if col_group == 0 else col_group
    for r in range(codes.shape[0]):
        at = 0 if row_group == 0 else (first + r * step) // row_group
        for g in range(scales.shape[1]):
            scale = scales[at, g]
            for k in range(g * width, min((g + 1) * width, columns)):
                out[r, k] = values[codes[r, k]] * scale


@kernel
def bf16(codes: Any, out: Any) -> None:
    """Out u32 [rows, K] = codes u16 [rows, K], shifted to the top half: a float32 of the same value."""
    for r in range(codes.shape[0]):
        for k in range(codes.shape[1]):
            out[r, k] = codes[r, k] << 16


@kernel
def turn(stored: Any, first: int, step: int, out: Any) -> None:
    """out[i, k] = stored[k, first + i * step]: rows of a matrix whose columns are stored one after another.

    Args:
        stored: [K, stored rows], elements of any size.
        first: Stored row of row 0.
        step: Stored rows from one row to the next.
        out: [rows, K] of the same type.
    """
    rows, columns = out.shape
    for i0 in range(0, rows, 64):
        for k0 in range(0, columns, 64):
            for i in range(i0, min(i0 + 64, rows)):
                for k in range(k0, min(k0 + 64, columns)):
                    out[i, k] = stored[k, first + i * step]


@kernel
def first_refused(scales: Any, refused: Any) -> int:
    """Index of the first byte of u8 [n] that bool [256] refuses, or -1."""
    for i in range(scales.size):
        if refused[scales[i]]:
            return i
    return -1


@kernel
def first_not_finite(words: Any) -> int:
    """Index of the first of u32 [n], each the bits of a float32, that is infinite or no number, or -1."""
    step = 4096
    for begin in range(0, words.size, step):
        end = min(begin + step, words.size)
        bad = 0
        for i in range(begin, end):
            bad |= (words[i] & 0x7F800000) == 0x7F800000
        if bad:
            for i in range(begin, end):
                if words[i] & 0x7F800000 == 0x7F800000:
                    return i
    return -1
