"""Block scales as b12x 1.1.0 reads them: one byte each, transposed, rows permuted in blocks of 64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.layouts.rows import Rows, require_size, require_tiles


@lru_cache(maxsize=1)
def row_order() -> NDArray[np.int64]:
    """i64 [64]: the row of a 64-row block found at each position.

    Position 8i + j takes row i + 8j, then every four positions are put in the order 0, 2, 1, 3.
    """
    transposed = np.arange(64).reshape(8, 8).T.reshape(-1, 4)
    order = np.ascontiguousarray(transposed[:, [0, 2, 1, 3]].reshape(-1))
    order.flags.writeable = False
    return order


@dataclass(frozen=True)
class BlockScales:
    """Scales of one expert matrix [N, K] as u8 [K/group, N], each byte recoded through a table.

    Attributes:
        group: Columns that share a scale, 16 or 32.
    """

    group: int

    def shape(self, n: int, k: int) -> tuple[int, int]:
        """Shape of one expert's u8 tensor."""
        return (k // self.group, n)

    def pack_rows(
        self, rows: Rows, n: int, k: int, first_row: int, table: NDArray[np.uint8], out: NDArray[np.uint8]
    ) -> None:
        """Write stored rows ``first_row .. first_row + rows.count`` of an [N, K/group] matrix into ``out``.

        Args:
            rows: Stored scale bytes, K/group a row.
            n: Rows of the whole matrix, a multiple of 64.
            k: Columns of the weight matrix.
            first_row: Multiple of 64.
            table: u8 [256], the device byte of each stored byte.
            out: u8 [K/group * N], contiguous.
        """
        from hybrid_pack.layouts.pack_kernels import pack_scales

        self._require(n, k)
        groups = k // self.group
        rows.require(groups, first_row, n)
        require_size(out, self.shape(n, k))
        pack_scales(
            rows.buffer, rows.start, rows.stride, rows.count // 64, groups, table, out, first_row // 64, n, row_order()
        )

    def unpack(self, packed: NDArray[np.uint8], n: int, k: int) -> NDArray[np.uint8]:
        """Inverse: u8 [K/group, N] to device bytes in stored order u8 [N, K/group]; the table is not undone."""
        self._require(n, k)
        require_size(packed, self.shape(n, k))
        blocks = packed.reshape(k // self.group, n // 64, 64)
        plain = np.empty_like(blocks)
        for position in range(64):  # the definition again, without row_order
            i, j = divmod(position // 4 * 4 + (0, 2, 1, 3)[position % 4], 8)
            plain[:, :, i + 8 * j] = blocks[:, :, position]
        return np.ascontiguousarray(plain.reshape(k // self.group, n).T)

    def _require(self, n: int, k: int) -> None:
        """Whole groups and blocks, and more than one group: b12x permutes a single group's scales in another way."""
        require_tiles(n, k, 64, self.group)
        if k == self.group:
            raise ValueError(f"a row of one group of {k} columns has another layout")


def count_scale_bytes(rows: Rows) -> NDArray[np.int64]:
    """i64 [256]: how often each stored byte occurs in rows of scales."""
    from hybrid_pack.layouts.pack_kernels import count_bytes

    counts = np.zeros(256, np.int64)
    count_bytes(rows.buffer, rows.start, rows.stride, rows.count, rows.width, counts)
    return counts


def count_used_scale_bytes(codes: Rows, scales: Rows) -> NDArray[np.int64]:
    """i64 [256]: how often each stored byte occurs in rows of scales, of groups with an E2M1 code that is not zero.

    Args:
        codes: Two a byte, as many rows.
        scales: Of groups of an even number of codes.
    """
    from hybrid_pack.layouts.pack_kernels import count_used_bytes

    counts = np.zeros(256, np.int64)
    count_used_bytes(
        codes.buffer, codes.start, codes.stride, scales.buffer, scales.start, scales.stride, scales.count,
        scales.width, codes.width // scales.width, counts,
    )  # fmt: skip
    return counts
