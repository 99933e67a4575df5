"""A layer's tensors as b12x takes them, without a copy, and both tiers in one launch (one tier: ``b12x_tier``).

How b12x 1.1.0 treats ids, of which the code below makes use:

* One-grid kernel (``_emit_route_map_tile``): an id below 0 or not below ``map_slots``, or one whose descriptor is below
  0, skips its tiles. The output is zeroed before, so such a place adds nothing.
* Decode kernel of one tier (``_emit_expert_map_tile``): the same, with the expert map in place of the descriptors.
* Route packing (``route_pack.py``): ids below 0 or not below E, and those the map gives -1, are not packed. Their rows
  of the intermediate result are zeroed by ``zero_fc2_output`` before the sum over a token's places.

So -1, ids held by another rank and ids out of range are all inactive, and none of them is read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hybrid_pack.errors import UsageError
from hybrid_pack.layouts.shard import RankGeometry, shard_tensors
from hybrid_pack.runtime.layer import PackedMoELayer, TierWeights
from hybrid_pack.runtime.moe_runtime import DECODE_BLOCK, DECODE_TOKENS, MoERuntime

ONE_GRID_EXPERTS = 256
"""Most experts of a tier in the one-grid kernel, whose descriptors have eight bits for them."""

ALIGNMENT = 16
"""Bytes; what the kernels assume of every pointer but the router weights'."""

_DTYPES = {"I32": torch.int32, "U8": torch.uint8, "F32": torch.float32}


