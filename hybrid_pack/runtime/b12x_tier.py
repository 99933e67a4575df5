"""The experts of one tier by a launch of their own: for few tokens where one grid cannot run both, else for many.

Experts without a gate take the route-packed launch for any number of tokens, since b12x 1.1.0 has no other that is
right for them. ``run_w4a16_moe`` makes the decode launch with its sum of a token's routes (``tc_decode_fused_sum``) for
experts with a gate only. The launch without that sum it does make, but where that reads ids through an expert map, the
kernel's FC1 writes to ``fc1_bf16_flat`` (``fc1_emit_tile``), and its FC2 reads ``activated_bf16_flat``, to which FC1
without a gate writes everywhere else (``_moe_body``): nothing has written there.
"""

from __future__ import annotations

from typing import Any

import torch

from hybrid_pack.runtime.b12x_launch import bundle
from hybrid_pack.runtime.layer import PackedMoELayer, TierWeights
from hybrid_pack.runtime.moe_runtime import DECODE_BLOCK, DECODE_TOKENS, MoERuntime


class TierRunner:
    """Runs the experts of one tier, for any number of tokens up to the runtime's chunk.

    Attributes:
        bundle: b12x's weight bundle.
        expert_map: i32 [E], row of each expert in the bundle, or -1.
        prefill: b12x's launch for each of the runtime's ``prefill_sizes``.
    """

    def __init__(self, layer: PackedMoELayer, tier: TierWeights, runtime: MoERuntime, *, decode: bool) -> None:
        """Compile what is needed.

        Args:
            layer: The layer.
            tier: One of its tiers.
            runtime: Shared scratch.
            decode: Whether calls of few tokens have a decode launch here: they do not come to a ``OneGrid``, and the
                runtime has decode launches.
        """
        self._runtime = runtime
        self.bundle = bundle(layer, tier, runtime)
        table = torch.full((layer.geometry.num_experts,), -1, dtype=torch.int32)
        table[tier.expert_ids.cpu().long()] = torch.arange(tier.expert_ids.numel(), dtype=torch.int32)
        self.expert_map = table.to(layer.device)
        name, scales = self.bundle.weight_layout, self.bundle.scale_format
        experts = self.bundle.num_experts
        self._decode: Any = None
        if decode:
            self._decode = runtime.tier_launch(
                name, experts, scales, tokens=DECODE_TOKENS, block=DECODE_BLOCK, decode=True
            )
        self.prefill = [
            runtime.tier_launch(name, experts, scales, tokens=tokens, block=block, decode=False)
            for tokens, block in (runtime.prefill_sizes() if runtime.has_prefill else ())
        ]
        self._launches = [_Prefill(launch, self.bundle, self.expert_map, runtime) for launch in self.prefill]

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, stream: int
    ) -> None:
        """Write this tier's sum to out, bf16 [M, H]; all of it is written, whatever the ids."""
        tokens, runtime = x.shape[0], self._runtime
        if self._decode is None or tokens > DECODE_TOKENS:
            self._launches[runtime.prefill_of(tokens)](x, weights, ids, out, stream)
            return
        runtime.kernel.run_w4a16_moe(
            x, self.bundle, weights, ids, output=out, fused_launch=self._decode,
            expert_map=self.expert_map, **runtime.activation.arguments, **runtime.scratch.gemm,
        )  # fmt: skip


