"""The tensor names of routed experts, one line per family.

``{L}`` is the decoder layer, ``{E}`` the expert. A family without ``{E}`` stores all experts of a layer in one tensor
with a leading dimension of experts. A new family is a new line; nothing else needs to change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

GATE_UP_DOWN = (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj"))
W1_W3_W2 = (("gate", "w1"), ("up", "w3"), ("down", "w2"))
UP_DOWN = (("up", "up_proj"), ("down", "down_proj"))
STACKED = (("gate_up", "gate_up_proj"), ("down", "down_proj"))


@dataclass(frozen=True)
class Family:
    """How one family of models names its expert matrices.

    Attributes:
        models: Who uses it.
        prefix: Template of the name of an expert, or of all of a layer.
        projections: (role, name): gate, up and down; up and down alone where the experts have no gate; or ``gate_up``,
            both in one tensor, and down.
    """

    models: str
    prefix: str
    projections: tuple[tuple[str, str], ...]

    @property
    def fused(self) -> bool:
        """Whether one tensor holds all experts of a layer."""
        return "{E}" not in self.prefix

    @property
    def gated(self) -> bool:
        """Whether experts have a gate."""
        return self.roles != ("up", "down")

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles of the stored tensors, in the order of the table."""
        return tuple(role for role, _ in self.projections)

    @property
    def names(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(name for _, name in self.projections)


FAMILIES: tuple[Family, ...] = (
    Family("GLM-5, DeepSeek-V3, Qwen3, Kimi-K2", "model.layers.{L}.mlp.experts.{E}", GATE_UP_DOWN),
    Family("DeepSeek-V4", "layers.{L}.ffn.experts.{E}", W1_W3_W2),
    Family("Qwen3.5, Qwen3.6", "model.language_model.layers.{L}.mlp.experts.{E}", GATE_UP_DOWN),
    Family("MiniMax-M2, Mixtral", "model.layers.{L}.block_sparse_moe.experts.{E}", W1_W3_W2),
    Family("MiniMax-M3", "language_model.model.layers.{L}.block_sparse_moe.experts.{E}", W1_W3_W2),
    Family("Kimi-K3", "language_model.model.layers.{L}.block_sparse_moe.experts.{E}", GATE_UP_DOWN),
    Family("Kimi-K2.5", "language_model.model.layers.{L}.mlp.experts.{E}", GATE_UP_DOWN),
    Family("Gemma-4", "model.language_model.layers.{L}.experts.{E}", GATE_UP_DOWN),
    Family("Nemotron-3", "backbone.layers.{L}.mixer.experts.{E}", UP_DOWN),
    Family("Llama-4 by llm-compressor", "language_model.model.layers.{L}.feed_forward.experts.{E}", GATE_UP_DOWN),
    Family("Step-3.5 by llm-compressor", "model.layers.{L}.moe.experts.{E}", GATE_UP_DOWN),
    Family("gpt-oss, and models of families above saved in one tensor", "model.layers.{L}.mlp.experts", STACKED),
    Family("Qwen3.5, Qwen3.6, Qwen3-VL in one tensor", "model.language_model.layers.{L}.mlp.experts", STACKED),
    Family("Gemma-4 in one tensor", "model.language_model.layers.{L}.experts", STACKED),
    Family("Llama-4", "language_model.model.layers.{L}.feed_forward.experts", STACKED),
    Family("Step-3.5, Step-3.7", "model.layers.{L}.moe", GATE_UP_DOWN),
    Family("Llama-4, text only", "model.layers.{L}.feed_forward.experts", STACKED),
)

NOT_PACKED = re.compile(
    r"(^|\.)(mlp|ffn|mixer|moe|block_sparse_moe|feed_forward|layers\.\d+)\.experts\.|\.moe\.(gate|up|down)_proj"
)
"""Names that look like routed experts; one that no family matches is reported instead of skipped silently."""


@dataclass(frozen=True)
class ExpertName:
    """A parsed tensor name.

    Attributes:
        family: The line of the table that matched.
        layer: Decoder layer.
        expert: Global expert id; None where the tensor holds all of the layer.
        role: ``gate``, ``up``, ``down`` or ``gate_up``.
        field: Last part, such as ``weight_scale``; ``weight`` where a fused tensor has none.
    """

    family: Family
    layer: int
    expert: int | None
    role: str
    field: str


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[Family, re.Pattern[str], dict[str, str]], ...]:
    """(family, pattern of its tensors, role of each projection)."""
    number = "(0|[1-9][0-9]{0,5})"
    patterns = []
    for family in FAMILIES:
        prefix = re.escape(family.prefix).replace(r"\{L\}", number).replace(r"\{E\}", number)
        field = r"(?:[._]([A-Za-z0-9_]+))?" if family.fused else r"\.([A-Za-z0-9_]+)"
        roles = {name: role for role, name in family.projections}
        patterns.append((family, re.compile(rf"{prefix}\.({'|'.join(roles)}){field}"), roles))
    return tuple(patterns)


def parse(name: str) -> ExpertName | None:
    """The expert a tensor belongs to, or None for every other tensor."""
    if ".experts." not in name and ".moe." not in name:
        return None
    for family, pattern, roles in _patterns():
        match = pattern.fullmatch(name)
        if match:
            layer, *expert, projection, field = match.groups()
            number = int(expert[0]) if expert else None
            return ExpertName(family, int(layer), number, roles[projection], field or "weight")
    return None


def looks_like_expert(name: str) -> bool:
    """Whether a tensor that no family matched still looks like a routed expert's."""
    return NOT_PACKED.search(name) is not None


def likeliest_expert(names: Iterable[str]) -> str | None:
    """Of names no family matches, the one that looks most like a routed expert's; None where none does."""
    names = list(names)
    loose = (name for name in names if "expert" in name.lower() and "shared" not in name.lower())
    return next(filter(looks_like_expert, names), None) or next(loose, None)
