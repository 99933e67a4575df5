"""Which backend runs a layer, and why not the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hybrid_pack.errors import EnvironmentFailure, HybridPackError, UsageError
from hybrid_pack.runtime import b12x_backend, torch_backend
from hybrid_pack.runtime.layer import LayerGeometry, PackedMoELayer
from hybrid_pack.runtime.moe_runtime import MoERuntime
from hybrid_pack.sharding import Tiles

PREFERENCE = ("b12x", "cuda", "torch")
"""Candidates, best first."""

NOT_YET = "not implemented in this version of hybrid-pack"
AUTO = "auto"


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

    def __call__(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """bf16 [M, H] from x bf16 [M, H], weights f32 [M, k] and ids i32 [M, k]; M is at least 1.

        Written to out, and out returned, where one is given.
        """


def consider(layer: PackedMoELayer) -> list[Choice]:
    """What each candidate says to a layer, best candidate first."""
    return _choices(b12x_backend.why_not(layer), torch_backend.why_not(layer))


def foresee(geometry: LayerGeometry, tiles: Tiles, device: torch.device, *, kept: bool, tail: bool) -> list[Choice]:
    """What each candidate would say, before anything is loaded; b12x may reject the layer later, after a self-test.

    Args:
        geometry: Of the rank's experts.
        tiles: Tiles they are laid out for.
        device: Where they shall be.
        kept: Whether there are kept experts.
        tail: Whether there are tail experts.
    """
    b12x = b12x_backend.why_not_geometry(geometry, tiles, device, kept=kept, tail=tail)
    return _choices(b12x, torch_backend.why_not_geometry(geometry))


def _choices(b12x: str | None, torch: str | None) -> list[Choice]:
    reasons = {"b12x": b12x, "cuda": NOT_YET, "torch": torch}
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
    names = [AUTO, *(choice.backend for choice in choices)]
    if backend not in names:
        raise UsageError("no such backend", where=where, expected=" or ".join(names), found=repr(backend))
    wanted = [choice for choice in choices if backend in (AUTO, choice.backend)]
    for choice in wanted:
        if isinstance(choice, Accepted):
            return choice.backend
    reasons = "; ".join(f"{c.backend}: {c.reason}" for c in wanted if isinstance(c, Rejected))
    problem = "no backend can run this layer" if backend == AUTO else f"the backend {backend!r} cannot run this layer"
    raise EnvironmentFailure(f"{problem}: {reasons}", where=where)


def build(name: str, layer: PackedMoELayer, top_k: int, max_tokens: int, runtime: MoERuntime | None) -> Backend:
    """An accepted backend, ready to run.

    Raises:
        UsageError: The layer or the runtime is not what it says it is.
        EnvironmentFailure: Device memory is not enough.
        Exception: Whatever else a compiler or driver says; the backend cannot run the layer after all.
    """
    if name == "torch":
        return torch_backend.TorchBackend(layer)
    assert name == "b12x", "cuda is never accepted"
    try:
        return b12x_backend.B12xBackend(layer, top_k, max_tokens, runtime)
    except torch.cuda.OutOfMemoryError as error:
        raise EnvironmentFailure(
            "device memory is not enough for the scratch of b12x", where=f"layer {layer.layer} rank {layer.rank}",
            found=str(error), hint="a smaller max_tokens needs less; layers can share one MoERuntime",
        ) from error  # fmt: skip


def select(
    backend: str, layer: PackedMoELayer, top_k: int, max_tokens: int, runtime: MoERuntime | None
) -> tuple[str, Backend, list[Choice]]:
    """Choose a backend and build it: (name, backend, what every candidate said).

    With ``auto``, a backend that was accepted and then cannot be built is rejected with what it said, and the next one
    is tried.

    Raises:
        UsageError: No such backend, or the layer or the runtime is not what it says it is.
        EnvironmentFailure: The backend asked for, or every backend, cannot run the layer.
    """
    where = f"layer {layer.layer} rank {layer.rank}"
    choices = consider(layer)
    while True:
        name = choose(backend, choices, where)
        try:
            return name, build(name, layer, top_k, max_tokens, runtime), choices
        except HybridPackError:
            raise
        except Exception as error:  # CUTLASS, Triton and the driver have no error type in common
            reason = f"it failed while it was built: {type(error).__name__}: {error}"
            choices = [Rejected(name, reason) if choice.backend == name else choice for choice in choices]
