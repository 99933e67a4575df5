"""The mixture-of-experts product, token by token, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .floats import F64


def silu(x: F64) -> F64:
    """x * sigmoid(x), without overflow at either end."""
    return np.asarray(x * np.exp(-np.logaddexp(0.0, -x)), np.float64)


def swigluoai(gate: F64, up: F64, alpha: float, limit: float) -> F64:
    """gpt-oss: ``gate * sigmoid(alpha * gate) * (up + 1)``, both clamped first."""
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return np.asarray(gate * np.exp(-np.logaddexp(0.0, -alpha * gate)) * (up + 1), np.float64)


def expert_output(x: F64, gate_up: F64, down: F64) -> F64:
    """One expert: ``down @ (silu(gate @ x) * (up @ x))``.

    Args:
        x: f64 [H].
        gate_up: f64 [2 I, H], gate rows then up rows.
        down: f64 [H, I].

    Returns:
        f64 [H].
    """
    gate, up = np.split(gate_up @ x, 2)
    return np.asarray(down @ (silu(gate) * up), np.float64)


def moe(
    x: NDArray[Any],
    experts: Mapping[int, tuple[F64, F64]],
    topk_weights: NDArray[Any],
    topk_ids: NDArray[Any],
) -> F64:
    """``y = sum_k weight_k * expert_k(x)``.

    Args:
        x: [M, H], converted to f64.
        experts: Global expert id to (gate_up f64 [2 I, H], down f64 [H, I]).
        topk_weights: [M, k].
        topk_ids: int [M, k]; -1 is inactive, a repeated id counts each time, any other id must be in ``experts``.

    Returns:
        f64 [M, H].
    """
    tokens = np.asarray(x, np.float64)
    y = np.zeros_like(tokens)
    for token, ids in enumerate(topk_ids):
        for slot, expert in enumerate(ids):
            if expert != -1:
                y[token] += float(topk_weights[token, slot]) * expert_output(tokens[token], *experts[int(expert)])
    return y
