"""A view of rows inside a buffer: the common input of every packer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Rows:
    """``count`` rows of ``width`` bytes, ``stride`` bytes apart, the first at byte ``start`` of a contiguous buffer.

    Lets a packer read a slice of a matrix (rows for gate and up, columns for down) without a copy.

    Attributes:
        buffer: u8 [bytes], contiguous.
        start: Byte offset of the first row.
        stride: Bytes from one row to the next.
        count: Number of rows.
        width: Bytes of one row.
    """

    buffer: NDArray[np.uint8]
    start: int
    stride: int
    count: int
    width: int

    def __post_init__(self) -> None:
        last = self.start + (self.count - 1) * self.stride + self.width
        if self.count < 1 or self.start < 0 or self.stride < self.width or last > self.buffer.nbytes:
            raise ValueError(
                f"{self.count} rows of {self.width} bytes at {self.start} do not fit {self.buffer.nbytes} bytes"
            )

    @classmethod
    def of(cls, matrix: NDArray[np.uint8]) -> Rows:
        """All rows of a contiguous u8 matrix [rows, bytes]."""
        flat = np.ascontiguousarray(matrix)
        return cls(flat.reshape(-1), 0, flat.shape[1], flat.shape[0], flat.shape[1])

    @classmethod
    def within(cls, buffer: NDArray[np.uint8], matrix: NDArray[np.uint8]) -> Rows:
        """A u8 matrix [rows, bytes] that is a view of a buffer, without a copy; of any other one a copy."""
        start, end = matrix.ctypes.data - buffer.ctypes.data, buffer.nbytes
        if matrix.strides[1] != 1 or not 0 <= start < end or matrix.strides[0] < matrix.shape[1]:
            return cls.of(matrix)
        return cls(buffer, start, matrix.strides[0], matrix.shape[0], matrix.shape[1])

    def rows(self, first: int, count: int) -> Rows:
        """Some of these rows."""
        return Rows(self.buffer, self.start + first * self.stride, self.stride, count, self.width)

    def columns(self, first: int, width: int) -> Rows:
        """Some bytes of each of these rows."""
        return Rows(self.buffer, self.start + first, self.stride, self.count, width)

    def require(self, width: int, first_row: int, n: int) -> None:
        """Refuse rows that are not whole 64-row blocks of a matrix of n rows of ``width`` bytes.

        Raises:
            ValueError: They are not.
        """
        if self.width != width or self.count % 64 or first_row % 64 or not 0 <= first_row <= n - self.count:
            raise ValueError(
                f"rows {first_row}..{first_row + self.count} of {self.width} bytes do not fit {n} rows of {width} bytes"
            )

    @property
    def words(self) -> tuple[NDArray[np.uint32], int, int]:
        """(u32 view of the buffer, start, stride), the last two in words.

        Raises:
            ValueError: Start, stride or the buffer's address is not a multiple of four bytes.
        """
        if self.start % 4 or self.stride % 4 or self.buffer.ctypes.data % 4:
            raise ValueError(f"rows at {self.start} every {self.stride} bytes are not aligned to 4-byte words")
        whole = self.buffer[: self.buffer.nbytes // 4 * 4]
        return whole.view(np.uint32), self.start // 4, self.stride // 4

    def matrix(self) -> NDArray[np.uint8]:
        """u8 [count, width], a view without a copy."""
        return np.lib.stride_tricks.as_strided(
            self.buffer[self.start :], (self.count, self.width), (self.stride, 1), writeable=False
        )


def require_tiles(n: int, k: int, rows: int, columns: int) -> None:
    """Refuse a matrix that does not divide into tiles.

    Raises:
        ValueError: It does not.
    """
    if n <= 0 or k <= 0 or n % rows or k % columns:
        raise ValueError(f"[{n}, {k}] does not divide into tiles of {rows} rows and {columns} columns")


def require_size(array: NDArray[Any], shape: tuple[int, ...]) -> None:
    """Refuse an array that has not exactly the elements of a shape, or is not contiguous.

    Raises:
        ValueError: It has not.
    """
    if array.size != math.prod(shape) or not array.flags.c_contiguous:
        raise ValueError(f"expected {math.prod(shape)} contiguous elements {list(shape)}, found {array.size}")
