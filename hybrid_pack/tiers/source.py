"""What planning needs of a checkpoint. With ``decided`` the only module here that knows how an opened one looks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_pack.errors import DataError, UsageError
from hybrid_pack.io.bitmap import spans
from hybrid_pack.io.checkpoint import Checkpoint
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.shards import Located
from hybrid_pack.tiers.measure import measure_of
from hybrid_pack.tiers.saliency import Saliency
from hybrid_pack.tiers.weights import saliency_from_weights

FOUR_BIT = frozenset({"nvfp4", "mxfp4"})
"""Stored formats that are kept as they are; a layer of them that no map names is packed with everything kept."""


@dataclass(frozen=True)
class BaseTensor:
    """A tensor that is no packed expert's."""

    name: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Model:
    """A source as planning sees it.

    Attributes:
        name: Hub id or folder name.
        root: Its folder.
        config: config.json with ``text_config`` laid over it.
        hidden: Width the experts read and write.
        intermediate: Their intermediate size.
        num_experts: Routed experts in a layer.
        top_k: Experts a token visits.
        num_layers: Decoder layers without MTP layers; 0 where the config does not say.
        layers: Layers with routed experts and the format these are stored in, MTP layers too.
        base: Every other tensor.
        notes: Oddities that are no errors.
        gated: Whether experts have a gate.
    """

    name: str
    root: Path
    config: Mapping[str, Any]
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    num_layers: int
    layers: Mapping[int, str]
    base: tuple[BaseTensor, ...]
    notes: tuple[str, ...]
    gated: bool = True

    @property
    def mtp(self) -> tuple[int, ...]:
        """Layers past the decoder's last: they predict further tokens and have experts of their own."""
        return tuple(layer for layer in sorted(self.layers) if 0 < self.num_layers <= layer)


def decoder_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json with ``text_config`` laid over it."""
    nested = raw.get("text_config")
    return {**raw, **nested} if isinstance(nested, Mapping) else raw


def base_tensors(located: Iterable[Located]) -> tuple[BaseTensor, ...]:
    """What is counted of tensors that stay as they are."""
    return tuple(BaseTensor(t.header.name, t.header.shape, t.header.nbytes) for t in located)


def _stored(checkpoint: Checkpoint, index: int) -> str:
    """Format the experts of a layer are stored in."""
    formats = {expert: {m.format.name for m in e.matrices} for expert, e in checkpoint.layers[index].experts.items()}
    squeezed = next((expert for expert, names in formats.items() if "nf3" in names), None)
    if squeezed is not None:
        raise DataError(
            f"layer {index} expert {squeezed} is NF3 already: there is nothing left to choose",
            where=checkpoint.root,
            expected="experts that are NVFP4, MXFP4 or wider",
            hint="plan from the checkpoint that this one was made of",
        )
    stored = sorted(set().union(*formats.values()))
    return stored[0] if len(stored) == 1 else "+".join(stored)


def read_model(checkpoint: Checkpoint) -> Model:
    """Take from an opened checkpoint what planning needs.

    Raises:
        DataError: No layer whose experts could be planned, or experts that are NF3 already.
    """
    config = checkpoint.config
    if not checkpoint.layers:
        raise DataError(
            "no layer whose experts can be planned",
            where=checkpoint.root,
            hint=next((n for n in checkpoint.notes if "stay in the base" in n), None),
        )
    return Model(
        name=checkpoint.name,
        root=checkpoint.root,
        config=decoder_config(config.raw),
        hidden=checkpoint.hidden,
        intermediate=checkpoint.intermediate,
        num_experts=config.num_experts,
        top_k=config.top_k,
        num_layers=config.num_layers,
        layers={index: _stored(checkpoint, index) for index in sorted(checkpoint.layers)},
        base=base_tensors(checkpoint.base),
        notes=checkpoint.notes,
        gated=checkpoint.gated,
    )


def planned_layers(model: Model, include_mtp: bool) -> tuple[int, ...]:
    """Layers whose experts are chosen: all with experts, MTP layers only where asked for.

    Raises:
        UsageError: None is left.
    """
    layers = tuple(layer for layer in sorted(model.layers) if include_mtp or layer not in model.mtp)
    if not layers:
        raise UsageError(
            "only MTP layers have experts", where=model.name, found=spans(model.mtp), hint="give --include-mtp"
        )
    return layers


def default_kept_format(model: Model, layers: Iterable[int]) -> str:
    """The 4-bit format all layers to choose from are stored in, else NVFP4."""
    stored = {model.layers[layer] for layer in layers}
    return stored.pop() if len(stored) == 1 and stored <= FOUR_BIT else "nvfp4"


def weights_saliency(
    checkpoint: Checkpoint, model: Model, kept_format: str | None = None, include_mtp: bool = False
) -> Saliency:
    """What ``--from-weights`` ranks experts by, see ``tiers.weights``. Unlike all else here it reads payloads.

    Args:
        checkpoint: The source, its payloads at hand.
        model: The same.
        kept_format: As for ``plan_tiers``.
        include_mtp: Likewise.

    Raises:
        DataError: Weights that are no numbers.
    """
    layers = planned_layers(model, include_mtp)
    with TensorReader() as reader:
        measure = measure_of(checkpoint, kept_format or default_kept_format(model, layers), reader)
        return saliency_from_weights(layers, model.num_experts, measure, str(checkpoint.root))
