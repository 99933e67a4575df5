"""Decoding against the slow decoders: every code and every scale byte of every format, bit for bit in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_pack.formats import checks
from hybrid_pack.formats.decode import decode_rows, float_scales, scale_values
from hybrid_pack.formats.nf3 import DEFAULT_LEVELS
from hybrid_pack.formats.source import SourceFormat
from tests.reference import source as reference

NVFP4 = SourceFormat("nvfp4", "weight", "weight_scale", "weight_scale_2", 16)
CT_NVFP4 = SourceFormat("nvfp4", "weight_packed", "weight_scale", "weight_global_scale", 16, second_reciprocal=True)
MXFP4 = SourceFormat("mxfp4", "weight", "weight_scale", None, 32)
OLD_MXFP4 = SourceFormat("mxfp4", "weight_packed", "weight_scale", None, 32, scale_bias=125)
NF3 = SourceFormat("nf3", "weight_packed", "weight_scale", None, 32)
KQUANT = SourceFormat("nf3", "weight_packed", "weight_scale", None, 32, scale_times_16=True)
MXFP8 = SourceFormat("mxfp8", "weight", "weight_scale", None, 32)
BLOCK = SourceFormat("fp8_block", "weight", "weight_scale_inv", None, 128, row_group=128, scale_dtype="F32")
ROW = SourceFormat("fp8_row", "weight", "weight_scale", None, 0, scale_dtype="F32")
TENSOR = SourceFormat("fp8_tensor", "weight", "weight_scale", None, 0, row_group=0, scale_dtype="F32")
BF16, F16, F32 = (SourceFormat(name, "weight", None, None, 0, row_group=0) for name in ("bf16", "f16", "f32"))  # type: ignore[arg-type]

PACKED = (NVFP4, CT_NVFP4, MXFP4, OLD_MXFP4, NF3, KQUANT)
FP8 = (
    MXFP8, BLOCK, replace(BLOCK, scale_dtype="BF16"), replace(BLOCK, scale_dtype="F16"),
    replace(BLOCK, scale_dtype="F8_E8M0"), ROW, replace(ROW, scale_dtype="BF16"), replace(ROW, scale_dtype="F16"),
    TENSOR, replace(TENSOR, scale_dtype="BF16"),
)  # fmt: skip
FLOATS = (BF16, F16, F32)


def same(found: Any, expected: Any) -> None:
    """Equal in every bit, as float32; any no number is like any other."""
    with np.errstate(over="ignore"):
        wanted = expected.astype(np.float32)
    assert found.dtype == np.float32 and found.shape == wanted.shape
    nan = np.isnan(wanted)
    assert np.array_equal(np.isnan(found), nan)
    assert np.array_equal(found.view(np.uint32)[~nan], wanted.view(np.uint32)[~nan])


def decoded(form: SourceFormat, codes: Any, scales: Any, rows: int, columns: int, **options: Any) -> Any:
    out = np.full((rows, columns), 7, np.float32)
    decode_rows(form, codes, scales, options.pop("second", 1.0), out, **options)
    return out


def slow(form: SourceFormat, codes: Any, scales: Any, second: float = 1.0, levels: Any = DEFAULT_LEVELS) -> Any:
    if form.native:
        name: Any = "nf3_times_16" if form.scale_times_16 else form.name
        return reference.dequantize(name, codes, scales, second, levels, form.scale_bias)
    if scales is None:
        return reference.dequantize_wide(form.name, codes, np.empty((0, 0)))  # type: ignore[arg-type]
    values = reference.numbers(form.scale_dtype or "F8_E8M0", scales)
    return reference.dequantize_wide(form.name, codes, values)  # type: ignore[arg-type]


def label(form: SourceFormat) -> str:
    return "-".join(filter(None, (form.name, form.codes_field, form.scale_dtype, "x16" * form.scale_times_16)))


@pytest.mark.parametrize("form", PACKED, ids=label)
@pytest.mark.parametrize("second", [1.0, 0.0123456789, 3.0e-5])
def test_every_code_under_every_scale_byte(form: SourceFormat, second: float) -> None:
    """256 rows, each with one scale byte, each with every pair of neighbouring codes."""
    if form.name != "nvfp4" and second != 1.0:
        second = 1.0
    second = float(np.float32(second))
    columns = 512
    row = np.arange(form.code_bytes(columns)).astype(np.uint8)
    codes = np.tile(row, (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], columns // form.group, axis=1)
    expected = slow(form, codes, scales, second)
    assert len(np.unique(expected[0x30])) >= (8 if form.name == "nf3" else 15)
    same(decoded(form, codes, scales, 256, columns, second=second), expected)


@pytest.mark.parametrize("byte", [0, 1, 64, 127, 128, 200, 254, 255])
def test_every_mxfp8_code(byte: int) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    scales = np.full((2, 4), byte, np.uint8)
    same(decoded(MXFP8, codes, scales, 2, 128), slow(MXFP8, codes, scales))


@pytest.mark.parametrize("form", [BF16, F16], ids=label)
def test_every_number_of_two_bytes(form: SourceFormat) -> None:
    codes = np.arange(65536, dtype="<u2").view(np.uint8).reshape(64, 2048)
    same(decoded(form, codes, None, 64, 1024), slow(form, codes, None))


@settings(deadline=None, max_examples=60)
@given(data=st.data(), form=st.sampled_from([*PACKED, *FP8, *FLOATS]))
def test_any_rows(data: st.DataObject, form: SourceFormat) -> None:
    """Any bytes and sizes; blocks of 128 may be cut off at both ends, rows may be every second one stored."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    stored_rows = data.draw(st.integers(1, 300))
    columns = data.draw(st.integers(1, 12)) * (8 if form.wide and form.group != 32 else 32)
    step = data.draw(st.sampled_from([1, 2]))
    first = data.draw(st.integers(0, stored_rows - 1))
    rows = data.draw(st.integers(1, (stored_rows - first + step - 1) // step))
    codes = rng.integers(0, 256, (stored_rows, form.code_bytes(columns)), dtype=np.uint8)
    down, across = form.scale_shape(stored_rows, columns)
    scales = None
    if form.scale_field is not None:
        scales = rng.integers(0, 256, (down, across * form.scale_bytes), dtype=np.uint8)
    second = float(np.float32(rng.uniform(1e-4, 2))) if form.name == "nvfp4" else 1.0
    picked = slice(first, first + (rows - 1) * step + 1, step)
    mine = scales[picked] if scales is not None and form.row_group == 1 else scales
    found = decoded(form, codes[picked], mine, rows, columns, second=second, first_row=first, row_step=step)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = slow(form, codes, scales, second)
    same(found, expected[picked])


def test_other_levels() -> None:
    levels = (-8.0, -3.0, -2.0, -1.0, 1.0, 2.0, 3.0, 8.5)
    codes, scales = np.arange(24, dtype=np.uint8).reshape(2, 12), np.array([[0x38], [0x45]], np.uint8)
    same(decoded(NF3, codes, scales, 2, 32, levels=levels), slow(NF3, codes, scales, levels=levels))


def test_scales_are_required() -> None:
    with pytest.raises(ValueError, match="nvfp4 without scales"):
        decoded(NVFP4, np.zeros((1, 8), np.uint8), None, 1, 16)
    for form in (BF16, BLOCK):
        with pytest.raises(ValueError, match=f"{form.name} has no scales of one byte"):
            scale_values(form)


REFUSED = {
    "nvfp4": {0x7F, 0xFF, *range(0x81, 0xFF)},
    "mxfp4": {0xFF},
    "mxfp8": {0xFF},
    "fp8_block": {0xFF},
}


@pytest.mark.parametrize("form", [NVFP4, MXFP4, MXFP8, replace(BLOCK, scale_dtype="F8_E8M0")], ids=label)
def test_refused_bytes(form: SourceFormat) -> None:
    assert set(np.flatnonzero(checks.refused_bytes(form))) == REFUSED[form.name]
    for byte in (0, 0x38, *sorted(REFUSED[form.name])[:3]):
        scales = np.full((5, 7), 1, np.uint8)
        scales[3, 4] = byte
        fault = checks.scale_fault(form, scales)
        if byte in REFUSED[form.name]:
            assert fault is not None and (fault.row, fault.column) == (3, 4)
            assert fault.found.startswith(f"byte 0x{byte:02X} = ")
        else:
            assert fault is None


def test_nf3_scales_of_32_and_more_are_refused() -> None:
    assert {0x60, 0x7E} <= set(np.flatnonzero(checks.refused_bytes(NF3)))
    assert not checks.refused_bytes(NF3)[0x5F]
    assert set(np.flatnonzero(checks.refused_bytes(KQUANT))) == REFUSED["nvfp4"]


def test_scales_of_the_old_bias_that_the_new_one_cannot_say_are_refused() -> None:
    assert set(np.flatnonzero(checks.refused_bytes(OLD_MXFP4))) == {253, 254, 255}


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1.0])
def test_refused_numbers(dtype: str, value: float) -> None:
    form = replace(BLOCK, scale_dtype=dtype)
    good = np.array([[0.0, 1.0], [2.0, 0.5]], np.float32)
    bad = good.copy()
    bad[1, 0] = value

    def stored(values: Any) -> Any:
        if dtype == "F16":
            return values.astype("<f2").view(np.uint8)
        if dtype == "BF16":
            return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
        return values.view(np.uint8)

    assert np.array_equal(float_scales(form, stored(good)), good)
    assert checks.scale_fault(form, stored(good)) is None
    fault = checks.scale_fault(form, stored(bad))
    assert fault is not None and (fault.row, fault.column) == (1, 0)


@pytest.mark.parametrize("at", [0, 4095, 4096, 9999])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_no_number(at: int, value: float) -> None:
    values = np.full((100, 100), -3.0e38, np.float32)
    assert checks.value_fault(values) is None
    values.reshape(-1)[at] = value
    fault = checks.value_fault(values)
    assert fault is not None and (fault.row, fault.column) == divmod(at, 100)


@pytest.mark.parametrize("stored", [0.0, -0.0, -1.0, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("form", [NVFP4, CT_NVFP4], ids=label)
def test_a_second_scale_that_means_nothing(form: SourceFormat, stored: float) -> None:
    assert checks.second_fault(form, stored) == f"{stored:g}"


def test_one_over_a_second_scale() -> None:
    smallest = float(np.float32(1e-45))
    assert checks.second_fault(NVFP4, smallest) is None
    assert checks.second_fault(CT_NVFP4, smallest) is not None  # one over it is infinite
    assert checks.second_fault(CT_NVFP4, 26880.0) is None
    assert checks.second_value(CT_NVFP4, 26880.0) == float(np.float32(1) / np.float32(26880))
    assert checks.second_value(NVFP4, 0.25) == 0.25
