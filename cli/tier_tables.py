"""Text and JSON of ``hybrid-pack plan``, and of what ``inspect --cards`` adds."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from hybrid_pack.cli.progress import counted, size
from hybrid_pack.cli.tables import table, tier_map
from hybrid_pack.inspection import LayerView
from hybrid_pack.io.bitmap import spans
from hybrid_pack.tiers import Budget, KeepFraction, Rule, TierPlan
from hybrid_pack.tiers.cards import Fit
from hybrid_pack.tiers.needs import Needs

Rows = list[Sequence[object]]


def _rule(rule: Rule, floor: int) -> str:
    if isinstance(rule, Budget):
        by = "share of its layer" if rule.rank_by == "share" else "raw saliency"
        return f"{size(rule.nbytes)} of weights a rank, by {by}, at least {floor} kept a layer"
    if isinstance(rule, KeepFraction):
        return f"{float(100 * rule.fraction):.4g} % of each layer"
    return f"{counted(rule.count, 'expert')} of each layer"


def _rule_json(rule: Rule, floor: int) -> dict[str, Any]:
    if isinstance(rule, Budget):
        return {"budget_bytes": rule.nbytes, "floor": floor, "rank_by": rule.rank_by}
    if isinstance(rule, KeepFraction):
        return {"keep_fraction": float(rule.fraction)}
    return {"keep": rule.count}


def _fit_json(fit: Fit) -> dict[str, Any]:
    return {**asdict(fit), "fits": fit.fits, "left": fit.left}


def needs_json(needs: Needs, cards: Sequence[Fit]) -> dict[str, Any]:
    """Bytes of every rank and what fits: part of ``plan --json``, and of ``inspect --cards --json``."""
    return {
        "topology": {
            "tensor_parallel": needs.topology.tensor_parallel,
            "expert_parallel": needs.topology.expert_parallel,
        },
        "intermediate_padded": needs.intermediate,
        "ranks": [{**asdict(rank), "experts": rank.experts, "total": rank.total} for rank in needs.ranks],
        "base": asdict(needs.base),
        "kv_cache": asdict(needs.kv),
        "cards": [_fit_json(fit) for fit in cards],
    }


def tiers_json(plan: TierPlan, cards: Sequence[Fit], out: Path | None) -> dict[str, Any]:
    """``plan --json``."""
    return {
        "source": plan.model.name,
        "out": None if out is None else str(out),
        "metric": plan.metric,
        "rule": _rule_json(plan.rule, plan.floor),
        "intermediate": plan.model.intermediate,
        "kept_format": plan.kept_format,
        "num_experts": plan.model.num_experts,
        "kept": {str(layer): list(kept) for layer, kept in plan.choice.kept.items()},
        "layers_all_kept": {
            str(layer): {"kept_format": split.kept_format, "in_map": layer in plan.bit_map}
            for layer, split in plan.fixed.items()
        },
        "kept_per_layer": dict(zip(("least", "median", "most"), plan.counts, strict=True)),
        "retained": asdict(plan.retained),
        "tied": [list(key) for key in plan.choice.tied],
        **needs_json(plan, cards),
        "notes": list(plan.notes),
    }


def _rank_rows(needs: Needs) -> Rows:
    """Ranks that are equal in sequence share a row."""
    rows: Rows = [("rank", "kept", "tail", "expert files", "base", "weights")]
    for sizes, ranks in groupby(needs.ranks, key=lambda r: (r.kept, r.tail, r.experts, r.base, r.total)):
        rows.append((spans(rank.rank for rank in ranks), *map(size, sizes)))
    return rows


def _tokens(fit: Fit, count: int | None) -> str:
    return "-" if not fit.fits else "not estimated" if count is None else f"{count:,}"


def _card_rows(cards: Sequence[Fit]) -> Rows:
    rows: Rows = [("cards", "memory", "left", "KV tokens BF16", "KV tokens FP8", "fits")]
    for fit in cards:
        left = size(fit.left) if fit.fits else f"{size(-fit.left)} short"
        tokens = (_tokens(fit, fit.tokens_bf16), _tokens(fit, fit.tokens_fp8))
        rows.append((f"{fit.cards}x{fit.name_gb}GB", size(fit.memory), left, *tokens, "yes" if fit.fits else "no"))
    return rows


def needs_text(needs: Needs, cards: Sequence[Fit], stored: int) -> list[str]:
    """Bytes of every rank, then what fits.

    Args:
        needs: Of the ranks.
        cards: At least one.
        stored: The intermediate size before padding.
    """
    topology, base, kv = needs.topology, needs.base, needs.kv
    padded = f"; intermediate {stored}, padded to {needs.intermediate}" if needs.intermediate != stored else ""
    whole = f"base tensors: {size(base.total)}, of which {size(base.whole)} whole on every rank, the rest split"
    cache = f"not estimated: {kv.why_not}"
    if kv.kind is not None:
        cache = f"{kv.bf16:,} bytes a token and rank in BF16, {kv.fp8:,} in FP8 ({kv.kind})"
    room = cards[0].needed - needs.largest.total
    fitting = f"one card a rank, {size(room)} left for context, activations and graphs; KV cache: {cache}"
    sizes = f"tp {topology.tensor_parallel}, ep {topology.expert_parallel}{padded}; {whole}"
    return [f"{sizes}\n{table(_rank_rows(needs))}", f"{fitting}\n{table(_card_rows(cards))}"]


def _retained(plan: TierPlan) -> str:
    share = plan.retained
    if share.overall is None or share.layer_mean is None or share.worst is None:
        return "nothing: all saliency is zero"
    worst = f"least {share.worst:.1%} in layer {share.worst_layer}"
    return f"{share.overall:.1%} of all saliency; of a layer's {share.layer_mean:.1%} on average, {worst}"


def _ties(plan: TierPlan) -> str:
    count = len(plan.choice.tied)
    return f"{counted(count, 'tail expert')} as salient as a kept one of a lower layer or id" if count else "none"


def tiers_text(plan: TierPlan, cards: Sequence[Fit], out: Path | None, src: str) -> str:
    """The whole of ``plan``."""
    least, middle, most = plan.counts
    experts = sum(map(len, plan.choice.kept.values()))
    all_experts = len(plan.choice.kept) * plan.model.num_experts
    share = f"{experts} of {counted(all_experts, 'expert')} ({experts / all_experts:.1%})"
    rows: Rows = [
        ("source", plan.model.name),
        ("saliency", plan.metric or "of a metric the file does not name"),
        ("rule", _rule(plan.rule, plan.floor)),
        ("layers", f"{len(plan.choice.kept)} chosen in: {spans(plan.choice.kept)}"),
        ("kept", f"{share} as {plan.kept_format.upper()}"),
        ("kept per layer", f"least {least}, median {middle:g}, most {most}"),
        ("retained", _retained(plan)),
        ("ties cut", _ties(plan)),
    ]
    name = plan.kept_format.upper()
    views = [
        LayerView(
            layer, tuple(e for e, b in enumerate(bits) if b == 4), tuple(e for e, b in enumerate(bits) if b == 3),
            name, True,
        )
        for layer, bits in plan.bit_map.items()
    ]  # fmt: skip
    parts = [
        table(rows, ""),
        *needs_text(plan, cards, plan.model.intermediate),
        tier_map(views, plan.model.num_experts),
        *(["\n".join(f"note: {note}" for note in plan.notes)] if plan.notes else []),
        "nothing was written; give --out FILE for the map" if out is None else _next(plan, out, src),
    ]
    return "\n\n".join(parts)


def _next(plan: TierPlan, out: Path, src: str) -> str:
    """The call that makes what was planned: every option that the sizes above depend on."""
    topology = plan.topology
    words = ["hybrid-pack", "convert", src, "--bit-map", str(out), "--out", "OUT", "--tp", topology.tensor_parallel]
    words += ["--ep", topology.expert_parallel] if topology.expert_parallel > 1 else []
    words += ["--kept-format", plan.kept_format] if plan.forced else []
    words += ["--pad"] if plan.pad else []
    return f"wrote {out}\nnext: {shlex.join(map(str, words))}"
