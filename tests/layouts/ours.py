"""Short calls of the package's own packers, for whole matrices and for parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.layouts.nf3_2p1 import Nf32p1
from hybrid_pack.layouts.packed_fp4 import PackedFp4
from hybrid_pack.layouts.rows import Rows
from hybrid_pack.layouts.scales import BlockScales

U8 = NDArray[np.uint8]
IDENTITY = np.arange(256, dtype=np.uint8)
"""The table that leaves bytes as they are, to look at the permutation alone."""
FILL = 0xA5
"""What output arrays hold before packing, so that a byte never written shows."""


def pack_codes(layout: Nf32p1 | PackedFp4, stored: U8 | Sequence[Rows], k: int) -> NDArray[np.uint32]:
    """Pack stored rows, or several row ranges one below the other, to the flat u32 words of one expert."""
    parts = [Rows.of(stored)] if isinstance(stored, np.ndarray) else list(stored)
    n = sum(rows.count for rows in parts)
    size = int(np.prod(layout.shape(n, k)))
    out = np.full(4 * size, FILL, np.uint8).view(np.uint32)
    first = 0
    for rows in parts:
        layout.pack_rows(rows, n, k, first, out)
        first += rows.count
    return out


def pack_scales(layout: BlockScales, stored: U8 | Sequence[Rows], k: int, table: U8 = IDENTITY) -> U8:
    """Pack stored scale bytes, or several row ranges one below the other, to u8 [K/group, N]."""
    parts = [Rows.of(stored)] if isinstance(stored, np.ndarray) else list(stored)
    n = sum(rows.count for rows in parts)
    shape = layout.shape(n, k)
    out = np.full(shape[0] * shape[1], FILL, np.uint8)
    first = 0
    for rows in parts:
        layout.pack_rows(rows, n, k, first, table, out)
        first += rows.count
    return out.reshape(shape)


def row_range(matrix: U8, first: int, count: int) -> Rows:
    """Rows ``first .. first + count`` of a stored matrix [N, width], as a view: gate or up of one rank."""
    width = matrix.shape[1]
    return Rows(matrix.reshape(-1), first * width, width, count, width)


def column_range(matrix: U8, first: int, width: int) -> Rows:
    """Bytes ``first .. first + width`` of every row of a stored matrix [N, width], as a view: down of one rank."""
    return Rows(matrix.reshape(-1), first, matrix.shape[1], matrix.shape[0], width)


def random_bytes(rng: np.random.Generator, *shape: int, low: int = 0, high: int = 256) -> U8:
    """Random bytes of low .. high - 1."""
    return rng.integers(low, high, shape, np.uint8)


def same(left: NDArray[Any], right: NDArray[Any]) -> bool:
    """Equal in type, shape and every bit."""
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
