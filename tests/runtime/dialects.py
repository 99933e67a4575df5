"""Small checkpoints, one for each way sources store experts. H 256 and I 512 can be split by 8 and use both tile sets."""

from __future__ import annotations

from typing import Any

from hybrid_pack.synthetic import Spec


def spec(**changes: Any) -> Spec:
    """One mapped layer, 1, and the all-kept MTP layer 2."""
    return Spec(**{"intermediate": 512, "moe_layers": (1,), "dense_layers": (0,), "kept": 3, "vocab": 8, **changes})


DIALECTS = {
    "nvfp4": spec(),
    "power_of_two": spec(seed=1, second_scale="power_of_two", scalar_shape=(1,), input_scale=False),
    "mxfp4": spec(seed=2, kept_format="mxfp4", single_file=True),
    "kquant": spec(seed=3, kept_format="mxfp4", nf3_scales="e4m3_x16", family=5, shard_bytes=1 << 20),
    "deepseek_v4": spec(seed=4, kept_format="mxfp4", family=1, mtp_layer=False),
    "qwen": spec(seed=5, family=2, map_in="hf_quant", map_keys="zero_padded"),
    "one_kept": spec(seed=6, kept=1),
    "all_tail": spec(seed=7, kept=0, mtp_layer=False),
}
MAPPED, MTP = 1, 2
