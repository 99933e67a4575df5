"""Small models and saliency to plan with."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from hybrid_pack.tiers import Model, Saliency
from hybrid_pack.tiers.source import BaseTensor

BASE = (
    BaseTensor("model.embed_tokens.weight", (64, 128), 64 * 128 * 2),
    BaseTensor("model.layers.1.self_attn.q_proj.weight", (128, 128), 128 * 128 * 2),
    BaseTensor("model.layers.1.self_attn.kv_a_proj_with_mqa.weight", (64, 128), 64 * 128 * 2),
    BaseTensor("model.norm.weight", (128,), 256),
)


def model(**changes: Any) -> Model:
    """Layers 1 and 2 of four NVFP4 experts, hidden and intermediate size 128, no MTP layer."""
    fixed: dict[str, Any] = {
        "name": "small",
        "root": Path("small"),
        "config": {},
        "hidden": 128,
        "intermediate": 128,
        "num_experts": 4,
        "top_k": 1,
        "num_layers": 3,
        "layers": {1: "nvfp4", 2: "nvfp4"},
        "base": BASE,
        "notes": (),
    }
    return Model(**{**fixed, **changes})


def saliency_of(layers: dict[int, list[float]]) -> Saliency:
    return Saliency({layer: tuple(values) for layer, values in layers.items()}, "made up", "file")


def any_saliency(of: Model, seed: int = 0) -> Saliency:
    """Distinct numbers for every layer of a model."""
    rng = random.Random(seed)
    return saliency_of({layer: [rng.lognormvariate(0, 1) for _ in range(of.num_experts)] for layer in of.layers})
