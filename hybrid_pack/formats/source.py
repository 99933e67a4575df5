"""The expert formats a source can store, told apart by tensor headers alone.

Shapes are of one expert matrix of N output rows and K input columns:

==========  =============================================  =============================================================
format      codes                                          scales
==========  =============================================  =============================================================
nvfp4       ``weight`` U8/I8 [N, K/2] or F4 [N, K]         ``weight_scale`` F8_E4M3 [N, K/16], ``weight_scale_2`` F32
nvfp4       ``weight_packed`` U8 [N, K/2]                  ``weight_scale`` F8_E4M3 [N, K/16], ``weight_global_scale``
                                                           F32, one over the second scale (compressed-tensors)
mxfp4       ``weight`` U8/I8 [N, K/2] or F4 [N, K]         ``weight_scale`` or ``scale``, U8 or F8_E8M0 [N, K/32]
mxfp4       ``weight_packed`` U8 [N, K/2]                  ``weight_scale`` U8 or F8_E8M0 [N, K/32] (compressed-tensors)
mxfp4       ``blocks`` U8 [N, K/32, 16]                    ``scales`` U8 or F8_E8M0 [N, K/32] (gpt-oss)
nf3         ``weight_packed`` U8 [N, K/8*3]                ``weight_scale`` F8_E4M3 [N, K/32], or U8 with the E4M3 bits
                                                           of 16 times the scale (the kquant dialect)
mxfp8       ``weight`` F8_E4M3 [N, K]                      ``weight_scale``, ``weight_scale_inv`` or ``scale``, U8 or
                                                           F8_E8M0 [N, K/32]
fp8_block   ``weight`` F8_E4M3 [N, K]                      the same names, F32, BF16, F16 or F8_E8M0 [N/128, K/128],
                                                           both rounded up
fp8_row     ``weight`` F8_E4M3 [N, K]                      the same names, F32, BF16 or F16 [N] or [N, 1]
fp8_tensor  ``weight`` F8_E4M3 [N, K]                      the same names, F32, BF16 or F16 [], [1] or [1, 1]
bf16        ``weight`` BF16 [N, K]                         none; so f16 and f32
==========  =============================================  =============================================================

Low nibble is the even column. NF3 puts eight codes in a little-endian 24-bit word, code i at bits 3i. ``_inv`` is a
misnomer of DeepSeek's: the stored number is the scale itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from hybrid_pack.formats import e8m0

FormatName = Literal[
    "nvfp4", "mxfp4", "nf3", "mxfp8", "fp8_block", "fp8_row", "fp8_tensor", "bf16", "f16", "f32"
]  # fmt: skip
NATIVE = frozenset({"nvfp4", "mxfp4", "nf3"})
"""Formats a pack can hold, so that codes and scales may be moved as they are."""
FOUR_BIT = frozenset({"nvfp4", "mxfp4"})
FP8_BLOCK = 128
"""Rows and columns of a block of ``fp8_block`` (DeepSeek-V3's ``weight_block_size``)."""
SCALE_FIELDS = ("weight_scale", "scale")
FP8_SCALE_FIELDS = ("weight_scale", "weight_scale_inv", "scale_inv", "weight_scale_fp8", "scale")

_FLOATS: Mapping[str, FormatName] = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
_SCALE_FLOATS = frozenset({"F32", "BF16", "F16"})
_E8M0 = frozenset({"U8", "F8_E8M0"})
_BYTES = frozenset({"U8", "I8"})


@dataclass(frozen=True)
class SourceFormat:
    """How one expert matrix is stored.

    Attributes:
        name: One of ``FormatName``.
        codes_field: Field with the codes, packed or not.
        scale_field: Field with the scales; None for bf16, f16 and f32.
        second_field: Field with the second-level scale, NVFP4 only.
        group: Columns that share a scale: 16, 32 or 128; 0 where a whole row does or there is no scale.
        scale_times_16: NF3 of the kquant dialect: the stored scale is 16 times the real one.
        second_reciprocal: NVFP4 of compressed-tensors: the stored second scale is one over the real one.
        scale_bias: What is taken from an E8M0 byte to give the exponent: 127, or 125 where that was asked for.
        row_group: Rows that share a scale: 1, 128 for ``fp8_block``; 0 where all do (``fp8_tensor``) or there is none.
        scale_dtype: Dtype of a scale that is not a byte (F32, BF16, F16), or F8_E8M0 for ``fp8_block``; "" elsewhere.
    """

    name: FormatName
    codes_field: str
    scale_field: str | None
    second_field: str | None
    group: int
    scale_times_16: bool = False
    second_reciprocal: bool = False
    scale_bias: int = e8m0.BIAS
    row_group: int = 1
    scale_dtype: str = ""

    def code_bytes(self, columns: int) -> int:
        """Bytes that hold a number of columns (a multiple of 8) of one row."""
        return columns // 8 * 3 if self.name == "nf3" else columns * self.bits // 8

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Scales of a matrix as [scale rows, scales of a row]; (0, 0) where there are none."""
        if self.scale_field is None:
            return 0, 0
        down = -(-rows // self.row_group) if self.row_group else 1
        return down, -(-columns // self.group) if self.group else 1

    @property
    def scale_bytes(self) -> int:
        """Bytes of one scale."""
        return {"F32": 4, "BF16": 2, "F16": 2}.get(self.scale_dtype, 1)

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return {"nvfp4": 4, "mxfp4": 4, "nf3": 3, "bf16": 16, "f16": 16, "f32": 32}.get(self.name, 8)

    @property
    def native(self) -> bool:
        """Whether a pack can hold it: nvfp4, mxfp4 and nf3 may be moved bit for bit."""
        return self.name in NATIVE

    @property
    def wide(self) -> bool:
        """Whether it must be quantised before a pack can hold it."""
        return self.name not in NATIVE


NVFP4 = SourceFormat("nvfp4", "weight", "weight_scale", "weight_scale_2", 16)
MXFP4 = SourceFormat("mxfp4", "weight", "weight_scale", None, 32)
NF3 = SourceFormat("nf3", "weight_packed", "weight_scale", None, 32)
"""The three forms a pack is made of, as ModelOpt and the hybrid checkpoints store them."""


@dataclass(frozen=True)
class Unsupported:
    """A stored format that is none of those above, with the reason in words.

    Attributes:
        reason: Why.
        wide: Whether its codes have eight bits or more; experts the map does not name may then stay as they are.
    """

    reason: str
    wide: bool = False


Header = tuple[str, tuple[int, ...]]
"""(safetensors dtype, shape) of a tensor."""
Detected = tuple[SourceFormat, int, int]
"""(format, N, K)."""


def _text(header: Header) -> str:
    return f"{header[0]} {list(header[1])}"


def _scales(fields: Mapping[str, Header], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in fields), None)


def _no_scale(codes: str, names: tuple[str, ...]) -> Unsupported:
    """No scale under any of the names that are looked for."""
    return Unsupported(f"{codes} has no {names[0]} beside it, nor {', '.join(names[1:])}")


def _misfit(field: str, fields: Mapping[str, Header], codes: str) -> Unsupported:
    shape, other = fields[field][1], fields[codes][1]
    kind = "; a 1-D scale is swizzled for one kernel" if len(shape) == 1 else ""
    return Unsupported(f"{field} {list(shape)} does not fit {codes} {list(other)}{kind}")


def _packed_bytes(fields: Mapping[str, Header]) -> Detected | Unsupported:
    """``weight_packed``: NF3 has 12 bytes for one scale, compressed-tensors' MXFP4 16 and NVFP4 8."""
    (dtype, shape), field = fields["weight_packed"], _scales(fields, SCALE_FIELDS)
    expected = "neither NF3's U8 [N, K/8*3] nor 4-bit codes U8 [N, K/2]"
    if dtype not in _BYTES or len(shape) != 2:
        return Unsupported(f"weight_packed is {_text((dtype, shape))}, {expected}")
    if field is None:
        return _no_scale("weight_packed", SCALE_FIELDS)
    scale_dtype, scale = fields[field]
    if len(scale) != 2 or scale[0] != shape[0] or scale[1] == 0 or shape[1] % scale[1]:
        return _misfit(field, fields, "weight_packed")
    found: SourceFormat | None = None
    columns = shape[1] * 2
    match shape[1] // scale[1]:
        case 12 if scale_dtype in ("F8_E4M3", "U8"):
            found, columns = SourceFormat("nf3", "weight_packed", field, None, 32, scale_dtype == "U8"), scale[1] * 32
        case 8 if scale_dtype == "F8_E4M3":
            found = SourceFormat("nvfp4", "weight_packed", field, "weight_global_scale", 16, second_reciprocal=True)
        case 16 if scale_dtype in _E8M0:
            found = SourceFormat("mxfp4", "weight_packed", field, None, 32)
    if found is None:
        has = f"weight_packed {list(shape)} with {field} {_text(fields[field])}"
        return Unsupported(f"{has} is neither NF3 nor compressed-tensors' NVFP4 or MXFP4")
    return found, shape[0], columns


def _blocks(fields: Mapping[str, Header]) -> Detected | Unsupported:
    """gpt-oss: 16 bytes, so 32 codes, for each scale."""
    (dtype, shape), scales = fields["blocks"], fields.get("scales")
    if dtype not in _BYTES or len(shape) != 3 or shape[2] != 16:
        return Unsupported(f"blocks is {_text((dtype, shape))}, not MXFP4's U8 [N, K/32, 16]")
    if scales is None:
        return Unsupported("blocks has no scales beside it")
    if scales[0] not in _E8M0 or scales[1] != shape[:2]:
        return Unsupported(f"scales {_text(scales)} does not fit blocks {list(shape)}")
    return SourceFormat("mxfp4", "blocks", "scales", None, 32), shape[0], shape[1] * 32


def _four_bits(fields: Mapping[str, Header]) -> Detected | Unsupported:
    dtype, shape = fields["weight"]
    if dtype not in {*_BYTES, "F4"} or len(shape) != 2:
        return Unsupported(f"weight is {_text((dtype, shape))}, not packed 4-bit codes U8 [N, K/2]")
    columns = shape[1] if dtype == "F4" else shape[1] * 2
    field = _scales(fields, SCALE_FIELDS)
    if field is None:
        return _no_scale("weight", SCALE_FIELDS)
    scale_dtype, scale = fields[field]
    if len(scale) != 2 or scale[0] != shape[0] or scale[1] == 0 or columns % scale[1]:
        return _misfit(field, fields, "weight")
    group = columns // scale[1]
    if group == 16 and scale_dtype == "F8_E4M3":
        return SourceFormat("nvfp4", "weight", field, "weight_scale_2", 16), shape[0], columns
    if group == 32 and scale_dtype in _E8M0:
        return SourceFormat("mxfp4", "weight", field, None, 32), shape[0], columns
    return Unsupported(f"{field} {scale_dtype} with one scale for {group} codes is neither NVFP4 nor MXFP4")


def _eight_bits(fields: Mapping[str, Header]) -> Detected | Unsupported:
    _, shape = fields["weight"]
    field = _scales(fields, FP8_SCALE_FIELDS)
    if len(shape) != 2 or not all(shape):
        return Unsupported(f"weight is F8_E4M3 {list(shape)}, not [N, K]", wide=True)
    if field is None:
        return replace(_no_scale("weight F8_E4M3", FP8_SCALE_FIELDS), wide=True)
    rows, columns = shape
    dtype, scale = fields[field]
    if len(scale) == 4 and scale[1] == scale[3] == 1:  # ModelOpt keeps the blocks' own dimensions
        scale = (scale[0], scale[2])
    # Where a matrix is one block, block and tensor mean the same, and only the name says which it is called.
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    one = ((1, 1), "weight_scale")
    found: SourceFormat | None = None
    if dtype in _E8M0 and columns % 32 == 0 and scale == (rows, columns // 32):
        found = SourceFormat("mxfp8", "weight", field, None, 32)
    elif scale == blocks and (dtype == "F8_E8M0" or (dtype in _SCALE_FLOATS and (scale, field) != one)):
        found = SourceFormat("fp8_block", "weight", field, None, FP8_BLOCK, row_group=FP8_BLOCK, scale_dtype=dtype)
    elif dtype in _SCALE_FLOATS and scale in ((), (1,), (1, 1)):
        found = SourceFormat("fp8_tensor", "weight", field, None, 0, row_group=0, scale_dtype=dtype)
    elif dtype in _SCALE_FLOATS and scale in ((rows,), (rows, 1)):
        found = SourceFormat("fp8_row", "weight", field, None, 0, scale_dtype=dtype)
    if found is None:
        known = "MXFP8 (U8 [N, K/32]), 128x128 blocks, nor one scale a row or matrix"
        what = f"{field} {_text(fields[field])} beside weight F8_E4M3 {list(shape)}"
        return Unsupported(f"{what} is neither {known}", wide=True)
    return found, rows, columns


def detect(fields: Mapping[str, Header], mx_bias: int = e8m0.BIAS) -> Detected | Unsupported:
    """Decide the format of one expert matrix from the headers of its fields.

    A U8 scale has several meanings in the wild, so the companion's dtype and the ratio of columns decide, never a name.

    Args:
        fields: Header of each field stored under the matrix's name, such as ``weight`` and ``weight_scale``.
        mx_bias: Bias of the E8M0 scales of compressed-tensors' MXFP4: 125 in exports from before 2026, which nothing in
            a header tells.

    Returns:
        (format, N, K), or why it is none of the supported ones.
    """
    if "weight_packed" in fields:
        result = _packed_bytes(fields)
        if not isinstance(result, Unsupported) and result[0].name == "mxfp4":
            return replace(result[0], scale_bias=mx_bias), result[1], result[2]
        return result
    if "blocks" in fields:
        return _blocks(fields)
    if "weight" not in fields:
        return Unsupported("neither weight nor weight_packed is stored")
    dtype, shape = fields["weight"]
    if dtype in _FLOATS:
        if len(shape) != 2:
            return Unsupported(f"weight is {_text((dtype, shape))}, not [N, K]", wide=True)
        return SourceFormat(_FLOATS[dtype], "weight", None, None, 0, row_group=0), shape[0], shape[1]
    if dtype == "F8_E4M3":
        return _eight_bits(fields)
    if dtype.startswith("F8_"):
        return Unsupported(f"weight is {dtype}, which this version does not read", wide=True)
    return _four_bits(fields)
