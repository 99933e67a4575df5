"""The b12x backend: both tiers in one launch for few tokens, else a launch a tier and a sum."""

from __future__ import annotations

from functools import cache

import torch

from hybrid_pack.errors import UsageError
from hybrid_pack.runtime import b12x_probe
from hybrid_pack.runtime.b12x_launch import ALIGNMENT, OneGrid, check_tensors, one_grid_problem
from hybrid_pack.runtime.b12x_tier import TierRunner
from hybrid_pack.runtime.layer import LayerGeometry, PackedMoELayer
from hybrid_pack.runtime.moe_runtime import DECODE_TOKENS, MoERuntime, RuntimeKey, require_fitting, shared_runtime
from hybrid_pack.runtime.random_layer import random_layer
from hybrid_pack.runtime.torch_backend import TorchBackend
from hybrid_pack.sharding import Tiles

SELF_TEST_LIMIT = 1e-2
"""Largest relative L2 distance to the torch backend; BF16 noise is 5e-3 or less (measured on an H200)."""

_SELF_TEST_SIZES: dict[Tiles, tuple[int, int]] = {
    (64, 256, 64, 256): (256, 512),
    (64, 128, 64, 128): (256, 128),
    (128, 64, 64, 128): (3584, 384),
}
"""(H, rows of w13) of the known problem for each set of tiles; the last are of experts with a gate only."""


def why_not(layer: PackedMoELayer) -> str | None:
    """Why this backend cannot run a layer, or None if it can; all reasons that can be told without running anything.

    Only where there are none is b12x imported, and only on a GPU nobody has tried is a self-test run.
    """
    problem = why_not_geometry(
        layer.geometry, layer.tiles, layer.device, kept=layer.kept is not None, tail=layer.tail is not None
    )
    if problem is None and b12x_probe.needs_self_test(layer.device):
        problem = self_test(
            layer.device, layer.tiles, layer.geometry.kept_scale_format or "e4m3_k16", layer.geometry.gated
        )
    return problem


def why_not_geometry(
    geometry: LayerGeometry, tiles: Tiles, device: torch.device, *, kept: bool, tail: bool
) -> str | None:
    """The same before there is a layer; all but the self-test.

    Args:
        geometry: Of the rank's experts.
        tiles: Tiles they are laid out for.
        device: Where they shall be.
        kept: Whether there are kept experts.
        tail: Whether there are tail experts.
    """
    problems = [
        *b12x_probe.device_problems(device),
        *b12x_probe.package_problems(),
        *b12x_probe.layer_problems(geometry, tiles, kept=kept, tail=tail),
    ]
    return "; ".join(problems) or b12x_probe.import_problem()


@cache
def self_test(device: torch.device, tiles: Tiles, kept_scale_format: str, gated: bool = True) -> str | None:
    """Run a small known problem; None if b12x gives what the torch backend gives.

    Args:
        device: A CUDA device.
        tiles: Tiles to try.
        kept_scale_format: Of the kept experts.
        gated: Whether experts have a gate.
    """
    major, minor = torch.cuda.get_device_capability(device)
    where = f"nobody has tried b12x {b12x_probe.VERSION} on compute capability {major}.{minor}, and its self-test"
    hidden, rows = _SELF_TEST_SIZES[tiles]
    layer = random_layer(
        hidden, rows // (2 if gated else 1), 8, (1, 4), (0, 2, 3, 5, 6, 7), device=device,
        activation="silu" if gated else "relu2",
        kept_scale_format="e4m3_k16" if kept_scale_format == "e4m3_k16" else "e8m0_k32",
    )  # fmt: skip
    generator = torch.Generator("cpu").manual_seed(1)
    top_k = 4
    try:
        backend, reference = B12xBackend(layer, top_k, 64), TorchBackend(layer)
        for tokens in (1, DECODE_TOKENS, 33):
            x = torch.randn(tokens, hidden, generator=generator).to(device, torch.bfloat16)
            weights = torch.rand(tokens, top_k, generator=generator).to(device)
            ids = torch.randint(-1, 8, (tokens, top_k), generator=generator, dtype=torch.int32).to(device)
            found, right = backend(x, weights, ids).float(), reference.accumulate(x, weights, ids)
            distance = float((found - right).norm() / right.norm())
            if not distance <= SELF_TEST_LIMIT:
                return f"{where} gave wrong results: relative distance {distance:.1e} at {tokens} tokens"
    except Exception as error:  # whatever a compiler or driver says
        return f"{where} failed: {type(error).__name__}: {error}"
    return None


