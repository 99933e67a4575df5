"""Names of vLLM's modules. Imports nothing of vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_LAYER = re.compile(r"(?:^|\.)layers\.(0|[1-9][0-9]{0,5})(?=\.|$)")

PACKED: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""What vLLM's fused modules are stored as, where a model does not say (several leave out what they never match)."""


def layer_of(prefix: str) -> int | None:
    """The decoder layer a module belongs to, by the number checkpoints give it; None where it is in none.

    ``model.layers.61.mlp.experts`` is layer 61, also as the MTP layer of DeepSeek and GLM, whose numbers go on where
    the decoder's end. ``mtp.layers.0`` (Qwen) counts for itself and is no decoder layer: no pack holds it.
    """
    match = _LAYER.search(prefix)
    if match is None or any("mtp" in part for part in prefix[: match.start()].split(".")):
        return None
    return int(match[1])


def stack_of(prefix: str) -> str | None:
    """The list a module's decoder layer is in, with its dot: ``model.layers.``; None where it is in none."""
    match = _LAYER.search(prefix)
    return None if layer_of(prefix) is None or match is None else prefix[: match.start(1)]


_FUSED_TOO: Mapping[str, Sequence[str]] = {"qkv_proj": ("index_q_proj", "index_k_proj")}
"""What MiniMax-M3 fuses besides, in its layers with sparse attention; its mapping does not say so."""


def stored_names(prefix: str, packed: Mapping[str, Sequence[str]]) -> list[str]:
    """The modules of a checkpoint that vLLM fuses into one; the module itself where it is not fused."""
    parent, dot, last = prefix.rpartition(".")
    parts = packed.get(last) or PACKED.get(last)
    if not parts:
        return [prefix]
    more = [part for part in _FUSED_TOO.get(last, ()) if part not in parts]
    return [f"{parent}{dot}{part}" for part in (*parts, *more)]
