"""What is defined beyond the least error: storage, zeros, ties, limits, counts, blocks, threads, refusals."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_pack.quantize import QuantStats, Search, nvfp4_second_scale, quantize_mxfp4, quantize_nf3, quantize_nvfp4
from tests.quantize.ours import F32, FILL, NAMES, Name, gaussian, quantize, require_least, some_importance, student
from tests.reference.floats import E2M1, E4M3
from tests.reference.quantize import in_groups
from tests.reference.source import GROUP, NF3_LEVELS, codes_of, dequantize, store

LEVELS = np.array(NF3_LEVELS)
SEARCHES: tuple[Search, ...] = ("absmax", "mse", "weighted")


def row(*values: float, group: int = 32) -> F32:
    """One group: the values, the last of them over and over."""
    return np.array([*values, *[values[-1]] * (group - len(values))], np.float32)[None]


# --- storage ---


@pytest.mark.parametrize("name", NAMES)
def test_stored_codes_are_the_nearest_levels(name: Name) -> None:
    """Each code by itself, by the reference's unpacking."""
    weights = gaussian(9, 96)
    second = 0.001 if name == "nvfp4" else 1.0
    found = quantize(name, weights, second=second)
    codes = codes_of(name, found.codes)
    step = dequantize(name, found.codes, found.scales, second) - weights
    levels = LEVELS if name == "nf3" else E2M1
    one = np.zeros_like(codes)
    for code, level in enumerate(levels):
        other = dequantize(name, store(name, one + np.uint8(code)), found.scales, second)
        assert (np.abs(step) <= np.abs(other - weights) * (1 + 1e-6)).all(), level
    assert codes.max() == len(levels) - 1


