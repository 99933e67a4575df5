"""Format detection from headers: each stored convention, and each way of being none of them with its words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hybrid_pack.formats.source import Header, SourceFormat, Unsupported, detect

Fields = dict[str, Header]

NVFP4 = SourceFormat("nvfp4", "weight", "weight_scale", "weight_scale_2", 16)
MXFP4 = SourceFormat("mxfp4", "weight", "weight_scale", None, 32)
NF3 = SourceFormat("nf3", "weight_packed", "weight_scale", None, 32)
KQUANT = SourceFormat("nf3", "weight_packed", "weight_scale", None, 32, scale_times_16=True)
DEEPSEEK = SourceFormat("mxfp4", "weight", "scale", None, 32)
OSS = SourceFormat("mxfp4", "blocks", "scales", None, 32)
CT_NVFP4 = SourceFormat("nvfp4", "weight_packed", "weight_scale", "weight_global_scale", 16, second_reciprocal=True)
CT_MXFP4 = SourceFormat("mxfp4", "weight_packed", "weight_scale", None, 32)
BLOCK = SourceFormat("fp8_block", "weight", "weight_scale_inv", None, 128, row_group=128, scale_dtype="F32")
ROW = SourceFormat("fp8_row", "weight", "weight_scale", None, 0, scale_dtype="F32")
TENSOR = SourceFormat("fp8_tensor", "weight", "weight_scale", None, 0, row_group=0, scale_dtype="F32")


def weight(dtype: str, *shape: int) -> Fields:
    return {"weight": (dtype, shape)}


def packed(dtype: str, *shape: int) -> Fields:
    return {"weight_packed": (dtype, shape)}


def scale(dtype: str, *shape: int, name: str = "weight_scale") -> Fields:
    return {name: (dtype, shape)}


SECOND: Fields = {"weight_scale_2": ("F32", ()), "input_scale": ("F32", ())}


@pytest.mark.parametrize(
    ("fields", "expected", "rows", "columns"),
    [
        pytest.param(
            weight("U8", 2048, 3072) | scale("F8_E4M3", 2048, 384) | SECOND, NVFP4, 2048, 6144, id="GLM kept gate"
        ),
        pytest.param(
            weight("U8", 6144, 1024) | scale("F8_E4M3", 6144, 128) | SECOND, NVFP4, 6144, 2048, id="GLM kept down"
        ),
        pytest.param(packed("U8", 2048, 2304) | scale("F8_E4M3", 2048, 192), NF3, 2048, 6144, id="GLM tail gate"),
        pytest.param(packed("U8", 6144, 768) | scale("F8_E4M3", 6144, 64), NF3, 6144, 2048, id="GLM tail down"),
        pytest.param(packed("U8", 3072, 1344) | scale("U8", 3072, 112), KQUANT, 3072, 3584, id="Kimi-K3 tail gate"),
        pytest.param(weight("U8", 2048, 3072) | scale("U8", 2048, 192), MXFP4, 2048, 6144, id="MXFP4 kept gate"),
        pytest.param(weight("U8", 64, 32) | scale("F8_E8M0", 64, 2), MXFP4, 64, 64, id="MXFP4 with a typed scale"),
        pytest.param(
            weight("I8", 2048, 2048) | scale("F8_E8M0", 2048, 128, name="scale"), DEEPSEEK, 2048, 4096, id="DeepSeek-V4"
        ),
        pytest.param(
            {"blocks": ("U8", (5760, 90, 16)), "scales": ("U8", (5760, 90))}, OSS, 5760, 2880, id="gpt-oss gate and up"
        ),
        pytest.param(
            packed("U8", 64, 32) | scale("F8_E4M3", 64, 4) | {"weight_global_scale": ("F32", (1,))},
            CT_NVFP4,
            64,
            64,
            id="ct NVFP4",
        ),
        pytest.param(packed("U8", 64, 32) | scale("F8_E8M0", 64, 2), CT_MXFP4, 64, 64, id="ct MXFP4"),
        pytest.param(weight("I8", 64, 32) | scale("F8_E4M3", 64, 4) | SECOND, NVFP4, 64, 64, id="NVFP4 in I8"),
        pytest.param(weight("F4", 64, 96) | scale("F8_E4M3", 64, 6) | SECOND, NVFP4, 64, 96, id="NVFP4 in F4"),
        pytest.param(weight("F4", 64, 96) | scale("F8_E8M0", 64, 3), MXFP4, 64, 96, id="MXFP4 in F4"),
        pytest.param(packed("I8", 64, 24) | scale("F8_E4M3", 64, 2), NF3, 64, 64, id="NF3 in I8"),
        pytest.param(weight("U8", 64, 32) | scale("F8_E4M3", 64, 4), NVFP4, 64, 64, id="second scale missing"),
        pytest.param(
            weight("U8", 64, 32) | scale("U8", 64, 2) | scale("F32", 64, 9, name="scale"),
            MXFP4,
            64,
            64,
            id="both names",
        ),
    ],
)
def test_supported(fields: Fields, expected: SourceFormat, rows: int, columns: int) -> None:
    assert detect(fields) == (expected, rows, columns)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "neither weight nor weight_packed is stored"),
        (scale("F8_E4M3", 64, 4), "neither weight nor weight_packed is stored"),
        ({"w13_blocks": ("U8", (64, 32))}, "neither weight nor weight_packed is stored"),
        (weight("U8", 64, 32), "weight has no weight_scale beside it, nor scale"),
        (packed("U8", 64, 24), "weight_packed has no weight_scale beside it"),
        (weight("U8", 64, 32) | scale("F32", 1, 1, name="weight_scale_inv"), "weight has no weight_scale beside it"),
        (weight("I32", 64, 8), "weight is I32 [64, 8], not packed 4-bit codes U8 [N, K/2]"),
        (weight("U8", 4, 64, 32), "weight is U8 [4, 64, 32], not packed 4-bit codes U8 [N, K/2]"),
        (weight("U8", 2048), "weight is U8 [2048], not packed 4-bit codes U8 [N, K/2]"),
        (
            packed("I32", 64, 24) | scale("F8_E4M3", 64, 2),
            "weight_packed is I32 [64, 24], neither NF3's",
        ),
        (packed("U8", 2, 64, 24), "weight_packed is U8 [2, 64, 24], neither NF3's U8 [N, K/8*3] nor"),
        (weight("U8", 64, 32) | scale("U8", 128), "weight_scale [128] does not fit weight [64, 32]"),
        (weight("U8", 64, 32) | scale("U8", 65, 2), "weight_scale [65, 2] does not fit weight [64, 32]"),
        (weight("U8", 64, 32) | scale("F8_E4M3", 64, 0), "weight_scale [64, 0] does not fit weight [64, 32]"),
        (weight("U8", 64, 32) | scale("F8_E4M3", 64, 3), "weight_scale [64, 3] does not fit weight [64, 32]"),
        (weight("U8", 64, 32) | scale("F8_E8M0", 65, 2, name="scale"), "scale [65, 2] does not fit weight [64, 32]"),
        (packed("U8", 64, 24) | scale("F8_E4M3", 64, 5), "weight_scale [64, 5] does not fit weight_packed [64, 24]"),
        (packed("U8", 64, 24) | scale("BF16", 64, 2), "with weight_scale BF16 [64, 2] is neither NF3 nor"),
        (packed("U8", 64, 24) | scale("F8_E4M3", 64, 4), "weight_packed [64, 24] with weight_scale F8_E4M3 [64, 4] is"),
        (packed("U8", 64, 24) | scale("F8_E8M0", 64, 2), "with weight_scale F8_E8M0 [64, 2] is neither"),
        (weight("U8", 64, 32) | scale("U8", 64, 4), "U8 with one scale for 16 codes is neither NVFP4 nor MXFP4"),
        (weight("U8", 64, 32) | scale("F8_E4M3", 64, 2), "weight_scale F8_E4M3 with one scale for 32 codes is neither"),
        (weight("U8", 64, 32) | scale("F8_E4M3", 64, 1), "weight_scale F8_E4M3 with one scale for 64 codes is neither"),
        (weight("U8", 64, 32) | scale("F32", 64, 4), "weight_scale F32 with one scale for 16 codes is neither"),
        (weight("U8", 64, 32) | scale("BF16", 64, 1), "weight_scale BF16 with one scale for 64 codes is neither"),
    ],
)
def test_unsupported(fields: Fields, reason: str) -> None:
    found = detect(fields)
    assert isinstance(found, Unsupported)
    assert reason in found.reason
    assert not found.wide


def fp8(*scale_header: Any, name: str = "weight_scale_inv", shape: tuple[int, int] = (300, 640)) -> Fields:
    dtype, *scale_shape = scale_header
    return weight("F8_E4M3", *shape) | scale(dtype, *scale_shape, name=name)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (weight("BF16", 300, 640), SourceFormat("bf16", "weight", None, None, 0, row_group=0)),
        (weight("F16", 300, 640), SourceFormat("f16", "weight", None, None, 0, row_group=0)),
        (weight("F32", 300, 640), SourceFormat("f32", "weight", None, None, 0, row_group=0)),
        (fp8("U8", 300, 20), SourceFormat("mxfp8", "weight", "weight_scale_inv", None, 32)),
        (fp8("U8", 300, 20, name="weight_scale"), SourceFormat("mxfp8", "weight", "weight_scale", None, 32)),
        (fp8("F8_E8M0", 300, 20, name="scale"), SourceFormat("mxfp8", "weight", "scale", None, 32)),
        (fp8("F32", 3, 5), BLOCK),
        (fp8("BF16", 3, 5), replace(BLOCK, scale_dtype="BF16")),
        (fp8("F8_E8M0", 3, 5, name="scale"), replace(BLOCK, scale_field="scale", scale_dtype="F8_E8M0")),
        (fp8("F32", 3, 1, 5, 1, name="weight_scale"), replace(BLOCK, scale_field="weight_scale")),
        (fp8("F32", 300, name="weight_scale"), ROW),
        (fp8("BF16", 300, 1, name="weight_scale"), replace(ROW, scale_dtype="BF16")),
        (fp8("F32", name="weight_scale"), TENSOR),
        (fp8("F32", 1, name="weight_scale"), TENSOR),
        (fp8("F32", 1, 1, name="weight_scale", shape=(300, 640)), TENSOR),
        (fp8("F32", 1, 1, name="weight_scale", shape=(300, 96)), TENSOR),
        (fp8("F32", 3, 1, shape=(300, 96)), BLOCK),
        (fp8("F32", 1, 1, shape=(128, 96)), BLOCK),
        (fp8("F32", 1, 1, name="weight_scale", shape=(128, 96)), TENSOR),
    ],
)
def test_wide_formats(fields: Fields, expected: SourceFormat) -> None:
    found = detect(fields)
    assert found == (expected, *fields["weight"][1])
    assert found[0].wide and not found[0].native


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (weight("F8_E5M2", 64, 64), "weight is F8_E5M2, which this version does not read"),
        (
            weight("F8_E4M3", 64, 64),
            "weight F8_E4M3 has no weight_scale beside it, nor weight_scale_inv, scale_inv, weight_scale_fp8, scale",
        ),
        (weight("F8_E4M3", 2, 64, 64) | scale("F32"), "weight is F8_E4M3 [2, 64, 64], not [N, K]"),
        (weight("BF16", 2, 64, 64), "weight is BF16 [2, 64, 64], not [N, K]"),
        (fp8("F32", 3, 4), "weight_scale_inv F32 [3, 4] beside weight F8_E4M3 [300, 640] is neither MXFP8"),
        (fp8("U8", 3, 5), "weight_scale_inv U8 [3, 5] beside weight"),
        (fp8("U8", 6000), "weight_scale_inv U8 [6000] beside weight"),
        (fp8("F8_E4M3", 300, 20), "weight_scale_inv F8_E4M3 [300, 20] beside weight"),
        (fp8("F32", 300, 20), "weight_scale_inv F32 [300, 20] beside weight"),
        (fp8("F32", 640), "weight_scale_inv F32 [640] beside weight"),
    ],
)
def test_wide_weights_are_told_apart_from_faults(fields: Fields, reason: str) -> None:
    found = detect(fields)
    assert isinstance(found, Unsupported) and found.wide
    assert reason in found.reason


GLOBAL: Fields = {"weight_global_scale": ("F32", (1,)), "input_global_scale": ("F32", (1,))}


def test_the_three_formats_called_weight_packed_are_told_apart_at_every_width() -> None:
    """By their bytes for one scale: 12, 8 or 16."""
    for k in range(32, 8192, 32):
        nf3 = packed("U8", 64, k // 8 * 3) | scale("F8_E4M3", 64, k // 32)
        assert detect(nf3) == (NF3, 64, k)
        assert detect(packed("U8", 64, k // 8 * 3) | scale("U8", 64, k // 32)) == (KQUANT, 64, k)
        nvfp4 = packed("U8", 64, k // 2) | scale("F8_E4M3", 64, k // 16) | GLOBAL
        assert detect(nvfp4) == (CT_NVFP4, 64, k)
        assert detect(packed("U8", 64, k // 2) | scale("U8", 64, k // 32)) == (CT_MXFP4, 64, k)


def test_the_bias_is_of_compressed_tensors_alone() -> None:
    assert detect(packed("U8", 64, 32) | scale("U8", 64, 2), 125) == (replace(CT_MXFP4, scale_bias=125), 64, 64)
    assert detect(weight("U8", 64, 32) | scale("U8", 64, 2), 125) == (MXFP4, 64, 64)
    assert detect({"blocks": ("U8", (64, 2, 16)), "scales": ("U8", (64, 2))}, 125) == (OSS, 64, 64)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"blocks": ("U8", (64, 2, 16))}, "blocks has no scales beside it"),
        ({"blocks": ("U8", (64, 2, 8)), "scales": ("U8", (64, 2))}, "blocks is U8 [64, 2, 8], not MXFP4's"),
        ({"blocks": ("U8", (64, 32)), "scales": ("U8", (64, 2))}, "blocks is U8 [64, 32], not MXFP4's"),
        ({"blocks": ("BF16", (64, 2, 16)), "scales": ("U8", (64, 2))}, "blocks is BF16"),
        ({"blocks": ("U8", (64, 2, 16)), "scales": ("U8", (64, 3))}, "scales U8 [64, 3] does not fit blocks"),
        ({"blocks": ("U8", (64, 2, 16)), "scales": ("F8_E4M3", (64, 2))}, "scales F8_E4M3 [64, 2] does not fit"),
    ],
)
def test_blocks_of_gpt_oss_that_are_none(fields: Fields, reason: str) -> None:
    found = detect(fields)
    assert isinstance(found, Unsupported) and not found.wide
    assert reason in found.reason


@pytest.mark.parametrize(
    ("form", "rows", "columns", "shape"),
    [
        (NVFP4, 10, 64, (10, 4)),
        (NF3, 10, 64, (10, 2)),
        (BLOCK, 129, 200, (2, 2)),
        (ROW, 10, 64, (10, 1)),
        (TENSOR, 10, 64, (1, 1)),
        (SourceFormat("bf16", "weight", None, None, 0, row_group=0), 10, 64, (0, 0)),
    ],
)
def test_scales_of_a_matrix(form: SourceFormat, rows: int, columns: int, shape: tuple[int, int]) -> None:
    assert form.scale_shape(rows, columns) == shape


@pytest.mark.parametrize(
    ("form", "code_bytes", "bits"),
    [(NVFP4, 1024, 4), (MXFP4, 1024, 4), (NF3, 768, 3), (KQUANT, 768, 3), (BLOCK, 2048, 8), (OSS, 1024, 4)],
)
def test_bytes_of_a_row(form: SourceFormat, code_bytes: int, bits: int) -> None:
    assert form.code_bytes(2048) == code_bytes
    assert form.bits == bits
