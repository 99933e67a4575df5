"""``packed``: FP4 codes as b12x 1.1.0 reads them, for NVFP4 and MXFP4 alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.layouts.rows import Rows, require_size, require_tiles


@dataclass(frozen=True)
class PackedFp4:
    """Codes of one expert matrix [N, K] as int32 [K/16, N/64 * 128]; independent of the kernel's tiles.

    In the tile of 16 columns x 64 rows, word w = 0..127 has t = w // 16, c = (w // 4) % 4 and warp = w % 4, and holds
    rows ``n = 16 * warp + t`` and ``n + 8`` at columns ``2c + (0, 1, 8, 9)``, eight nibbles from low to high::

        (n, 2c) (n, 2c+8) (n+8, 2c) (n+8, 2c+8) (n, 2c+1) (n, 2c+9) (n+8, 2c+1) (n+8, 2c+9)
    """

    def shape(self, n: int, k: int) -> tuple[int, int]:
        """Shape of one expert's int32 tensor."""
        return (k // 16, n // 64 * 128)

    def pack_rows(self, rows: Rows, n: int, k: int, first_row: int, out: NDArray[np.uint32]) -> None:
        """Write stored rows ``first_row .. first_row + rows.count`` of an [N, K] matrix into ``out``.

        Args:
            rows: Stored codes, K/2 bytes a row, low nibble first.
            n: Rows of the whole matrix, a multiple of 64.
            k: Columns of the whole matrix, a multiple of 16.
            first_row: Multiple of 64.
            out: u32 [K/16 * N/64 * 128], contiguous.
        """
        from hybrid_pack.layouts.pack_kernels import pack_fp4

        require_tiles(n, k, 64, 16)
        rows.require(k // 2, first_row, n)
        require_size(out, self.shape(n, k))
        words, start, stride = rows.words
        pack_fp4(words, start, stride, rows.count // 64, k // 16, out, first_row // 64, n // 64)

    def unpack(self, words: NDArray[np.uint32], n: int, k: int) -> NDArray[np.uint8]:
        """Inverse: u32 [K/16 * N/64 * 128] to stored rows u8 [N, K/2]."""
        from hybrid_pack.layouts.unpack_kernels import unpack_fp4

        require_tiles(n, k, 64, 16)
        require_size(words, self.shape(n, k))
        out = np.empty((n, k // 2), np.uint8)
        unpack_fp4(words.reshape(k // 16, -1), out)
        return out
