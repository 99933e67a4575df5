"""Which second-level scale NVFP4 gets: the grid that the weights are on, where they are on one."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_pack.quantize import Search, best_second_scale, nvfp4_second_scale
from tests.quantize.ours import F32, gaussian, laplace, quantize, real_tensor, real_weights, student
from tests.reference.source import dequantize

BLOCK_SCALES = (240, 256, 288, 320, 352, 384, 416, 448)
ROWS, COLUMNS = 128, 512


def largest(weights: F32) -> float:
    return float(np.abs(weights).max())


def decoded(plain: F32, second: float, search: Search = "absmax") -> F32:
    return quantize("nvfp4", plain, search, second=second).weights().astype(np.float32)


def error(weights: F32, second: float) -> float:
    return float(quantize("nvfp4", weights, second=second).errors(weights).sum())


def decibels(weights: F32, second: float) -> float:
    return 10 * math.log10(float((weights.astype(np.float64) ** 2).sum()) / max(error(weights, second), 1e-300))


@pytest.mark.parametrize("block_scale", BLOCK_SCALES)
def test_weights_that_were_nvfp4_stay_what_they_are(block_scale: int) -> None:
    """Whatever block scale the checkpoint's maker gave the largest weight; BF16 leaves 50 dB."""
    plain = gaussian(ROWS, COLUMNS)
    weights = decoded(plain, largest(plain) / (6 * block_scale))
    assert decibels(weights, best_second_scale(weights, largest(weights), "mse")) > 140
    rounded = torch.from_numpy(weights).bfloat16().float().numpy()
    assert decibels(rounded, best_second_scale(rounded, largest(rounded), "mse")) > 45
    others = [decibels(weights, nvfp4_second_scale(largest(weights), q)) for q in BLOCK_SCALES]
    assert sorted(others)[-2] < 45  # one grid alone does it


@given(seed=st.integers(0, 99), exponent=st.integers(-30, 5), odd=st.floats(1, 2, width=32))
def test_weights_of_any_second_scale_stay_what_they_are(seed: int, exponent: int, odd: float) -> None:
    """The maker's scale came from elsewhere, such as a larger matrix beside this one; all is within E4M3's range."""
    rng = np.random.default_rng(seed)
    codes, scales = rng.integers(0, 16, (32, 128), np.uint8), rng.integers(0x40, 0x70, (32, 16), np.uint8)
    codes[:, ::8] = 0x77  # each block has a weight of the largest code
    true = math.ldexp(odd, exponent)
    weights = dequantize("nvfp4", codes, scales, true).astype(np.float32)
    second = best_second_scale(weights, largest(weights), "mse")
    octaves = math.log2(second / true)
    assert octaves == pytest.approx(round(octaves), abs=1e-6)
    assert decibels(weights, second) > 130


@pytest.mark.parametrize(
    "weights",
    [gaussian(ROWS, COLUMNS), student(ROWS, COLUMNS), laplace(ROWS, COLUMNS), real_weights()],
    ids=["gaussian", "student", "laplace", "real"],
)
def test_other_weights_get_the_default(weights: F32) -> None:
    assert best_second_scale(weights, largest(weights), "mse") == nvfp4_second_scale(largest(weights))


def test_a_better_grid_is_taken_for_what_it_saves() -> None:
    weights = (np.random.default_rng(0).integers(-7, 8, (ROWS, COLUMNS)) * 0.01).astype(np.float32)
    second = best_second_scale(weights, largest(weights), "mse")
    assert second == nvfp4_second_scale(largest(weights), 288)
    assert error(weights, second) < 0.97 * error(weights, nvfp4_second_scale(largest(weights)))


def test_where_blocks_reach_the_largest_weight_the_default_is_better() -> None:
    weights = np.random.default_rng(3).uniform(-1, 1, (ROWS, COLUMNS)).astype(np.float32)
    second = best_second_scale(weights, largest(weights), "mse")
    assert error(weights, second) < 0.85 * error(weights, nvfp4_second_scale(largest(weights), 448))


def test_importance_says_which_weights_are_to_stay() -> None:
    one = gaussian(ROWS, COLUMNS)
    left = decoded(one, largest(one) / 2688)[:, : COLUMNS // 2]
    right = decoded(one, largest(one) / 1920)[:, : COLUMNS // 2]
    for factor in (left, right):
        factor[0, 0] = largest(one)  # what both grids hold
    weights = np.ascontiguousarray(np.concatenate([left, right], 1))
    for columns, block_scale in ((slice(None, COLUMNS // 2), 448), (slice(COLUMNS // 2, None), 320)):
        importance = np.full(COLUMNS, 1e-6, np.float32)
        importance[columns] = 1
        second = best_second_scale(weights, largest(weights), "weighted", importance)
        assert second == nvfp4_second_scale(largest(weights), block_scale)


@pytest.mark.parametrize("search", ["absmax", "mse"])
def test_each_search_finds_the_grid(search: Search) -> None:
    plain = student(ROWS, COLUMNS)
    weights = decoded(plain, largest(plain) / 2688)
    assert best_second_scale(weights, largest(weights), search) == nvfp4_second_scale(largest(weights), 448)


def test_a_sample_that_says_nothing() -> None:
    for sample in (np.zeros((0, 64), np.float32), np.zeros((4, 64), np.float32)):
        assert best_second_scale(sample, 3.0, "mse") == nvfp4_second_scale(3.0)
    assert best_second_scale(np.zeros((4, 64), np.float32), 0.0, "mse") == 1.0
    weights = gaussian(4, 64)
    none = np.zeros(64, np.float32)
    assert best_second_scale(weights, largest(weights), "weighted", none) == nvfp4_second_scale(largest(weights))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="compressed-tensors 0.20.1 needs Python 3.11")
@pytest.mark.parametrize("noise", ["none", "bf16", "fp8", "two experts"])
def test_at_least_as_good_as_compressed_tensors_on_its_own_weights(noise: str) -> None:
    from tests.quantize import theirs

    def means(weights: F32) -> F32:
        found = theirs.quantize(weights, 16)
        return dequantize("nvfp4", found.codes, found.scales, found.second).astype(np.float32)

    weights = means(gaussian(ROWS, COLUMNS))
    if noise == "two experts":  # gate and up with scales of their own
        weights = np.concatenate([weights, means(real_tensor("encoder.layer.3.output.dense.weight")[:64, :COLUMNS])])
    if noise == "bf16":
        weights = torch.from_numpy(weights).bfloat16().float().numpy()
    if noise == "fp8":
        unit = largest(weights) / 448
        weights = torch.from_numpy(weights / unit).to(torch.float8_e4m3fn).float().numpy() * np.float32(unit)
    theirs_db = 10 * math.log10(float((weights**2.0).sum() / ((weights - means(weights)) ** 2.0).sum().clip(1e-30)))
    ours_db = decibels(weights, best_second_scale(weights, largest(weights), "mse"))
    assert ours_db > min(theirs_db, 140) - 0.01
