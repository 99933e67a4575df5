"""What an expert's matrices lose as NF3 and as the kept format, on rows taken evenly from each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.io.checkpoint import Checkpoint, Matrix
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.weights import read_matrix
from hybrid_pack.quantize import QuantStats, nvfp4_second_scale, quantize_mxfp4, quantize_nf3, quantize_nvfp4
from hybrid_pack.tiers.weights import MatrixError, Measure

ROWS = 128
"""Rows measured of each matrix: of 6144 columns they are 786,432 weights, enough for some tenths of a percent."""

BLOCK_ROWS = 16
"""Rows read at a time: neighbours, so that the disk is not asked for single rows."""

F32 = NDArray[np.float32]


def sampled_rows(rows: int, wanted: int = ROWS) -> Iterator[tuple[int, int]]:
    """(first row, count) of blocks spread evenly over a matrix, all of it where it is small."""
    if rows <= wanted:
        yield 0, rows
        return
    blocks = wanted // BLOCK_ROWS
    for i in range(blocks):
        yield (rows - BLOCK_ROWS) * i // max(blocks - 1, 1), BLOCK_ROWS


def _weights(reader: TensorReader, matrix: Matrix, where: str, levels: tuple[float, ...]) -> tuple[F32, float]:
    """Sampled rows, and how many times as many there are."""
    parts = [
        read_matrix(reader, matrix, where, first_row=first, count=count, levels=levels)
        for first, count in sampled_rows(matrix.rows)
    ]
    found = np.concatenate(parts)
    return found, matrix.rows / len(found)


def _nf3(weights: F32, levels: Sequence[float]) -> QuantStats:
    n, k = weights.shape
    return quantize_nf3(
        weights, levels, "mse", None, np.empty((n, k // 8 * 3), np.uint8), np.empty((n, k // 32), np.uint8)
    )


def _kept(weights: F32, kept_format: str) -> QuantStats:
    n, k = weights.shape
    codes = np.empty((n, k // 2), np.uint8)
    if kept_format == "mxfp4":
        return quantize_mxfp4(weights, "mse", None, codes, np.empty((n, k // 32), np.uint8))
    second = nvfp4_second_scale(float(np.abs(weights).max()))
    return quantize_nvfp4(weights, second, "mse", None, codes, np.empty((n, k // 16), np.uint8))


def measure_of(checkpoint: Checkpoint, kept_format: str, reader: TensorReader) -> Measure:
    """A function of (layer, expert) that reads and quantises.

    Args:
        checkpoint: The source.
        kept_format: ``nvfp4`` or ``mxfp4``.
        reader: Kept open while the function is used.
    """
    levels = checkpoint.config.nf3_levels

    def measure(layer: int, expert: int) -> list[MatrixError]:
        found = []
        for matrix in checkpoint.layers[layer].experts[expert].matrices:
            weights, times = _weights(reader, matrix, f"layer {layer} expert {expert}", levels)
            tail = _nf3(weights, levels)
            kept = 0.0 if matrix.native_to(kept_format) else _kept(weights, kept_format).error
            found.append(MatrixError(*(math.fsum([value * times]) for value in (tail.signal, tail.error, kept))))
        return found

    return measure