class _Prefill:
    """One route-packed launch, as ``run_w4a16_moe`` and the functions it calls make it.

    Called by its compiled object for the same reason as the one-grid kernel: b12x checks and plans every call anew, for
    two tiers in longer than the kernels take for up to a few hundred tokens. All that does not change from call to call
    is made here. A test compares the arguments of both ways.
    """

    def __init__(self, launch: Any, weights: Any, expert_map: torch.Tensor, runtime: MoERuntime) -> None:
        kernel, key, scratch = runtime.kernel, runtime.key, runtime.scratch
        self._runtime, self._compiled, self._map = runtime, launch.compiled, expert_map
        self._block, self._sum = launch.moe_block_size, runtime.sum_launch().compiled
        rows = launch.size_m * key.top_k
        slots = int(kernel.max_packed_route_slots(rows, self._block, key.num_experts))
        self._routes = dict(runtime.routes)
        self._routes["packed_route_indices"] = runtime.routes["packed_route_indices"][:slots]
        self._routes["block_expert_ids"] = runtime.routes["block_expert_ids"][: launch.max_m_blocks]
        bf16, f16, f32, i32 = (getattr(kernel.cutlass, name) for name in ("BFloat16", "Float16", "Float32", "Int32"))

        def pointer(dtype: Any, tensor: torch.Tensor) -> Any:
            return kernel.make_ptr(dtype, tensor.data_ptr(), kernel.cute.AddressSpace.gmem, assumed_align=16)

        self._weights = [pointer(i32, weights.w13), pointer(i32, weights.w2)]
        self._scales = [
            pointer(i32, weights.w13_scale), pointer(i32, weights.w2_scale),
            pointer(f32, weights.w13_global_scale), pointer(f32, weights.w2_global_scale),
        ]  # fmt: skip
        self._no_amax = weights.w13_global_scale
        # FC2 writes where FC1 wrote, since only the activated result is read in between. Without a gate FC1 writes just
        # that, and nothing to fc1.
        self._fc1 = scratch.cache13[: rows * key.w13_rows]
        self._activated = scratch.cache2[: rows * key.intermediate_size]
        self._fc2 = scratch.cache13[: rows * key.hidden_size]
        self._fc2_pointer = pointer(bf16, self._fc2)
        self._no_rotation = pointer(f16, kernel._rot_scales_dummy(key.device))
        self._experts, self._none = kernel.Int32(weights.num_experts), kernel.Int32(0)
        self._grid = kernel._w4a16_fused_persistent_grid_x(
            fused=launch, m=1, topk=key.top_k, intermediate_size=key.intermediate_size,
            activation=runtime.activation.name, direct_topk_routes=False, sms=runtime.sms,
        )  # fmt: skip

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, stream: int
    ) -> None:
        """Write the tier's sum to out, bf16 [M, H]."""
        kernel, scratch = self._runtime.kernel, self._runtime.scratch
        make, gmem, cutlass = kernel.make_ptr, kernel.cute.AddressSpace.gmem, kernel.cutlass
        routes, blocks, count = kernel.pack_topk_routes_by_expert(
            ids, self._block, self._runtime.key.num_experts, expert_map=self._map, **self._routes
        )
        tokens, handle, slots = x.shape[0], kernel.cuda.CUstream(stream), routes.numel()
        rows = make(cutlass.BFloat16, x.data_ptr(), gmem, assumed_align=16)
        self._compiled(
            rows, rows, rows, *self._weights, self._fc1, self._activated, self._fc2, *self._scales,
            routes, blocks, count, self._no_amax, 0,
            make(cutlass.Float32, weights.data_ptr(), gmem, assumed_align=4),
            scratch.fc1_c_tmp[: self._partials(self._runtime.key.w13_rows, slots)],
            scratch.fc2_c_tmp[: self._partials(self._runtime.key.hidden_size, slots)],
            scratch.workspace, self._no_rotation, self._no_rotation, self._no_rotation,
            make(cutlass.Int32, routes.data_ptr(), gmem, assumed_align=4),
            self._experts, self._none, tokens, self._grid, handle,
        )  # fmt: skip
        result = out.data_ptr()
        unused = [
            make(dtype, result, gmem, assumed_align=align)
            for dtype, align in ((cutlass.Float32, 4), (cutlass.Int32, 4), (cutlass.Int32, 4), (cutlass.Float16, 16))
        ]
        output = make(cutlass.BFloat16, result, gmem, assumed_align=16)
        self._sum(self._fc2_pointer, output, *unused, self._none, self._none, tokens, handle)

    def _partials(self, columns: int, slots: int) -> int:
        """Elements of scratch for partial results."""
        kernel, sms = self._runtime.kernel, self._runtime.sms
        found: int = kernel.packed_gemm_scratch_elements(
            size_n=columns, route_slots=slots, moe_block_size=self._block, sms=sms
        )
        return found
