"""Groups whose weights are too small for any scale: they are zero, at no cost that the error of a matrix would show."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.quantize.stats import QuantStats


def count_small(weights: NDArray[np.float32], scales: NDArray[np.uint8], stats: QuantStats) -> None:
    """Add groups with scale zero and weights that are not.

    Args:
        weights: f32 [N, K].
        scales: u8 [N, groups of a row], E4M3.
        stats: Of these rows, changed.
    """
    rows, groups = np.nonzero(scales == 0)
    if not rows.size:
        return
    signals = np.square(weights.reshape(*scales.shape, -1)[rows, groups], dtype=np.float64).sum(axis=1)
    lost = float(signals.sum())
    stats.small += int((signals > 0).sum())
    stats.small_signal += lost
    stats.small_error += lost
