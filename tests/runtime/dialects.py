"""Small checkpoints, one for each way sources store experts, and packs of them.

H 256 and I 512 can be split by 8, and their ranks use both tile sets.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hybrid_pack.convert import convert
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.plan import make_plan
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec, write_checkpoint


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


class Packs:
    """Makes a source when it is first asked for, and a pack of it likewise."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def source(
        self, name: str, spec: Spec | None = None, quantization: dict[str, Any] | None = None, **config: Any
    ) -> Path:
        """A checkpoint of a dialect, or of a spec with keys of its config.json replaced."""
        root = self._root / name / "source"
        if not root.exists():
            write_checkpoint(root, spec or DIALECTS[name])
            document = json.loads((root / "config.json").read_text()) | config
            document["quantization_config"] = document.get("quantization_config", {}) | (quantization or {})
            (root / "config.json").write_text(json.dumps(document))
        return root

    def pack(self, name: str, tp: int = 1, ep: int = 1) -> Path:
        """A pack of a source made before, or of a dialect."""
        out = self._root / name / f"tp{tp}-ep{ep}"
        if not out.exists():
            convert(make_plan(open_checkpoint(self.source(name)), Topology(tp, ep)), out, workers=2)
        return out
