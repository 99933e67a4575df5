"""Tensors as a pack stores them: device words and bytes to codes, scales and weights, one position at a time.

The position maps are plain loops over the format's definition and are kept, so that decoding many experts of one shape
costs one loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .floats import DEVICE_SCALE, E2M1, F64
from .source import NF3_LEVELS, U8

PackedName = Literal["nvfp4", "mxfp4", "nf3"]
I64 = NDArray[np.int64]

GROUP: dict[str, int] = {"nvfp4": 16, "mxfp4": 32, "nf3": 32}
NVFP4_EXPONENT = -126  # weight = e2m1 * value(byte) * global * 2^-126
NF3_EXPONENT = -112  # weight = level * value(byte) * global * 2^-112


@lru_cache(maxsize=64)
def nf3_positions(n: int, k: int, tile_n: int) -> I64:
    """Where each code's bits are: i64 [N, K, 4] of (word, shift) of its low two bits and (word, shift) of its top bit.

    Units of three words (lo0, lo1, hi) run over N tiles, then K blocks of 16, then tile_n / 2 units. A unit's word pair
    j = 0..3 holds two rows of four columns: low bits in half-word j of (lo0, lo1), top bits in byte j of hi.
    """
    where = np.full((n, k, 4), -1, np.int64)
    half = tile_n // 2
    unit = 0
    for n_tile in range(n // tile_n):
        for k_block in range(k // 16):
            for p in range(half):
                u = p + half * n_tile
                q, th = u // 32, u % 32
                k0 = 16 * k_block + 2 * (th % 4)
                for j in range(4):
                    n1 = 64 * q + 16 * j + th // 4
                    order = [(row, k0 + offset) for row in (n1, n1 + 8) for offset in (0, 1, 8, 9)]
                    for i, (row, column) in enumerate(order):
                        where[row, column] = (3 * unit + j // 2, 16 * (j % 2) + 2 * i, 3 * unit + 2, 8 * j + i)
                unit += 1
    assert where.min() >= 0, "every code has a place"
    return where


@lru_cache(maxsize=64)
def fp4_positions(n: int, k: int) -> I64:
    """Where each nibble is: i64 [N, K, 2] of (word, shift)."""
    where = np.full((n, k, 2), -1, np.int64)
    n_tiles = n // 64
    for k_tile in range(k // 16):
        for n_tile in range(n_tiles):
            for w in range(128):
                th, warp = w // 4, w % 4
                row, column = 64 * n_tile + 16 * warp + th // 4, 16 * k_tile + 2 * (th % 4)
                slots = [(r, column + c) for c in (0, 1) for r in (row, row + 8)]
                for slot, (r, c) in enumerate(slots):
                    word = (k_tile * n_tiles + n_tile) * 128 + w
                    where[r, c] = (word, 8 * slot)
                    where[r, c + 8] = (word, 8 * slot + 4)
    assert where.min() >= 0, "every code has a place"
    return where


@lru_cache(maxsize=8)
def scale_position(row: int) -> int:
    """Position 0..63 of a row of a 64-row block.

    Position 8i + j takes row i + 8j (i, j = 0..7), then inside every four the order 0, 2, 1, 3.
    """
    taken = [i + 8 * j for i in range(8) for j in range(8)]
    swapped = [taken[4 * (at // 4) + (0, 2, 1, 3)[at % 4]] for at in range(64)]
    return swapped.index(row)


def _words(words: NDArray[Any]) -> I64:
    """Words as non-negative int64, whether they came as int32 or uint32."""
    return np.asarray(words.reshape(-1).astype(np.int64) & 0xFFFFFFFF, np.int64)


def nf3_codes(words: NDArray[Any], n: int, k: int, tile_n: int) -> U8:
    """nf3_2p1 words i32 or u32 [(K/16) * (N/2) * 3] to codes u8 [N, K], 0..7."""
    assert words.size == k // 16 * (n // 2) * 3
    flat, where = _words(words), nf3_positions(n, k, tile_n)
    low = flat[where[:, :, 0]] >> where[:, :, 1] & 3
    top = flat[where[:, :, 2]] >> where[:, :, 3] & 1
    return np.asarray(low + 4 * top, np.uint8)


def fp4_codes(words: NDArray[Any], n: int, k: int) -> U8:
    """Packed FP4 words i32 or u32 [K/16, N/64 * 128] to codes u8 [N, K], 0..15."""
    assert words.size == k // 16 * (n // 64) * 128
    flat, where = _words(words), fp4_positions(n, k)
    return np.asarray(flat[where[:, :, 0]] >> where[:, :, 1] & 15, np.uint8)


def scale_bytes(packed: U8, n: int, groups: int) -> U8:
    """Packed scales u8 [groups, N] to device bytes in stored order, u8 [N, groups]."""
    flat = packed.reshape(groups, n)
    plain = np.empty((n, groups), np.uint8)
    for row in range(n):
        plain[row] = flat[:, row // 64 * 64 + scale_position(row % 64)]
    return plain


def scale_values(name: PackedName, device: U8, global_scale: float) -> F64:
    """Device bytes to the scales they mean, f64 of the same shape."""
    if name == "mxfp4":
        return np.asarray(np.ldexp(1.0, device.astype(np.int64) - 127) * global_scale, np.float64)
    exponent = NVFP4_EXPONENT if name == "nvfp4" else NF3_EXPONENT
    return np.asarray(DEVICE_SCALE[device] * (global_scale * 2.0**exponent), np.float64)


def dequantize(
    name: PackedName,
    words: NDArray[Any],
    scales: U8,
    global_scale: float,
    n: int,
    k: int,
    tile_n: int = 0,
    levels: tuple[float, ...] = NF3_LEVELS,
) -> F64:
    """The weights one packed expert matrix means.

    Args:
        name: ``nvfp4`` and ``mxfp4`` for the kept tier, ``nf3`` for the tail.
        words: i32 or u32, one expert's codes.
        scales: u8 [K/group, N], one expert's scales.
        global_scale: One expert's global scale.
        n: Rows.
        k: Columns.
        tile_n: N tile, NF3 only.
        levels: NF3 code book, eight values.

    Returns:
        f64 [N, K].
    """
    group = GROUP[name]
    codes = nf3_codes(words, n, k, tile_n) if name == "nf3" else fp4_codes(words, n, k)
    values = np.array(levels)[codes] if name == "nf3" else E2M1[codes]
    block = scale_values(name, scale_bytes(scales, n, k // group), float(global_scale))
    return np.asarray(values * np.repeat(block, group, axis=1), np.float64)


def expert(
    name: PackedName,
    tensors: Mapping[str, NDArray[Any]],
    row: int,
    hidden: int,
    intermediate: int,
    tiles: tuple[int, int, int, int],
    levels: tuple[float, ...] = NF3_LEVELS,
    gated: bool = True,
) -> tuple[F64, F64]:
    """The weights of one expert of a shard.

    Args:
        name: The tier's format: ``nf3`` reads ``tail.*``, the others ``kept.*``.
        tensors: Shard tensors by name, such as ``kept.w13_scale``, as numpy arrays.
        row: Index of the expert in its tier, not its global id.
        hidden: H.
        intermediate: I of this rank.
        tiles: (fc1_tile_k, fc1_tile_n, fc2_tile_k, fc2_tile_n).
        levels: NF3 code book, eight values.
        gated: Whether w13 holds gate and up.

    Returns:
        f64 [2 I, H], gate rows then up rows, or [I, H] without a gate, and f64 [H, I].
    """
    tier = "tail" if name == "nf3" else "kept"

    def matrix(which: str, n: int, k: int, tile_n: int) -> F64:
        words, scales, global_scale = (tensors[f"{tier}.{which}{end}"][row] for end in ("", "_scale", "_global_scale"))
        return dequantize(name, words, scales, float(global_scale), n, k, tile_n, levels)

    return matrix("w13", (1 + gated) * intermediate, hidden, tiles[1]), matrix("w2", hidden, intermediate, tiles[3])