class B12xBackend:
    """One layer, ready to run.

    Everything is planned, compiled and allocated here, and every launch is made once with inactive ids: a call then
    allocates nothing but, where all result buffers are held, its result; it waits for nothing and can be captured.
    """

    def __init__(self, layer: PackedMoELayer, top_k: int, max_tokens: int, runtime: MoERuntime | None = None) -> None:
        """Prepare a layer that ``why_not`` has nothing against.

        Args:
            layer: Its tensors are used in place.
            top_k: Experts a token visits.
            max_tokens: Most tokens of a call.
            runtime: Scratch and launches; by default those of all layers of this geometry and ``max_tokens``.

        Raises:
            UsageError: Tensors are not what the geometry says, or the runtime was made for other layers.
        """
        check_tensors(layer)
        key = RuntimeKey.of(layer, top_k)
        if runtime is not None:
            require_fitting(runtime, key, max_tokens)
        self.layer = layer
        self._device = layer.device
        with torch.cuda.device(self._device), torch.inference_mode(False):
            self.runtime = shared_runtime(key, max_tokens) if runtime is None else runtime
            self._prepare()
            self._warm_up(top_k, max_tokens)

    def _prepare(self) -> None:
        layer, runtime = self.layer, self.runtime
        tiers = [tier for tier in (layer.kept, layer.tail) if tier is not None]
        ids = [[] if tier is None else tier.expert_ids.tolist() for tier in (layer.kept, layer.tail)]
        self.one_grid_problem = one_grid_problem(
            ids[0], ids[1], gated=runtime.key.gated, limit=runtime.activation.limit
        )
        one_grid = self.one_grid_problem is None
        decode = runtime.has_decode and not one_grid
        self.tiers = [TierRunner(layer, tier, runtime, decode=decode) for tier in tiers]
        self.one_grid = OneGrid(layer, self.tiers[0].bundle, self.tiers[1].bundle, runtime) if one_grid else None
        if len(self.tiers) == 2 and (runtime.has_prefill or not one_grid):
            runtime.require_second_output()

    def _warm_up(self, top_k: int, max_tokens: int) -> None:
        """Run each launch once: code is loaded onto the GPU at the first run, which a graph capture would not allow."""
        bounds = [0, DECODE_TOKENS, *(upto for upto, _ in self.runtime.route_blocks)]
        for tokens in sorted({bound + 1 for bound in bounds if bound < min(max_tokens, self.runtime.chunk)}):
            x = torch.zeros(tokens, self.layer.geometry.hidden_size, dtype=torch.bfloat16, device=self._device)
            weights = torch.zeros(tokens, top_k, device=self._device)
            ids = torch.full((tokens, top_k), -1, dtype=torch.int32, device=self._device)
            self(x, weights, ids, torch.empty_like(x))
        torch.cuda.synchronize(self._device)  # a launch that failed says so here

    def __call__(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """bf16 [M, H], this rank's sum; arguments as ``HybridMoE``'s."""
        if torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                return self._call(x, topk_weights, topk_ids, out)
        return self._call(x, topk_weights, topk_ids, out)

    def _call(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        if x.requires_grad or weights.requires_grad:
            x, weights = x.detach(), weights.detach()
        if out is None:
            out = self.runtime.outputs.take(x)
        begin, result, nbytes = x.data_ptr(), out.data_ptr(), x.numel() * 2
        if (begin | result) % ALIGNMENT:
            raise UsageError("not aligned", where="x or out", expected=f"an address that is a multiple of {ALIGNMENT}")
        if begin < result + nbytes and result < begin + nbytes:
            raise UsageError("out overlaps x, which is still read while out is written", where="out")
        stream = self.runtime.enter()
        tokens, chunk = x.shape[0], self.runtime.chunk
        if tokens <= chunk:
            self._run(x, weights, ids, out, stream)
        else:
            for first in range(0, tokens, chunk):
                part = slice(first, first + chunk)
                self._run(x[part], weights[part], ids[part], out[part], stream)
        return out

    def _run(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, stream: int) -> None:
        """One chunk."""
        if ids.data_ptr() % ALIGNMENT:  # a slice of some other tensor; copied, since the kernels cannot read it there
            ids = self.runtime.scratch.ids[: ids.numel()].view(ids.shape).copy_(ids)
        if self.one_grid is not None and x.shape[0] <= DECODE_TOKENS:
            self.one_grid(x, weights, ids, out, stream)
            return
        self.tiers[0](x, weights, ids, out, stream)
        if len(self.tiers) == 2:
            # A launch writes all of its output, it does not add to it: it ends with the sum over places.
            second = self.runtime.scratch.second
            assert second is not None
            second = second[: x.shape[0]]
            self.tiers[1](x, weights, ids, second, stream)
            torch.add(out, second, out=out)
