"""Every byte of every scale table, against scales decoded from their bits: exact, or flagged as what it is."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from hybrid_pack.layouts import scale_bytes
from hybrid_pack.layouts.scale_bytes import ScaleTable
from tests.reference import floats, packed
from tests.reference.floats import E4M3, E8M0

F64 = NDArray[np.float64]
FINITE = range(0x7F)
"""E4M3 bytes of the finite non-negative values."""
REFUSED = range(0x7F, 0x100)
"""NaN, and values with a sign: the caller's to refuse, -0 aside."""


def unflagged(table: ScaleTable) -> NDArray[np.bool_]:
    return np.asarray(~table.flushed & ~table.saturated & (table.error == 0))


def weights(name: packed.PackedName, device: NDArray[np.uint8], global_scale: float) -> F64:
    """The scale each device byte means in a pack: what a weight is multiplied with."""
    return packed.scale_values(name, device, global_scale)


def test_device_values_are_the_reference_s() -> None:
    assert np.array_equal(scale_bytes.DEVICE_VALUES, floats.DEVICE_SCALE, equal_nan=True)
    assert np.array_equal(scale_bytes.E8M0_VALUES[:255], E8M0[:255])


def test_formulas_are_what_the_kernel_s_registers_do() -> None:
    """The two value exponents are one rule of the kernel, seen from the two halves of the byte range."""
    low, high = np.arange(0x80), np.arange(0x80, 0xF8)
    e2m1_in_registers = 2.0**-126
    assert np.array_equal(floats.REGISTER_SCALE[low], floats.DEVICE_SCALE[low] * 2.0**scale_bytes.NF3_VALUE_EXPONENT)
    assert np.array_equal(
        floats.REGISTER_SCALE[high] * e2m1_in_registers,
        floats.DEVICE_SCALE[high] * 2.0**scale_bytes.NVFP4_VALUE_EXPONENT,
    )


@pytest.mark.parametrize("divisor", [1, 16])
def test_nf3_every_byte(divisor: int) -> None:
    scales = E4M3 / divisor
    table = scale_bytes.nf3_table(scales)
    means = weights("nf3", table.device, scale_bytes.NF3_GLOBAL_SCALE)
    fits = [byte for byte in FINITE if scales[byte] < 32]
    assert len(fits) == (0x60 if divisor == 1 else 0x7F)
    for byte in fits:
        assert means[byte] == scales[byte], byte
    assert unflagged(table)[fits].all()
    assert table.device[0] == table.device[0x80] == 0


@pytest.mark.parametrize("divisor", [1, 16])
def test_nf3_never_writes_a_byte_of_the_kernel_s_other_range(divisor: int) -> None:
    assert scale_bytes.nf3_table(E4M3 / divisor).device.max() < 0x80


def test_nf3_times_16_keeps_what_b12x_raises_to_its_floor() -> None:
    raised = [byte for byte in FINITE if 0 < E4M3[byte] / 16 < 2.0**-10]
    assert raised == list(range(1, 8))
    table = scale_bytes.nf3_table(E4M3 / 16)
    assert weights("nf3", table.device, scale_bytes.NF3_GLOBAL_SCALE)[raised].tolist() == (E4M3[raised] / 16).tolist()


@pytest.mark.parametrize("ratio_exponent", [0, -1, -4, -9, -17])
def test_nvfp4_every_byte_beside_every_largest(ratio_exponent: int) -> None:
    """Scales of a matrix whose second scale was moved by a power of two, as gate beside up."""
    scales = E4M3 * 2.0**ratio_exponent
    for largest in FINITE:
        factor = scale_bytes.nvfp4_factor(float(scales[largest]))
        assert math.frexp(factor)[0] == 0.5
        assert largest == 0 or 224 < scales[largest] * factor <= 448
        table = scale_bytes.nvfp4_table(scales, factor)
        means = weights("nvfp4", table.device, scale_bytes.nvfp4_global_scale(1.0, factor))
        used = slice(0, largest + 1)
        flushed = (scales[used] > 0) & (scales[used] * factor < 2.0**-6)
        assert np.array_equal(table.flushed[used], flushed), largest
        assert not table.error[used].any() and not table.saturated[used].any(), largest
        assert np.array_equal(means[used], np.where(flushed, 0.0, scales[used])), largest
        assert ((table.device[used] == 0) | (table.device[used] >= 0x80)).all(), largest


