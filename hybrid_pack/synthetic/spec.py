"""What a synthetic checkpoint is to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hybrid_pack.errors import UsageError
from hybrid_pack.io.bitmap import KEPT_BITS, TAIL_BITS
from hybrid_pack.io.names import FAMILIES, Family
from hybrid_pack.synthetic.models import MODELS, VARIANTS, Model

Stored = Literal[
    "nvfp4", "mxfp4", "nf3", "ct_nvfp4", "ct_mxfp4", "mxfp8", "mxfp8_inv", "fp8_block", "fp8_row", "fp8_tensor",
    "bf16", "f16", "f32",
]  # fmt: skip
"""``ct_``: as compressed-tensors stores it. ``mxfp8_inv``: MXFP8 with MiniMax-M3's ``weight_scale_inv``."""


@dataclass(frozen=True)
class Spec:
    """What to write; the defaults make GLM-5.2 in small.

    Attributes:
        seed: Same seed, same bytes.
        hidden: Width the experts read and write, a multiple of 32.
        intermediate: Their intermediate size, a multiple of 32.
        num_experts: Routed experts in a layer.
        top_k: Experts a token visits.
        kept: Kept experts in each mapped layer; the rest are tail.
        moe_layers: Layers with experts, all named by the map.
        dense_layers: Layers without.
        mtp_layer: Add one layer past the last, not in the map: all NVFP4, or as ``stored`` says.
        kept_format: Kept format of the mapped layers of a hybrid checkpoint.
        nf3_scales: ``e4m3``, or ``e4m3_x16`` for kquant's U8 holding the E4M3 bits of 16 times the scale.
        stored: What experts are stored as, whatever their tier: expert i as the i-th, counted round. Empty: a hybrid
            checkpoint, kept experts as ``kept_format`` and tail ones as NF3; or what models of the family are stored
            as, where all experts are in one tensor.
        mix_matrices: Go on counting with each matrix, so that those of an expert differ.
        base_dialect: How the linear layers outside the experts are stored.
        family: Index into ``names.FAMILIES``.
        variant: Another model of a family, by its model type; gives the family too. See ``models.VARIANTS``.
        map_in: ``config``: in config.json. ``quantization``: under that key of hf_quant_config.json.
            ``hf_quant``: at the top of that file. ``none``: nowhere.
        map_keys: Keys "3" or "03".
        scalar_shape: Shape of scalar scales, () or (1,).
        input_scale: Whether NVFP4 experts have the (unused) activation scale.
        second_scale: How up's second-level scale relates to gate's.
        single_file: One file and no index.
        shard_bytes: Largest shard otherwise.
        vocab: Rows of the embedding.
    """

    seed: int = 0
    hidden: int = 256
    intermediate: int = 256
    num_experts: int = 8
    top_k: int = 2
    kept: int = 2
    moe_layers: tuple[int, ...] = (3, 4)
    dense_layers: tuple[int, ...] = (0, 1, 2)
    mtp_layer: bool = True
    kept_format: Literal["nvfp4", "mxfp4"] = "nvfp4"
    nf3_scales: Literal["e4m3", "e4m3_x16"] = "e4m3"
    stored: tuple[Stored, ...] = ()
    mix_matrices: bool = False
    base_dialect: Literal["bf16", "mxfp8", "fp8_row"] = "bf16"
    family: int = 0
    variant: str = ""
    map_in: Literal["config", "quantization", "hf_quant", "none"] = "config"
    map_keys: Literal["plain", "zero_padded"] = "plain"
    scalar_shape: tuple[int, ...] = ()
    input_scale: bool = True
    second_scale: Literal["equal", "power_of_two", "unequal"] = "equal"
    single_file: bool = False
    shard_bytes: int = 1 << 30
    vocab: int = 64

    def __post_init__(self) -> None:
        if self.hidden % 32 or self.intermediate % 32 or min(self.hidden, self.intermediate) < 32:
            raise UsageError("sizes must be multiples of 32", found=f"{self.hidden} and {self.intermediate}")
        if not 0 <= self.kept <= self.num_experts or not self.moe_layers:
            raise UsageError("kept must be 0 to num_experts, and one layer needs experts", found=self.kept)
        if self.names.fused and (len(self.stored) > 1 or self.stored in (("nf3",), ("ct_nvfp4",), ("ct_mxfp4",))):
            raise UsageError("one tensor of all experts has one format, as published", found=self.stored)

    @property
    def model(self) -> Model:
        """Habits of the model."""
        return VARIANTS[self.variant][1] if self.variant else MODELS[self.family]

    @property
    def names(self) -> Family:
        """Names of the tensors."""
        return FAMILIES[VARIANTS[self.variant][0] if self.variant else self.family]

    @property
    def published(self) -> tuple[str, ...]:
        """``stored``, or what the model is stored as; empty for a hybrid checkpoint."""
        return self.stored or tuple(filter(None, (self.model.stored,)))

    @property
    def layers(self) -> int:
        """Decoder layers; the MTP layer, if any, has this index."""
        return max((*self.moe_layers, *self.dense_layers)) + 1

    @property
    def width(self) -> int:
        """Hidden size of the model: twice the experts' where the family gives those a narrower one."""
        return self.hidden * (2 if self.model.latent else 1)


def bit_map(spec: Spec) -> dict[str, list[int]]:
    """The map in its JSON form: per mapped layer 4 (kept) or 3 (tail) for each expert."""
    rng = np.random.default_rng([spec.seed, 1])
    result = {}
    for layer in sorted(spec.moe_layers):
        kept = set(rng.permutation(spec.num_experts)[: spec.kept].tolist())
        key = f"{layer:02d}" if spec.map_keys == "zero_padded" else str(layer)
        result[key] = [KEPT_BITS if expert in kept else TAIL_BITS for expert in range(spec.num_experts)]
    return result
