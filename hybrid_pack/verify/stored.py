"""An expert as the source stores it: its bytes, its rows in order, its weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.io.checkpoint import Expert, Matrix
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.weights import NativeRows, canonical_rows, decode_stored, pick_rows, second_scale
from hybrid_pack.verify.pool import Buffers

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class Share:
    """A rank's slice of the intermediate size.

    Attributes:
        first: Its first row of gate and up, or column of down.
        count: How many of the source there are; what the rank has more is padding.
        padded: How many the rank has.
    """

    first: int
    count: int
    padded: int

    @classmethod
    def of(cls, tp_rank: int, share: int, intermediate: int) -> Share:
        """Of a rank."""
        first = tp_rank * share
        return cls(min(first, intermediate), min(max(intermediate - first, 0), share), share)


class StoredExpert:
    """Reads an expert once; what it gives is valid until the thread's next one.

    Args:
        expert: Which.
        where: Layer and expert in words.
        reader: Reads the source.
        buffers: Of the threads.
        levels: Of NF3.

    Raises:
        DataError: A file ended early, or a second-level scale is no number.
    """

    def __init__(
        self, expert: Expert, where: str, reader: TensorReader, buffers: Buffers, levels: tuple[float, ...]
    ) -> None:
        self._where, self._buffers, self._levels = where, buffers, levels
        self._bytes: dict[str, U8] = {}
        self.read_bytes = 0
        for i, at in enumerate(expert.tensors):
            buffer = buffers.take(f"stored {i}", at.header.nbytes)
            reader.read(at, buffer)
            self._bytes[at.header.name] = buffer
            self.read_bytes += buffer.nbytes
        self.seconds = [second_scale(reader, matrix, where) for matrix in expert.matrices]

    def _of(self, matrix: Matrix) -> tuple[U8, U8 | None]:
        scales = None if matrix.scales is None else self._bytes[matrix.scales.header.name]
        return self._bytes[matrix.codes.header.name], scales

    def rows(self, matrix: Matrix) -> NativeRows:
        """Codes and scales of NVFP4, MXFP4 or NF3, in order."""
        return canonical_rows(matrix, *self._of(matrix), self._where)

    def weights(self, role: str, matrix: Matrix, second: float) -> F32:
        """f32 [N, K].

        Raises:
            DataError: A scale or a weight that is no number.
        """
        buffer = self._buffers.take(f"{role} weights", 4 * matrix.rows * matrix.columns)
        weights = buffer.view(np.float32).reshape(matrix.rows, matrix.columns)
        return decode_stored(
            matrix, pick_rows(matrix, *self._of(matrix)), second, self._where, weights, 0, self._levels
        )
