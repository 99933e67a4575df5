"""What is refused as a Hessian, and how damping is raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybrid_pack.errors import DataError
from hybrid_pack.quantize.gptq_hessian import prepare_hessian
from tests.quantize.gptq_inputs import autoregressive, hessian_of

K = 64


def good() -> torch.Tensor:
    return hessian_of(autoregressive(256, K, 0.8))


def put(value: float, *places: tuple[int, int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Write a value into some places."""

    def change(hessian: torch.Tensor) -> torch.Tensor:
        for row, column in places:
            hessian[row, column] = value
        return hessian

    return change


def with_eigenvalue(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A Hessian whose least eigenvalue is a part, mostly negative, of the mean of its diagonal (1)."""

    def change(hessian: torch.Tensor) -> torch.Tensor:
        vectors = torch.linalg.eigh(hessian).eigenvectors
        values = torch.full((K,), (K - value) / (K - 1), dtype=torch.float64)
        values[0] = value
        return (vectors * values) @ vectors.T

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h[0], r"layer 3: not a Hessian of these weights \(expected \[64, 64\], found \[64\]\)"),
        (lambda h: h[:, :32], r"layer 3: not a Hessian of these weights \(expected \[64, 64\], found \[64, 32\]\)"),
        (lambda h: h[:32, :32], r"layer 3: not a Hessian of these weights \(expected \[64, 64\], found \[32, 32\]\)"),
        (lambda h: h[None], r"layer 3: not a Hessian of these weights \(expected \[64, 64\], found \[1, 64, 64\]\)"),
        (lambda h: h.round().long(), r"layer 3: a Hessian that is not floating point \(found torch.int64\)"),
        (put(torch.nan, (3, 5), (5, 3)), r"layer 3: the Hessian is not finite at \[3, 5\] \(found nan\)"),
        (put(torch.inf, (9, 9)), r"layer 3: the Hessian is not finite at \[9, 9\] \(found inf\)"),
        (put(-1.0, (7, 7)), r"layer 3: the Hessian's diagonal is negative at channel 7 \(found -1\.0\)"),
        (put(9.0, (2, 4)), r"layer 3: the Hessian is not symmetric \(expected .*, found [01]\.\d+\)"),
        (put(0.0, (8, 8)), r"layer 3: channel 8 of the Hessian has products with others, but a zero on the diagonal"),
        (put(9.0, (2, 4), (4, 2)), r"layer 3: the Hessian is not positive definite, even with damping 1\.0"),
        (with_eigenvalue(-1.5), r"layer 3: the Hessian is not positive definite, even with damping 1\.0"),
    ],
)
def test_refusals(change: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    hessian = good()
    prepare_hessian(hessian, columns=K, where="layer 3")
    with pytest.raises(DataError, match=message):
        prepare_hessian(change(hessian), columns=K, where="layer 3")


@pytest.mark.parametrize("shape", [(), (0,), (0, 0), (48, 48), (32, 64)], ids=str)
def test_shapes_without_known_columns(shape: Any) -> None:
    with pytest.raises(DataError, match=r"Hessian: not a Hessian of these weights"):
        prepare_hessian(torch.ones(shape))


@pytest.mark.parametrize(
    ("least", "asked", "used"),
    [(0.5, 0.01, 0.01), (0.0, 0.01, 0.01), (-0.005, 0.01, 0.01), (-0.05, 0.01, 0.1), (-0.5, 0.01, 1.0),
     (-0.05, 0.03, 0.3), (-0.5, 0.03, 1.0), (-0.5, 1.0, 1.0), (-3e-7, 1e-9, 1e-6)],
)  # fmt: skip
def test_damping_is_raised_tenfold(least: float, asked: float, used: float) -> None:
    prepared = prepare_hessian(with_eigenvalue(least)(good()), damping=asked)
    assert prepared.damping == pytest.approx(used, rel=1e-12)


@pytest.mark.parametrize("order", ["activation", "natural"])
def test_the_factors_multiply_to_the_damped_hessian(order: str) -> None:
    hessian = hessian_of(autoregressive(256, K, 0.8, 1.0))
    prepared = prepare_hessian(hessian, order=order, damping=0.02)
    steps = torch.tensor(prepared.order)
    unit = prepared.feedback + torch.eye(K, dtype=torch.float64)
    product = (unit * prepared.remaining[steps]) @ unit.T
    mean = hessian.diagonal().mean()
    expected = (hessian / mean + 0.02 * torch.eye(K, dtype=torch.float64))[steps][:, steps]
    assert torch.allclose(product, expected, rtol=1e-12, atol=1e-12)
    assert not prepared.feedback.tril().any()
    diagonal = hessian.diagonal()[steps]
    assert order == "natural" or (diagonal.diff() <= 0).all()
    assert sorted(prepared.order) == list(range(K))
    assert order == "activation" or list(prepared.order) == list(range(K))


def test_channels_of_equal_size_keep_their_order() -> None:
    assert prepare_hessian(torch.eye(K)).order == tuple(range(K))


@pytest.mark.parametrize("order", ["activation", "natural"])
def test_channels_without_input_are_left_out(order: str) -> None:
    """As if they were not there, but for their weights, which keep a place in the order."""
    x = autoregressive(256, K, 0.8, 1.0)
    dead = [0, 1, 40]
    live = [channel for channel in range(K) if channel not in dead]
    x[:, dead] = 0
    hessian = hessian_of(x)
    prepared = prepare_hessian(hessian, order=order)
    assert prepared.dead == 3 and not prepared.importance[dead].any() and not prepared.remaining[dead].any()
    position = {column: step for step, column in enumerate(prepared.order)}
    places = torch.tensor([position[channel] for channel in dead])
    assert not prepared.feedback[places].any() and not prepared.feedback[:, places].any()
    assert order == "natural" or set(prepared.order[-3:]) == set(dead)
    part = hessian[live][:, live]
    mean = part.diagonal().mean()
    damped = part / mean + 0.01 * torch.eye(len(live), dtype=torch.float64)
    assert float(prepared.remaining[live].log().sum()) == pytest.approx(float(damped.logdet()), rel=1e-9)


def test_differences_of_rounding_are_made_symmetric() -> None:
    hessian = good().float()
    hessian[2, 4] *= 1 + 1e-5
    prepared = prepare_hessian(hessian)
    assert torch.equal(prepared.matrix, prepared.matrix.T)
