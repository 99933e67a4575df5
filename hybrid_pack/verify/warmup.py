"""Compiles the unpack kernels before experts are compared, so that first use is seen and not mistaken for slowness."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from hybrid_pack.layouts import unpack_kernels
from hybrid_pack.layouts.nf3_2p1 import Nf32p1
from hybrid_pack.layouts.packed_fp4 import PackedFp4

KERNELS = (unpack_kernels.unpack_nf3_2p1, unpack_kernels.unpack_fp4)


def _compiled() -> int:
    """How many kernels numba has compiled in this process, those from its cache aside."""
    return sum(sum(kernel.stats.cache_misses.values()) for kernel in KERNELS)


def compile_kernels() -> Iterator[str]:
    """Compile, or load from numba's cache, the kernels that decode; yields a line if any was compiled."""
    began, before = time.monotonic(), _compiled()
    n = k = 128
    Nf32p1(128).unpack(np.zeros(k // 16 * (n // 2) * 3, np.uint32), n, k)
    PackedFp4().unpack(np.zeros(k // 16 * (n // 64) * 128, np.uint32), n, k)
    if _compiled() > before:
        cached = all(kernel.stats.cache_path for kernel in KERNELS)
        later = "first use; cached for the next" if cached else "no folder to cache them in can be written"
        yield f"compiled the unpack kernels in {time.monotonic() - began:.1f} s ({later})"
