"""b12x's own packers and reference decoders make of our bytes the weights we mean."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from hybrid_pack.quantize import nvfp4_second_scale
from tests.golden import oracle
from tests.quantize.ours import F32, F64, gaussian, quantize, real_weights
from tests.reference import packed
from tests.reference.floats import E4M3
from tests.reference.source import NF3_LEVELS, codes_of

SOURCES = {
    "gaussian": lambda: gaussian(128, 256),
    "with zeros and subnormal scales": lambda: np.concatenate(
        [gaussian(64, 256, 0.001), np.zeros((32, 256), np.float32), gaussian(32, 256, 2.0**-11)]
    ),
    "real": lambda: real_weights()[:128],
}


@pytest.fixture(autouse=True)
def b12x() -> None:
    oracle.require()


def second_of(weights: F32) -> float:
    return nvfp4_second_scale(float(np.abs(weights).max()))


def fp4_by_b12x(codes: Any, scales: Any, group: int) -> F64:
    """The decoder of b12x's reference MoE product, block scales given as float32."""
    import torch

    reference = importlib.import_module("b12x.moe._shared.kernels.reference")
    n, width = codes.shape
    table = reference._make_fp4_lut(torch.device("cpu"))
    raw = reference._dequant_fp4(torch.from_numpy(codes), n, 2 * width, table)
    return reference._apply_block_scales(raw, torch.from_numpy(scales), n, 2 * width, block_size=group).double().numpy()


@pytest.mark.parametrize("source", SOURCES)
def test_nf3_by_the_packers(source: str) -> None:
    weights = SOURCES[source]()
    n, k = weights.shape
    found = quantize("nf3", weights)
    words = oracle.nf3_codes(codes_of("nf3", found.codes), 64)
    scales = oracle.nf3_scales(E4M3[found.scales], k)
    decoded = packed.dequantize("nf3", words, scales, oracle.module()._NF3_SCALE_GLOBAL, n, k, 64, found.levels)
    assert (decoded == found.weights()).all()


def test_the_levels_are_b12x_s() -> None:
    assert tuple(oracle.module()._NF3_CODEBOOK) == NF3_LEVELS


@pytest.mark.parametrize("source", SOURCES)
def test_nvfp4_by_the_reference(source: str) -> None:
    weights = SOURCES[source]()
    second = second_of(weights)
    found = quantize("nvfp4", weights, second=second)
    decoded = fp4_by_b12x(found.codes, E4M3[found.scales].astype(np.float32), 16) * second
    assert (decoded == found.weights()).all()


@pytest.mark.parametrize("source", SOURCES)
def test_nvfp4_by_the_packers(source: str) -> None:
    weights = SOURCES[source]()
    n, k = weights.shape
    second = second_of(weights)
    found = quantize("nvfp4", weights, second=second)
    words = oracle.fp4_codes(found.codes)
    scales, global_scale = oracle.nvfp4_scales(found.scales, second, k)
    decoded = packed.dequantize("nvfp4", words, scales, global_scale, n, k)
    kept = np.repeat(found.scales >= 8, 16, axis=1)  # b12x's scale byte holds no subnormal scale beside a large one
    assert np.allclose(decoded[kept], found.weights()[kept], rtol=1e-12, atol=0)
    assert kept.any()


@pytest.mark.parametrize("source", SOURCES)
def test_mxfp4_by_the_reference_and_the_packers(source: str) -> None:
    import torch

    weights = SOURCES[source]()
    n, k = weights.shape
    found = quantize("mxfp4", weights)
    reference = importlib.import_module("b12x.moe._shared.kernels.reference")
    scales = reference._e8m0_scales_to_float(torch.from_numpy(found.scales)).numpy()
    assert (fp4_by_b12x(found.codes, scales, 32) == found.weights()).all()
    packed_scales = oracle.mxfp4_scales(found.scales, k)
    assert (
        packed.dequantize("mxfp4", oracle.fp4_codes(found.codes), packed_scales, 1.0, n, k) == found.weights()
    ).all()
