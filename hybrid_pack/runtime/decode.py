"""The readable decoder: packed tensors to codes, scales and weights, with torch on any device that has float64.

Bit 0 is the least significant, byte 0 the lowest address. N is an output row, K an input column. Each function undoes
one layout by naming the digits of a position, permuting them and joining them again; a comment after each reshape
gives the digits, slowest first:

======  ==================================================================
``R``   block of 16 columns, K/16 of them
``b``   upper or lower half of such a block, 2
``c``   pair of columns within a half, 4
``a``   column of a pair, 2
``nt``  N tile; ``q`` block of 64 rows (of the tile)
``t``   row within eight rows, 8
``m``   group of eight rows within 64, 8 (FP4: ``warp``, 4, and ``r``, 2)
======  ==================================================================

so that a column is ``16 R + 8 b + 2 c + a`` and a row ``64 q + 8 m + t``.
"""

from __future__ import annotations

from typing import Literal

import torch

FormatName = Literal["nvfp4", "mxfp4", "nf3"]

GROUP = {"nvfp4": 16, "mxfp4": 32, "nf3": 32}
"""Columns that share a scale."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Value of each FP4 code ``0bSEEM``."""

_EXPONENT = {"nvfp4": -126, "nf3": -112}
"""weight = code value * value(byte) * global scale * 2^exponent; see the table in ``layouts/scale_bytes.py``."""


def nf3_codes(words: torch.Tensor, n: int, k: int, tile_n: int) -> torch.Tensor:
    """nf3_2p1 words to codes.

    A unit of three words holds rows ``m`` = 0..7 of one ``t`` at the four columns ``i = 2 b + a`` of one ``c``::

        bytes of (lo0, lo1)   m0  m1  m2  m3 | m4  m5  m6  m7    each 0b i3i3 i2i2 i1i1 i0i0: low two bits of a code
        bytes of hi           m1m0  m3m2  m5m4  m7m6             each nibble 0b i3 i2 i1 i0: top bit of a code

    Args:
        words: i32 [(K/16)*(N/2)*3], one matrix.
        n: Rows, a multiple of tile_n.
        k: Columns, a multiple of 16.
        tile_n: N tile the words are laid out for, a multiple of 64.

    Returns:
        u8 [N, K], 0..7.
    """
    units = words.reshape(-1, 3).view(torch.uint8)
    units = units.reshape(n // tile_n, k // 16, tile_n // 64, 8, 4, 12)  # nt R q t c byte
    by_two = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=words.device)
    by_one = torch.tensor([0, 1, 2, 3], dtype=torch.uint8, device=words.device)
    low = (units[..., :8, None] >> by_two) & 3  # nt R q t c m i
    nibbles = torch.stack([units[..., 8:] & 15, units[..., 8:] >> 4], dim=-1).flatten(-2)  # nt R q t c m
    top = (nibbles[..., None] >> by_one) & 1  # nt R q t c m i
    codes = (low | (top << 2)).reshape(*low.shape[:-1], 2, 2)  # nt R q t c m b a
    return codes.permute(0, 2, 5, 3, 1, 6, 4, 7).reshape(n, k)  # (nt q m t) (R b c a)


def fp4_codes(words: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Packed FP4 words to codes.

    A word holds rows ``r`` = 0, 1 (eight apart) of one ``t`` and ``warp`` at four columns of one ``c``::

        bytes   a0r0  a0r1  a1r0  a1r1    each 0b b1b1b1b1 b0b0b0b0: a nibble for each half of the 16 columns

    Args:
        words: i32 [K/16, N/64*128], one matrix.
        n: Rows, a multiple of 64.
        k: Columns, a multiple of 16.

    Returns:
        u8 [N, K], 0..15.
    """
    pairs = words.reshape(-1).view(torch.uint8).reshape(k // 16, n // 64, 8, 4, 4, 2, 2)  # R q t c warp a r
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-1)  # R q t c warp a r b
    return codes.permute(1, 4, 6, 2, 0, 7, 3, 5).reshape(n, k)  # (q warp r t) (R b c a)


def scale_bytes(packed: torch.Tensor, n: int, groups: int) -> torch.Tensor:
    """Packed scales to device bytes in stored order.

    Position ``8 t + m`` of a block of 64 holds row ``8 m + t``, except that the low two bits of m change places::

        position  0b tttm2 m0m1
        row       0b m2m1m0 ttt

    Args:
        packed: u8 [groups, N], one matrix.
        n: Rows, a multiple of 64.
        groups: K/group, at least 2; b12x lays a single group out in another way, which no legal size has.

    Returns:
        u8 [N, groups].
    """
    blocks = packed.reshape(groups, n // 64, 8, 2, 2, 2)  # group q t m2 m0 m1
    return blocks.permute(1, 3, 5, 4, 2, 0).reshape(n, groups)  # (q m2 m1 m0 t) group


def scale_values(name: FormatName, device_bytes: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """What device bytes mean, global scale included.

    Float64, because a global scale of 2^116 times 2^-112 and a block scale of 28 significant bits both leave float32.

    Args:
        name: Format of the matrix.
        device_bytes: u8, any shape.
        global_scale: f32 [], of the matrix.

    Returns:
        f64, of the bytes' shape; exact.
    """
    if name == "mxfp4":  # 2^(byte - 127), written into a float64's exponent field of bias 1023
        values = ((device_bytes.to(torch.int64) + (1023 - 127)) << 52).view(torch.float64)
        return values * global_scale.to(torch.float64)
    # 0bEEEEEMMM: exponent and upper mantissa of a float16, whose sign and lower mantissa 0b0_EEEEE_MMM_0000000 are zero
    values = (device_bytes.to(torch.int16) << 7).view(torch.float16).to(torch.float64)
    return values * (global_scale.to(torch.float64) * 2.0 ** _EXPONENT[name])


def dequantize_matrix(
    name: FormatName,
    words: torch.Tensor,
    scales: torch.Tensor,
    global_scale: torch.Tensor,
    n: int,
    k: int,
    tile_n: int,
    levels: torch.Tensor,
) -> torch.Tensor:
    """The weights one packed matrix means: code value * block scale * global scale.

    Args:
        name: Format of the matrix.
        words: i32, the codes.
        scales: u8 [K/group, N].
        global_scale: f32 [].
        n: Rows.
        k: Columns.
        tile_n: N tile; NF3 only.
        levels: f64 [8]; NF3 only.

    Returns:
        f32 [N, K]: the product in float64 (exact for FP4), rounded.
    """
    if name == "nf3":
        values, codes = levels, nf3_codes(words, n, k, tile_n)
    else:
        values, codes = torch.tensor(E2M1, dtype=torch.float64, device=words.device), fp4_codes(words, n, k)
    group = GROUP[name]
    scale = scale_values(name, scale_bytes(scales, n, k // group), global_scale)  # f64 [N, K/group]
    product = values[codes.to(torch.int32)].reshape(n, k // group, group) * scale[:, :, None]
    return product.to(torch.float32).reshape(n, k)
