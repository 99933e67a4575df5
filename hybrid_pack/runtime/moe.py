"""``HybridMoE``: run one rank's experts of one layer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch

from hybrid_pack.errors import UsageError
from hybrid_pack.runtime import op
from hybrid_pack.runtime.backends import AUTO, Choice, Rejected, select
from hybrid_pack.runtime.layer import PackedMoELayer
from hybrid_pack.runtime.moe_runtime import MoERuntime


class HybridMoE:
    """The routed experts of one layer and rank, both tiers; for inference.

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

    def __init__(
        self,
        layer: PackedMoELayer,
        top_k: int = 8,
        max_tokens: int = 8192,
        backend: str = AUTO,
        runtime: MoERuntime | None = None,
    ) -> None:
        """Choose a backend for a layer; it plans, compiles and allocates here, and not in a call.

        Args:
            layer: From ``Pack.load_layer``.
            top_k: Experts a token visits, at least 1; the model's own is ``layer.geometry.top_k``.
            max_tokens: Most tokens of one call, at least 1.
            backend: ``auto``, or one of ``b12x``, ``torch`` and ``cuda``. This version has no ``cuda`` yet.
            runtime: Scratch and launches of b12x to use. By default all layers of a process that agree in geometry,
                ``top_k`` and ``max_tokens`` share one, which is what a model that runs its layers in turn wants.

        Raises:
            UsageError: No such backend, a size below 1, a layer whose tensors are not what its geometry says, or a
                runtime of other sizes.
            EnvironmentFailure: The backend asked for cannot run the layer, or none can.
        """
        for name, value in (("top_k", top_k), ("max_tokens", max_tokens)):
            if type(value) is not int or value < 1:
                raise UsageError(f"{name} must be a whole number of at least 1", where="HybridMoE", found=repr(value))
        self.layer = layer
        self.top_k = top_k
        self.max_tokens = max_tokens
        self.backend, self._run, self.choices = select(backend, layer, top_k, max_tokens, runtime)
        self._device = layer.device
        self._hidden = layer.geometry.hidden_size
        self._number = op.register(self)
        if backend == AUTO and self.backend == "torch" and self._device.type == "cuda":
            reasons = "; ".join(f"{c.backend}: {c.reason}" for c in self.choices if isinstance(c, Rejected))
            warnings.warn(
                f"experts on a GPU are run by the slow torch backend, because of {reasons}; see `hybrid-pack doctor`",
                RuntimeWarning, stacklevel=2,
            )  # fmt: skip

    @property
    def scratch_bytes(self) -> int:
        """Device memory of the runtime this layer shares with others; 0 where the backend has none."""
        runtime = getattr(self._run, "runtime", None)
        return 0 if runtime is None else int(runtime.nbytes)

    def __call__(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``y[i] = sum over j of topk_weights[i, j] * expert(topk_ids[i, j])(x[i])``.

        An expert is ``down @ activation(gate @ x, up @ x)``. With tensor parallelism y is this rank's partial sum,
        which the caller reduces. Experts on other expert-parallel ranks contribute nothing here. A repeated id counts
        each time.

        With b12x a call waits for nothing and can be captured in a CUDA graph. Its result lies in out, or in one of a
        few buffers that are used again only when nothing refers to them; if all are held, it is allocated, and while a
        graph is captured it comes from the graph's memory. Repeating a call can change last bits: up to 8 tokens are
        summed by atomic additions in BF16, and of more, the rows of an expert are put into blocks in no fixed order.
        Under ``torch.compile`` a call is one operator.

        Args:
            x: bf16 [M, H], M from 0 to ``max_tokens``, contiguous, on the layer's device.
            topk_weights: f32 [M, k], contiguous.
            topk_ids: i32 [M, k], contiguous; global ids 0..num_experts - 1, or -1 for an inactive place. Their range is
                checked on the CPU only, since elsewhere it would wait for the device; there others contribute nothing.
            out: bf16 [M, H] to write to, contiguous, not overlapping x.

        Returns:
            bf16 [M, H]; out, if it was given.

        Raises:
            UsageError: An argument of another type, shape, device or range.
        """
        if torch.compiler.is_compiling():
            if out is None:
                result: torch.Tensor = torch.ops.hybrid_pack.moe(x, topk_weights, topk_ids, self._number)
                return result
            torch.ops.hybrid_pack.moe_out(x, topk_weights, topk_ids, out, self._number)
            return out
        return self.run(x, topk_weights, topk_ids, out)

    def run(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The call itself, in eager mode."""
        tokens = self._check(x, topk_weights, topk_ids, out)
        if tokens == 0:
            return torch.empty_like(x) if out is None else out
        if topk_ids.device.type == "cpu":
            lowest, highest = (int(value) for value in topk_ids.aminmax())
            last = self.layer.geometry.num_experts - 1
            if lowest < -1 or highest > last:
                found = lowest if lowest < -1 else highest
                raise UsageError(
                    "not an expert id", where="topk_ids", expected=f"0..{last}, or -1 for none", found=found
                )
        return self._run(x, topk_weights, topk_ids, out)

    def _check(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, out: torch.Tensor | None
    ) -> int:
        """Checks that never wait for a device; returns M."""
        tokens = x.shape[0] if isinstance(x, torch.Tensor) and x.dim() == 2 else 0
        if tokens > self.max_tokens:
            raise UsageError(
                "more tokens than max_tokens", where="x", expected=f"at most {self.max_tokens}", found=tokens
            )
        wide, narrow = (tokens, self._hidden), (tokens, self.top_k)
        # One expression where all is well, which is nearly always: a decode step has microseconds for it.
        if not (
            _is(x, torch.bfloat16, wide, self._device)
            and _is(topk_weights, torch.float32, narrow, self._device)
            and _is(topk_ids, torch.int32, narrow, self._device)
            and (out is None or _is(out, torch.bfloat16, wide, self._device))
        ):
            given = {"x": x, "topk_weights": topk_weights, "topk_ids": topk_ids, "out": x if out is None else out}
            self._complain(given, wide, narrow)
        return tokens

    def _complain(self, given: Mapping[str, object], wide: tuple[int, int], narrow: tuple[int, int]) -> None:
        """Name the first argument that is wrong, and how."""
        for name, tensor in given.items():
            if not isinstance(tensor, torch.Tensor):
                raise UsageError("not a torch tensor", where=name, found=type(tensor).__name__)
            shape = narrow if name.startswith("topk") else wide
            dtype = {"topk_weights": torch.float32, "topk_ids": torch.int32}.get(name, torch.bfloat16)
            if tensor.dtype != dtype:
                raise UsageError("wrong dtype", where=name, expected=dtype, found=tensor.dtype)
            if tuple(tensor.shape) != shape:
                raise UsageError("wrong shape", where=name, expected=list(shape), found=list(tensor.shape))
            if tensor.device != self._device:
                raise UsageError("wrong device", where=name, expected=self._device, found=tensor.device)
            if not tensor.is_contiguous():
                strides = f"strides [{shape[1]}, 1]"
                raise UsageError("not contiguous", where=name, expected=strides, found=list(tensor.stride()))


def _is(tensor: object, dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> bool:
    """Whether an argument is a contiguous tensor of a dtype, shape and device."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype is dtype
        and tensor.shape == shape
        and tensor.device == device
        and tensor.is_contiguous()
    )