@pytest.mark.parametrize("largest", [0x7E, 0x75, 0x38, 0x08])
@pytest.mark.parametrize("ratio", [0.9, 1 / 3, 0.123, 5e-3])
def test_nvfp4_of_a_ratio_that_is_no_power_of_two(ratio: float, largest: int) -> None:
    """Requantised scales: the nearest device value, its error told, and nothing called exact that is not."""
    scales = E4M3 * ratio
    factor = scale_bytes.nvfp4_factor(float(scales[largest]))
    table = scale_bytes.nvfp4_table(scales, factor)
    means = weights("nvfp4", table.device, scale_bytes.nvfp4_global_scale(1.0, factor))
    values = floats.DEVICE_SCALE[:0xF8] / 2.0**7 / factor
    for byte in range(1, largest + 1):
        scale = scales[byte]
        if scale * factor < 2.0**-6:
            assert table.flushed[byte] and means[byte] == 0 and table.error[byte] == 0, byte
            continue
        assert not table.flushed[byte] and not table.saturated[byte], byte
        assert table.error[byte] == pytest.approx(abs(means[byte] / scale - 1), abs=1e-15), byte
        assert (table.error[byte] > 0) == (means[byte] != scale), byte
        distance = np.abs(values - scale).min()
        assert abs(means[byte] - scale) <= distance * (1 + 2.0**-6), byte  # a tie may go either way through float16
    assert (table.error[: largest + 1] > 0).any()
    assert table.error[: largest + 1].max() <= 1 / 17 * (1 + 2.0**-6)


@pytest.mark.parametrize(("numerator", "stored"), [(17, 16), (19, 20), (21, 20), (23, 24)])
def test_nvfp4_ties_go_to_the_even_mantissa(numerator: int, stored: int) -> None:
    """A scale of 1 times n/32 lies halfway between two device values where n is odd."""
    table = scale_bytes.nvfp4_table(E4M3 * (numerator / 32), 1.0)
    means = weights("nvfp4", table.device, scale_bytes.nvfp4_global_scale(1.0, 1.0))
    assert means[0x38] == stored / 32


@pytest.mark.parametrize(
    "table", [scale_bytes.nf3_table(E4M3), scale_bytes.nf3_table(E4M3 / 16), scale_bytes.nvfp4_table(E4M3, 1.0)]
)
def test_refused_bytes_never_become_a_scale(table: ScaleTable) -> None:
    """The caller refuses them; should one slip through it is a zero, not infinity, NaN or a positive scale."""
    assert not table.device[list(REFUSED)].any()


@pytest.mark.parametrize("second", [1.0, 1e-6, 3.3e-4, 0.01, 500.0, 1.1754944e-38])
@pytest.mark.parametrize("factor", [1.0, 2.0, 2.0**17])
def test_nvfp4_global_scale_is_exact(second: float, factor: float) -> None:
    second = float(np.float32(second))
    assert math.ldexp(scale_bytes.nvfp4_global_scale(second, factor), -119) * factor == second


def test_mxfp4_every_byte_of_every_shift() -> None:
    byte = np.arange(255)
    for shift in range(127):
        table = scale_bytes.mxfp4_table(shift)
        means = weights("mxfp4", table.device, scale_bytes.mxfp4_global_scale(shift))
        saturated = byte + shift > 247
        operands = np.ldexp(0.5, table.device.astype(int) - 246)  # of the least code, before the global scale
        assert np.array_equal(table.flushed, operands < 2.0**-126), shift
        assert np.array_equal(table.saturated[:255], saturated), shift
        assert np.array_equal(means[:255], np.where(saturated, 2.0 ** (120 - shift), E8M0[:255])), shift
        assert np.array_equal(table.error[:255], 1 - means[:255] / E8M0[:255]), shift
        assert np.array_equal(table.error[:255] > 0, saturated), shift


def test_mxfp4_shift_of_every_largest_byte() -> None:
    for largest in range(255):
        shift = scale_bytes.mxfp4_shift(largest)
        assert 0 <= shift <= 126, largest
        moved = largest + shift
        assert moved == 200 or (moved < 200 and shift == 126) or (moved > 200 and shift == 0), largest
        assert scale_bytes.mxfp4_table(shift).saturated[: largest + 1].any() == (largest > 247), largest
        assert scale_bytes.mxfp4_global_scale(shift) == float(np.float32(2.0**-shift)) >= 2.0**-126, largest
