"""MXFP4 turned into NVFP4 without rounding, where the scales' range allows it and not elsewhere."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_pack.quantize import mxfp4_to_nvfp4
from tests.reference.floats import E4M3, E8M0
from tests.reference.source import dequantize, fp4_codes, store_fp4

SPAN = 17
"""Between 2^-9 and 2^8."""


@given(
    lowest=st.integers(0, 254),
    span=st.integers(0, 40),
    shapes=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
)
def test_the_same_weights_or_none(lowest: int, span: int, shapes: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    highest = min(254, lowest + span)
    scales = [rng.integers(lowest, highest + 1, (n, 3), np.uint8) for n in shapes]
    scales[0][0, 0], scales[-1][-1, -1] = lowest, highest
    codes = [rng.integers(0, 256, (n, 48), np.uint8) for n in shapes]
    cast = mxfp4_to_nvfp4(scales)
    reachable = max(highest - 127 - 8, -126) - 9
    if lowest - 127 < reachable:
        assert cast is None
        return
    assert cast is not None
    recoded, second = cast
    assert math.frexp(second)[0] == 0.5 and second == float(np.float32(second)) and second >= 2.0**-126
    for matrix, old, new in zip(codes, scales, recoded, strict=True):
        assert new.dtype == np.uint8 and new.shape == (len(old), 6)
        assert (dequantize("nvfp4", matrix, new, second) == dequantize("mxfp4", matrix, old)).all()


@pytest.mark.parametrize("highest", [30, 127, 200, 254])
def test_the_widest_span(highest: int) -> None:
    assert mxfp4_to_nvfp4([np.array([[highest, highest - SPAN]], np.uint8)]) is not None
    assert mxfp4_to_nvfp4([np.array([[highest]], np.uint8), np.array([[highest - SPAN - 1]], np.uint8)]) is None


def test_every_step_of_the_span() -> None:
    scales = np.arange(120 - SPAN, 121, dtype=np.uint8)[None]
    cast = mxfp4_to_nvfp4([scales])
    assert cast is not None
    recoded, second = cast
    assert (E4M3[recoded[0]][:, 0::2] * second == E8M0[scales[0]]).all()
    assert (recoded[0][0, 0::2] == recoded[0][0, 1::2]).all()
    assert E4M3[recoded[0]].max() == 256 and E4M3[recoded[0]].min() == 2.0**-9


def test_normal_scales_only() -> None:
    near, far = np.array([[127, 127 - 14]], np.uint8), np.array([[127, 127 - 15]], np.uint8)
    cast = mxfp4_to_nvfp4([near], lowest_exponent=-6)
    assert cast is not None and cast[0][0].min() >= 8
    assert mxfp4_to_nvfp4([far], lowest_exponent=-6) is None and mxfp4_to_nvfp4([far]) is not None


def test_groups_of_zeros_have_no_say() -> None:
    codes = np.full((2, 96), 3, np.uint8)
    codes[0, 32:64] = 0
    codes[1, :32] = 8  # -0
    stored = store_fp4(codes)
    scales = np.array([[120, 1, 118], [254, 119, 121]], np.uint8)
    assert mxfp4_to_nvfp4([scales]) is None
    cast = mxfp4_to_nvfp4([scales], [stored])
    assert cast is not None
    recoded, second = cast
    assert (recoded[0][0, 2:4] == 0).all() and (recoded[0][1, :2] == 0).all()
    assert (dequantize("nvfp4", stored, recoded[0], second) == dequantize("mxfp4", stored, scales)).all()
    assert (fp4_codes(stored) == codes).all()


def test_nothing_but_zeros() -> None:
    cast = mxfp4_to_nvfp4([np.full((2, 2), 7, np.uint8)], [np.zeros((2, 32), np.uint8)])
    assert cast is not None and (cast[0][0] == 0).all() and cast[1] == 1.0


def test_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="255"):
        mxfp4_to_nvfp4([np.array([[127, 255]], np.uint8)])
