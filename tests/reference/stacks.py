"""Where one expert's weights lie in tensors that hold all experts of a layer, said with plain indexing."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Layout = Literal["halves", "halves_turned", "alternate", "alternate_turned"]
"""``halves``: [E, 2I, K], gate's rows then up's. ``alternate``: gate in even rows, up in odd ones. ``turned``:
[E, K, 2I] with gate and up along the last dimension."""


def untwist(whole: NDArray[Any], expert: int, layout: Layout) -> NDArray[Any]:
    """One expert's [rows, columns], rows first whatever the layout; gpt-oss's [rows, K/32, 16] are made [rows, K/2]."""
    part = np.array(whole[expert])
    if part.ndim == 3:
        part = part.reshape(part.shape[0], part.shape[1] * part.shape[2])
    return part.T.copy() if layout.endswith("turned") and part.ndim == 2 else part


def gate_rows(rows: int, layout: Layout) -> list[int]:
    """Rows of gate among ``rows`` rows of gate and up."""
    return list(range(0, rows, 2)) if layout.startswith("alternate") else list(range(rows // 2))


def up_rows(rows: int, layout: Layout) -> list[int]:
    """Rows of up."""
    return list(range(1, rows, 2)) if layout.startswith("alternate") else list(range(rows // 2, rows))
