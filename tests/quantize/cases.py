"""Matrices on which the GPU's bytes are held against the CPU's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybrid_pack.quantize import SEARCHES, Search, nvfp4_second_scale
from tests.quantize.ours import F32, NAMES, Name, gaussian, some_importance, student
from tests.reference.source import NF3_LEVELS, dequantize

LOPSIDED = (-0.9, -0.5, -0.25, -0.05, 0.1, 0.3, 0.6, 1.0)
UNIMPORTANT = 40
WITH_ZERO = (-1.0, -0.5, -0.2, 0.0, 0.2, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Case:
    name: Name
    search: Search
    weights: F32
    importance: F32 | None = None
    second: float = 1.0
    levels: tuple[float, ...] = NF3_LEVELS


def edges(k: int) -> F32:
    """Zeros, -0, one-hot, ties, outliers, subnormal floats and huge ones, groups of one number, grid points.

    The last row's only weight is at a column without importance.
    """
    rng = np.random.default_rng(k)
    rows = np.zeros((15, k), np.float32)
    rows[1] = -0.0
    rows[2, :: k // 4] = [0.5, -1, 2, 31.5]
    rows[3] = rng.choice([0.25, -0.25, 0.75, 1.25, -2.5, 5, -6, 0], k)
    rows[4] = gaussian(1, k)[0]
    rows[4, 5] = 1e6
    rows[5] = gaussian(1, k)[0] * 1e-40
    rows[6] = gaussian(1, k)[0] * 1e36
    rows[7] = -0.37
    rows[8] = rng.choice(np.array(NF3_LEVELS), k) * 0.3
    rows[9] = gaussian(1, k, 2.0**-10)[0]
    rows[10] = gaussian(1, k, 12.0)[0]
    rows[11] = gaussian(1, k, 1e-4)[0]
    rows[12] = rng.standard_cauchy(k)
    rows[13] = np.ldexp(1.0, rng.integers(-130, 3, k))
    rows[14, UNIMPORTANT] = -1
    return rows


def decoded_nvfp4(n: int, k: int) -> F32:
    """What an NVFP4 checkpoint holds."""
    rng = np.random.default_rng((n, k, 4))
    codes, scales = rng.integers(0, 256, (n, k // 2), np.uint8), rng.integers(0x30, 0x7F, (n, k // 16), np.uint8)
    return dequantize("nvfp4", codes, scales, 2.0**-13 * 1.37).astype(np.float32)


def sources(n: int, k: int) -> dict[str, F32]:
    return {
        "gaussian": gaussian(n, k),
        "student": student(n, k, 0.003),
        "edges": edges(k),
        "decoded": decoded_nvfp4(n, k),
    }


def cases(n: int, k: int, *, stacked: bool = False) -> dict[str, Case]:
    """Every format and search on every source, or on all of them in one matrix, and NF3 with other code books."""
    importance = some_importance(k)
    importance[:32] = importance[UNIMPORTANT] = 0
    found = {}
    matrices = sources(n, k)
    for source, weights in {"all": np.concatenate([*matrices.values()])}.items() if stacked else matrices.items():
        for search in SEARCHES:
            given = importance if search == "weighted" else None
            for name in NAMES:
                second = nvfp4_second_scale(float(np.abs(weights[:n]).max())) if name == "nvfp4" else 1.0
                found[f"{name}-{search}-{source}"] = Case(name, search, weights, given, second)
            for book, levels in (("lopsided", LOPSIDED), ("zero", WITH_ZERO)):
                found[f"nf3 {book}-{search}-{source}"] = Case("nf3", search, weights, given, 1.0, levels)
    return found