def check_tensors(layer: PackedMoELayer) -> None:
    """Check that a layer's tensors are what its geometry says, for kernels that would not notice.

    Raises:
        UsageError: A tensor of another shape, dtype, device or alignment, or tiers that share an expert.
    """
    geometry = layer.geometry
    rank = RankGeometry(geometry.hidden_size, geometry.intermediate_size, layer.tiles, geometry.gated)
    where = f"layer {layer.layer} rank {layer.rank}"
    counts = [0 if tier is None else int(tier.expert_ids.numel()) for tier in (layer.kept, layer.tail)]
    for spec in shard_tensors(rank, counts[0], counts[1], geometry.kept_scale_format):  # type: ignore[arg-type]
        tier, _, field = spec.name.partition(".")
        tensor: torch.Tensor = getattr(getattr(layer, tier), field)
        found = (tuple(tensor.shape), tensor.dtype, tensor.device, tensor.is_contiguous())
        expected = (spec.shape, _DTYPES[spec.dtype], layer.device, True)
        if found != expected:
            words = "{}, {}, on {}, contiguous {}"
            raise UsageError(
                f"{spec.name} is not what the layer's geometry says", where=where, expected=words.format(*expected),
                found=words.format(*found),
            )  # fmt: skip
        if len(spec.shape) > 1 and tensor.data_ptr() % ALIGNMENT:
            raise UsageError(f"{spec.name} is not aligned", where=where, expected=f"{ALIGNMENT} bytes")
    ids = [expert for tier in (layer.kept, layer.tail) if tier is not None for expert in tier.expert_ids.tolist()]
    if len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= geometry.num_experts:
        raise UsageError(
            "expert ids are not distinct ids of the layer", where=where, expected=f"0..{geometry.num_experts - 1}",
            found=str(sorted(ids)),
        )  # fmt: skip


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A small tensor, copied if it lies where the kernels cannot read it."""
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def bundle(layer: PackedMoELayer, tier: TierWeights, runtime: MoERuntime) -> Any:
    """A tier's tensors as b12x's ``W4A16PackedWeights`` (kept) or ``PreparedW4A16MoeWeights`` (tail).

    Both tiers share the runtime's lock workspace, since their launches follow each other on one stream.
    """
    geometry = layer.geometry
    fields: dict[str, Any] = {
        "w13": tier.w13,
        "w13_scale": tier.w13_scale,
        "w13_global_scale": _aligned(tier.w13_global_scale),
        "w2": tier.w2,
        "w2_scale": tier.w2_scale,
        "w2_global_scale": _aligned(tier.w2_global_scale),
        "workspace": runtime.scratch.workspace,
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
        "num_experts": int(tier.expert_ids.numel()),
        "is_gated": geometry.gated,
        "params_dtype": torch.bfloat16,
    }
    if tier is layer.tail:
        return runtime.prepare.PreparedW4A16MoeWeights(
            **fields, fc1_tile_n=layer.tiles[1], fc2_tile_n=layer.tiles[3], w13_layout="packed",
            weight_layout="nf3_2p1", scale_format="e4m3_k32", tile_config=layer.tiles,
        )  # fmt: skip
    # w13_layout tells how a source orders gate and up; "w31" is gate first, as the kernel and our packs have it. For
    # the layouts used here a launch takes no notice of it.
    source = "modelopt_nvfp4" if geometry.kept_scale_format == "e4m3_k16" else "fp4_e8m0_k32"
    return runtime.prepare.W4A16PackedWeights(
        **fields, source_format=source, w13_layout="w31", weight_layout="packed",
        scale_format=geometry.kept_scale_format,
    )  # fmt: skip


class OneGrid:
    """Both tiers in one launch, for up to ``DECODE_TOKENS`` tokens.

    A token's routes are added to its output with atomic additions in BF16 (``red_add_global_bf16x2``), in no fixed
    order: results are not the same bit for bit from call to call.

    The kernel is launched by its compiled object, as ``_w4a16_fused_moe_hybrid_launch_flat`` does it, and not by
    ``run_w4a16_moe_hybrid``. b12x plans a launch anew for each call, to find the compiled object of the last one; that
    takes longer on the host than the kernel on the GPU. A test compares the arguments of both ways.
    """

    def __init__(self, layer: PackedMoELayer, kept: Any, tail: Any, runtime: MoERuntime) -> None:
        self._runtime, self._kept, self._tail = runtime, kept, tail
        assert layer.kept is not None and layer.tail is not None
        experts = layer.geometry.num_experts
        # b12x finds compiled code, in memory and on disk, by a key that has the number of tail experts but not that of
        # kept ones (``dynamic_num_experts``), though the code skips kept experts past the number it was compiled for.
        # map_slots is in the key, so it is made to tell that number; slots past the last expert are never asked for.
        slots = -(-experts // 1024) * 1024 + kept.num_experts
        self.tier_map = runtime.kernel.build_w4a16_tier_local_map(
            layer.kept.expert_ids.tolist(), layer.tail.expert_ids.tolist(), map_slots=slots, device=layer.device
        )
        self._launch = runtime.compiled(
            ("one grid", kept.num_experts, tail.num_experts, kept.scale_format), self._compile
        )
        kernel, key = runtime.kernel, runtime.key
        self._compiled = self._launch.compiled
        self._grids = [
            kernel._w4a16_fused_persistent_grid_x(
                fused=self._launch, m=tokens, topk=key.top_k, intermediate_size=key.intermediate_size,
                activation=runtime.activation.name, direct_topk_routes=True, sms=runtime.sms,
            )
            for tokens in range(1, DECODE_TOKENS + 1)
        ]  # fmt: skip
        rows, scratch = DECODE_TOKENS * key.top_k, runtime.scratch
        elements = kernel.packed_gemm_scratch_elements(
            size_n=max(key.w13_rows, key.hidden_size), route_slots=rows, moe_block_size=DECODE_BLOCK,
            sms=runtime.sms,
        )  # fmt: skip
        self._weights = [
            tensor
            for tier in (kept, tail)
            for tensor in (
                tier.w13.view(-1), tier.w2.view(-1), tier.w13_scale.view(torch.int32).view(-1),
                tier.w2_scale.view(torch.int32).view(-1), tier.w13_global_scale, tier.w2_global_scale,
            )
        ]  # fmt: skip
        self._fc1 = scratch.cache13[: rows * key.w13_rows]
        self._activated = scratch.cache2[: rows * key.intermediate_size]
        self._tail_arguments = (scratch.fc1_c_tmp[:elements], scratch.fc2_c_tmp[:elements], scratch.workspace)

    def _compile(self) -> Any:
        runtime = self._runtime
        key = runtime.key
        return runtime.kernel.compile_w4a16_fused_moe_hybrid(
            size_m=DECODE_TOKENS,
            hidden_size=key.hidden_size,
            intermediate_size=key.intermediate_size,
            tier0_num_experts=self._kept.num_experts,
            tier1_num_experts=self._tail.num_experts,
            top_k=key.top_k,
            activation=runtime.activation.name,
            map_slots=int(self.tier_map.numel()),
            moe_block_size=DECODE_BLOCK,
            element_dtype="bf16",
            fast_math=True,
            sms=runtime.sms,
            max_shared_mem=runtime.shared_memory,
            tier0_weight_layout="packed",
            tier0_scale_format=self._kept.scale_format,
            tier0_w13_layout="packed",
            tier1_weight_layout="nf3_2p1",
            tier1_scale_format="e4m3_k32",
            tier1_w13_layout="packed",
            force_tile_config=key.tiles,
            schedule_whole_tiles=True,
        )

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, stream: int
    ) -> None:
        """Write the layer's sum to out, bf16 [M, H], M at most ``DECODE_TOKENS``; all of it is written."""
        kernel, tokens = self._runtime.kernel, x.shape[0]
        gmem = kernel.cute.AddressSpace.gmem
        self._compiled(
            kernel.make_ptr(kernel.cutlass.BFloat16, x.data_ptr(), gmem, assumed_align=16),
            *self._weights,
            ids.view(-1),
            self.tier_map,
            self._fc1,
            self._activated,
            out.view(-1),
            kernel.make_ptr(kernel.cutlass.Float32, weights.data_ptr(), gmem, assumed_align=4),
            *self._tail_arguments,
            tokens,
            self._grids[tokens - 1],
            kernel.cuda.CUstream(stream),
        )


def one_grid_problem(kept: Sequence[int], tail: Sequence[int], *, gated: bool, limit: float | None) -> str | None:
    """Why the one-grid kernel cannot run a layer, or None if it can.

    Args:
        kept: Global ids of the kept experts.
        tail: Global ids of the tail experts.
        gated: Whether experts have a gate.
        limit: Of the activation, if it has one.
    """
    if not kept or not tail:
        return "it needs experts of both tiers"
    if not gated:
        return "it takes only experts with a gate (compile_w4a16_fused_moe_hybrid)"
    if max(len(kept), len(tail)) > ONE_GRID_EXPERTS:
        return f"it takes at most {ONE_GRID_EXPERTS} experts a tier"
    if limit is not None:
        return "run_w4a16_moe_hybrid has no swiglu_limit"
    return None
