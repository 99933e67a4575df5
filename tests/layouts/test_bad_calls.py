"""Calls outside a docstring's contract are refused, not served with half the data."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_pack.layouts import scale_bytes
from hybrid_pack.layouts.nf3_2p1 import Nf32p1
from hybrid_pack.layouts.packed_fp4 import PackedFp4
from hybrid_pack.layouts.rows import Rows
from hybrid_pack.layouts.scales import BlockScales
from tests.layouts.ours import IDENTITY
from tests.reference.floats import E4M3


def zeros(*shape: int) -> Rows:
    return Rows.of(np.zeros(shape, np.uint8))


def test_fp4_rows_not_a_multiple_of_64() -> None:
    with pytest.raises(ValueError):
        PackedFp4().pack_rows(zeros(64, 16), 96, 32, 0, np.zeros(256, np.uint32))


def test_fp4_columns_not_a_multiple_of_16() -> None:
    with pytest.raises(ValueError):
        PackedFp4().pack_rows(zeros(64, 12), 64, 24, 0, np.zeros(128, np.uint32))


def test_scales_of_columns_not_a_multiple_of_the_group() -> None:
    with pytest.raises(ValueError):
        BlockScales(32).pack_rows(zeros(64, 2), 64, 80, 0, IDENTITY, np.zeros(128, np.uint8))


def test_nf3_words_of_another_size() -> None:
    half_of_them = np.zeros(2 * 32 * 3, np.uint32)[: 32 * 3]  # what lies past the end belongs to this test too
    with pytest.raises(ValueError):
        Nf32p1(64).unpack(half_of_them, 64, 32)


def test_fp4_words_of_another_size() -> None:
    with pytest.raises(ValueError):
        PackedFp4().unpack(np.zeros(128, np.uint32), 128, 16)


def test_nvfp4_scales_above_the_largest_device_value() -> None:
    """As where the second scale of up is a power of two above gate's and gate's is kept for both."""
    scales = np.where(np.isfinite(E4M3), E4M3, 0.0) * 4
    table = scale_bytes.nvfp4_table(scales, scale_bytes.nvfp4_factor(float(scales.max())))
    assert table.device.max() < 0xF8
    assert np.array_equal(table.saturated, scales > 480)


def test_scales_of_a_single_group() -> None:
    """b12x orders them in another way."""
    with pytest.raises(ValueError, match="one group"):
        BlockScales(32).pack_rows(zeros(64, 1), 64, 32, 0, IDENTITY, np.zeros(64, np.uint8))
