"""From a model, its saliency and a rule to a plan of tiers: which experts are kept, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from statistics import mean, median

from hybrid_pack.errors import DataError, UsageError
from hybrid_pack.io.bitmap import KEPT_BITS, TAIL_BITS, BitMap, spans
from hybrid_pack.sharding import QUANTISED_GROUP, Topology
from hybrid_pack.tiers.needs import Needs, needs_of
from hybrid_pack.tiers.saliency import Saliency, Scores, for_layers
from hybrid_pack.tiers.select import Choice, RankBy, count_of, floors, overall, per_layer, retained, shares
from hybrid_pack.tiers.sizing import RankBytes, Split, geometry_of, kept_cost
from hybrid_pack.tiers.source import FOUR_BIT, Model, default_kept_format, planned_layers


@dataclass(frozen=True)
class Keep:
    """The same number of kept experts in each layer."""

    count: int


@dataclass(frozen=True)
class KeepFraction:
    """The same fraction of each layer, to the nearest whole expert, halves up."""

    fraction: Fraction


@dataclass(frozen=True)
class Budget:
    """As many kept experts as fit a number of bytes on the fullest rank, the most salient of all layers first.

    Attributes:
        nbytes: Weights of a rank: expert files and base tensors.
        floor: Kept experts each layer has at least; None is the model's top-k.
        rank_by: ``share``: layers are compared by the share an expert has of its layer. ``raw``: by the numbers.
    """

    nbytes: int
    floor: int | None = None
    rank_by: RankBy = "share"


Rule = Keep | KeepFraction | Budget


@dataclass(frozen=True)
class Retained:
    """Share of the saliency that kept experts have.

    Attributes:
        overall: Of the sum over all layers; None where that is zero.
        layer_mean: Mean of the layers' own shares.
        worst: The smallest of these.
        worst_layer: Where it is.
    """

    overall: float | None
    layer_mean: float | None
    worst: float | None
    worst_layer: int | None


@dataclass(frozen=True)
class TierPlan(Needs):
    """A plan: what was chosen, and what ranks then need.

    Attributes:
        model: The source.
        metric: What the saliency is, by whoever made it.
        rule: What was asked for.
        pad: Whether ``convert`` must be told to pad for these sizes.
        kept_format: Format of the kept tier.
        forced: Whether ``convert`` must be told the kept format for these sizes.
        scores: Saliency of the planned layers.
        choice: Kept experts of these.
        fixed: Layers that are not chosen, everything kept, and whether the map must name them so.
        floor: Least kept experts of a layer that applied; 0 where none did.
        notes: Oddities that are no errors.
    """

    model: Model
    metric: str | None
    rule: Rule
    pad: bool
    kept_format: str
    forced: bool
    scores: Scores
    choice: Choice
    fixed: Mapping[int, Split]
    floor: int
    notes: tuple[str, ...]

    @property
    def bit_map(self) -> BitMap:
        """The map, as ``--bit-map`` takes it."""
        named = dict(self.choice.kept) | {i: s.kept for i, s in self.fixed.items() if _wide(self.model, i)}
        experts = range(self.model.num_experts)
        return {
            layer: tuple(KEPT_BITS if e in kept else TAIL_BITS for e in experts)
            for layer, kept in sorted((layer, frozenset(kept)) for layer, kept in named.items())
        }

    @property
    def counts(self) -> tuple[int, float, int]:
        """(least, median, most) kept experts of a planned layer."""
        counts = [len(kept) for kept in self.choice.kept.values()]
        return min(counts), median(counts), max(counts)

    @property
    def retained(self) -> Retained:
        """Share of the saliency the kept experts have."""
        layers = {i: share for i, share in retained(self.scores, self.choice.kept).items() if share is not None}
        total = math.fsum(value for values in self.scores.values() for value in values)
        if not layers:
            return Retained(None, None, None, None)
        kept = math.fsum(self.scores[i][e] for i, experts in self.choice.kept.items() for e in experts)
        worst = min(layers, key=lambda layer: (layers[layer], layer))
        return Retained(kept / total, mean(layers.values()), layers[worst], worst)


def _wide(model: Model, layer: int) -> bool:
    return model.layers[layer] not in FOUR_BIT


def _count(rule: Keep | KeepFraction, num_experts: int) -> int:
    if isinstance(rule, KeepFraction):
        if not 0 <= rule.fraction <= 1:
            found = float(rule.fraction)
            raise UsageError("not a fraction", where="--keep-fraction", expected="0 to 1", found=found)
        return count_of(rule.fraction, num_experts)
    if not 0 <= rule.count <= num_experts:
        raise UsageError("not a number of experts", where="--keep", expected=f"0 to {num_experts}", found=rule.count)
    return rule.count


def _floor(rule: Budget, model: Model) -> int:
    floor = min(model.top_k, model.num_experts) if rule.floor is None else rule.floor
    if not 0 <= floor <= model.num_experts:
        raise UsageError("not a number of experts", where="--floor", expected=f"0 to {model.num_experts}", found=floor)
    return floor


def _by_budget(
    rule: Budget, floor: int, scores: Scores, empty: tuple[RankBytes, ...], topology: Topology, cost: int
) -> Choice:
    """Fill the budget.

    Args:
        rule: The budget.
        floor: Least kept experts of a layer.
        scores: As given.
        empty: Ranks with nothing of the planned layers kept.
        topology: tp and ep.
        cost: Bytes one kept expert adds to the ranks that hold it.
    """
    compared = shares(scores) if rule.rank_by == "share" else scores
    num_experts = len(next(iter(scores.values())))
    block = num_experts // topology.expert_parallel
    fixed = [empty[ep * topology.tensor_parallel].total for ep in range(topology.expert_parallel)]
    needs = list(fixed)
    for _, expert in floors(compared, floor):
        needs[expert // block] += cost
    least = max(needs)
    if least > rule.nbytes:
        base = empty[0].base
        raise UsageError(
            f"too small even with {floor} kept experts a layer",
            where="--budget",
            expected=f"{least:,} bytes a rank or more ({base:,} of them base tensors)",
            found=f"{rule.nbytes:,}",
            hint="raise --budget or --tp" + (", or lower --floor" if max(fixed) <= rule.nbytes else ""),
        )
    room = [(rule.nbytes - nbytes) // cost for nbytes in fixed]
    return overall(compared, floor, room, lambda expert: expert // block)


def plan_tiers(
    model: Model,
    saliency: Saliency,
    rule: Rule,
    topology: Topology,
    *,
    kept_format: str | None = None,
    include_mtp: bool = False,
    pad: bool = False,
) -> TierPlan:
    """Choose the kept experts.

    Args:
        model: The source.
        saliency: Of every layer to plan.
        rule: How many are kept.
        topology: tp and ep the sizes are for.
        kept_format: ``nvfp4`` or ``mxfp4``; None is ``default_kept_format``.
        include_mtp: Choose in MTP layers too.
        pad: Pad the intermediate size where the topology cannot split it, as ``convert --pad``.

    Raises:
        DataError: Saliency that does not fit the model.
        UsageError: An illegal topology, a number out of range, a budget that is too small.
    """
    geometry = geometry_of(model.hidden, model.intermediate, model.num_experts, topology, gated=model.gated, pad=pad)
    layers = planned_layers(model, include_mtp)
    asked, kept_format = kept_format, kept_format or default_kept_format(model, layers)
    # Told nothing, convert goes by what each layer's kept experts are stored as, which differs in a mixed model.
    forced = asked is not None or (kept_format == "nvfp4" and any("mxfp4" in model.layers[i] for i in layers))
    scores, notes = for_layers(saliency, layers, model.layers, model.num_experts)
    everything = tuple(range(model.num_experts))
    fixed = {
        i: Split(everything, kept_format if forced else "nvfp4" if _wide(model, i) else kind)
        for i, kind in model.layers.items()
        if i not in layers
    }

    def needs(kept: Mapping[int, tuple[int, ...]]) -> Needs:
        splits = {i: Split(kept[i], kept_format) for i in layers} | fixed
        return needs_of(geometry, topology, model.num_experts, splits, model.base, model.config, model.num_layers)

    floor = 0
    if isinstance(rule, Budget):
        floor = _floor(rule, model)
        empty = needs(dict.fromkeys(layers, ())).ranks
        choice = _by_budget(rule, floor, scores, empty, topology, kept_cost(geometry, kept_format))
    else:
        choice = per_layer(scores, _count(rule, model.num_experts))
    if model.intermediate % QUANTISED_GROUP and any(len(ids) < model.num_experts for ids in choice.kept.values()):
        raise DataError(
            "no expert can become tail: NF3 has groups of columns that the intermediate size would cut",
            expected=f"a multiple of {QUANTISED_GROUP}",
            found=model.intermediate,
        )
    made = needs(choice.kept)
    assert not isinstance(rule, Budget) or made.largest.total <= rule.nbytes
    return TierPlan(
        model=model,
        metric=saliency.metric,
        rule=rule,
        topology=made.topology,
        intermediate=made.intermediate,
        ranks=made.ranks,
        base=made.base,
        kv=made.kv,
        pad=pad,
        kept_format=kept_format,
        forced=forced,
        scores=scores,
        choice=choice,
        fixed=fixed,
        floor=floor,
        notes=(*model.notes, *notes, *_notes(model, fixed, layers, kept_format)),
    )


def _notes(model: Model, fixed: Mapping[int, Split], layers: tuple[int, ...], kept_format: str) -> list[str]:
    notes = []
    for wide, says in ((False, "not in the map: they are packed with everything kept"), (True, "in the map all kept")):
        found = [i for i in fixed if _wide(model, i) == wide]
        if found:
            notes.append(f"MTP layer {spans(found)}: experts {says}; --include-mtp chooses among them too")
    other = [i for i in layers if not _wide(model, i) and model.layers[i] != kept_format]
    if other:
        notes.append(
            f"layer {spans(other)}: experts are stored as {model.layers[other[0]].upper()}, sizes are for "
            f"{kept_format.upper()} as asked"
        )
    return notes
