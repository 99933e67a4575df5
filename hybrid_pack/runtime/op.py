"""``torch.ops.hybrid_pack.moe``: a layer as one opaque operator, for ``torch.compile`` and ``torch.export``.

An operator takes tensors and numbers, so layers are named by a number. The layer's scratch is not among the arguments:
its contents mean nothing between calls, and calls on one stream follow each other.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

import torch

from hybrid_pack.errors import UsageError

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A layer's own method: x, topk_weights, topk_ids, out."""

_LAYERS: weakref.WeakValueDictionary[int, object] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def register(layer: object) -> int:
    """A number for a layer whose ``run`` is a ``Run``; valid while the layer lives."""
    number = next(_NUMBERS)
    _LAYERS[number] = layer
    return number


def _run_of(number: int) -> Run:
    layer = _LAYERS.get(number)
    if layer is None:
        raise UsageError("this layer is gone", where="hybrid_pack::moe", found=f"number {number}")
    run: Run = layer.run  # type: ignore[attr-defined]
    return run


@torch.library.custom_op(
    "hybrid_pack::moe",
    mutates_args=(),
    schema="(Tensor x, Tensor topk_weights, Tensor topk_ids, SymInt layer) -> Tensor",
)
def moe(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer: int) -> torch.Tensor:
    """bf16 [M, H] in new memory, which belongs to the graph where one is captured."""
    return _run_of(layer)(x, topk_weights, topk_ids, torch.empty_like(x, requires_grad=False))


@moe.register_fake
def _(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer: int) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op(
    "hybrid_pack::moe_out",
    mutates_args=("out",),
    schema="(Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor(a!) out, SymInt layer) -> ()",
)
def moe_out(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, out: torch.Tensor, layer: int) -> None:
    """The same, written to out."""
    _run_of(layer)(x, topk_weights, topk_ids, out)


@moe_out.register_fake
def _(x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, out: torch.Tensor, layer: int) -> None:
    return None
