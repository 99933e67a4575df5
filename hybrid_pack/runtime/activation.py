"""The arithmetic of the activations that ``hybrid_pack.runnable`` knows by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybrid_pack.runnable import parse_formula


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


def parse_activation(text: str) -> Activation | None:
    """The activation a manifest names, or None where it is not one of those supported."""
    formula = parse_formula(text)
    if formula is None:
        return None
    if formula.kind == "relu2":
        return Relu2()
    if formula.alpha is not None and formula.limit is not None:
        return SwigluOai(formula.alpha, formula.limit)
    return GatedSilu(formula.limit)
