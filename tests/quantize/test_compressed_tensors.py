"""Never worse than compressed-tensors' quantiser, and the same meaning of bytes."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from hybrid_pack.quantize import nvfp4_second_scale
from tests.quantize.ours import F32, Name, gaussian, laplace, quantize, real_tensor, real_weights, student
from tests.reference.quantize import in_groups
from tests.reference.source import GROUP, dequantize

if sys.version_info < (3, 11):
    pytest.skip("compressed-tensors 0.20.1 needs Python 3.11", allow_module_level=True)
from tests.quantize import theirs

BF16 = 2.0**-6
"""Relative rounding of three BF16 operations."""

SOURCES = {
    "gaussian": lambda: gaussian(64, 512),
    "small": lambda: gaussian(64, 512, 0.002),
    "student": lambda: student(64, 512),
    "laplace": lambda: laplace(64, 512),
    "uniform": lambda: np.random.default_rng(3).uniform(-1, 1, (64, 512)).astype(np.float32),
    "real up": real_weights,
    "real down": lambda: real_tensor("encoder.layer.3.output.dense.weight"),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_every_group_is_at_least_as_good(name: Name, source: str) -> None:
    weights: F32 = SOURCES[source]()
    group = GROUP[name]
    other = theirs.quantize(weights, group)
    second = float(np.float32(np.abs(weights).max() / 2688)) if name == "nvfp4" else 1.0  # theirs: ours is larger
    found = quantize(name, weights, second=second)
    # What their bytes mean with our second-level scale: theirs is 2688/amax and back, and they decode NVFP4 in BF16.
    decoded = dequantize(name, other.codes, other.scales, second)
    assert second == pytest.approx(other.second, rel=1e-6)
    assert np.allclose(decoded, other.weights, rtol=BF16 if name == "nvfp4" else 0, atol=0)
    ours = found.errors(weights)
    their_errors = in_groups((weights - decoded) ** 2, group).sum(1)
    assert (ours <= their_errors * (1 + 1e-5) + 1e-30).all()
    assert ours.sum() < their_errors.sum()
    if name == "nvfp4":
        own = quantize(name, weights, second=nvfp4_second_scale(float(np.abs(weights).max())))
        assert own.errors(weights).sum() < their_errors.sum()


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_they_decode_our_bytes_as_we_mean_them(name: Name) -> None:
    weights = student(32, 256)
    second = nvfp4_second_scale(float(np.abs(weights).max())) if name == "nvfp4" else 1.0
    found = quantize(name, weights, second=second)
    decoded = theirs.decode(found.codes, found.scales, second, GROUP[name])
    assert np.allclose(decoded, found.weights(), rtol=BF16 if name == "nvfp4" else 0, atol=0)
