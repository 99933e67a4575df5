"""Quantising on the GPU: the bytes of the CPU, for every format, search and kind of weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybrid_pack.quantize.cuda import quantize_nf3_cuda
from tests.quantize.cases import cases
from tests.quantize.interpreted import quantize_on
from tests.quantize.ours import gaussian, quantize
from tests.reference.source import NF3_LEVELS

pytestmark = pytest.mark.gpu

CASES = {**cases(257, 416), **{f"{key} wide": case for key, case in cases(64, 4096).items() if "gaussian" in key}}


@pytest.mark.parametrize("key", CASES)
def test_same_bytes(key: str) -> None:
    case = CASES[key]
    codes, scales, stats = quantize_on(case, "cuda")
    expected = quantize(case.name, case.weights, case.search, case.importance, case.second, case.levels)
    assert np.array_equal(scales.cpu().numpy(), expected.scales)
    assert np.array_equal(codes.cpu().numpy(), expected.codes)
    counts = expected.stats.groups, expected.stats.zero, expected.stats.subnormal, expected.stats.saturated
    assert (stats.groups, stats.zero, stats.subnormal, stats.saturated) == counts
    sums = [expected.stats.signal, expected.stats.error, expected.stats.weighted_error]
    assert np.allclose([stats.signal, stats.error, stats.weighted_error], sums, rtol=1e-10, atol=0)


@pytest.mark.parametrize("key", [key for key in cases(8, 96) if "gaussian" in key])
def test_bfloat16_is_its_float32(key: str) -> None:
    case = cases(8, 96)[key]
    rounded = torch.from_numpy(case.weights).to(torch.bfloat16)
    codes, scales, _ = quantize_on(case, "cuda", torch.bfloat16)
    weights = rounded.float().numpy()
    expected = quantize(case.name, weights, case.search, case.importance, case.second, case.levels)
    assert np.array_equal(scales.cpu().numpy(), expected.scales)
    assert np.array_equal(codes.cpu().numpy(), expected.codes)


def test_many_weights() -> None:
    """A hundred million weights: every rounding that one machine might do and the other might not would show."""
    generator = torch.Generator("cuda").manual_seed(7)
    weights = torch.randn(16384, 6144, generator=generator, device="cuda") * 0.02
    codes, scales, _ = quantize_nf3_cuda(weights, NF3_LEVELS, "mse", None)
    expected = quantize("nf3", weights.cpu().numpy())
    assert np.array_equal(scales.cpu().numpy(), expected.scales)
    assert np.array_equal(codes.cpu().numpy(), expected.codes)


def test_twice_is_the_same() -> None:
    weights = torch.from_numpy(gaussian(2048, 2048)).cuda()
    one, other = (quantize_nf3_cuda(weights, NF3_LEVELS, "mse", None) for _ in range(2))
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1]) and one[2] == other[2]


def test_weights_that_are_not_finite() -> None:
    weights = torch.from_numpy(gaussian(70, 96)).cuda()
    weights[69, 33] = float("nan")
    with pytest.raises(ValueError, match="row 69, column 33 is nan"):
        quantize_nf3_cuda(weights, NF3_LEVELS, "mse", None)


def test_more_than_two_to_the_31_weights() -> None:
    rows = 2**31 // 4096 + 64
    weights = torch.zeros(rows, 4096, dtype=torch.bfloat16, device="cuda")
    tail = torch.from_numpy(gaussian(32, 4096)).to("cuda", torch.bfloat16)
    weights[-32:] = tail
    codes, scales, _ = quantize_nf3_cuda(weights, NF3_LEVELS, "mse", None)
    expected = quantize("nf3", tail.float().cpu().numpy())
    assert np.array_equal(scales[-32:].cpu().numpy(), expected.scales)
    assert np.array_equal(codes[-32:].cpu().numpy(), expected.codes)
    assert not scales[:-32].any()