@pytest.mark.parametrize("name", NAMES)
def test_what_is_exact_stays_exact(name: Name) -> None:
    """Weights that a format holds come back without error, whatever their scales were."""
    rng = np.random.default_rng(5)
    group = GROUP[name]
    codes = rng.integers(0, 8 if name == "nf3" else 16, (40, 8 * group), np.uint8)
    limit = {"nf3": 0x60, "nvfp4": 0x7F, "mxfp4": 255}[name]
    scales = rng.integers(1, limit, (40, 8), np.uint8) if name != "mxfp4" else rng.integers(3, 250, (40, 8), np.uint8)
    levels = (-1.0, -0.625, -0.375, -0.125, 0.125, 0.375, 0.625, 1.0)
    weights = dequantize(name, store(name, codes), scales, 0.5, levels)
    found = quantize(name, weights.astype(np.float32), second=0.5, levels=levels)
    assert (found.weights() == weights).all()
    assert found.stats.error == 0 and found.stats.sqnr_db == math.inf


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", NAMES)
def test_every_byte_is_written(name: Name, search: Search) -> None:
    importance = some_importance(96) if search == "weighted" else None
    weights = gaussian(7, 96)
    n, k = weights.shape
    shape = (n, k // 8 * 3 if name == "nf3" else k // 2), (n, k // GROUP[name])
    for fill in (0, 255):
        codes, scales = (np.full(s, fill, np.uint8) for s in shape)
        call(name, weights, search, importance, codes, scales)
        expected = quantize(name, weights, search, importance)
        assert (codes == expected.codes).all() and (scales == expected.scales).all()


def call(name: Name, weights: F32, search: Any, importance: Any, codes: Any, scales: Any) -> QuantStats:
    if name == "nf3":
        return quantize_nf3(weights, NF3_LEVELS, search, importance, codes, scales)
    if name == "nvfp4":
        return quantize_nvfp4(weights, 1.0, search, importance, codes, scales)
    return quantize_mxfp4(weights, search, importance, codes, scales)


# --- zeros ---


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_groups_of_zeros(name: Name, search: Search, zero: float) -> None:
    weights = np.concatenate([np.full((1, 64), zero, np.float32), gaussian(1, 64)])
    found = quantize(name, weights, search, some_importance(64) if search == "weighted" else None)
    assert (found.scales[0] == 0).all() and (found.scales[1] > 0).all()
    decoded = found.weights()[0]
    assert (decoded == 0).all() and not np.signbit(decoded).any()
    assert found.stats.zero == 64 // GROUP[name]


def test_a_level_zero_does_not_keep_groups_of_zeros_from_scale_zero() -> None:
    levels = (-1.0, -0.5, -0.2, 0.0, 0.2, 0.5, 0.75, 1.0)
    found = quantize("nf3", np.zeros((1, 32), np.float32), levels=levels)
    assert found.scales[0, 0] == 0 and (codes_of("nf3", found.codes) == 3).all()


@pytest.mark.parametrize("name", NAMES)
def test_negative_zero_is_zero(name: Name) -> None:
    weights = gaussian(4, 64)
    weights[:, ::3] = 0
    negative = weights.copy()
    negative[:, ::3] = -0.0
    one, other = quantize(name, weights), quantize(name, negative)
    assert (one.codes == other.codes).all() and (one.scales == other.scales).all()


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_no_code_means_minus_zero(name: Name) -> None:
    weights = student(64, 256)
    assert (weights < 0).any()
    codes = codes_of(name, quantize(name, weights, second=nvfp4_second_scale(float(np.abs(weights).max()))).codes)
    assert (codes == 0).any() and not (codes == 8).any()


def test_nf3_takes_scale_zero_where_it_is_best() -> None:
    """The smallest scale is 2^-9; where its smallest level is too much, nothing is better than zeros."""
    smallest = 0.1275 * 2.0**-9
    below, above = np.float32(smallest * 0.49), np.float32(smallest * 0.51)
    assert quantize("nf3", row(float(below))).scales[0, 0] == 0
    assert quantize("nf3", row(float(above))).scales[0, 0] == 1
    assert quantize("nf3", row(float(below))).stats.zero == 1


def test_nf3_takes_subnormal_scales_on_purpose() -> None:
    weights = gaussian(16, 256, 2.0**-10)
    found = quantize("nf3", weights)
    assert (found.scales < 8).all() and (found.scales > 0).sum() == found.stats.subnormal > 100
    require_least(found, weights)


# --- ties ---


def test_a_weight_between_two_levels_takes_the_one_nearer_zero() -> None:
    levels = (-1.0, -0.75, -0.5, -0.25, 0.25, 0.5, 0.75, 1.0)
    exact = [-1.0, 1.0, -0.75, 0.75, -0.5, 0.5, -0.25, 0.25] * 3
    found = quantize("nf3", row(*exact, -0.875, -0.625, -0.375, 0.0, 0.375, 0.625, 0.875, 1.0), "absmax", levels=levels)
    assert found.scales[0, 0] == 0x38 and E4M3[0x38] == 1
    assert codes_of("nf3", found.codes)[0, 24:].tolist() == [1, 2, 3, 4, 4, 5, 6, 7]


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_ties_of_e2m1(name: Name) -> None:
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    weights = row(6.0, *middles, *-middles, 0.0, group=GROUP[name])
    found = quantize(name, weights, "absmax")
    assert codes_of(name, found.codes)[0, 1:15].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 9, 10, 11, 12, 13, 14]


def test_of_two_scales_as_good_the_smaller() -> None:
    levels = (-1.0, -0.75, -0.5, -0.25, 0.25, 0.5, 0.75, 1.0)
    assert E4M3[quantize("nf3", row(0.5, -0.25), levels=levels).scales[0, 0]] == 0.5
    assert E4M3[quantize("nvfp4", row(3.0, -1.5, 0.0, group=16)).scales[0, 0]] == 0.5
    assert quantize("mxfp4", row(3.0, -1.5, 0.0)).scales[0, 0] == 126


# --- limits ---


