"""The references themselves: against torch's own small floats, against each other, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.reference import floats, moe, packed, source


def torch_values(dtype: torch.dtype) -> np.ndarray:
    return torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float64).numpy()


def test_e4m3_is_torch_s() -> None:
    assert np.array_equal(floats.E4M3, torch_values(torch.float8_e4m3fn), equal_nan=True)
    assert math.copysign(1, floats.E4M3[0x80]) == -1


def test_e2m1_by_hand() -> None:
    assert floats.E2M1.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert math.copysign(1, floats.E2M1[8]) == -1


def test_e8m0_by_hand() -> None:
    assert floats.E8M0[[0, 126, 127, 128, 254]].tolist() == [2.0**-127, 0.5, 1, 2, 2.0**127]
    assert math.isnan(floats.E8M0[255])


def test_device_scale_is_a_float16_without_its_sign() -> None:
    halves = (np.arange(0xF8, dtype=np.uint16) << 7).view(np.float16).astype(np.float64)
    assert np.array_equal(floats.DEVICE_SCALE[:0xF8], halves)
    assert not np.isfinite(floats.DEVICE_SCALE[0xF8:]).any()


def test_register_scale_is_a_bfloat16() -> None:
    byte = torch.arange(256, dtype=torch.int32)
    bits = ((byte & 0x80) << 7 | (byte & 0x7F) << 4).to(torch.int16)
    assert np.array_equal(floats.REGISTER_SCALE, bits.view(torch.bfloat16).to(torch.float64).numpy())


def test_nf3_words_by_hand() -> None:
    """Code i of eight is at bits 3i of a little-endian 24-bit word."""
    codes = np.array([[0, 0, 5, 0, 0, 7, 0, 0] + [1] * 8], np.uint8)
    word = 5 << 6 | 7 << 15
    assert source.store_nf3(codes)[0, :3].tolist() == [word & 255, word >> 8 & 255, word >> 16]
    assert source.store_nf3(codes)[0, 3:].tolist() == [0x49, 0x92, 0x24]


def test_nibbles_by_hand() -> None:
    assert source.store_fp4(np.array([[1, 2, 3, 15]], np.uint8)).tolist() == [[0x21, 0xF3]]


@pytest.mark.parametrize(("name", "base"), [("nvfp4", 16), ("mxfp4", 16), ("nf3", 8), ("nf3_times_16", 8)])
def test_storing_and_reading_are_inverse(name: source.SourceName, base: int) -> None:
    codes = np.random.default_rng(base).integers(0, base, (5, 64), np.uint8)
    assert np.array_equal(source.codes_of(name, source.store(name, codes)), codes)


def test_dequantize_by_hand() -> None:
    codes = np.zeros((1, 32), np.uint8)
    codes[0, [1, 17]] = 7
    one, half = 0x38, 0x30  # E4M3
    fp4, nf3 = source.store_fp4(codes), source.store_nf3(codes)
    nvfp4 = source.dequantize("nvfp4", fp4, np.array([[one, half]], np.uint8), 0.25)
    assert (nvfp4[0, 0], nvfp4[0, 1], nvfp4[0, 17]) == (0, 1.5, 0.75)
    mxfp4 = source.dequantize("mxfp4", fp4, np.array([[120]], np.uint8))
    assert (mxfp4[0, 0], mxfp4[0, 17]) == (0, 6 / 128)
    plain = source.dequantize("nf3", nf3, np.array([[half]], np.uint8))
    assert (plain[0, 0], plain[0, 17]) == (-0.5, 0.5)
    kquant = source.dequantize("nf3_times_16", nf3, np.array([[half]], np.uint8))
    assert (kquant[0, 0], kquant[0, 17]) == (-0.03125, 0.03125)
    levels = source.dequantize("nf3", nf3, np.array([[one]], np.uint8), levels=(3.0, 0, 0, 0, 0, 0, 0, 5.0))
    assert (levels[0, 0], levels[0, 17]) == (3, 5)
    assert not source.dequantize("nf3", nf3, np.zeros((1, 1), np.uint8)).any()


def test_packed_positions_use_every_bit_once() -> None:
    nf3 = packed.nf3_positions(128, 32, 128).reshape(-1, 4).tolist()
    bits = [(word, shift + i) for word, shift, _, _ in nf3 for i in (0, 1)]
    bits += [(word, shift) for _, _, word, shift in nf3]
    assert sorted(bits) == [(word, bit) for word in range(2 * 64 * 3) for bit in range(32)]
    fp4 = packed.fp4_positions(128, 32).reshape(-1, 2).tolist()
    assert sorted(map(tuple, fp4)) == [(word, 4 * slot) for word in range(2 * 256) for slot in range(8)]
    assert sorted(map(packed.scale_position, range(64))) == list(range(64))


def test_packed_words_may_be_signed() -> None:
    words = np.random.default_rng(1).integers(0, 2**32, 64 * 32 // 8, np.uint32)
    assert np.array_equal(packed.fp4_codes(words, 64, 32), packed.fp4_codes(words.view(np.int32), 64, 32))
    words = words[: 2 * 32 * 3]
    assert np.array_equal(packed.nf3_codes(words, 64, 32, 64), packed.nf3_codes(words.view(np.int32), 64, 32, 64))


def test_silu() -> None:
    x = np.array([-1000.0, -1.0, 0.0, 1.0, 1000.0])
    assert moe.silu(x) == pytest.approx([0, -1 / (1 + math.e), 0, math.e / (1 + math.e), 1000], rel=1e-14)


def test_moe_by_hand() -> None:
    """One hidden column, one intermediate row: y = sum weight * down * silu(gate x) * up x."""

    def expert(gate: float, up: float, down: float) -> tuple[np.ndarray, np.ndarray]:
        return np.array([[gate], [up]]), np.array([[down]])

    def value(x: float, gate: float, up: float, down: float) -> float:
        return down * gate * x / (1 + math.exp(-gate * x)) * up * x

    experts = {3: expert(1, 2, 3), 9: expert(-1, 0.5, 4)}
    x = np.array([[0.5], [2.0], [1.0]], np.float32)
    ids = np.array([[3, 9], [9, 9], [-1, -1]], np.int32)
    weights = np.array([[0.25, 0.75], [0.5, 0.125], [1, 1]], np.float32)
    first = 0.25 * value(0.5, 1, 2, 3) + 0.75 * value(0.5, -1, 0.5, 4)
    second = 0.625 * value(2, -1, 0.5, 4)
    assert moe.moe(x, experts, weights, ids)[:, 0] == pytest.approx([first, second, 0], rel=1e-14)


def test_moe_takes_gate_rows_first() -> None:
    rng = np.random.default_rng(2)
    gate, up, down, x = (rng.standard_normal(shape) for shape in ((4, 6), (4, 6), (6, 4), (1, 6)))
    y = moe.moe(x, {0: (np.concatenate([gate, up]), down)}, np.ones((1, 1)), np.zeros((1, 1), np.int32))
    h = gate @ x[0]
    assert y[0] == pytest.approx(down @ (h / (1 + np.exp(-h)) * (up @ x[0])), rel=1e-12)
