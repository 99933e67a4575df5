"""``HybridMoEMethod``: vLLM's routed experts, run by ``HybridMoE``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from hybrid_pack.integrations.vllm.request import Request
from hybrid_pack.runtime.moe import HybridMoE
from hybrid_pack.runtime.report import LoadReport

if TYPE_CHECKING:
    from hybrid_pack.integrations.vllm.session import Engine, Session

ALIGNMENT = 16
"""Bytes at which the kernels want x to begin."""


class HybridMoEMethod(FusedMoEMethodBase):
    """The routed experts of one layer and rank, both tiers.

    Routing, scaling, shared experts and the sum over ranks stay vLLM's.

    Attributes:
        layer: Number of the layer in the pack.
        hybrid: What runs it, once the weights are loaded.
        report: How they were loaded.
    """

    def __init__(self, moe: Any, session: Session, request: Request) -> None:
        super().__init__(moe)
        self.layer = request.layer
        self.hybrid: HybridMoE | None = None
        self.report: LoadReport | None = None
        self._session, self._rank = session, request.rank
        session.experts(request.rank).announce(request.layer)
        session.fetch(request.rank)

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Nothing: a checkpoint that has no experts loads into a layer that has no parameters."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Take this rank's experts of the layer from the pack."""
        if self.hybrid is None:
            self._session.base.require_claimed()
            self.hybrid, self.report = self._session.experts(self._rank).take(self.layer)

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
        """None: none of vLLM's kernels runs these weights."""

    def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> None:
        """None, so that vLLM does not put a modular kernel in this method's place."""

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: torch.dtype, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """As they are: the pack was made for these sizes."""
        return hidden_size, intermediate_size_per_partition

    @property
    def topk_indices_dtype(self) -> torch.dtype:
        """What the kernels read ids as."""
        return torch.int32

    @property
    def is_monolithic(self) -> bool:
        """Whether the method routes too; it does not."""
        return False

    @property
    def supports_eplb(self) -> bool:
        """Whether experts may move; they may not."""
        return False

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The routed sum, bf16 [M, H], this rank's part; waits for nothing.

        Ids are global, also under expert parallelism: those of other ranks contribute nothing here.
        """
        moe = self.hybrid
        assert moe is not None, "vLLM calls process_weights_after_loading first"
        x = x.contiguous()
        if x.data_ptr() % ALIGNMENT:
            x = x.clone()
        weights = topk_weights.to(torch.float32).contiguous()
        ids = topk_ids.to(torch.int32).contiguous()
        tokens, most = x.shape[0], moe.max_tokens
        if tokens <= most:
            return moe.run(x, weights, ids)
        # Some drafters run a few tokens more than the scheduler may give; rarely, so the parts may be slow.
        out = torch.empty_like(x)
        for first in range(0, tokens, most):
            part = slice(first, first + most)
            moe.run(x[part], weights[part], ids[part], out[part])
        return out


def request_of(layer: Any, number: int, prefix: str, engine: Engine) -> Request:
    """What vLLM wants of a layer's experts.

    Args:
        layer: A ``RoutedExperts`` (``FusedMoE`` before 0.25) that is being made.
        number: Of the layer.
        prefix: vLLM's name of it.
        engine: The engine's settings.
    """
    moe = layer.moe_config
    parallel = moe.moe_parallel_config
    refused = {
        "biases of experts": moe.has_bias,
        "router weights applied to the experts' input": layer.apply_router_weight_on_input,
        "sequence-parallel experts": parallel.is_sequence_parallel,
        "redundant experts": moe.num_experts != moe.num_logical_experts,
        "shared experts fused into the routed ones": getattr(layer, "num_fused_shared_experts", 0)
        or getattr(getattr(layer, "expert_map_manager", None), "num_fused_shared_experts", 0),
        "an all-to-all backend": parallel.use_all2all_kernels,
    }
    expert_map = layer.expert_map if parallel.use_ep else None
    return Request(
        prefix=prefix,
        layer=number,
        tp_size=parallel.tp_size,
        tp_rank=parallel.tp_rank,
        ep_size=parallel.ep_size,
        ep_rank=parallel.ep_rank,
        dp_size=parallel.dp_size * parallel.pcp_size,
        hidden_size=moe.hidden_dim,
        intermediate_size=moe.intermediate_size_per_partition * parallel.tp_size,
        num_experts=moe.num_experts,
        top_k=moe.experts_per_token,
        activation=str(moe.activation.value),
        limit=layer.swiglu_limit,
        alpha=getattr(layer, "swiglu_alpha", None),  # since vLLM 0.25
        beta=getattr(layer, "swiglu_beta", None),
        dtype=str(moe.in_dtype).removeprefix("torch."),
        expert_map=None if expert_map is None else tuple(expert_map.tolist()),
        refused=(*engine.refused, *(name for name, on in refused.items() if on)),
    )
