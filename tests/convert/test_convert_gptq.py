"""Statistics of a matrix quantised by GPTQ against an independent count from its stored bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybrid_pack.convert.gptq import HessianAtHand
from hybrid_pack.formats.nf3 import DEFAULT_LEVELS
from hybrid_pack.quantize import QuantStats, quantize_nf3
from hybrid_pack.quantize.gptq_hessian import prepare_hessian
from tests.reference import gptq as reference
from tests.reference.floats import E4M3
from tests.reference.source import nf3_codes

UNEVEN = (-1.5, -0.9, -0.25, -0.0625, 0.0, 0.3, 0.8, 1.25)
SIGMAS = {"usual": 0.02, "small": 2e-3, "tiny": 2e-4, "lost": 1e-8, "large": 5.0, "too large": 100.0}
N, K = 16, 96


def by_gptq(
    weights: np.ndarray, hessian: np.ndarray, levels: tuple[float, ...]
) -> tuple[QuantStats, np.ndarray, np.ndarray]:
    """Statistics, codes u8 [N, K] and scales u8 [N, K/32]."""
    codes, scales = np.empty((N, K // 8 * 3), np.uint8), np.empty((N, K // 32), np.uint8)
    prepared = prepare_hessian(torch.from_numpy(hessian))
    stats, _ = HessianAtHand(prepared).quantize(weights, levels, "here", codes, scales)
    return stats, nf3_codes(codes), scales


@pytest.mark.parametrize("levels", [DEFAULT_LEVELS, UNEVEN], ids=["default", "uneven"])
@pytest.mark.parametrize("correlated", [False, True])
@pytest.mark.parametrize("size", [*SIGMAS, "mixed"])
def test_statistics_are_those_of_the_bytes(size: str, correlated: bool, levels: tuple[float, ...]) -> None:
    random = np.random.default_rng(3)
    sigma = np.repeat(10.0 ** random.uniform(-4, 2.5, (N, K // 32)), 32, axis=1) if size == "mixed" else SIGMAS[size]
    weights = (random.standard_normal((N, K)) * sigma).astype(np.float32)
    weights[2, 32:64] = 0
    x = random.standard_normal((300, K))
    x[:, 1:] += 0.7 * x[:, :-1]
    stats, codes, scales = by_gptq(weights, x.T @ x if correlated else np.eye(K), levels)
    values = reference.decode(codes, scales, levels)
    assert stats.groups == scales.size == N * K // 32
    assert stats.zero == int((~values.reshape(N, -1, 32).any(axis=2)).sum())
    assert stats.subnormal == int(((E4M3[scales] > 0) & (E4M3[scales] < 2.0**-6)).sum())
    assert stats.signal == pytest.approx(float((weights.astype(np.float64) ** 2).sum()), rel=1e-12)
    assert stats.error == pytest.approx(float(((weights - values) ** 2).sum()), rel=1e-12)
    if not correlated:
        wanting = 0
        for row in weights.reshape(-1, 32):
            losses = reference.losses(row, np.ones(32), levels, 120.0)
            wanting += losses[96:].min() < losses[:96].min()  # 30 is the largest legal one
        assert stats.saturated == wanting
        stored, other = np.empty((N, K // 8 * 3), np.uint8), np.empty_like(scales)
        searched = quantize_nf3(weights, levels, "mse", None, stored, other)
        assert (stats.zero, stats.subnormal, stats.saturated) == (searched.zero, searched.subnormal, searched.saturated)
    assert (stats.saturated > 0) == (size in ("too large", "mixed"))
