"""Which backend runs a layer, and why not the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hybrid_pack.errors import EnvironmentFailure, UsageError
from hybrid_pack.runtime import torch_backend
from hybrid_pack.runtime.layer import PackedMoELayer

PREFERENCE = ("b12x", "cuda", "torch")
"""Candidates, best first."""

_NOT_YET = "not implemented in this version of hybrid-pack"


@dataclass(frozen=True)
class Accepted:
    """A backend that can run the layer."""

    backend: str


@dataclass(frozen=True)
class Rejected:
    """A backend that cannot.

    Attributes:
        backend: Its name.
        reason: Why, in words.
    """

    backend: str
    reason: str


Choice = Accepted | Rejected


class Backend(Protocol):
    """What runs a layer: its arguments have been checked by ``HybridMoE``."""

    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """bf16 [M, H] from x bf16 [M, H], weights f32 [M, k] and ids i32 [M, k]; M is at least 1."""


def consider(layer: PackedMoELayer) -> list[Choice]:
    """What each candidate says to a layer, best candidate first."""
    reasons = {"b12x": _NOT_YET, "cuda": _NOT_YET, "torch": torch_backend.why_not(layer)}
    return [Accepted(name) if (why := reasons[name]) is None else Rejected(name, why) for name in PREFERENCE]


def choose(backend: str, choices: Sequence[Choice], where: str) -> str:
    """The name of the backend to use.

    Args:
        backend: ``auto`` for the first accepted one, or a name.
        choices: From ``consider``.
        where: Named in errors.

    Raises:
        UsageError: No backend has that name.
        EnvironmentFailure: The backend asked for, or every backend, is rejected; the message gives the reasons.
    """
    names = ["auto", *(choice.backend for choice in choices)]
    if backend not in names:
        raise UsageError("no such backend", where=where, expected=" or ".join(names), found=repr(backend))
    wanted = [choice for choice in choices if backend in ("auto", choice.backend)]
    for choice in wanted:
        if isinstance(choice, Accepted):
            return choice.backend
    reasons = "; ".join(f"{c.backend}: {c.reason}" for c in wanted if isinstance(c, Rejected))
    problem = "no backend can run this layer" if backend == "auto" else f"the backend {backend!r} cannot run this layer"
    raise EnvironmentFailure(f"{problem}: {reasons}", where=where)


def build(name: str, layer: PackedMoELayer) -> Backend:
    """An accepted backend, ready to run."""
    assert name == "torch", "the only backend of this version"
    return torch_backend.TorchBackend(layer)
