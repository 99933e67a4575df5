"""What is said before experts are quantised, against what quantising normally distributed weights comes to."""

from __future__ import annotations

from collections import Counter
from typing import Literal, cast

import numpy as np
import pytest

from hybrid_pack.formats.nf3 import DEFAULT_LEVELS
from hybrid_pack.io.calibration import Statistics
from hybrid_pack.io.quantization import (
    EXPECTED_DB,
    FROM_COARSE_DB,
    ORIGINAL_DB,
    Quantization,
    _against_source,
    _expectation,
)
from hybrid_pack.quantize import Search, nvfp4_second_scale, quantize_mxfp4, quantize_nf3, quantize_nvfp4
from tests.reference.floats import E2M1, E4M3
from tests.reference.source import dequantize

ROUNDED = 0.3
"""dB that a forecast may be off."""

POSITIVE = np.sort(E4M3[:0x7F])
LEVELS = np.unique(np.abs(E2M1))


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The nearest number of an ascending table, with the values' signs."""
    return np.sign(values) * table[np.searchsorted((table[1:] + table[:-1]) / 2, np.abs(values))]


def largest(weights: np.ndarray, group: int) -> np.ndarray:
    """Of each group, repeated over its columns."""
    return np.repeat(np.abs(weights.reshape(len(weights), -1, group)).max(axis=2), group, axis=1)


def as_nvfp4(weights: np.ndarray) -> np.ndarray:
    """As ModelOpt makes them: the largest weight over 6 * 448, then the largest of a block over 6."""
    second = np.abs(weights).max() / (6 * 448)
    scale = nearest(largest(weights, 16) / 6 / second, POSITIVE) * second
    return nearest(weights / scale, LEVELS) * scale


def as_mxfp4(weights: np.ndarray) -> np.ndarray:
    """As OCP Microscaling Formats v1.0, section 6.3, has it."""
    scale = 2.0 ** (np.floor(np.log2(largest(weights, 32))) - 2)
    return nearest(weights / scale, LEVELS) * scale


def as_mxfp8(weights: np.ndarray) -> np.ndarray:
    """Likewise."""
    scale = 2.0 ** (np.floor(np.log2(largest(weights, 32))) - 8)
    return nearest(weights / scale, POSITIVE) * scale


MADE = {"nvfp4": as_nvfp4, "mxfp4": as_mxfp4, "mxfp8": as_mxfp8, "bf16": lambda weights: weights}


def quantised(weights: np.ndarray, target: str, search: Search) -> np.ndarray:
    rows, columns = weights.shape
    exact = weights.astype(np.float32)
    name: Literal["nf3", "nvfp4", "mxfp4"]
    second = 1.0
    if target == "nf3":
        name, codes, scales = "nf3", np.empty((rows, columns // 8 * 3), np.uint8), np.empty((rows, columns // 32), "u1")
        quantize_nf3(exact, DEFAULT_LEVELS, search, None, codes, scales)
    elif target == "nvfp4":
        name, codes, scales = "nvfp4", np.empty((rows, columns // 2), np.uint8), np.empty((rows, columns // 16), "u1")
        second = nvfp4_second_scale(float(np.abs(exact).max()))
        quantize_nvfp4(exact, second, search, None, codes, scales)
    else:
        name, codes, scales = "mxfp4", np.empty((rows, columns // 2), np.uint8), np.empty((rows, columns // 32), "u1")
        quantize_mxfp4(exact, search, None, codes, scales)
    return dequantize(name, codes, scales, second)


def sqnr(weights: np.ndarray, found: np.ndarray) -> float:
    return float(10 * np.log10((weights**2).sum() / ((weights - found) ** 2).sum()))


def measured(tier: str, source: str, search: Search, seed: int) -> tuple[float, float]:
    """Means over sizes of a weight within an octave: against the source, against what that was made from."""
    random = np.random.default_rng(seed)
    found = []
    for step in range(8):
        original = random.standard_normal((128, 2048)) * 0.02 * 2 ** (step / 8)
        stored = MADE[source](original)
        made = quantised(stored, tier, search)
        found.append((sqnr(stored, made), sqnr(original, made)))
    means = np.mean(found, axis=0)
    return float(means[0]), float(means[1])


@pytest.mark.parametrize("key", EXPECTED_DB, ids="-".join)
def test_forecasts_from_wide_weights(key: tuple[str, str]) -> None:
    tier, search = key
    assert measured(tier, "bf16", cast(Search, search), 1)[0] == pytest.approx(EXPECTED_DB[key], abs=ROUNDED)


@pytest.mark.parametrize("key", sorted(ORIGINAL_DB.keys() | FROM_COARSE_DB.keys()), ids="-".join)
def test_forecasts_from_coarse_weights(key: tuple[str, str, str]) -> None:
    tier, source, search = key
    against_source, against_original = measured(tier, source, cast(Search, search), 2)
    expected = _against_source(tier, [source], search)
    assert expected is None or against_source == pytest.approx(expected, abs=ROUNDED)
    assert key not in ORIGINAL_DB or against_original == pytest.approx(ORIGINAL_DB[key], abs=ROUNDED)


def said(tier: str, four_bit: str, kinds: list[str], search: str, gptq: bool = False) -> str:
    hessians = cast(Statistics, object()) if gptq else None  # that there are some is all that matters
    options = Quantization(cast(Search, search), None, hessians, None, None, "cpu")
    return _expectation(tier, four_bit, Counter(dict.fromkeys(kinds, 2)), options).partition("(")[2]


ORIGIN = "against the weights the {} was made from: convert the original checkpoint if you have it"


@pytest.mark.parametrize(
    ("tier", "four_bit", "kinds", "search", "gptq", "words"),
    [
        ("nf3", "nvfp4", ["NVFP4"], "mse", False, "search mse): about 15.8 dB, but about 14.4 " + ORIGIN),
        ("nf3", "nvfp4", ["NVFP4"], "absmax", False, "search absmax): about 14.9 dB, but about 13.8 " + ORIGIN),
        ("nf3", "nvfp4", ["NVFP4"], "weighted", False, "search weighted), with more error " + ORIGIN),
        ("nf3", "nvfp4", ["NVFP4"], "mse", True, "GPTQ), with more error " + ORIGIN),
        ("nf3", "mxfp4", ["MXFP4"], "mse", True, "GPTQ), with more error " + ORIGIN),
        ("nf3", "mxfp4", ["MXFP4"], "absmax", False, "search absmax): about 13.4 dB " + ORIGIN),
        ("nf3", "nvfp4", ["BF16+NVFP4"], "mse", False, "search mse): about 15.8 dB, with more error " + ORIGIN),
        ("nf3", "", ["BF16+NF3"], "mse", False, "search mse)"),
        ("mxfp4", "", ["BF16+MXFP4"], "mse", False, "search mse)"),
        ("mxfp4", "nvfp4", ["MXFP4+NVFP4"], "mse", False, "search mse), with more error " + ORIGIN),
        ("mxfp4", "", ["MXFP8"], "mse", False, "search mse): about 18.6 dB"),
        ("mxfp4", "", ["BF16", "MXFP8"], "mse", False, "search mse)"),
        ("nvfp4", "", ["BF16", "MXFP8"], "weighted", False, "search weighted)"),
    ],
)
def test_no_figure_is_said_that_is_not_known(
    tier: str, four_bit: str, kinds: list[str], search: str, gptq: bool, words: str
) -> None:
    assert said(tier, four_bit, kinds, search, gptq) == words.format(four_bit.upper())
