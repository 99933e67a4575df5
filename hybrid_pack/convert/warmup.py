"""Compiles the pack kernels before the work starts, so that first use is seen and not mistaken for slowness."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from hybrid_pack.formats.nf3 import DEFAULT_LEVELS
from hybrid_pack.layouts.nf3_2p1 import Nf32p1
from hybrid_pack.layouts.packed_fp4 import PackedFp4
from hybrid_pack.layouts.rows import Rows
from hybrid_pack.layouts.scales import BlockScales, count_scale_bytes, count_used_scale_bytes
from hybrid_pack.quantize import quantize_nf3

WORTH_SAYING_SECONDS = 1.0


def _kernels() -> list[Any]:
    from hybrid_pack.layouts import pack_kernels as k

    return [k.pack_nf3_2p1, k.pack_fp4, k.pack_scales, k.count_bytes, k.count_used_bytes]


def _compilations(kernel: Any) -> int:
    return sum(kernel.stats.cache_misses.values())


def compile_kernels(*, quantize: bool = False) -> Iterator[str]:
    """Compile, or load from numba's cache, every kernel a conversion uses; yields a line if compiling took long.

    Args:
        quantize: Those of the quantisers too.
    """
    began = time.monotonic()
    kernels = _kernels()
    before = [_compilations(kernel) for kernel in kernels]
    n = k = 128
    Nf32p1(128).pack_rows(
        Rows.of(np.zeros((n, k // 8 * 3), np.uint8)), n, k, 0, np.empty(k // 16 * (n // 2) * 3, np.uint32)
    )
    PackedFp4().pack_rows(
        Rows.of(np.zeros((n, k // 2), np.uint8)), n, k, 0, np.empty(k // 16 * (n // 64) * 128, np.uint32)
    )
    scales = Rows.of(np.zeros((n, k // 32), np.uint8))
    BlockScales(32).pack_rows(scales, n, k, 0, np.zeros(256, np.uint8), np.empty(n * k // 32, np.uint8))
    count_scale_bytes(scales)
    count_used_scale_bytes(Rows.of(np.zeros((n, k // 2), np.uint8)), scales)
    if quantize:
        codes, groups = np.empty((1, 12), np.uint8), np.empty((1, 1), np.uint8)
        quantize_nf3(np.zeros((1, 32), np.float32), DEFAULT_LEVELS, "mse", None, codes, groups)
    seconds = time.monotonic() - began
    compiled = [kernel for kernel, count in zip(kernels, before, strict=True) if _compilations(kernel) > count]
    if compiled and seconds > WORTH_SAYING_SECONDS:
        cached = all(kernel.stats.cache_path for kernel in compiled)
        later = "first use; cached for the next" if cached else "no folder to cache them in can be written"
        yield f"compiled the pack kernels in {seconds:.1f} s ({later})"
