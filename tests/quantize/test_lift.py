"""Block scales of NVFP4 that the device would flush, against trying every scale it holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_pack.quantize import QuantStats, count_small, lift_subnormal, nvfp4_second_scale, quantize_nvfp4
from tests.reference.floats import E4M3
from tests.reference.source import dequantize

LEVELS = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def spread(seed: int, rows: int = 24, columns: int = 64) -> np.ndarray:
    """Groups of sizes over twenty octaves."""
    rng = np.random.default_rng(seed)
    sizes = np.ldexp(1.0, -rng.integers(0, 21, (rows, columns // 16)))
    return (rng.standard_normal((rows, columns)) * np.repeat(sizes, 16, axis=1)).astype(np.float32)


def lifted(weights: np.ndarray, importance: np.ndarray | None) -> tuple[np.ndarray, np.ndarray, float, QuantStats]:
    n, k = weights.shape
    codes, scales = np.empty((n, k // 2), np.uint8), np.empty((n, k // 16), np.uint8)
    second = nvfp4_second_scale(float(np.abs(weights).max()))
    search = "mse" if importance is None else "weighted"
    stats = quantize_nvfp4(weights, second, search, importance, codes, scales)
    lift_subnormal(weights, second, importance, codes, scales, stats)
    return codes, scales, second, stats


def best_errors(weights: np.ndarray, second: float, importance: np.ndarray) -> np.ndarray:
    """Least weighted error of each group over zero and all normal scales."""
    groups = weights.astype(np.float64).reshape(-1, 16)
    weight = np.broadcast_to(importance, weights.shape).reshape(-1, 16)
    found = (weight * groups**2).sum(axis=1)
    for byte in range(8, 0x7F):
        levels = np.concatenate([LEVELS, -LEVELS]) * E4M3[byte] * second
        error = (weight * (np.abs(groups[:, :, None] - levels).min(axis=2)) ** 2).sum(axis=1)
        found = np.minimum(found, error)
    return found


@settings(deadline=None)
@given(seed=st.integers(0, 10_000))
def test_best_of_all_where_a_large_weight_hardly_matters(seed: int) -> None:
    """Small weights beside one that is thousands of times larger, and nearly without importance."""
    rng = np.random.default_rng(seed)
    weights = (rng.uniform(0.001, 0.02, (64, 32)) * rng.choice([-1, 1], (64, 32))).astype(np.float32)
    weights[:, 16] = 1400  # the largest of the matrix, in another block
    weights[:, 0] = rng.uniform(1, 60)
    importance = np.ones(32, np.float32)
    importance[0] = 10.0 ** rng.uniform(-7, -3)
    codes, scales, second, _ = lifted(weights, importance)
    difference = weights - dequantize("nvfp4", codes, scales, second)
    found = (importance.astype(np.float64) * difference**2).reshape(-1, 16).sum(axis=1)
    assert (found <= best_errors(weights, second, importance.astype(np.float64)) * (1 + 1e-5) + 1e-30).all()


@pytest.mark.parametrize("weighted", [False, True])
@settings(deadline=None)
@given(seed=st.integers(0, 10_000))
def test_best_of_what_the_device_holds(weighted: bool, seed: int) -> None:
    weights = spread(seed)
    importance = np.random.default_rng(seed).random(64).astype(np.float32) + np.float32(0.1) if weighted else None
    codes, scales, second, stats = lifted(weights, importance)
    assert not ((scales > 0) & (scales < 8)).any()
    decoded = dequantize("nvfp4", codes, scales, second)
    channel = np.ones(64) if importance is None else importance.astype(np.float64)
    found = (channel * (weights - decoded) ** 2).reshape(-1, 16).sum(axis=1)
    assert (found <= best_errors(weights, second, channel) * (1 + 1e-5) + 1e-30).all()
    assert stats.error == pytest.approx(((weights - decoded) ** 2).sum(), rel=1e-6)
    assert stats.weighted_error == pytest.approx(found.sum(), rel=1e-6)
    assert (stats.subnormal, stats.zero) == (0, int((scales == 0).sum()))
    plain = np.empty_like(codes), np.empty_like(scales)
    quantize_nvfp4(weights, second, "mse" if importance is None else "weighted", importance, *plain)
    there = ((plain[1] > 0) & (plain[1] < 8) & (scales > 0)).reshape(-1)
    squares, errors = ((x**2).reshape(-1, 16).sum(axis=1) for x in (weights.astype(np.float64), weights - decoded))
    assert stats.small == there.sum()
    assert stats.small_signal == pytest.approx(squares[there].sum(), rel=1e-9)
    assert stats.small_error == pytest.approx(errors[there].sum(), rel=1e-9)
    assert not (((codes & 15) == 8) | (codes >> 4 == 8)).any(), "no -0"


def test_groups_that_became_zero_are_counted_unless_they_were() -> None:
    weights = spread(3)
    weights[5] = 0
    _, scales, _, stats = lifted(weights, None)
    before = stats.small, stats.small_signal, stats.small_error
    count_small(weights, scales, stats)
    lost = [g for row, byte in zip(weights, scales, strict=True) for g, b in zip(row.reshape(-1, 16), byte, strict=True)
            if b == 0 and g.any()]  # fmt: skip
    assert 0 < len(lost) < (scales == 0).sum()
    squares = sum(float(x) ** 2 for group in lost for x in group)
    after = stats.small, stats.small_signal, stats.small_error
    assert np.subtract(after, before) == pytest.approx([len(lost), squares, squares], rel=1e-9, abs=1e-15)


def test_what_needs_no_lift_is_left_alone() -> None:
    weights = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    codes, scales, second, _ = lifted(weights, None)
    plain = np.empty_like(codes), np.empty_like(scales)
    quantize_nvfp4(weights, second, "mse", None, *plain)
    assert np.array_equal(codes, plain[0]) and np.array_equal(scales, plain[1])
