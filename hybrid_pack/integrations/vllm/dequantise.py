"""Matrices of the base to BF16, with torch, a block of rows at a time. Imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hybrid_pack.formats import e2m1
from hybrid_pack.formats.source import FP8_BLOCK, SourceFormat

ROWS = 1024
"""Rows done at once, so that memory beyond the result is that of a few in float32."""

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
"""By the names of safetensors."""


def dequantise(
    form: SourceFormat, fields: Mapping[str, torch.Tensor], widths: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """A weight from its codes and scales.

    Args:
        form: How it is stored: ``mxfp8``, ``fp8_row``, ``fp8_tensor``, ``fp8_block``, ``nvfp4`` or ``mxfp4``.
        fields: Codes [N, K] or [N, K/2], scales as ``formats.source`` says, but those of blocks one a row, as
            ``rows_of_blocks`` gives them; one scale of a whole matrix, and NVFP4's second ones, as f32 [len(widths)],
            one for each of the matrices that lie below each other.
        widths: Rows of each of these matrices.
        dtype: Of the result.

    Returns:
        The weight [N, K]: code times scale in float32, rounded once.
    """
    codes = fields[form.codes_field]
    assert form.scale_field is not None, "not quantised"
    scales = fields[form.scale_field]
    columns = codes.shape[1] * (2 if form.bits == 4 else 1)
    out = torch.empty(codes.shape[0], columns, dtype=dtype, device=codes.device)
    whole = _of_matrices(form, fields, widths)
    for first in range(0, codes.shape[0], ROWS):
        part = slice(first, first + ROWS)
        values = _values(form, codes[part])
        if form.name != "fp8_tensor":
            values = _scaled(form, values, scales[part])
        out[part] = values if whole is None else values * whole[part, None]
    return out


def rows_of_blocks(scales: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    """Scales of 128x128 blocks, repeated for every row of a block, so that rows can be cut and joined anywhere.

    Args:
        scales: [N/128, K/128], both rounded up; [N/128, 1, K/128, 1] where the blocks' own dimensions were kept.
        rows: N; by default a whole number of blocks.

    Returns:
        f32 [N, K/128].
    """
    flat = scales[:, 0, :, 0] if scales.dim() == 4 else scales
    return flat.to(torch.float32).repeat_interleave(FP8_BLOCK, dim=0)[:rows]


def _values(form: SourceFormat, codes: torch.Tensor) -> torch.Tensor:
    """Codes as numbers, f32 [rows, K]."""
    if form.bits != 4:
        return codes.to(torch.float32)
    book = torch.tensor(e2m1.VALUES.tolist(), dtype=torch.float32, device=codes.device)
    stored = codes.view(torch.uint8).to(torch.int64)
    return torch.stack((book[stored & 15], book[stored >> 4]), dim=-1).flatten(1)  # low nibble is the even column


def _scaled(form: SourceFormat, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if form.name == "fp8_row":
        return values * scales.to(torch.float32).reshape(-1, 1)
    if form.name == "fp8_block":
        return values * scales.repeat_interleave(FP8_BLOCK, dim=1)[:, : values.shape[1]]
    if form.name in ("mxfp8", "mxfp4"):
        exponents = scales.view(torch.uint8).to(torch.float32) - form.scale_bias
        numbers = torch.exp2(exponents)
    else:
        numbers = scales.to(torch.float32)
    grouped = values.reshape(values.shape[0], -1, form.group) * numbers[:, :, None]
    return grouped.flatten(1)


def _of_matrices(form: SourceFormat, fields: Mapping[str, torch.Tensor], widths: Sequence[int]) -> torch.Tensor | None:
    """The scale of each row's whole matrix, f32 [N], where the format has one."""
    name = form.scale_field if form.name == "fp8_tensor" else form.second_field
    if name is None:
        return None
    found = fields[name].to(torch.float32).reshape(-1)
    found = torch.where(torch.isnan(found), found[0], found)  # matrices stored as one have one scale, the first
    found = 1 / found if form.second_reciprocal else found
    return found.repeat_interleave(torch.tensor(list(widths), device=found.device))
