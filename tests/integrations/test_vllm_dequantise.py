"""Matrices of the base dequantised: what they mean, wherever parts and ranks cut them."""

from __future__ import annotations

import pytest
import torch

from hybrid_pack.formats.source import Header, SourceFormat, detect
from hybrid_pack.integrations.vllm.dequantise import dequantise, rows_of_blocks
from tests.integrations import checkpoint


def header(tensor: torch.Tensor) -> Header:
    names = {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32", torch.bfloat16: "BF16"}
    return names[tensor.dtype], tuple(tensor.shape)


def form_of(fields: dict[str, torch.Tensor]) -> SourceFormat:
    found = detect({name: header(tensor) for name, tensor in fields.items()})
    assert isinstance(found, tuple), found
    return found[0]


@pytest.mark.parametrize("dialect", ["mxfp8", "fp8_row", "fp8_tensor", "nvfp4"])
@pytest.mark.parametrize("rows", [[96], [64, 32, 2048]])
def test_dequantised_is_what_is_meant(dialect: str, rows: list[int]) -> None:
    generator = torch.Generator().manual_seed(len(rows))
    parts = [checkpoint.matrix(dialect, n, 128, generator) for n in rows]
    fields = {}
    for name, tensor in parts[0].fields.items():
        stacked = [part.fields[name] for part in parts]
        fields[name] = torch.stack(stacked) if tensor.dim() == 0 else torch.cat(stacked)
    found = dequantise(form_of(parts[0].fields), fields, rows, torch.bfloat16)
    assert torch.equal(found, torch.cat([part.meaning for part in parts]).to(torch.bfloat16))


@pytest.mark.parametrize("rows", [[1], [128], [300], [64, 32, 2048], [200, 72]])
@pytest.mark.parametrize("columns", [128, 320])
@pytest.mark.parametrize("cut", [False, True])
def test_blocks_of_scales_whose_parts_begin_anywhere(rows: list[int], columns: int, cut: bool) -> None:
    generator = torch.Generator().manual_seed(len(rows))
    parts = [checkpoint.matrix("fp8_block", n, columns, generator) for n in rows]
    scales = [rows_of_blocks(part.fields["weight_scale_inv"], n) for part, n in zip(parts, rows, strict=True)]
    kept = rows_of_blocks(parts[0].fields["weight_scale_inv"][:, None, :, None], rows[0])
    assert torch.equal(kept, scales[0]), "ModelOpt keeps the blocks' own dimensions"
    begins = [n // 3 if cut else 0 for n in rows]  # as a rank cuts each part
    at = list(zip(parts, scales, begins, strict=True))
    fields = {
        "weight": torch.cat([part.fields["weight"][b:] for part, _, b in at]),
        "weight_scale_inv": torch.cat([scale[b:] for _, scale, b in at]),
    }
    widths = [n - b for n, b in zip(rows, begins, strict=True)]
    found = dequantise(form_of(parts[0].fields), fields, widths, torch.bfloat16)
    assert torch.equal(found, torch.cat([part.meaning[b:] for part, _, b in at]).to(torch.bfloat16))


def test_one_scale_for_matrices_stored_as_one() -> None:
    made = checkpoint.matrix("fp8_tensor", 64, 32, torch.Generator().manual_seed(0))
    scale = torch.stack((made.fields["weight_scale"], torch.tensor(float("nan"))))
    fields = {"weight": made.fields["weight"], "weight_scale": scale}
    found = dequantise(form_of(made.fields), fields, [32, 32], torch.bfloat16)
    assert torch.equal(found, made.meaning.to(torch.bfloat16))


def test_compressed_tensors_second_scale_is_a_reciprocal() -> None:
    made = checkpoint.matrix("nvfp4", 64, 32, torch.Generator().manual_seed(0))
    form = SourceFormat("nvfp4", "weight_packed", "weight_scale", "weight_global_scale", 16, second_reciprocal=True)
    fields = {
        "weight_packed": made.fields["weight"],
        "weight_scale": made.fields["weight_scale"],
        "weight_global_scale": 1 / made.fields["weight_scale_2"][None],
    }
    assert torch.equal(dequantise(form, fields, [64], torch.bfloat16), made.meaning.to(torch.bfloat16))
