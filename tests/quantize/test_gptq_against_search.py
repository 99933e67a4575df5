"""GPTQ is never worse on its Hessian than what the default and the weighted search of this package come to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_pack.formats.nf3 import DEFAULT_LEVELS
from hybrid_pack.quantize import Search, quantize_nf3
from hybrid_pack.quantize.gptq import gptq_nf3
from hybrid_pack.quantize.gptq_grid import make_grid
from tests.reference import gptq as reference
from tests.reference.source import nf3_codes

UNEVEN = (-1.5, -0.9, -0.25, -0.0625, 0.0, 0.3, 0.8, 1.25)
ROWS = 4


def sizes(kind: str, groups: int, random: np.random.Generator) -> np.ndarray:
    """Sigma of each group, f64 [ROWS, groups]."""
    ranges = {"usual": (-3.0, 1.6), "tiny": (-8.0, -3.0)}
    if kind == "mixed":
        return np.asarray(10.0 ** random.uniform(-8, 1, (ROWS, groups)))
    return np.full((ROWS, groups), 10.0 ** random.uniform(*ranges[kind]))


def made_hessian(kind: str, k: int, random: np.random.Generator) -> np.ndarray:
    if kind == "identity":
        return np.eye(k)
    x = random.standard_normal((int(random.integers(1, 3 * k)), k))
    if kind == "correlated":
        x[:, 1:] += 0.7 * x[:, :-1]
    if kind == "uneven":
        x *= np.exp(2 * random.standard_normal(k))
        x[:, random.random(k) < 0.1] = 0
    h = x.T @ x
    return np.diag(h.diagonal()) if kind == "diagonal" else (h + h.T) / 2


def searched(
    weights: np.ndarray, levels: tuple[float, ...], importance: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Codes u8 [N, K] and scales u8 [N, K/32] of the search of ``quantize_nf3``."""
    n, k = weights.shape
    codes, scales = np.empty((n, k // 8 * 3), np.uint8), np.empty((n, k // 32), np.uint8)
    search: Search = "mse" if importance is None else "weighted"
    quantize_nf3(weights, levels, search, importance, codes, scales)
    return nf3_codes(codes), scales


@pytest.mark.parametrize("levels", [DEFAULT_LEVELS, UNEVEN], ids=["default", "uneven"])
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    groups=st.integers(1, 4),
    size=st.sampled_from(["usual", "tiny", "mixed"]),
    kind=st.sampled_from(["identity", "diagonal", "white", "correlated", "uneven"]),
    sparse=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_never_worse_than_a_search(
    levels: tuple[float, ...], seed: int, groups: int, size: str, kind: str, sparse: float
) -> None:
    random = np.random.default_rng(seed)
    k = 32 * groups
    weights = random.standard_normal((ROWS, k)) * np.repeat(sizes(size, groups, random), 32, axis=1)
    weights[random.random((ROWS, k)) < sparse] = 0
    weights = weights.astype(np.float32)
    h = made_hessian(kind, k, random)
    result = gptq_nf3(torch.from_numpy(weights), torch.from_numpy(h), levels)
    values = reference.decode(result.codes.numpy(), result.scales.numpy(), levels)
    for importance in (None, h.diagonal().astype(np.float32)):
        other = reference.decode(*searched(weights, levels, importance), levels)
        for row in range(ROWS):
            one = weights[[row]]
            slack = 1e-6 * reference.error(one, other[[row]], h)  # that search is in float32
            assert reference.error(one, values[[row]], h) <= reference.error(one, other[[row]], h) + slack


@pytest.mark.parametrize("sigma", [0.0, 1e-8, 3e-5])
def test_a_matrix_below_the_smallest_scale_is_as_by_the_search(sigma: float) -> None:
    """Both lose it, and write the same bytes."""
    weights = (np.random.default_rng(1).standard_normal((8, 96)) * sigma).astype(np.float32)
    result = gptq_nf3(torch.from_numpy(weights), torch.eye(96), DEFAULT_LEVELS)
    codes, scales = searched(weights, DEFAULT_LEVELS, None)
    assert not scales.any() and not result.scales.any()
    assert np.array_equal(result.codes.numpy(), codes)
    assert set(codes.flatten().tolist()) == {make_grid(DEFAULT_LEVELS, torch.device("cpu")).zero_code}
    assert result.error == result.rtn_error == pytest.approx(float((weights.astype(np.float64) ** 2).sum()))
