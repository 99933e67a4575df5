"""Format detection from headers: each stored convention, and each way of being none of them with its words."""

from __future__ import annotations

import pytest

from hybrid_pack.formats.source import Header, SourceFormat, Unsupported, detect

Fields = dict[str, Header]

NVFP4 = SourceFormat("nvfp4", "weight", "weight_scale", "weight_scale_2", 16)
MXFP4 = SourceFormat("mxfp4", "weight", "weight_scale", None, 32)
NF3 = SourceFormat("nf3", "weight_packed", "weight_scale", None, 32)
KQUANT = SourceFormat("nf3", "weight_packed", "weight_scale", None, 32, scale_times_16=True)
DEEPSEEK = SourceFormat("mxfp4", "weight", "scale", None, 32)


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
        (weight("U8", 64, 32), "weight has no weight_scale beside it"),
        (packed("U8", 64, 24), "weight_packed has no weight_scale beside it"),
        (weight("U8", 64, 32) | scale("F32", 1, 1, name="weight_scale_inv"), "weight has no weight_scale beside it"),
        (weight("I32", 64, 8), "weight is I32 [64, 8], not packed 4-bit codes U8 [N, K/2]"),
        (weight("U8", 4, 64, 32), "weight is U8 [4, 64, 32], not packed 4-bit codes U8 [N, K/2]"),
        (weight("U8", 2048), "weight is U8 [2048], not packed 4-bit codes U8 [N, K/2]"),
        (packed("I32", 64, 24) | scale("F8_E4M3", 64, 2), "weight_packed is I32 [64, 24], not NF3's U8 [N, K/8*3]"),
        (packed("U8", 2, 64, 24), "weight_packed is U8 [2, 64, 24], not NF3's U8 [N, K/8*3]"),
        (packed("U8", 64, 32) | scale("F8_E4M3", 64, 4), "weight_packed is NVFP4 as compressed-tensors stores it"),
        (weight("U8", 64, 32) | scale("U8", 128), "weight_scale [128] does not fit weight [64, 32]"),
        (weight("U8", 64, 32) | scale("U8", 65, 2), "weight_scale [65, 2] does not fit weight [64, 32]"),
        (weight("U8", 64, 32) | scale("F8_E4M3", 64, 0), "weight_scale [64, 0] does not fit weight [64, 32]"),
        (weight("U8", 64, 32) | scale("F8_E4M3", 64, 3), "weight_scale [64, 3] does not fit weight [64, 32]"),
        (weight("U8", 64, 32) | scale("F8_E8M0", 65, 2, name="scale"), "scale [65, 2] does not fit weight [64, 32]"),
        (packed("U8", 64, 24) | scale("F8_E4M3", 64, 5), "weight_scale [64, 5] does not fit weight_packed [64, 24]"),
        (packed("U8", 64, 24) | scale("BF16", 64, 2), "with weight_scale BF16 [64, 2] is not NF3"),
        (packed("U8", 64, 24) | scale("F8_E4M3", 64, 4), "weight_packed [64, 24] with weight_scale F8_E4M3 [64, 4] is"),
        (packed("U8", 64, 24) | scale("F8_E8M0", 64, 2), "with weight_scale F8_E8M0 [64, 2] is not NF3"),
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


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        (weight("BF16", 64, 64), "BF16"),
        (weight("F16", 64, 64), "F16"),
        (weight("F32", 64, 64), "F32"),
        (weight("F8_E4M3", 64, 64) | scale("U8", 64, 2), "F8_E4M3"),
        (weight("F8_E4M3", 64, 64) | scale("F32", 1, 1, name="weight_scale_inv"), "F8_E4M3"),
        (weight("F8_E5M2", 64, 64), "F8_E5M2"),
    ],
)
def test_wide_weights_are_told_apart_from_faults(fields: Fields, dtype: str) -> None:
    assert detect(fields) == Unsupported(f"weight is {dtype}, not a packed 3- or 4-bit format", wide=True)


@pytest.mark.parametrize("expert", ["nvfp4", "mxfp4"])
def test_compressed_tensors_fp4_is_never_taken_for_nf3(expert: str) -> None:
    """It too is called weight_packed; its bytes and scales have other ratios at every width."""
    for k in range(32, 8192, 32):
        field = scale("F8_E4M3", 64, k // 16) if expert == "nvfp4" else scale("U8", 64, k // 32)
        assert isinstance(detect(packed("U8", 64, k // 2) | field), Unsupported), k


@pytest.mark.parametrize("k", [6144, 2048, 4096])
def test_compressed_tensors_fp4_is_refused_by_name(k: int) -> None:
    found = detect(packed("U8", 64, k // 2) | scale("F8_E4M3", 64, k // 16))
    assert isinstance(found, Unsupported)
    assert "compressed-tensors" in found.reason


@pytest.mark.parametrize(
    ("form", "code_bytes", "bits"), [(NVFP4, 1024, 4), (MXFP4, 1024, 4), (NF3, 768, 3), (KQUANT, 768, 3)]
)
def test_bytes_of_a_row(form: SourceFormat, code_bytes: int, bits: int) -> None:
    assert form.code_bytes(2048) == code_bytes
    assert form.bits == bits
