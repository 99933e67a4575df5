"""The data-free score, on measures that are made up; what reads real weights is not part of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hybrid_pack.errors import DataError
from hybrid_pack.tiers.weights import METRIC, MatrixError, saliency_from_weights, score


def same(signal: float, tail: float, kept: float = 0.0) -> tuple[MatrixError, ...]:
    return (MatrixError(signal, tail, kept),) * 3


def test_score_by_hand() -> None:
    matrices = (MatrixError(4.0, 0.4, 0.0), MatrixError(9.0, 0.9, 0.45), MatrixError(16.0, 0.0, 0.0))
    assert score(matrices) == pytest.approx(2 * 3 * 4 * math.sqrt(0.1 + 0.05))


def test_scales_with_every_matrix() -> None:
    """Twice a matrix is twice the output and twice its error."""
    assert score(same(4.0, 0.4)) == pytest.approx(8 * score(same(1.0, 0.1)))


@pytest.mark.parametrize("kept", [0.1, 0.2])
def test_nothing_to_gain(kept: float) -> None:
    assert score(same(1.0, 0.1, kept)) == 0


def test_a_matrix_of_zeros() -> None:
    assert score((MatrixError(0.0, 0.0, 0.0), *same(1.0, 0.1)[:2])) == 0


def test_estimates_the_error_of_the_output() -> None:
    """Experts of other norms and other errors come in the order of the error their outputs really have."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((512, 64))

    def silu(v: np.ndarray) -> np.ndarray:
        return v / (1 + np.exp(-v))

    scores, errors = [], []
    for norm, noise in ((1.0, 0.02), (1.0, 0.1), (1.6, 0.06), (0.6, 0.05), (2.0, 0.1)):
        weights = [rng.standard_normal(shape) * norm / 8 for shape in ((96, 64), (96, 64), (64, 96))]
        wrong = [w + rng.standard_normal(w.shape) * noise * np.std(w) for w in weights]
        exact, other = ((silu(x @ g.T) * (x @ u.T)) @ d.T for g, u, d in (weights, wrong))
        errors.append(float(np.linalg.norm(exact - other)))
        pairs = zip(weights, wrong, strict=True)
        scores.append(score([MatrixError(float((w**2).sum()), float(((w - v) ** 2).sum()), 0.0) for w, v in pairs]))
    assert np.argsort(scores).tolist() == np.argsort(errors).tolist()


def test_all_experts_in_order() -> None:
    asked: list[tuple[int, int]] = []

    def measure(layer: int, expert: int) -> tuple[MatrixError, ...]:
        asked.append((layer, expert))
        return same(1.0, 0.01 * (layer + expert))

    found = saliency_from_weights((3, 5), 3, measure, "here")
    assert asked == [(layer, expert) for layer in (3, 5) for expert in range(3)]
    assert (found.metric, found.where) == (METRIC, "here")
    assert "no data" in METRIC and "no routing" in METRIC
    assert found.layers == {i: tuple(score(same(1.0, 0.01 * (i + e))) for e in range(3)) for i in (3, 5)}


@pytest.mark.parametrize(
    "matrices",
    [
        same(float("nan"), 0.1),
        same(float("inf"), 0.1),
        same(1.0, float("nan")),
        same(1.0, float("inf")),
        same(1.0, 0.1, float("nan")),
        same(-1.0, 0.1),
        same(1e299, 1e299),
    ],
    ids=["nan", "inf", "nan_tail", "inf_tail", "nan_kept", "negative", "overflow"],
)
def test_weights_that_cannot_be_measured(matrices: tuple[MatrixError, ...]) -> None:
    with pytest.raises(DataError, match=r"here: layer 3 expert 1: its weights cannot be measured"):
        saliency_from_weights((3,), 2, lambda _, expert: matrices if expert else same(1.0, 0.1), "here")
