"""The readable backend: experts dequantised one by one, products in float32, on any device torch has."""

from __future__ import annotations

import torch

from hybrid_pack.runnable import why_not_run
from hybrid_pack.runtime.activation import Relu2, parse_activation
from hybrid_pack.runtime.layer import LayerGeometry, PackedMoELayer


def why_not(layer: PackedMoELayer) -> str | None:
    """Why this backend cannot run a layer, or None if it can."""
    return why_not_geometry(layer.geometry)


def why_not_geometry(geometry: LayerGeometry) -> str | None:
    """Why experts cannot be run, or None if they can."""
    return why_not_run(geometry.activation, gated=geometry.gated, biases=geometry.expert_biases)


class TorchBackend:
    """Mixture of experts in float32: a reference to compare kernels with, not a fast path.

    Tokens are grouped by expert and each expert that has any is dequantised once a call, so memory beyond the packed
    weights is one expert in float32 and the grouped tokens. x and weights become float32, both products, the activation
    and the weighted sum over experts (in ascending order of their ids) are float32; only the result is rounded to BF16.
    """

    def __init__(self, layer: PackedMoELayer) -> None:
        activation = parse_activation(layer.geometry.activation)
        assert activation is not None, "why_not was asked before"
        self._layer = layer
        self._activation = activation

    def __call__(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """bf16 [M, H], this rank's sum; arguments as ``HybridMoE``'s."""
        y = self.accumulate(x, topk_weights, topk_ids)
        return y.to(torch.bfloat16) if out is None else out.copy_(y)

    def accumulate(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """The same before it is rounded: f32 [M, H]."""
        held = set(self._layer.expert_ids)
        with torch.no_grad():
            tokens, weights = x.to(torch.float32), topk_weights.reshape(-1)
            y = torch.zeros_like(tokens)
            ids, order = torch.sort(topk_ids.reshape(-1), stable=True)  # order: slot = token * k + choice
            experts, counts = torch.unique_consecutive(ids, return_counts=True)
            slots = torch.split(order, counts.tolist())
            for expert, chosen in zip(experts.tolist(), slots, strict=True):
                if expert not in held:  # -1, or on another expert-parallel rank
                    continue
                gate_up, down = self._layer.dequantize(expert)
                token = chosen // topk_ids.shape[1]
                inner = tokens[token] @ gate_up.T  # f32 [m, 2 I], or [m, I] without a gate
                if isinstance(self._activation, Relu2):
                    inner = self._activation(inner)
                else:
                    inner = self._activation(*inner.chunk(2, dim=1))
                out = inner @ down.T  # f32 [m, H]
                y.index_add_(0, token, out * weights[chosen, None])
        return y
