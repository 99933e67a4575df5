"""Rounding and the search for scales, against a plain search over every E4M3 scale."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_pack.formats.nf3 import DEFAULT_LEVELS
from hybrid_pack.quantize.gptq_grid import LAST_BYTE, Grid, decode, make_grid, round_to, saturated, search_scales
from tests.reference import gptq as reference
from tests.reference.floats import E4M3

CPU = torch.device("cpu")
UNEVEN = (-1.5, -0.9, -0.25, -0.0625, 0.0, 0.3, 0.8, 1.25)
"""Levels of a checkpoint's own, one of them zero."""


def losses(weights: torch.Tensor, scales: torch.Tensor, importance: np.ndarray, grid: Grid) -> np.ndarray:
    found = decode(round_to(weights, scales, grid), scales, grid).numpy()
    return (importance * (weights.double().numpy() - found) ** 2).reshape(len(weights), -1, 32).sum(2)


@pytest.mark.parametrize("levels", [DEFAULT_LEVELS, UNEVEN], ids=["default", "uneven"])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), spread=st.floats(-5, 3), weighted=st.booleans())
def test_the_scale_of_least_loss_is_found(levels: tuple[float, ...], seed: int, spread: float, weighted: bool) -> None:
    random = np.random.default_rng(seed)
    grid = make_grid(levels, CPU)
    weights = torch.from_numpy((random.standard_normal((3, 64)) * 10**spread).astype(np.float32))
    weights[random.random((3, 64)) < 0.2] = 0
    importance = random.exponential(size=64) ** 3 if weighted else np.ones(64)
    scales = search_scales(weights, torch.from_numpy(importance) if weighted else None, grid)
    assert scales.dtype == torch.uint8 and int(scales.max()) <= LAST_BYTE
    found = losses(weights, scales, importance, grid)
    for row, group in np.ndindex(3, 2):
        columns = slice(32 * group, 32 * group + 32)
        w = weights[row, columns].numpy()
        least = reference.least_loss(w, importance[columns], levels)
        total = float((importance[columns] * w.astype(np.float64) ** 2).sum())
        assert found[row, group] <= least + 1e-12 * total


@pytest.mark.parametrize(
    "levels", [DEFAULT_LEVELS, UNEVEN, tuple(x + 2.0 for x in UNEVEN)], ids=["default", "uneven", "positive"]
)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), weighted=st.booleans())
def test_saturated_groups_are_those_a_larger_scale_would_serve_better(
    levels: tuple[float, ...], seed: int, weighted: bool
) -> None:
    random = np.random.default_rng(seed)
    grid = make_grid(levels, CPU)
    weights = (random.standard_normal((4, 64)) * 10 ** random.uniform(-1, 2.5, (4, 1))).astype(np.float32)
    importance = random.exponential(size=64) ** 3 if weighted else None
    given = None if importance is None else torch.from_numpy(importance)
    scales = search_scales(torch.from_numpy(weights), given, grid)
    found = saturated(torch.from_numpy(weights), scales, given, grid)
    for row, group in np.ndindex(4, 2):
        columns = slice(32 * group, 32 * group + 32)
        h = np.ones(32) if importance is None else importance[columns]
        losses = reference.losses(weights[row, columns], h, levels, float(E4M3[LAST_BYTE + 16]))
        assert bool(found[row, group]) == (losses[LAST_BYTE + 1 :].min() < losses[: LAST_BYTE + 1].min())


def test_the_largest_scale_is_the_largest_below_32() -> None:
    assert E4M3[LAST_BYTE] < 32 <= E4M3[LAST_BYTE + 1]


def test_rounding_takes_the_nearest_level() -> None:
    grid = make_grid(DEFAULT_LEVELS, CPU)
    weights = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    scales = torch.tensor([[40, 56], [1, 95], [70, 60], [30, 64]], dtype=torch.uint8)
    codes = round_to(weights, scales, grid)
    for row, column in np.ndindex(4, 64):
        scale = float(E4M3[int(scales[row, column // 32])])
        assert int(codes[row, column]) == reference.nearest(float(weights[row, column]), scale, DEFAULT_LEVELS)[0]


def test_zero_groups_get_scale_zero_and_one_code() -> None:
    grid = make_grid(DEFAULT_LEVELS, CPU)
    weights = torch.zeros(2, 64)
    weights[0, 32] = 1e-30  # not zero, however small
    weights[1, :32] = -0.0
    scales = search_scales(weights, None, grid)
    assert scales.tolist() == [[0, 0], [0, 0]]
    weights[1] = 0.3  # lost with its group
    assert set(round_to(weights, scales, grid).flatten().tolist()) == {grid.zero_code} == {4}


def test_scale_zero_where_the_smallest_is_no_better() -> None:
    """A group of one small weight: what the smallest scale makes of the other 31, which are zero, costs more."""
    weights = torch.zeros(3, 32)
    weights[:, 5] = torch.tensor([1e-4, 2e-3, 2.0])
    scales = search_scales(weights, None, make_grid(DEFAULT_LEVELS, CPU)).flatten().tolist()
    assert scales[0] == 0 and scales[2] > 0
    assert search_scales(weights, None, make_grid(UNEVEN, CPU)).flatten().tolist()[1] > 0  # it has a level zero
    important = torch.full((32,), 1e-6, dtype=torch.float64)
    important[5] = 1
    assert search_scales(weights, important, make_grid(DEFAULT_LEVELS, CPU)).flatten().tolist()[1] > 0


@pytest.mark.parametrize("levels", [DEFAULT_LEVELS, UNEVEN], ids=["default", "uneven"])
def test_a_tie_goes_to_the_level_nearer_zero_and_zero_above_it(levels: tuple[float, ...]) -> None:
    grid = make_grid(levels, CPU)
    middles = grid.midpoints.float()  # not all of them exact: those that are, are ties
    weights = torch.zeros(1, 32)
    weights[0, :7] = middles
    codes = round_to(weights, torch.tensor([[56]], dtype=torch.uint8), grid)[0]  # scale 1
    for i, middle in enumerate(middles.tolist()):
        below, above = middle - levels[i], levels[i + 1] - middle
        tie = i if middle > 0 else i + 1
        assert int(codes[i]) == (i if below < above else i + 1 if above < below else tie)
    assert int(codes[7]) == grid.zero_code
    assert levels[grid.zero_code] == min(level for level in levels if level >= 0)


def test_a_group_without_importance_is_searched_all_the_same() -> None:
    grid = make_grid(DEFAULT_LEVELS, CPU)
    weights = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
    importance = torch.ones(64, dtype=torch.float64)
    importance[:32] = 0
    assert torch.equal(search_scales(weights, importance, grid), search_scales(weights, None, grid))


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = make_grid(DEFAULT_LEVELS, CPU)
    generator = torch.Generator().manual_seed(3)
    weights, importance = torch.randn(5, 96, generator=generator), torch.rand(96, generator=generator).double()
    whole = search_scales(weights, importance, grid)
    monkeypatch.setattr("hybrid_pack.quantize.gptq_grid.SEARCH_GROUPS", {"cpu": 4, "cuda": 4})
    assert torch.equal(search_scales(weights, importance, grid), whole)


@pytest.mark.parametrize(
    "levels", [DEFAULT_LEVELS[:7], DEFAULT_LEVELS[::-1], (*DEFAULT_LEVELS[:7], float("inf"))], ids=str
)
def test_levels_that_cannot_be(levels: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="eight finite ascending numbers"):
        make_grid(levels, CPU)
