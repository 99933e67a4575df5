"""Where experts are quantised: here, or on a GPU, with the same bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.errors import EnvironmentFailure
from hybrid_pack.formats.decode import F32
from hybrid_pack.formats.source import MXFP4, NF3, NVFP4, SourceFormat
from hybrid_pack.io.quantization import Quantization
from hybrid_pack.quantize import (
    QuantStats,
    count_small,
    lift_subnormal,
    quantize_mxfp4,
    quantize_nf3,
    quantize_nvfp4,
)

Buffer = NDArray[np.uint8]


def require_device(device: str) -> None:
    """Refuse a device that is not there, before anything is written.

    Raises:
        EnvironmentFailure: No GPU that torch can use.
    """
    if device == "cpu":
        return
    import torch

    if not torch.cuda.is_available():
        raise EnvironmentFailure(
            "torch sees no CUDA GPU",
            where=f"--device {device}",
            found=f"torch {torch.__version__}",
            hint="leave it out to quantise on the CPU, to the same bytes; hybrid-pack doctor says more",
        )


class Quantizer:
    """Quantises rows as the options say.

    Args:
        options: Search and device.
        levels: Of NF3.
    """

    def __init__(self, options: Quantization, levels: tuple[float, ...]) -> None:
        self._search, self._levels = options.search, levels
        self._on_gpu = options.device == "cuda"

    def rows(
        self, target: SourceFormat, weights: F32, second: float, channels: F32 | None, codes: Buffer, scales: Buffer
    ) -> QuantStats:
        """Quantise some rows.

        Args:
            target: Format to give them.
            weights: f32 [rows, K].
            second: NVFP4's second-level scale.
            channels: f32 [K], importance of each column, for ``weighted``.
            codes: u8 [rows, bytes] out.
            scales: u8 [rows, groups] out.
        """
        if self._on_gpu:
            stats = self._on_cuda(target, weights, second, channels, codes, scales)
        elif target is NF3:
            stats = quantize_nf3(weights, self._levels, self._search, channels, codes, scales)
        elif target is NVFP4:
            stats = quantize_nvfp4(weights, second, self._search, channels, codes, scales)
        else:
            stats = quantize_mxfp4(weights, self._search, channels, codes, scales)
        if target is NVFP4:
            lift_subnormal(weights, second, channels, codes, scales, stats)
        if target is not MXFP4:  # its scales reach down to where float32 ends
            count_small(weights, scales, stats)
        return stats

    def _on_cuda(
        self, target: SourceFormat, weights: F32, second: float, channels: F32 | None, codes: Buffer, scales: Buffer
    ) -> QuantStats:
        import torch

        from hybrid_pack.quantize.cuda import quantize_mxfp4_cuda, quantize_nf3_cuda, quantize_nvfp4_cuda

        there = torch.from_numpy(weights).to("cuda")
        importance = None if channels is None else torch.from_numpy(channels)
        if target is NF3:
            found = quantize_nf3_cuda(there, self._levels, self._search, importance)
        elif target is NVFP4:
            found = quantize_nvfp4_cuda(there, second, self._search, importance)
        else:
            found = quantize_mxfp4_cuda(there, self._search, importance)
        codes[:], scales[:] = found[0].cpu().numpy(), found[1].cpu().numpy()
        return found[2]
