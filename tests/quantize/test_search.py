"""The scale found is the best there is, held against a float64 search over all scales."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from hybrid_pack.quantize import Search, nvfp4_second_scale
from tests.quantize.cases import LOPSIDED, WITH_ZERO
from tests.quantize.ours import (
    F32,
    NAMES,
    Name,
    gaussian,
    laplace,
    quantize,
    real_weights,
    require_least,
    some_importance,
    student,
)
from tests.reference.quantize import E2M1_LEVELS, MXFP4_SCALES, NF3_SCALES, NVFP4_SCALES, errors_of_scales
from tests.reference.source import GROUP, NF3_LEVELS

SOURCES = {
    "gaussian": lambda: gaussian(48, 384),
    "gaussian, small": lambda: gaussian(48, 384, 0.002),
    "gaussian, subnormal scales": lambda: gaussian(24, 384, 2e-4),
    "gaussian, large": lambda: gaussian(24, 384, 7.0),
    "student": lambda: student(48, 384),
    "laplace": lambda: laplace(48, 384),
    "real": lambda: real_weights()[:64],
}


def second_of(name: Name, weights: F32) -> float:
    return nvfp4_second_scale(float(np.abs(weights).max())) if name == "nvfp4" else 1.0


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", NAMES)
def test_mse_is_the_least(name: Name, source: str) -> None:
    weights = SOURCES[source]()
    require_least(quantize(name, weights, second=second_of(name, weights)), weights)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", NAMES)
def test_weighted_is_the_least_weighted(name: Name, source: str) -> None:
    weights = SOURCES[source]()
    importance = some_importance(weights.shape[1])
    require_least(quantize(name, weights, "weighted", importance, second_of(name, weights)), weights, importance)


@pytest.mark.parametrize("name", NAMES)
def test_searching_pays(name: Name) -> None:
    weights = gaussian(64, 1024)
    importance = some_importance(1024)
    found: dict[Search, float] = {}
    for search, given_importance in (("absmax", None), ("mse", None), ("weighted", importance)):
        result = quantize(name, weights, search, given_importance, second_of(name, weights))
        found[search] = float(result.errors(weights, importance).sum())
    assert found["weighted"] < found["mse"] < found["absmax"]


def test_nf3_of_a_gaussian_in_decibels() -> None:
    """The figures other implementations of the same search reach."""
    weights = gaussian(256, 2048)
    assert quantize("nf3", weights).stats.sqnr_db == pytest.approx(15.8, abs=0.05)
    assert quantize("nf3", weights, "absmax").stats.sqnr_db == pytest.approx(14.9, abs=0.05)


DYADIC = (-1.0, -0.75, -0.5, -0.25, 0.25, 0.5, 0.75, 1.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NAMES)
def test_of_equally_good_scales_the_smallest(name: Name, seed: int) -> None:
    """Few small multiples of 1/16, so that all sums are exact and many scales are as good as each other."""
    rng = np.random.default_rng(seed)
    group = GROUP[name]
    weights = np.stack([rng.choice(rng.integers(-24, 25, 1 + seed) / 16, group) for _ in range(600)])
    errors = errors_of_scales(
        weights,
        np.array(DYADIC) if name == "nf3" else E2M1_LEVELS,
        {"nf3": NF3_SCALES, "nvfp4": NVFP4_SCALES, "mxfp4": MXFP4_SCALES[:140]}[name],
    )
    smallest = np.where((weights == 0).all(axis=1), 0, errors.argmin(axis=0))
    assert ((errors == errors.min(axis=0)).sum(axis=0) > 1).sum() > 5, "there are ties"
    found = quantize(name, weights.astype(np.float32), levels=DYADIC).scales[:, 0]
    assert (found == smallest).all()


magnitudes = st.sampled_from([1e-45, 1e-38, 1e-30, 1e-10, 2.0**-12, 2.0**-9, 1e-3, 0.02, 1.0, 17.0, 31.0])


@st.composite
def matrices(draw: st.DrawFn, group: int) -> F32:
    """Rows of groups: noise, few values, one-hot, zeros, -0, exact grid points, outliers, in any mixture."""
    n, groups = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    parts = []
    for _ in range(n * groups):
        size = draw(magnitudes)
        kind = draw(st.sampled_from(["noise", "tails", "few", "one", "zero", "minus zero", "grid", "outlier", "same"]))
        values = {
            "noise": lambda: rng.standard_normal(group),
            "tails": lambda: rng.standard_t(1.5, group).clip(-50, 50),
            "few": lambda: rng.choice([-1, -0.5, 0, 0.25, 1], group),
            "one": lambda: np.where(np.arange(group) == rng.integers(group), rng.choice([-1, 1]), 0),
            "zero": lambda: np.zeros(group),
            "minus zero": lambda: np.full(group, -0.0),
            "grid": lambda: rng.choice(np.array(NF3_LEVELS), group),
            "outlier": lambda: np.where(np.arange(group) == 3, 1000, rng.standard_normal(group)),
            "same": lambda: np.full(group, rng.choice([-1.0, 1.0])),
        }[kind]()
        parts.append(values * size)
    return np.stack(parts).reshape(n, groups * group).astype(np.float32)


@st.composite
def code_books(draw: st.DrawFn) -> tuple[float, ...]:
    """Any eight ascending numbers: lopsided, one-sided, with a level zero, close together."""
    size = draw(st.sampled_from([0.25, 1.0, 6.0]))
    numbers = draw(st.lists(st.integers(-1000, 1000), min_size=8, max_size=8, unique=True))
    return tuple(float(np.float32(size * number / 1000)) for number in sorted(numbers))


@settings(max_examples=150, deadline=None)
@given(weights=matrices(32))
def test_nf3_of_anything(weights: F32) -> None:
    require_least(quantize("nf3", weights), weights)


@settings(max_examples=150, deadline=None)
@given(weights=matrices(32), levels=code_books())
def test_nf3_of_any_code_book(weights: F32, levels: tuple[float, ...]) -> None:
    require_least(quantize("nf3", weights, levels=levels), weights)


@settings(max_examples=150, deadline=None)
@given(weights=matrices(16), exponent=st.integers(-20, 10), data=st.data())
def test_nvfp4_of_anything(weights: F32, exponent: int, data: st.DataObject) -> None:
    own = nvfp4_second_scale(float(np.abs(weights).max()))
    second = data.draw(st.sampled_from([own, math.ldexp(1.0, exponent), 0.0003, own * 3]))
    require_least(quantize("nvfp4", weights, second=float(np.float32(second))), weights)


@settings(max_examples=150, deadline=None)
@given(weights=matrices(32), exponent=st.integers(-100, 100))
def test_mxfp4_of_anything(weights: F32, exponent: int) -> None:
    moved = np.ldexp(weights, exponent).astype(np.float32)
    require_least(quantize("mxfp4", moved), moved)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), name=st.sampled_from(NAMES), exponent=st.integers(-60, 60))
def test_weighted_of_anything(data: st.DataObject, name: Name, exponent: int) -> None:
    weights = data.draw(matrices(GROUP[name]))
    shape = weights.shape[1]
    importance = data.draw(
        hnp.arrays(np.float32, shape, elements=st.sampled_from([0.0, 0.001, 0.5, 1.0, 30.0]), fill=st.just(1.0))
    )
    importance = np.ldexp(importance, exponent).astype(np.float32)
    found = quantize(name, weights, "weighted", importance, second_of(name, weights))
    require_least(found, weights, importance)


@pytest.mark.parametrize("levels", [NF3_LEVELS, LOPSIDED, WITH_ZERO])
@pytest.mark.parametrize("weight", [-0.002, 1.0, 1e-30, 30.0])
def test_zeros_that_matter_stay_zero_beside_a_weight_that_does_not(levels: tuple[float, ...], weight: float) -> None:
    """NF3 has no zero but that of a zero scale; a group's only weight may lack importance."""
    weights, importance = np.zeros((2, 64), np.float32), np.ones(64, np.float32)
    weights[0, 47], importance[47] = weight, 0
    found = quantize("nf3", weights, "weighted", importance, levels=levels)
    assert not found.errors(weights, importance).any()
    if 0.0 not in levels:
        assert not found.scales.any()
    importance[32:] = 0  # nothing matters: as if all did
    plain = quantize("nf3", weights, "mse", levels=levels)
    again = quantize("nf3", weights, "weighted", importance, levels=levels)
    assert np.array_equal(again.scales, plain.scales) and np.array_equal(again.codes, plain.codes)
