"""The tensor names of routed experts, one line per family.

``{L}`` is the decoder layer, ``{E}`` the expert. A new family is a new line; nothing else needs to change.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

Projections = tuple[str, str, str]
GATE_UP_DOWN: Projections = ("gate_proj", "up_proj", "down_proj")
W1_W3_W2: Projections = ("w1", "w3", "w2")


@dataclass(frozen=True)
class Family:
    """How one family of models names its expert matrices.

    Attributes:
        models: Who uses it.
        prefix: Template of an expert's name.
        projections: Names of gate, up and down.
    """

    models: str
    prefix: str
    projections: Projections


FAMILIES: tuple[Family, ...] = (
    Family("GLM-5, DeepSeek-V3, Qwen3, Kimi-K2", "model.layers.{L}.mlp.experts.{E}", GATE_UP_DOWN),
    Family("DeepSeek-V4", "layers.{L}.ffn.experts.{E}", W1_W3_W2),
    Family("Qwen3.5, Qwen3.6", "model.language_model.layers.{L}.mlp.experts.{E}", GATE_UP_DOWN),
    Family("MiniMax-M2, Mixtral", "model.layers.{L}.block_sparse_moe.experts.{E}", W1_W3_W2),
    Family("MiniMax-M3", "language_model.model.layers.{L}.block_sparse_moe.experts.{E}", W1_W3_W2),
    Family("Kimi-K3", "language_model.model.layers.{L}.block_sparse_moe.experts.{E}", GATE_UP_DOWN),
    Family("Kimi-K2.5", "language_model.model.layers.{L}.mlp.experts.{E}", GATE_UP_DOWN),
    Family("Gemma-4", "model.language_model.layers.{L}.experts.{E}", GATE_UP_DOWN),
)

PROJECTION_ROLES = ("gate", "up", "down")

NOT_PACKED = re.compile(r"(^|\.)(mlp|ffn|mixer|block_sparse_moe|feed_forward|layers\.\d+)\.experts\.")
"""Names that look like routed experts; one that no family matches is reported instead of skipped silently."""


@dataclass(frozen=True)
class ExpertName:
    """A parsed tensor name.

    Attributes:
        family: The line of the table that matched.
        layer: Decoder layer.
        expert: Global expert id.
        role: ``gate``, ``up`` or ``down``.
        field: Last part, such as ``weight_scale``.
    """

    family: Family
    layer: int
    expert: int
    role: str
    field: str


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[Family, re.Pattern[str]], ...]:
    number = "(0|[1-9][0-9]{0,5})"
    return tuple(
        (
            family,
            re.compile(
                re.escape(family.prefix).replace(r"\{L\}", number).replace(r"\{E\}", number)
                + rf"\.({'|'.join(family.projections)})\.([A-Za-z0-9_]+)"
            ),
        )
        for family in FAMILIES
    )


def parse(name: str) -> ExpertName | None:
    """The expert a tensor belongs to, or None for every other tensor."""
    if ".experts." not in name:
        return None
    for family, pattern in _patterns():
        match = pattern.fullmatch(name)
        if match:
            layer, expert, projection, field = match.groups()
            return ExpertName(
                family, int(layer), int(expert), PROJECTION_ROLES[family.projections.index(projection)], field
            )
    return None


def looks_like_expert(name: str) -> bool:
    """Whether a tensor that no family matched still looks like a routed expert's."""
    return NOT_PACKED.search(name) is not None