@pytest.mark.parametrize("largest", [1e3, 1e6, 1e20, 3e38])
@pytest.mark.parametrize("search", SEARCHES)
def test_nf3_scales_stay_below_32_and_are_counted(search: Search, largest: float) -> None:
    weights = gaussian(4, 64)
    weights[1, 40], weights[2, 3] = largest, -largest
    found = quantize("nf3", weights, search, np.ones(64, np.float32) if search == "weighted" else None)
    assert found.scales[1, 1] == found.scales[2, 0] == 0x5F and E4M3[0x5F] == 30
    assert found.stats.saturated == 2 and found.scales.max() == 0x5F
    assert np.isfinite(found.stats.error)


def test_nf3_just_below_the_limit_is_not_saturated() -> None:
    at_30, at_32 = LEVELS * 30.0, LEVELS * 32.0
    for search in ("absmax", "mse"):
        assert quantize("nf3", np.tile(at_30, 4)[None].astype(np.float32), search).stats.saturated == 0
        assert quantize("nf3", np.tile(at_32, 4)[None].astype(np.float32), search).stats.saturated == 1


def test_nvfp4_of_a_second_scale_too_small() -> None:
    found = quantize("nvfp4", gaussian(8, 64, 1.0), second=2.0**-14)
    assert (found.scales == 0x7E).all() and found.stats.saturated == found.stats.groups


@pytest.mark.parametrize("exponent", [-149, -140, -127, -126, -100, 0, 100, 125])
def test_mxfp4_from_the_smallest_to_the_largest_float(exponent: int) -> None:
    rng = np.random.default_rng(exponent + 200)
    weights = np.ldexp(rng.uniform(-1, 1, (16, 64)), exponent).astype(np.float32)
    for search in ("absmax", "mse"):
        found = quantize("mxfp4", weights, search)
        assert found.scales.max() <= 254 and np.isfinite(found.weights()).all()
        empty = found.scales == 0
        assert found.stats.zero >= 0 and (np.repeat(empty, 32, 1) <= (np.abs(weights) < 2.0**-124)).all()
    require_least(found, weights)


@given(amax=st.floats(0, 3e38))
def test_second_scale(amax: float) -> None:
    second = nvfp4_second_scale(amax)
    assert second == float(np.float32(second)) and second > 0
    if amax > 1536 * 2.0**-126:
        assert second == float(np.float32(amax / 1536))


@pytest.mark.parametrize("amax", [-1.0, math.inf, math.nan])
def test_second_scale_of_no_magnitude(amax: float) -> None:
    with pytest.raises(ValueError, match="largest magnitude"):
        nvfp4_second_scale(amax)


# --- absmax ---


def test_absmax_is_the_nearest_e4m3() -> None:
    import torch

    weights = np.concatenate([gaussian(64, 256), gaussian(64, 256, 2e-3), gaussian(64, 256, 1.0)])
    second = np.float32(nvfp4_second_scale(float(np.abs(weights).max())))
    largest = np.abs(weights).reshape(len(weights), -1, 32).max(2)
    expected = torch.from_numpy(largest).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert (quantize("nf3", weights, "absmax").scales == expected).all()
    blocks = np.abs(weights).reshape(len(weights), -1, 16).max(2) * (np.float32(1) / second) / np.float32(6)
    expected = torch.from_numpy(blocks).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert (quantize("nvfp4", weights, "absmax", second=float(second)).scales == expected).all()


def test_absmax_of_mxfp4_is_the_rule_of_the_standard() -> None:
    weights = student(64, 256)
    exponent = np.floor(np.log2(np.abs(weights).reshape(64, -1, 32).max(2).astype(np.float64)))
    assert (quantize("mxfp4", weights, "absmax").scales == exponent - 2 + 127).all()


# --- importance ---


