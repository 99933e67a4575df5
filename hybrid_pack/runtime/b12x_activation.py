"""How b12x's launches are told an activation.

Names and meanings are those of ``b12x/moe/_shared/kernels/activations.py`` and of ``_run_activation``, ``_relu2_elem2``
in ``w4a16/kernel.py`` (1.1.0). ``swigluoai_uninterleave`` is ``g * sigmoid(alpha * g) * (u + beta)`` of gate rows that
come before the up rows, g and u clamped first; gpt-oss and MiniMax-M3 have a beta of 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_pack.runtime.activation import GatedSilu, Relu2, parse_activation


@dataclass(frozen=True)
class KernelActivation:
    """An activation by b12x's arguments; those that are None are left to b12x.

    Attributes:
        name: ``activation``.
        limit: ``swiglu_limit``.
        alpha: ``swiglu_alpha``.
        beta: ``swiglu_beta``.
    """

    name: str
    limit: float | None = None
    alpha: float | None = None
    beta: float | None = None

    @property
    def arguments(self) -> dict[str, str | float | None]:
        """By the names of b12x's arguments."""
        return {
            "activation": self.name,
            "swiglu_limit": self.limit,
            "swiglu_alpha": self.alpha,
            "swiglu_beta": self.beta,
        }


def kernel_activation(text: str) -> KernelActivation | None:
    """b12x's arguments for the activation a manifest names, or None where b12x has no such activation."""
    found = parse_activation(text)
    if found is None:
        return None
    if isinstance(found, Relu2):
        return KernelActivation("relu2")
    if isinstance(found, GatedSilu):
        return KernelActivation("silu", found.limit)
    return KernelActivation("swigluoai_uninterleave", found.limit, found.alpha, 1.0)
