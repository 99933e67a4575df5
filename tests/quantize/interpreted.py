"""Runs the GPU quantisers on a CPU in Triton's interpreter, in a process of its own.

The interpreter is chosen when Triton is imported:
    TRITON_INTERPRET=1 python -m tests.quantize.interpreted OUT.npz
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from hybrid_pack.quantize import QuantStats, cuda
from hybrid_pack.quantize.cuda import quantize_mxfp4_cuda, quantize_nf3_cuda, quantize_nvfp4_cuda
from tests.quantize.cases import Case, cases

SHAPE = (5, 96)


def quantize_on(case: Case, device: str, dtype: Any = torch.float32) -> tuple[torch.Tensor, torch.Tensor, QuantStats]:
    """A case through the Triton kernel."""
    weights = torch.from_numpy(case.weights).to(device, dtype)
    importance = None if case.importance is None else torch.from_numpy(case.importance)
    if case.name == "nf3":
        return quantize_nf3_cuda(weights, case.levels, case.search, importance)
    if case.name == "nvfp4":
        return quantize_nvfp4_cuda(weights, case.second, case.search, importance)
    return quantize_mxfp4_cuda(weights, case.search, importance)


def main(out: str) -> None:
    found = {}
    cuda.BLOCK = (
        64  # the interpreter takes as long for one group as for many; still several programs, the last not full
    )
    for key, case in cases(*SHAPE, stacked=True).items():
        codes, scales, stats = quantize_on(case, "cpu")
        found[f"{key}/codes"], found[f"{key}/scales"] = codes.numpy(), scales.numpy()
        found[f"{key}/sums"] = np.array([stats.signal, stats.error, stats.weighted_error])
        found[f"{key}/counts"] = np.array([stats.groups, stats.zero, stats.subnormal, stats.saturated])
    np.savez(out, **found)


if __name__ == "__main__":
    main(sys.argv[1])
