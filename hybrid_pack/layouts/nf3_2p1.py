"""``nf3_2p1``: NF3 codes as b12x 1.1.0 reads them, two-bit and one-bit planes of 32 codes in three words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.layouts.rows import Rows, require_size, require_tiles


@dataclass(frozen=True)
class Nf32p1:
    """Codes of one expert matrix [N, K] as int32 [(K/16) * (N/2) * 3].

    A unit is 32 codes in three words (lo0, lo1, hi). With half = tile_n / 2, the unit of N tile nt, K block R (16
    columns) and p = 0..half-1 is number ``nt * (K/16) * half + R * half + p``. With u = p + half * nt, q = u // 32,
    t = (u % 32) // 4 and c = u % 4 it holds, for m = 0..7, row ``64q + t + 8m`` at columns ``16R + 2c + (0, 1, 8, 9)``:
    the low two bits of those four codes are byte m of (lo0, lo1), low code first, and their top bits nibble m of hi.

    ::

        lo0  0b D3D2D1D0 C3C2C1C0 B3B2B1B0 A3A2A1A0   A..D = rows m 0..3, two bits each of columns 0, 1, 8, 9
        lo1  the same for rows m 4..7
        hi   0b HHHH GGGG FFFF EEEE DDDD CCCC BBBB AAAA   one bit each

    Attributes:
        tile_n: N tile of the kernel that will read it; another value is another byte order.
    """

    tile_n: int

    def shape(self, n: int, k: int) -> tuple[int]:
        """Shape of one expert's int32 tensor."""
        return ((k // 16) * (n // 2) * 3,)

    def pack_rows(self, rows: Rows, n: int, k: int, first_row: int, out: NDArray[np.uint32]) -> None:
        """Write stored rows ``first_row .. first_row + rows.count`` of an [N, K] matrix into ``out``.

        Args:
            rows: Stored codes, K/8*3 bytes a row.
            n: Rows of the whole matrix, a multiple of tile_n.
            k: Columns of the whole matrix, a multiple of 32.
            first_row: Multiple of 64.
            out: u32 [(K/16) * (N/2) * 3], contiguous.
        """
        from hybrid_pack.layouts.pack_kernels import pack_nf3_2p1

        require_tiles(n, k, self.tile_n, 32)
        rows.require(k // 8 * 3, first_row, n)
        require_size(out, self.shape(n, k))
        words, start, stride = rows.words
        pack_nf3_2p1(words, start, stride, rows.count // 64, k // 16, out, first_row // 64, self.tile_n // 2)

    def unpack(self, words: NDArray[np.uint32], n: int, k: int) -> NDArray[np.uint8]:
        """Inverse: u32 [(K/16) * (N/2) * 3] to stored rows u8 [N, K/8*3]."""
        from hybrid_pack.layouts.unpack_kernels import unpack_nf3_2p1

        require_tiles(n, k, self.tile_n, 32)
        require_size(words, self.shape(n, k))
        out = np.empty((n, k // 8 * 3), np.uint8)
        unpack_nf3_2p1(words.reshape(-1, 3), self.tile_n, out)
        return out