@pytest.mark.parametrize("name", NAMES)
def test_equal_importance_is_none(name: Name) -> None:
    weights = student(16, 256)
    plain = quantize(name, weights)
    for size in (1.0, 2.0**-140, 2.0**100):
        weighted = quantize(name, weights, "weighted", np.full(256, size, np.float32))
        assert (weighted.codes == plain.codes).all() and (weighted.scales == plain.scales).all()
        assert weighted.stats.weighted_error == pytest.approx(weighted.stats.error * size, rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_groups_without_importance_are_searched_unweighted(name: Name) -> None:
    weights = gaussian(4, 128)
    importance = some_importance(128)
    importance[32:64] = 0
    weights[2, 96:] = np.where(importance[96:] > 0, 0, weights[2, 96:])
    found, plain = quantize(name, weights, "weighted", importance), quantize(name, weights)
    group = GROUP[name]
    assert (found.scales[:, 32 // group : 64 // group] == plain.scales[:, 32 // group : 64 // group]).all()
    # Weights without importance beside zeros that have some: any scale will do where there is a level for these zeros.
    expected = np.zeros(1, np.uint8) if name == "nf3" else plain.scales[2, 96 // group :]
    assert (found.scales[2, 96 // group :] == expected).all()


# --- stats ---


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", NAMES)
def test_stats_are_those_of_the_decoded_weights(name: Name, search: Search) -> None:
    weights = student(33, 160)
    weights[5] = 0
    importance = some_importance(160) if search == "weighted" else None
    second = float(np.float32(0.0003)) if name == "nvfp4" else 1.0
    found = quantize(name, weights, search, importance, second)
    error = (weights - found.weights()) ** 2
    assert found.stats.signal == pytest.approx(float((weights.astype(np.float64) ** 2).sum()), rel=1e-12)
    assert found.stats.error == pytest.approx(float(error.sum()), rel=1e-10)
    weighted = error if importance is None else error * importance.astype(np.float64)
    assert found.stats.weighted_error == pytest.approx(float(weighted.sum()), rel=1e-10)
    assert found.stats.groups == found.scales.size
    assert found.stats.zero == int((in_groups(found.weights(), GROUP[name]) == 0).all(1).sum())
    assert found.stats.subnormal == (0 if name == "mxfp4" else int(((found.scales > 0) & (found.scales < 8)).sum()))


def test_stats_add_up() -> None:
    total = QuantStats()
    assert total.sqnr_db == math.inf
    total.add(QuantStats(100.0, 1.0, 2.0, 5, 1, 2, 3))
    total.add(QuantStats(900.0, 9.0, 8.0, 1, 1, 1, 1))
    assert total == QuantStats(1000.0, 10.0, 10.0, 6, 2, 3, 4)
    assert total.sqnr_db == pytest.approx(20.0)


# --- blocks and threads ---


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    search=st.sampled_from(SEARCHES),
    cuts=st.lists(st.integers(1, 69), max_size=6),
    k=st.sampled_from([32, 96, 416]),
)
def test_rows_may_be_cut_anywhere(name: Name, search: Search, cuts: list[int], k: int) -> None:
    weights = student(70, k)
    importance = some_importance(k) if search == "weighted" else None
    whole = quantize(name, weights, search, importance)
    edges = [0, *sorted(set(cuts)), 70]
    parts = [quantize(name, weights[a:b], search, importance) for a, b in pairwise(edges)]
    assert (np.concatenate([p.codes for p in parts]) == whole.codes).all()
    assert (np.concatenate([p.scales for p in parts]) == whole.scales).all()
    total = QuantStats()
    for part in parts:
        total.add(part.stats)
    assert (total.groups, total.zero, total.subnormal, total.saturated) == (
        whole.stats.groups,
        whole.stats.zero,
        whole.stats.subnormal,
        whole.stats.saturated,
    )
    assert total.error == pytest.approx(whole.stats.error, rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_threads_write_the_same_bytes(name: Name) -> None:
    weights = student(512, 256)
    whole = quantize(name, weights)
    codes, scales = np.full_like(whole.codes, FILL), np.full_like(whole.scales, FILL)

    def one(first: int) -> None:
        rows = slice(first, first + 64)
        call(name, weights[rows], "mse", None, codes[rows], scales[rows])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, range(0, 512, 64)))
    assert (codes == whole.codes).all() and (scales == whole.scales).all()


# --- refusals ---


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("at_row", "at_column"), [(0, 0), (3, 95), (69, 31), (69, 64)])
@pytest.mark.parametrize("name", NAMES)
def test_weights_that_are_not_finite(name: Name, at_row: int, at_column: int, wrong: float) -> None:
    weights = gaussian(70, 96)
    weights[at_row, at_column] = wrong
    with pytest.raises(ValueError, match=rf"row {at_row}, column {at_column} is {wrong}"):
        quantize(name, weights)


def bytes_of(*shape: int) -> Any:
    return np.zeros(shape, np.uint8)


GOOD = {
    "weights": np.ones((2, 64), np.float32),
    "levels": NF3_LEVELS,
    "search": "mse",
    "importance": None,
    "codes": bytes_of(2, 24),
    "scales": bytes_of(2, 2),
}
MUTATIONS: list[tuple[str, dict[str, Any], str]] = [
    ("float64", {"weights": np.ones((2, 64))}, "weights are f32"),
    ("one dimension", {"weights": np.ones(64, np.float32)}, "weights are f32"),
    ("with gaps", {"weights": np.ones((2, 128), np.float32)[:, ::2]}, "weights are f32"),
    ("part of a group", {"weights": np.ones((2, 48), np.float32)}, "multiple of 32"),
    ("no rows", {"weights": np.ones((0, 64), np.float32)}, "multiple of 32"),
    ("codes too narrow", {"codes": bytes_of(2, 23)}, r"codes are u8 \[2, 24\]"),
    ("codes of another type", {"codes": np.zeros((2, 24), np.int8)}, "codes are u8"),
    ("codes with gaps", {"codes": bytes_of(2, 48)[:, ::2]}, "codes are u8"),
    ("scales of other rows", {"scales": bytes_of(3, 2)}, r"scales are u8 \[2, 2\]"),
    ("seven levels", {"levels": NF3_LEVELS[:7]}, "eight finite ascending"),
    ("levels that descend", {"levels": NF3_LEVELS[::-1]}, "eight finite ascending"),
    ("equal levels", {"levels": (*NF3_LEVELS[:7], NF3_LEVELS[6])}, "eight finite ascending"),
    ("levels not finite", {"levels": (*NF3_LEVELS[:7], math.inf)}, "eight finite ascending"),
    ("levels too large", {"levels": [level * 1e6 for level in NF3_LEVELS]}, "2\\^-16 and 2\\^16"),
    ("unknown search", {"search": "best"}, "search is one of"),
    ("weighted by nothing", {"search": "weighted"}, "without an importance"),
    ("importance without use", {"importance": np.ones(64, np.float32)}, "with an importance"),
    ("importance of other columns", {"search": "weighted", "importance": np.ones(32, np.float32)}, "importance is f32"),
    ("importance of doubles", {"search": "weighted", "importance": np.ones(64)}, "importance is f32"),
    (
        "negative importance",
        {"search": "weighted", "importance": np.r_[np.ones(5), -1, np.ones(58)].astype(np.float32)},
        "importance of column 5",
    ),
    (
        "importance not finite",
        {"search": "weighted", "importance": np.r_[np.nan, np.ones(63)].astype(np.float32)},
        "importance of column 0",
    ),
]


def test_the_unmutated_call_is_good() -> None:
    quantize_nf3(**GOOD)  # type: ignore[arg-type]


@pytest.mark.parametrize(("mutation", "message"), [m[1:] for m in MUTATIONS], ids=[m[0] for m in MUTATIONS])
def test_refusals(mutation: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_nf3(**{**GOOD, **mutation})  # type: ignore[arg-type]


@pytest.mark.parametrize("second", [0.0, -1.0, math.nan, math.inf, 1e-45])
def test_second_scales_that_are_none(second: float) -> None:
    with pytest.raises(ValueError, match="second-level scale"):
        quantize("nvfp4", gaussian(1, 16), second=second)
