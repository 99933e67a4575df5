"""GPTQ on CUDA: as good as on the CPU, never worse than rounding to nearest, at GLM-5.2's size."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybrid_pack.formats.nf3 import DEFAULT_LEVELS
from hybrid_pack.quantize.gptq import GptqResult, gptq_nf3, quantize_prepared
from hybrid_pack.quantize.gptq_grid import decode, make_grid, round_to, search_scales
from hybrid_pack.quantize.gptq_hessian import prepare_hessian
from tests.gpu.support import note
from tests.quantize.gptq_inputs import autoregressive, hessian_of, low_rank, made_weights

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def errors_of(result: GptqResult, weights: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """f64 [N] on the CPU, from the bytes alone."""
    grid = make_grid(DEFAULT_LEVELS, torch.device("cpu"))
    difference = weights.double() - decode(result.codes, result.scales, grid)
    return ((difference @ hessian.double()) * difference).sum(1)


def test_at_full_size_cuda_is_as_good_as_the_cpu() -> None:
    weights = made_weights(1024, 6144)
    hessian = hessian_of(autoregressive(4096, 6144, 0.9, 1.0)).float()  # fewer tokens than channels: singular
    torch.cuda.reset_peak_memory_stats()
    found = gptq_nf3(weights, hessian, DEFAULT_LEVELS, device=CUDA)
    peak = torch.cuda.max_memory_allocated()
    expected = gptq_nf3(weights, hessian, DEFAULT_LEVELS)
    note("GPTQ 1024 x 6144", ratio=found.error / found.rtn_error, cpu=expected.error / expected.rtn_error, peak=peak)
    assert found.codes.device.type == found.scales.device.type == "cpu", "where the weights came from"
    assert found.error == pytest.approx(expected.error, rel=1e-3)
    assert found.rtn_error == pytest.approx(expected.rtn_error, rel=1e-6)
    assert found.error <= found.rtn_error
    rows = errors_of(found, weights, hessian)
    assert found.error == pytest.approx(float(rows.sum()), rel=1e-6)
    grid = make_grid(DEFAULT_LEVELS, torch.device("cpu"))
    for importance in (None, hessian.diagonal().double()):
        scales = search_scales(weights, importance, grid)
        nearest = GptqResult(
            round_to(weights, scales, grid), scales, 0.0, 0.0, "rtn", gptq_rows=0, saturated=0, damping=0.0
        )
        assert (rows <= errors_of(nearest, weights, hessian) * (1 + 1e-9)).all()


@pytest.mark.parametrize("order", ["activation", "natural"])
def test_in_float64_cuda_gives_the_codes_of_the_cpu(order: str) -> None:
    weights, hessian = made_weights(96, 544), hessian_of(autoregressive(1024, 544, 0.9, 1.0))
    weights[3, 64:96] = 0
    expected = gptq_nf3(weights, hessian, DEFAULT_LEVELS, order=order)
    found = gptq_nf3(weights.to(CUDA), hessian, DEFAULT_LEVELS, order=order, device=CUDA, dtype=torch.float64)
    assert found.codes.is_cuda and found.scales.is_cuda
    assert torch.equal(found.scales.cpu(), expected.scales)
    assert (found.codes.cpu() != expected.codes).double().mean() < 1e-3, "a near tie here and there"
    assert found.error == pytest.approx(expected.error, rel=1e-6)


@pytest.mark.parametrize("factor", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("rank", [0, 5, 400])
def test_never_worse(rank: int, factor: float) -> None:
    x = low_rank(300, 256, rank, 0.0, rank)
    x[:, ::7] = 0
    weights, hessian = made_weights(40, 256, rank), hessian_of(x, factor).float()
    weights[0] = 0
    result = gptq_nf3(weights, hessian, DEFAULT_LEVELS, device=CUDA)
    assert result.error <= result.rtn_error
    assert not result.scales[0].any()
    total = float(((weights.double() @ hessian.double()) * weights.double()).sum())
    assert result.error == pytest.approx(float(errors_of(result, weights, hessian).sum()), rel=1e-6, abs=1e-9 * total)


def test_equal_inputs_give_equal_bytes() -> None:
    weights = made_weights(256, 1024).to(CUDA)
    prepared = prepare_hessian(hessian_of(autoregressive(2048, 1024, 0.9, 1.0)), device=CUDA)
    first, second = (quantize_prepared(weights, prepared, DEFAULT_LEVELS) for _ in range(2))
    assert torch.equal(first.codes, second.codes) and torch.equal(first.scales, second.scales)
    assert first.error == second.error


def test_the_search_on_cuda_finds_the_same_scales() -> None:
    weights = made_weights(64, 1024, sigma=0.05)
    importance = torch.from_numpy(np.random.default_rng(0).exponential(size=1024))
    for weighting in (None, importance):
        expected = search_scales(weights, weighting, make_grid(DEFAULT_LEVELS, torch.device("cpu")))
        on_cuda = None if weighting is None else weighting.to(CUDA)
        assert torch.equal(search_scales(weights.to(CUDA), on_cuda, make_grid(DEFAULT_LEVELS, CUDA)).cpu(), expected)
