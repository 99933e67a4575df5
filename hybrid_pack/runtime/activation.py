"""The gated activations: ``silu`` and DeepSeek-V4's clamped ``silu(limit=...)``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

SUPPORTED = "silu or silu(limit=<number above 0>)"
_SILU = re.compile(r"silu(?:\(limit=([0-9.eE+-]+)\))?")


@dataclass(frozen=True)
class GatedSilu:
    """``silu(gate) * up``.

    Attributes:
        limit: Where given, gate is first clamped to at most the limit and up to -limit..limit.
    """

    limit: float | None = None

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Apply it to f32 [M, I] each."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return torch.nn.functional.silu(gate) * up


def parse_activation(text: str) -> GatedSilu | None:
    """The activation a manifest names, or None where it is not one of those supported."""
    match = _SILU.fullmatch(text)
    if match is None:
        return None
    if match[1] is None:
        return GatedSilu()
    try:
        limit = float(match[1])
    except ValueError:
        return None
    return GatedSilu(limit) if math.isfinite(limit) and limit > 0 else None
