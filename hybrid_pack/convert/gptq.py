"""The tail by GPTQ: Hessians factored once for all experts that share them, results as stored rows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.formats import e4m3
from hybrid_pack.formats.decode import F32
from hybrid_pack.formats.nf3 import GROUP
from hybrid_pack.io.calibration import Statistics
from hybrid_pack.io.shards import Located
from hybrid_pack.quantize import QuantStats, count_small

if TYPE_CHECKING:
    from hybrid_pack.quantize.gptq_hessian import PreparedHessian

Buffer = NDArray[np.uint8]

SMALLEST_NORMAL = 2.0**-6
HELD = 2
"""Factored Hessians kept: gate and up's, and down's. They take 16 bytes for each pair of channels."""


def pack_codes(codes: Buffer, out: Buffer) -> None:
    """NF3 codes u8 [N, K] as stored rows u8 [N, K/8*3]: code i of eight at bits 3i of a little-endian 24-bit word."""
    eight = codes.reshape(len(codes), -1, 8).astype(np.uint32)
    word = (eight << (3 * np.arange(8, dtype=np.uint32))).sum(axis=2, dtype=np.uint32)
    out[:] = np.stack([word & 0xFF, word >> 8 & 0xFF, word >> 16], axis=2).reshape(len(codes), -1)


@dataclass
class HessianErrors:
    """Errors on Hessians, ``trace((W - Q) H (W - Q)^T)``; adds up.

    Attributes:
        gptq: Of what was packed.
        rtn: Of rounding to nearest.
    """

    gptq: float = 0.0
    rtn: float = 0.0

    def add(self, other: HessianErrors) -> None:
        """Add another's."""
        self.gptq += other.gptq
        self.rtn += other.rtn


class HessianAtHand:
    """A factored Hessian."""

    def __init__(self, prepared: PreparedHessian) -> None:
        self._prepared = prepared

    def quantize(
        self, weights: F32, levels: Sequence[float], where: str, codes: Buffer, scales: Buffer
    ) -> tuple[QuantStats, HessianErrors]:
        """Quantise a whole matrix.

        Args:
            weights: f32 [N, K].
            levels: Eight, ascending.
            where: For errors.
            codes: u8 [N, K/8*3] out.
            scales: u8 [N, K/32] out.

        Raises:
            DataError: Not a Hessian of these weights.
        """
        import torch

        from hybrid_pack.quantize.gptq import quantize_prepared

        result = quantize_prepared(torch.from_numpy(weights), self._prepared, levels, where=where)
        pack_codes(result.codes.cpu().numpy(), codes)
        scales[:] = result.scales.cpu().numpy()
        values = np.nan_to_num(e4m3.VALUES)[scales]
        stats = QuantStats(groups=scales.size, saturated=result.saturated)
        stats.subnormal = int(((values > 0) & (values < SMALLEST_NORMAL)).sum())
        count_small(weights, scales, stats)
        book = np.asarray(levels)
        for row, value, code in zip(weights, values, result.codes.cpu().numpy(), strict=True):
            exact = row.astype(np.float64)
            stats.signal += float(exact @ exact)
            found = book[code] * np.repeat(value, GROUP)
            stats.zero += int((~found.reshape(-1, GROUP).any(axis=1)).sum())
            error = exact - found
            stats.error += float(error @ error)
        return stats, HessianErrors(result.error, result.rtn_error)


class HessianCache:
    """Hessians by layer, expert and matrix, factored when they are first asked for. Safe for many threads.

    Args:
        statistics: The Hessians.
        device: Where to factor them and quantise.
    """

    def __init__(self, statistics: Statistics, device: str) -> None:
        self._statistics, self._device = statistics, device
        self._held: dict[Located, HessianAtHand] = {}
        self._lock = threading.Lock()

    def of(self, layer: int, expert: int, matrix: str) -> HessianAtHand:
        """The Hessian of an expert's ``gate_up`` or ``down``.

        Raises:
            DataError: It is none.
        """
        import torch

        from hybrid_pack.quantize.gptq_hessian import prepare_hessian

        located = self._statistics.located(layer, expert, matrix)
        with self._lock:
            held = self._held.pop(located, None)
            if held is None:
                values = torch.from_numpy(self._statistics.read(layer, expert, matrix))
                held = HessianAtHand(prepare_hessian(values, device=self._device, where=str(located)))
                while len(self._held) >= HELD:
                    self._held.pop(next(iter(self._held)))
            self._held[located] = held
            return held
