"""The expert formats a source can store, told apart by tensor headers alone.

Shapes are of one expert matrix of N output rows and K input columns:

========  ==============================================  ==========================================================
format    codes                                           scales
========  ==============================================  ==========================================================
nvfp4     ``weight`` U8/I8 [N, K/2] or F4 [N, K]          ``weight_scale`` F8_E4M3 [N, K/16], ``weight_scale_2`` F32
mxfp4     ``weight`` U8/I8 [N, K/2] or F4 [N, K]          ``weight_scale`` or ``scale``, U8 or F8_E8M0 [N, K/32]
nf3       ``weight_packed`` U8 [N, K/8*3]                 ``weight_scale`` F8_E4M3 [N, K/32], or U8 with the E4M3 bits
                                                          of 16 times the scale (the kquant dialect)
========  ==============================================  ==========================================================

Low nibble is the even column. NF3 puts eight codes in a little-endian 24-bit word, code i at bits 3i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FormatName = Literal["nvfp4", "mxfp4", "nf3"]
WIDE_DTYPES = frozenset({"BF16", "F16", "F32", "F8_E4M3", "F8_E5M2"})
"""Dtypes of ``weight`` that are not a packed 3- or 4-bit format."""


@dataclass(frozen=True)
class SourceFormat:
    """How one expert matrix is stored.

    Attributes:
        name: ``nvfp4``, ``mxfp4`` or ``nf3``.
        codes_field: Field with the packed codes.
        scale_field: Field with the block scales.
        second_field: Field with the second-level scale, NVFP4 only.
        group: Columns that share one block scale, 16 or 32.
        scale_times_16: NF3 of the kquant dialect: the stored scale is 16 times the real one.
    """

    name: FormatName
    codes_field: str
    scale_field: str
    second_field: str | None
    group: int
    scale_times_16: bool = False

    def code_bytes(self, columns: int) -> int:
        """Bytes that hold a number of columns (a multiple of 8) of one row."""
        return columns // 8 * 3 if self.name == "nf3" else columns // 2

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return 3 if self.name == "nf3" else 4


@dataclass(frozen=True)
class Unsupported:
    """A stored format that is not one of the three, with the reason in words."""

    reason: str
    wide: bool = False


Header = tuple[str, tuple[int, ...]]
"""(safetensors dtype, shape) of a tensor."""


_CT_SCALES = {("F8_E4M3", 8): "NVFP4", ("U8", 16): "MXFP4"}
"""(scale dtype, bytes of weight_packed for one scale) of compressed-tensors' formats; NF3 has 12."""


def _compressed_tensors(fields: dict[str, Header]) -> str | None:
    """The compressed-tensors format, where ``weight_packed`` is one."""
    (_, packed), (dtype, scales) = fields["weight_packed"], fields.get("weight_scale", ("", ()))
    if len(packed) != 2 or len(scales) != 2 or not scales[1] or packed[1] % scales[1]:
        return None
    return _CT_SCALES.get((dtype, packed[1] // scales[1]))


def _columns(fields: dict[str, Header]) -> tuple[str, int, int] | Unsupported:
    """(codes field, N, K) of the packed codes; K of ``weight_packed`` is still open and given for three bits."""
    if "weight_packed" in fields:
        dtype, shape = fields["weight_packed"]
        other = _compressed_tensors(fields)
        if other is not None:
            return Unsupported(
                f"weight_packed is {other} as compressed-tensors stores it; this version does not read that"
            )
        if dtype not in ("U8", "I8") or len(shape) != 2 or shape[1] % 3:
            return Unsupported(f"weight_packed is {dtype} {list(shape)}, not NF3's U8 [N, K/8*3]")
        return "weight_packed", shape[0], shape[1] // 3 * 8
    if "weight" not in fields:
        return Unsupported("neither weight nor weight_packed is stored")
    dtype, shape = fields["weight"]
    if dtype in WIDE_DTYPES:
        return Unsupported(f"weight is {dtype}, not a packed 3- or 4-bit format", wide=True)
    if dtype not in ("U8", "I8", "F4") or len(shape) != 2:
        return Unsupported(f"weight is {dtype} {list(shape)}, not packed 4-bit codes U8 [N, K/2]")
    return "weight", shape[0], shape[1] if dtype == "F4" else shape[1] * 2


def detect(fields: dict[str, Header]) -> tuple[SourceFormat, int, int] | Unsupported:
    """Decide the format of one expert matrix from the headers of its fields.

    A U8 scale has several meanings in the wild, so the companion's dtype and the ratio of columns decide, never a name.

    Args:
        fields: Header of each field stored under the matrix's name, such as ``weight`` and ``weight_scale``.

    Returns:
        (format, N, K), or why it is none of the supported ones.
    """
    codes = _columns(fields)
    if isinstance(codes, Unsupported):
        return codes
    codes_field, rows, columns = codes
    scale_field = next((name for name in ("weight_scale", "scale") if name in fields), None)
    if scale_field is None:
        return Unsupported(f"{codes_field} has no weight_scale beside it")
    scale_dtype, scale_shape = fields[scale_field]
    if len(scale_shape) != 2 or scale_shape[0] != rows or scale_shape[1] == 0 or columns % scale_shape[1]:
        return Unsupported(
            f"{scale_field} {list(scale_shape)} does not fit {codes_field} {list(fields[codes_field][1])}"
        )
    group = columns // scale_shape[1]
    if codes_field == "weight_packed":
        if group == 32 and scale_dtype in ("F8_E4M3", "U8"):
            return SourceFormat("nf3", codes_field, scale_field, None, 32, scale_dtype == "U8"), rows, columns
        packed = list(fields[codes_field][1])
        return Unsupported(f"weight_packed {packed} with {scale_field} {scale_dtype} {list(scale_shape)} is not NF3")
    if group == 16 and scale_dtype == "F8_E4M3":
        return SourceFormat("nvfp4", codes_field, scale_field, "weight_scale_2", 16), rows, columns
    if group == 32 and scale_dtype in ("U8", "F8_E8M0"):
        return SourceFormat("mxfp4", codes_field, scale_field, None, 32), rows, columns
    return Unsupported(f"{scale_field} {scale_dtype} with one scale for {group} codes is neither NVFP4 nor MXFP4")
