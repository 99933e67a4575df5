"""The package's value tables against values made from the bits."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from hybrid_pack.formats import e2m1, e4m3, e8m0, nf3
from tests.reference import floats


@pytest.mark.parametrize(
    ("ours", "reference"),
    [(e2m1.VALUES, floats.E2M1), (e4m3.VALUES, floats.E4M3), (e8m0.VALUES, floats.E8M0)],
    ids=["e2m1", "e4m3", "e8m0"],
)
def test_values_are_those_of_the_bits(ours: NDArray[np.float64], reference: NDArray[np.float64]) -> None:
    assert ours.dtype == np.float64
    assert np.array_equal(ours, reference, equal_nan=True)
    assert np.array_equal(np.signbit(ours), np.signbit(reference)), "-0 keeps its sign"


def test_nan_bytes() -> None:
    assert tuple(np.flatnonzero(np.isnan(e4m3.VALUES))) == e4m3.NAN_BYTES
    assert np.flatnonzero(np.isnan(e8m0.VALUES)).tolist() == [e8m0.NAN_BYTE]


def test_e4m3_largest() -> None:
    assert np.nanmax(e4m3.VALUES) == e4m3.MAX


def test_nf3_levels_ascend_and_have_no_zero() -> None:
    assert len(nf3.DEFAULT_LEVELS) == 8
    assert list(nf3.DEFAULT_LEVELS) == sorted(set(nf3.DEFAULT_LEVELS))
    assert 0 not in nf3.DEFAULT_LEVELS
    assert all(low == -high for low, high in zip(nf3.DEFAULT_LEVELS, reversed(nf3.DEFAULT_LEVELS), strict=True))
