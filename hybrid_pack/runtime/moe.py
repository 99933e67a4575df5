"""``HybridMoE``: run one rank's experts of one layer."""

from __future__ import annotations

import torch

from hybrid_pack.errors import UsageError
from hybrid_pack.runtime.backends import Choice, build, choose, consider
from hybrid_pack.runtime.layer import PackedMoELayer


class HybridMoE:
    """The routed experts of one layer and rank, both tiers.

    Attributes:
        layer: The weights.
        top_k: Experts a token visits.
        max_tokens: Most tokens of one call.
        backend: Name of the backend in use.
        choices: What every candidate said: ``Accepted`` or ``Rejected`` with its reason, best candidate first.
    """

    layer: PackedMoELayer
    top_k: int
    max_tokens: int
    backend: str
    choices: list[Choice]

    def __init__(self, layer: PackedMoELayer, top_k: int = 8, max_tokens: int = 8192, backend: str = "auto") -> None:
        """Choose a backend for a layer.

        Args:
            layer: From ``Pack.load_layer``.
            top_k: Experts a token visits, at least 1; the model's own is ``layer.geometry.top_k``.
            max_tokens: Most tokens of one call, at least 1.
            backend: ``auto``, or one of ``torch``, ``b12x`` and ``cuda``. This version has ``torch`` only.

        Raises:
            UsageError: No such backend, or a size below 1.
            EnvironmentFailure: The backend asked for cannot run the layer, or none can.
        """
        for name, value in (("top_k", top_k), ("max_tokens", max_tokens)):
            if type(value) is not int or value < 1:
                raise UsageError(f"{name} must be a whole number of at least 1", where="HybridMoE", found=repr(value))
        self.layer = layer
        self.top_k = top_k
        self.max_tokens = max_tokens
        self.choices = consider(layer)
        self.backend = choose(backend, self.choices, f"layer {layer.layer} rank {layer.rank}")
        self._run = build(self.backend, layer)
        self._device = layer.device

    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """``y[i] = sum over j of topk_weights[i, j] * expert(topk_ids[i, j])(x[i])``.

        An expert is ``down @ activation(gate @ x, up @ x)``. With tensor parallelism y is this rank's partial sum,
        which the caller reduces. Experts on other expert-parallel ranks contribute nothing here. A repeated id counts
        each time.

        Args:
            x: bf16 [M, H], M = 0..max_tokens, contiguous, on the layer's device; so are the others.
            topk_weights: f32 [M, top_k], any values.
            topk_ids: i32 [M, top_k], global expert ids 0..num_experts - 1, or -1 for an inactive place. Their range is
                checked on the CPU only, since elsewhere it would wait for the device; there others contribute nothing.

        Returns:
            bf16 [M, H].

        Raises:
            UsageError: An argument of another type, shape, device or range.
        """
        tokens = x.shape[0] if isinstance(x, torch.Tensor) and x.dim() == 2 else 0
        if tokens > self.max_tokens:
            raise UsageError(
                "more tokens than max_tokens", where="x", expected=f"at most {self.max_tokens}", found=tokens
            )
        self._check("x", x, torch.bfloat16, (tokens, self.layer.geometry.hidden_size))
        self._check("topk_weights", topk_weights, torch.float32, (tokens, self.top_k))
        self._check("topk_ids", topk_ids, torch.int32, (tokens, self.top_k))
        if tokens == 0:
            return torch.empty_like(x)
        if topk_ids.device.type == "cpu":
            lowest, highest = (int(value) for value in topk_ids.aminmax())
            last = self.layer.geometry.num_experts - 1
            if lowest < -1 or highest > last:
                found = lowest if lowest < -1 else highest
                raise UsageError(
                    "not an expert id", where="topk_ids", expected=f"0..{last}, or -1 for none", found=found
                )
        return self._run(x, topk_weights, topk_ids)

    def _check(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> None:
        """Checks that never wait for a device."""
        if not isinstance(tensor, torch.Tensor):
            raise UsageError("not a torch tensor", where=name, found=type(tensor).__name__)
        if tensor.dtype != dtype:
            raise UsageError("wrong dtype", where=name, expected=dtype, found=tensor.dtype)
        if tuple(tensor.shape) != shape:
            raise UsageError("wrong shape", where=name, expected=list(shape), found=list(tensor.shape))
        if tensor.device != self._device:
            raise UsageError("wrong device", where=name, expected=self._device, found=tensor.device)
        if not tensor.is_contiguous():
            raise UsageError(
                "not contiguous", where=name, expected=f"strides [{shape[1]}, 1]", found=list(tensor.stride())
            )
