"""The activations of experts, by the names a manifest has for them.

==================================  ==========================================================  ====================
name                                of gate g and up u                                          models
==================================  ==========================================================  ====================
``silu``                            ``silu(g) * u``                                             most
``silu(limit=L)``                   the same, g first at most L, u within -L..L                 DeepSeek-V4
``swigluoai(alpha=A, limit=L)``     ``g * sigmoid(A * g) * (u + 1)``, g and u as above           gpt-oss, MiniMax-M3
``relu2``                           ``max(u, 0)^2``; there is no gate                           Nemotron-3
==================================  ==========================================================  ====================
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

SUPPORTED = "silu, silu(limit=L), swigluoai(alpha=A, limit=L) or relu2"
_SILU = re.compile(r"silu(?:\(limit=([0-9.eE+-]+)\))?")
_SWIGLUOAI = re.compile(r"swigluoai\(alpha=([0-9.eE+-]+), limit=([0-9.eE+-]+)\)")


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


@dataclass(frozen=True)
class SwigluOai:
    """``gate * sigmoid(alpha * gate) * (up + 1)``, both clamped first.

    Attributes:
        alpha: Steepness.
        limit: Gate is at most this, up within -limit..limit.
    """

    alpha: float
    limit: float

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Apply it to f32 [M, I] each."""
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


@dataclass(frozen=True)
class Relu2:
    """``relu(up)^2``, of experts without a gate."""

    def __call__(self, up: torch.Tensor) -> torch.Tensor:
        """Apply it to f32 [M, I]."""
        return torch.nn.functional.relu(up).square()


Activation = GatedSilu | SwigluOai | Relu2


def _positive(*texts: str) -> tuple[float, ...] | None:
    """Finite numbers above zero, or None."""
    try:
        found = tuple(map(float, texts))
    except ValueError:
        return None
    return found if all(math.isfinite(value) and value > 0 for value in found) else None


def parse_activation(text: str) -> Activation | None:
    """The activation a manifest names, or None where it is not one of those supported."""
    if text == "relu2":
        return Relu2()
    if (match := _SWIGLUOAI.fullmatch(text)) is not None:
        numbers = _positive(*match.groups())
        return None if numbers is None else SwigluOai(*numbers)
    match = _SILU.fullmatch(text)
    if match is None or match[1] is None:
        return None if match is None else GatedSilu()
    numbers = _positive(match[1])
    return None if numbers is None else GatedSilu(*numbers)
