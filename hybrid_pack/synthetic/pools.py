"""Endless bytes of each kind, cut from a few megabytes of noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.formats import e4m3

SIGMA = 0.02
"""Standard deviation of the weights."""
AMAX = 0.1
"""Largest weight that second-level scales are made for."""

_SPREAD = 0.35
_FP4_RMS = 2.93
_NF3_RMS = 0.614
_FP8_SIGMA = 64.0
_SPARE_BYTES = 1 << 22
_POOL_BYTES = 3 << 22
_SMALL_ELEMS = 1 << 16
_STRIDE = 0x9E3779B1  # odd, so that offsets modulo a power of two repeat only after all of them


@dataclass(frozen=True)
class Item:
    """A tensor to write; ``data`` is repeated where it is shorter than the tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[Any]


def _e4m3_table(typical: float) -> NDArray[np.uint8]:
    """u8 [256]: E4M3 bytes of log-normal scales with this root mean square; two in 256 are zero, no NaN."""
    return np.array(
        [0, 0, *(np.abs(e4m3.VALUES[:0x7F] - value).argmin() for value in _log_normal(typical))], dtype=np.uint8
    )


def _log_normal(typical: float) -> list[float]:
    """254 quantiles of log-normal scales with this root mean square."""
    center = typical * math.exp(-(_SPREAD**2))
    return [center * math.exp(_SPREAD * NormalDist().inv_cdf((i + 0.5) / 254)) for i in range(254)]


def _bf16(values: NDArray[np.float64]) -> NDArray[np.uint16]:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _tables() -> dict[str, NDArray[Any]]:
    """For each kind of data, what a uniform random byte becomes."""
    normal = np.array([NormalDist().inv_cdf((i + 0.5) / 256) for i in range(256)])
    octave = round(math.log2(SIGMA / _FP4_RMS)) - 1 + 127
    finite = np.nan_to_num(e4m3.VALUES, nan=1e9)
    return {
        "nvfp4": _e4m3_table(SIGMA / _FP4_RMS * 2688 / AMAX),
        "nf3": _e4m3_table(SIGMA / _NF3_RMS),
        "nf3_x16": _e4m3_table(16 * SIGMA / _NF3_RMS),
        "mxfp4": np.clip(octave + np.rint(normal), octave - 4, octave + 2).astype(np.uint8),
        "BF16": _bf16(normal * SIGMA),
        "F16": (normal * SIGMA).astype(np.float16),
        "F32": (normal * SIGMA).astype(np.float32),
        "F8_E4M3": np.array([byte & 0xF7 if byte & 0x7F == 0x7F else byte for byte in range(256)], dtype=np.uint8),
        "mxfp8": np.clip(octave - 5 + np.rint(normal), 1, 254).astype(np.uint8),
        "fp8": np.array([np.abs(finite - value).argmin() for value in normal * _FP8_SIGMA], dtype=np.uint8),
        "fp8_scale": (SIGMA / _FP8_SIGMA * np.exp(_SPREAD * normal)).astype(np.float32),
        "fp8_exponent": np.rint(127 + math.log2(SIGMA / _FP8_SIGMA) + normal / 2).astype(np.uint8),
    }  # fmt: skip


class Pools:
    """Slices of a pool of each kind, at another offset each time."""

    def __init__(self, seed: int) -> None:
        self._noise = np.frombuffer(np.random.default_rng([seed, 0]).bytes(_POOL_BYTES), dtype=np.uint8)
        self._tables = _tables()
        self._pools: dict[str, NDArray[Any]] = {"codes": self._noise}
        self._taken = 0

    def take(self, kind: str, elements: int) -> NDArray[Any]:
        """Elements of one kind (bytes for packed codes), or as many as there are: the writer repeats them."""
        self._taken += 1
        offset = self._taken * _STRIDE % _SPARE_BYTES
        if elements <= _SMALL_ELEMS:
            noise = self._noise[offset : offset + elements]
            return noise if kind == "codes" else self._tables[kind][noise]
        if kind not in self._pools:
            self._pools[kind] = self._tables[kind][self._noise]
        return self._pools[kind][offset : offset + elements]
