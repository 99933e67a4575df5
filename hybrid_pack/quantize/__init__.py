"""From float32 weights to 3-bit and 4-bit rows, each group with the best scale there is. Pure functions, no I/O."""

from __future__ import annotations

from hybrid_pack.quantize.cast import mxfp4_to_nvfp4
from hybrid_pack.quantize.lift import lift_subnormal
from hybrid_pack.quantize.rows import (
    SEARCHES,
    Search,
    quantize_mxfp4,
    quantize_nf3,
    quantize_nvfp4,
)
from hybrid_pack.quantize.second import best_second_scale, nvfp4_second_scale
from hybrid_pack.quantize.small import count_small
from hybrid_pack.quantize.stats import QuantStats

__all__ = [
    "SEARCHES",
    "QuantStats",
    "Search",
    "best_second_scale",
    "count_small",
    "lift_subnormal",
    "mxfp4_to_nvfp4",
    "nvfp4_second_scale",
    "quantize_mxfp4",
    "quantize_nf3",
    "quantize_nvfp4",
]
