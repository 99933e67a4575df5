"""What the experts of a pack may compute for a runtime of this version to run them, told from a manifest's words alone.

==================================  ==========================================================  ====================
activation                          of gate g and up u                                          models
==================================  ==========================================================  ====================
``silu``                            ``silu(g) * u``                                             most
``silu(limit=L)``                   the same, g first at most L, u within -L..L                 DeepSeek-V4
``swigluoai(alpha=A, limit=L)``     ``g * sigmoid(A * g) * (u + 1)``, g and u as above          gpt-oss, MiniMax-M3
``relu2``                           ``max(u, 0)^2``; there is no gate                           Nemotron-3
==================================  ==========================================================  ====================

The runtime asks here before it takes a layer, and so do those who speak of running one before there is a layer: the
notes of a conversion and the model card. ``runtime`` has the arithmetic.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hybrid_pack.formats.nf3 import DEFAULT_LEVELS

SUPPORTED = "silu, silu(limit=L), swigluoai(alpha=A, limit=L) or relu2"
BIASES = "its experts have biases (base tensors), which no backend of this version adds"
_NAME = re.compile(
    r"(?P<relu2>relu2)|(?P<silu>silu)(?:\(limit=(?P<at_most>[0-9.eE+-]+)\))?"
    r"|(?P<swigluoai>swigluoai)\(alpha=(?P<alpha>[0-9.eE+-]+), limit=(?P<limit>[0-9.eE+-]+)\)"
)

UNSERVED = {
    "deepseek_v4": "its attention computes with codes and scale of wo_a itself, as only vLLM's own method leaves "
    "them, and shared experts are cut by that method's blocks",
}
"""Why vLLM does not serve packs of a family, by ``model_type``: it runs them with nothing but a config of their own."""


@dataclass(frozen=True)
class Formula:
    """An activation that is run.

    Attributes:
        kind: Its name without parameters.
        limit: Of gate and up, above zero; None where nothing is clamped.
        alpha: Steepness of ``swigluoai``, above zero; None of others.
    """

    kind: Literal["silu", "swigluoai", "relu2"]
    limit: float | None = None
    alpha: float | None = None


def _positive(text: str) -> float | None:
    """A finite number above zero, or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def parse_formula(activation: str) -> Formula | None:
    """The activation a manifest names, or None where it is not one of those supported."""
    match = _NAME.fullmatch(activation)
    if match is None:
        return None
    if match["relu2"]:
        return Formula("relu2")
    if match["silu"]:
        if match["at_most"] is None:
            return Formula("silu")
        at_most = _positive(match["at_most"])
        return None if at_most is None else Formula("silu", at_most)
    limit, alpha = _positive(match["limit"]), _positive(match["alpha"])
    return None if limit is None or alpha is None else Formula("swigluoai", limit, alpha)


def gate_problem(activation: str, *, gated: bool) -> str | None:
    """What is wrong where experts have a gate and a known activation has none, or the other way around; else None."""
    formula = parse_formula(activation)
    if formula is None or (formula.kind == "relu2") != gated:
        return None
    return f"the activation {activation!r} is of experts with{'out' if gated else ''} a gate"


def why_not_run(activation: str, *, gated: bool, biases: bool) -> str | None:
    """Why no backend runs experts, whatever the machine; None where the backend ``torch`` does.

    Args:
        activation: As the manifest names it.
        gated: Whether experts have a gate.
        biases: Whether they have biases.
    """
    if parse_formula(activation) is None:
        return f"the activation {activation!r} is not supported, only {SUPPORTED}"
    return gate_problem(activation, gated=gated) or (BIASES if biases else None)


def levels_problem(levels: Sequence[float]) -> str | None:
    """Why b12x does not run a tail of these NF3 levels; None where it does."""
    if tuple(levels) == DEFAULT_LEVELS:
        return None
    return f"the NF3 levels {tuple(levels)} are not those built into the kernel, {DEFAULT_LEVELS}"
