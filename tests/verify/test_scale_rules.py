"""Which device byte is right for which stored one, over all 65,536 pairs and at the edges."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from hybrid_pack.formats import e4m3
from hybrid_pack.formats.source import SourceFormat
from hybrid_pack.layouts import scale_bytes
from hybrid_pack.verify.scale_rules import ScaleRule, scale_rule

NVFP4 = SourceFormat("nvfp4", "weight", "weight_scale", "weight_scale_2", 16)
MXFP4 = SourceFormat("mxfp4", "weight", "weight_scale", None, 32)
NF3 = SourceFormat("nf3", "weight_packed", "weight_scale", None, 32)
KQUANT = SourceFormat("nf3", "weight_packed", "weight_scale", None, 32, True)
SECOND = float(np.float32(0.37e-3))


def nvfp4(factor: float, error: float = 0.0) -> ScaleRule:
    return scale_rule(NVFP4, SECOND, SECOND * 2.0**119 / factor, error)


def test_nf3_has_one_right_byte_for_every_scale_below_32() -> None:
    rule = scale_rule(NF3, 1.0, 2.0**116, 0.0)
    stored = np.flatnonzero((e4m3.VALUES >= 0) & (e4m3.VALUES < 32))
    assert (rule.right[stored].sum(axis=1) == 1).all()
    negative = np.flatnonzero(e4m3.VALUES < 0)
    assert not rule.right[negative].any()
    assert not rule.flushed.any()
    assert rule.right[0x80, 0]
    assert rule.zero.nonzero()[0].tolist() == [0, 0x80]


def test_nf3_with_scales_times_16() -> None:
    rule = scale_rule(KQUANT, 1.0, 2.0**116, 0.0)
    assert (rule.right[:0x7F].sum(axis=1) == 1).all()
    assert (rule.right[1:0x7F].argmax(axis=1) > 0).all()


def test_another_global_scale_makes_everything_wrong_but_zero() -> None:
    rule = scale_rule(NF3, 1.0, float(np.nextafter(np.float32(2.0**116), np.float32(np.inf))), 0.0)
    assert set(zip(*rule.right.nonzero(), strict=True)) == {(0, 0), (0x80, 0)}


@pytest.mark.parametrize("factor", [2.0**-2, 1.0, 2.0**9])
def test_nvfp4_is_exact_or_flushed_below_two_to_the_minus_six(factor: float) -> None:
    rule = nvfp4(factor)
    scaled = e4m3.VALUES[:0x7F] * factor
    fits = scaled <= 448
    assert (rule.flushed[:0x7F, 0] == ((scaled > 0) & (scaled < 2.0**-6))).all()
    assert not rule.flushed[:, 1:].any()
    held = np.flatnonzero(fits & (scaled >= 2.0**-6))
    assert (rule.right[held].sum(axis=1) == 1).all()
    assert not rule.right[held, 0].any()


def test_nvfp4_nan_and_negative_scales_are_never_right() -> None:
    rule = nvfp4(1.0)
    assert not rule.right[[0x7F, 0xFF, 0x81, 0xFE]].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0, 0.0])
def test_second_scales_that_mean_nothing_are_never_right(bad: float) -> None:
    rule = scale_rule(NVFP4, bad, SECOND * 2.0**119, 0.0)
    assert not rule.right[0x38, 1:].any()


def test_nvfp4_device_bytes_that_are_no_numbers_are_never_right() -> None:
    assert not nvfp4(1.0).right[:, 0xF8:].any()


def test_rounding_is_allowed_only_where_reported_and_only_that_much() -> None:
    second = SECOND / 1.37
    wide = scale_rule(NVFP4, second, SECOND * 2.0**119, 0.05)
    narrow = scale_rule(NVFP4, second, SECOND * 2.0**119, 0.01)
    exact = scale_rule(NVFP4, second, SECOND * 2.0**119, 0.0)
    wanted = e4m3.VALUES[0x38] / 1.37 * 2.0**7
    error = np.abs(scale_bytes.DEVICE_VALUES[:0xF8] / wanted - 1)
    nearest = error == error.min()
    assert 0.01 < error.min() <= 0.05
    assert (wide.right[0x38, :0xF8] == nearest).all()
    assert not narrow.right[0x38].any()
    assert not exact.right[0x38].any()


def test_a_report_that_allows_anything_does_not() -> None:
    rule = scale_rule(NVFP4, SECOND, SECOND * 2.0**119, 1e9)
    wanted = 2.0**7
    assert (rule.right[0x38] == (wanted == scale_bytes.DEVICE_VALUES)).all()
    assert rule.right[0x38].sum() == 1


@pytest.mark.parametrize("shift", [0, 1, 80, 126])
def test_mxfp4_is_the_byte_plus_the_shift_up_to_the_largest(shift: int) -> None:
    rule = scale_rule(MXFP4, 1.0, 2.0**-shift, 0.0)
    for stored in range(255):
        right = np.flatnonzero(rule.right[stored]).tolist()
        if stored + shift > 255:
            assert right == [247]
        else:
            assert right == ([stored + shift] if stored + shift <= 247 else [247, stored + shift])
    assert rule.saturated[:, 247].nonzero()[0].tolist() == list(range(248 - shift, 255))
    assert np.argwhere(rule.flushed).tolist() == [[device - shift, device] for device in range(shift, 121)]
    assert not rule.right[255].any()


@pytest.mark.parametrize("form", [NVFP4, MXFP4, NF3, KQUANT])
@pytest.mark.parametrize("number", [0.0, -1.0, 5e-324, 1.7e308, np.inf, np.nan])
def test_no_number_makes_numpy_warn(form: SourceFormat, number: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for second, scale in ((number, 1.0), (1.0, number), (number, number)):
            for error in (0.0, 0.01):
                scale_rule.__wrapped__(form, second, scale, error)
