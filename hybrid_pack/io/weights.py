"""Expert matrices read from a source: rows in order, whatever the storage; as stored bytes or as float32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybrid_pack.errors import DataError
from hybrid_pack.formats import checks, decode_kernels
from hybrid_pack.formats.decode import F32, U8, decode_rows
from hybrid_pack.formats.nf3 import DEFAULT_LEVELS
from hybrid_pack.formats.source import SourceFormat
from hybrid_pack.io.experts import Matrix
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.shards import Located

HINT = "the export is damaged; export the checkpoint again"


@dataclass(frozen=True)
class StoredRows:
    """Rows of a matrix as they are stored, in order.

    Attributes:
        codes: u8 [rows, code bytes]; rows may be strided, the bytes of one are neighbours.
        scales: Bytes of the scales: u8 [rows, bytes] of these rows, or of the whole matrix where rows share one
            (``fp8_block``, ``fp8_tensor``); None where there are none.
    """

    codes: U8
    scales: U8 | None


@dataclass(frozen=True)
class NativeRows:
    """Rows of an NVFP4, MXFP4 or NF3 matrix.

    Attributes:
        codes: u8 [N, K/2] or [N, K/8*3].
        scales: u8 [N, K/group].
    """

    codes: U8
    scales: U8


def _rows(matrix: Matrix, first_row: int, count: int | None) -> int:
    """How many rows are meant."""
    found = matrix.rows - first_row if count is None else count
    if first_row < 0 or found < 1 or first_row + found > matrix.rows:
        raise ValueError(f"{matrix.name} has {matrix.rows} rows, not {first_row} to {first_row + found}")
    return found


def _turned(stored: U8, width: int, unit: int, first: int, step: int, count: int) -> U8:
    """Rows u8 [count, width] of bytes stored as [width / unit, stored rows] elements of ``unit`` bytes."""
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[unit]
    out = np.empty((count, width), np.uint8)
    decode_kernels.turn(stored.view(kind).reshape(width // unit, -1), first, step, out.view(kind))
    return out


def _pick(matrix: Matrix, stored: U8, width: int, unit: int, first_row: int, count: int) -> U8:
    """Rows u8 [count, width] out of all bytes that hold the matrix."""
    view = matrix.view
    first = view.first_row + first_row * view.row_step
    if view.transposed:
        return _turned(stored, width, unit, first, view.row_step, count)
    picked: U8 = stored.reshape(-1, width)[first : first + (count - 1) * view.row_step + 1 : view.row_step]
    return picked


def _canonical(form: SourceFormat, scales: U8, matrix: Matrix, where: str) -> U8:
    """MXFP4 scales of bias 125 as bytes of bias 127; others as they are."""
    if form.scale_bias == 127:
        return scales
    check_scales(matrix, scales, where)
    return np.add(scales, 127 - form.scale_bias, dtype=np.uint8)


def pick_rows(matrix: Matrix, codes: U8, scales: U8 | None, first_row: int = 0, count: int | None = None) -> StoredRows:
    """Rows of a matrix out of the bytes of its tensors.

    Gate and up that alternate have the same tensors, so that one reading of them serves both.

    Args:
        matrix: The matrix.
        codes: u8 [bytes], all of ``matrix.codes``.
        scales: u8 [bytes], all of ``matrix.scales``.
        first_row: First row of the matrix.
        count: Rows; by default all that follow.
    """
    form, count = matrix.format, _rows(matrix, first_row, count)
    unit = max(form.bits // 8, 1)
    picked = _pick(matrix, codes, form.code_bytes(matrix.columns), unit, first_row, count)
    if scales is None:
        return StoredRows(picked, None)
    down, across = form.scale_shape(matrix.stored_rows, matrix.columns)
    width = across * form.scale_bytes
    if form.row_group == 1:
        return StoredRows(picked, _pick(matrix, scales, width, form.scale_bytes, first_row, count))
    if matrix.view.transposed and across > 1:
        return StoredRows(picked, _turned(scales, width, form.scale_bytes, 0, 1, down))
    return StoredRows(picked, scales.reshape(down, width))


def canonical_rows(matrix: Matrix, codes: U8, scales: U8 | None, where: str) -> NativeRows:
    """Codes and scales of an NVFP4, MXFP4 or NF3 matrix as ``native_rows`` gives them, out of the bytes of its tensors.

    Scales are not checked, unless their bias must be changed.

    Raises:
        DataError: A scale that no byte of bias 127 can say.
    """
    rows = pick_rows(matrix, codes, scales)
    assert rows.scales is not None and matrix.format.native
    return NativeRows(rows.codes, _canonical(matrix.format, rows.scales, matrix, where))


def _read(reader: TensorReader, at: Located, begin: int = 0, nbytes: int | None = None) -> U8:
    out = np.empty(at.header.nbytes if nbytes is None else nbytes, np.uint8)
    reader.read(at, out, begin)
    return out


def stored_rows(reader: TensorReader, matrix: Matrix, first_row: int = 0, count: int | None = None) -> StoredRows:
    """Read rows of a matrix as they are stored; of a transposed one everything is read.

    Raises:
        DataError: The file ends early.
        EnvironmentFailure: The system could not read.
    """
    form, view = matrix.format, matrix.view
    count = _rows(matrix, first_row, count)
    if view.transposed:
        scales = None if matrix.scales is None else _read(reader, matrix.scales)
        return pick_rows(matrix, _read(reader, matrix.codes), scales, first_row, count)
    first = view.first_row + first_row * view.row_step
    span = (count - 1) * view.row_step + 1
    width = form.code_bytes(matrix.columns)
    codes = _read(reader, matrix.codes, first * width, span * width).reshape(span, width)[:: view.row_step]
    if matrix.scales is None:
        return StoredRows(codes, None)
    down, across = form.scale_shape(matrix.stored_rows, matrix.columns)
    width = across * form.scale_bytes
    if form.row_group != 1:
        return StoredRows(codes, _read(reader, matrix.scales).reshape(down, width))
    rows = _read(reader, matrix.scales, first * width, span * width).reshape(span, width)
    return StoredRows(codes, rows[:: view.row_step])


def check_scales(matrix: Matrix, scales: U8, where: str, first_row: int = 0) -> None:
    """Refuse scales that mean nothing.

    Args:
        matrix: Whose scales they are.
        scales: Their bytes, u8 [scale rows, bytes].
        where: Layer and expert in words.
        first_row: Row of the matrix that row 0 is of.

    Raises:
        DataError: The first such scale, by tensor and index.
    """
    fault = checks.scale_fault(matrix.format, scales)
    if fault is None:
        return
    row = fault.row + (first_row if matrix.format.row_group == 1 else 0)
    raise DataError(
        f"{where}: scale [{row}, {fault.column}] of {matrix.format.name.upper()}",
        where=matrix.scales,
        expected=fault.expected,
        found=fault.found,
        hint=HINT,
    )


def second_scale(reader: TensorReader, matrix: Matrix, where: str) -> float:
    """The second-level scale of a matrix: what is stored, or one over it for compressed-tensors; 1.0 without one.

    Raises:
        DataError: It is not finite and positive.
        EnvironmentFailure: The system could not read.
    """
    if matrix.second is None:
        return 1.0
    stored = float(_read(reader, matrix.second).view("<f4")[0])
    if (found := checks.second_fault(matrix.format, stored)) is not None:
        inverse = ", as is one over it" if matrix.format.second_reciprocal else ""
        raise DataError(
            f"{where}: second-level scale",
            where=matrix.second,
            expected=f"a finite positive number{inverse}",
            found=found,
            hint=HINT,
        )
    return checks.second_value(matrix.format, stored)


def native_rows(
    reader: TensorReader, matrix: Matrix, where: str, first_row: int = 0, count: int | None = None
) -> NativeRows:
    """Codes and scales of an NVFP4, MXFP4 or NF3 matrix as ModelOpt and the hybrid checkpoints store them.

    Codes are u8 [rows, K/2] or [rows, K/8*3] and never changed, scales u8 [rows, K/group]; E8M0 bytes of bias 125
    become those of bias 127.

    Raises:
        DataError: A scale that is refused; the file ends early.
        EnvironmentFailure: The system could not read.
    """
    rows = stored_rows(reader, matrix, first_row, count)
    assert rows.scales is not None and matrix.format.native
    check_scales(matrix, rows.scales, where, first_row)
    return NativeRows(rows.codes, _canonical(matrix.format, rows.scales, matrix, where))


def read_matrix(
    reader: TensorReader,
    matrix: Matrix,
    where: str,
    out: F32 | None = None,
    first_row: int = 0,
    count: int | None = None,
    levels: tuple[float, ...] = DEFAULT_LEVELS,
) -> F32:
    """Rows of a matrix as float32, scales and weights checked; see ``formats/decode.py`` for what each value is.

    Args:
        reader: Of the source.
        matrix: The matrix.
        where: Layer and expert in words, for errors.
        out: f32 [count, K], contiguous; made where it is not given.
        first_row: First row of the matrix.
        count: Rows; by default all that follow.
        levels: NF3 code book.

    Raises:
        DataError: A scale that is refused, a weight that is no finite number; the file ends early.
        EnvironmentFailure: The system could not read.
    """
    rows = stored_rows(reader, matrix, first_row, count)
    return decode_stored(matrix, rows, second_scale(reader, matrix, where), where, out, first_row, levels)


def decode_stored(
    matrix: Matrix,
    rows: StoredRows,
    second: float,
    where: str,
    out: F32 | None = None,
    first_row: int = 0,
    levels: tuple[float, ...] = DEFAULT_LEVELS,
) -> F32:
    """Rows that were read as float32; arguments and errors as ``read_matrix``, ``second`` from ``second_scale``."""
    if rows.scales is not None:
        check_scales(matrix, rows.scales, where, first_row)
    if out is None:
        out = np.empty((rows.codes.shape[0], matrix.columns), np.float32)
    view = matrix.view
    first = view.first_row + first_row * view.row_step
    decode_rows(matrix.format, rows.codes, rows.scales, second, out, first, view.row_step, levels)
    fault = checks.value_fault(out)
    if fault is not None:
        raise DataError(
            f"{where}: weight [{first_row + fault.row}, {fault.column}]",
            where=matrix.codes,
            expected=fault.expected,
            found=fault.found,
            hint=HINT,
        )
    return out
