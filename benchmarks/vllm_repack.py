"""A vLLM plugin that does what serving does without packs: repacks a hybrid checkpoint's experts at every start.

The baseline of ``vllm_serve``; quantisation method ``hybrid_repack``, of which config.json says where the source is. As
the serving fork (its PR #104): each MoE layer, after loading, reads the source tensors of its experts, unpacks NF3,
packs both tiers with b12x's own packers on the GPU (``repack_baseline``) and keeps the result; then the same
``HybridMoE`` runs it. In its favour: headers are read before the clock starts, files are memory-mapped and read once,
and no other tensor of the checkpoint is looked at.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.repack_baseline import Packed, repack_layer
from hybrid_pack.formats.nf3 import DEFAULT_LEVELS
from hybrid_pack.integrations.vllm.experts import float32_by_default
from hybrid_pack.io.checkpoint import Checkpoint, Layer, open_checkpoint
from hybrid_pack.layouts.scale_bytes import NF3_GLOBAL_SCALE
from hybrid_pack.layouts.shard import RankGeometry, shard_tensors
from hybrid_pack.runtime import HybridMoE, LayerGeometry, PackedMoELayer, TierWeights
from hybrid_pack.sharding import Tiles, tiles_for

METHOD = "hybrid_repack"
_DTYPES = {"I32": torch.int32, "U8": torch.uint8, "F32": torch.float32}


def tiles_of(hidden: int, intermediate: int) -> Tiles:
    """The kernel's tiles."""
    tiles = tiles_for(hidden, intermediate)
    assert tiles is not None
    return tiles


def packed_layer(packed: Packed, layer: Layer, number: int, hidden: int, intermediate: int, top_k: int) -> Any:
    """What ``HybridMoE`` takes, from what the packers gave.

    Args:
        packed: From ``repack_layer``.
        layer: The source's layer.
        number: Of it.
        hidden: H.
        intermediate: I.
        top_k: Experts a token visits.
    """
    tiles = tiles_of(hidden, intermediate)
    device = packed["tail.w13"].device
    tensors = dict(packed)
    for tier, ids in (("kept", layer.kept), ("tail", layer.tail)):
        tensors[f"{tier}.expert_ids"] = torch.tensor(list(ids), dtype=torch.int32, device=device)
        for matrix in ("w13", "w2"):
            if f"{tier}.{matrix}_global_scale" not in tensors:
                scale = torch.full((len(ids),), NF3_GLOBAL_SCALE, dtype=torch.float32, device=device)
                tensors[f"{tier}.{matrix}_global_scale"] = scale
    geometry = RankGeometry(hidden, intermediate, tiles)
    weights: dict[str, dict[str, torch.Tensor]] = {"kept": {}, "tail": {}}
    for spec in shard_tensors(geometry, len(layer.kept), len(layer.tail), "e4m3_k16"):
        tier, _, field = spec.name.partition(".")
        weights[tier][field] = tensors[spec.name].view(_DTYPES[spec.dtype]).reshape(spec.shape).contiguous()
    return PackedMoELayer(
        layer=number, rank=0, kept=TierWeights(**weights["kept"]), tail=TierWeights(**weights["tail"]), tiles=tiles,
        geometry=LayerGeometry(
            hidden, intermediate, len(layer.kept) + len(layer.tail), top_k, "e4m3_k16", DEFAULT_LEVELS, "silu"
        ),
    )  # fmt: skip


def repack(source: Path, layer: Layer, number: int, sizes: tuple[int, int, int], device: torch.device) -> Any:
    """Read a layer's source tensors and pack them: (hidden, intermediate, top_k) are its sizes."""
    with float32_by_default(), torch.no_grad():
        packed = repack_layer(source, layer, tiles_of(*sizes[:2]), device)
        return packed_layer(packed, layer, number, *sizes)


def register() -> None:
    """The entry point's target; vLLM is imported only here."""
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.model_executor.layers.fused_moe.layer import FusedMoE
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    if METHOD in QUANTIZATION_METHODS:
        return

    class HybridRepackMethod(FusedMoEMethodBase):  # type: ignore[misc]
        """Experts of one layer."""

        def __init__(self, moe: Any, checkpoint: Checkpoint, source: Path, number: int) -> None:
            super().__init__(moe)
            self.source, self.number, self.layer = source, number, checkpoint.layers[number]
            self.hybrid: HybridMoE | None = None

        def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            """Nothing: weights are made after loading."""

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            moe = self.moe
            sizes = int(moe.hidden_dim), int(moe.intermediate_size_per_partition), int(moe.experts_per_token)
            device = torch.device(moe.device)
            weights = repack(self.source, self.layer, self.number, sizes, device)
            backend = "b12x" if device.type == "cuda" else "torch"
            with float32_by_default():
                self.hybrid = HybridMoE(weights, sizes[2], int(moe.max_num_tokens), backend)

        def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> None:
            """None: no kernel of vLLM runs these weights."""

        def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> None:
            """None, so that nothing takes this method's place."""

        @property
        def topk_indices_dtype(self) -> torch.dtype:
            return torch.int32

        def apply(
            self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **_: Any
        ) -> torch.Tensor:
            assert self.hybrid is not None
            return self.hybrid.run(x.contiguous(), topk_weights.float(), topk_ids.int())

    @register_quantization_config(METHOD)
    class HybridRepackConfig(QuantizationConfig):  # type: ignore[misc]
        """Chosen by config.json: ``{"quant_method": "hybrid_repack", "source": folder}``."""

        def __init__(self, source: str) -> None:
            super().__init__()
            self.source = Path(source)
            self.checkpoint = open_checkpoint(self.source)
            import_module("b12x.moe._shared.kernels.w4a16.prepare")  # before the clock starts

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> HybridRepackConfig:
            return cls(config["source"])

        def get_name(self) -> str:
            return METHOD

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.bfloat16]

        @classmethod
        def get_min_capability(cls) -> int:
            return 80

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
            if isinstance(layer, LinearBase):
                return UnquantizedLinearMethod()
            if isinstance(layer, FusedMoE):
                number = int(prefix.split("layers.")[1].split(".")[0])
                return HybridRepackMethod(layer.moe_config, self.checkpoint, self.source, number)
            return None
