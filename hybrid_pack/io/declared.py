"""What a pack says of itself: in which respects it is not its source, by the report in its manifest."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from statistics import median

from hybrid_pack.io.bitmap import spans
from hybrid_pack.schemas.manifest import QuantizedTier, Report

TIERS = ("kept", "tail")
BAD_DB = 10.0
"""SQNR of an expert that nobody would want: NF3 of usual weights has 15, the worst seen in trained ones 13."""

LEAST_PERCENT = 0.01
"""The smallest share that is given in digits."""

NAMED = 4
"""Places that a line names before it counts the rest."""
TOO_GOOD = 0.03
"""GPTQ's error over that of rounding to nearest that no inputs of a model gave: trained ones 0.31, autoregressive ones
of 0.99 0.038; Hessians of a sixteenth as many tokens as channels, which have that rank, gave 0.022."""
_TOO_LARGE = "saturated (weights too large for the largest scale)"
_ENDS = (
    ("scales_saturated", _TOO_LARGE),
    ("scales_subnormal", "subnormal (weights so small that a scale has few bits or one)"),
    ("groups_zero_scale", "zero (weights all zero, or too small for the smallest scale)"),
)
"""What a scale at an end of its range means."""


def first_of(places: Sequence[str]) -> str:
    """The first few of them, and how many more."""
    more = f" and {len(places) - NAMED:,} more" if len(places) > NAMED else ""
    return ", ".join(places[:NAMED]) + more


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def declared(report: Report) -> tuple[str, ...]:
    """The differences, then the notes of the conversion; nothing where all was moved exactly."""
    return (*differences(report), *report.notes)


def worst_of_tiers(report: Report, count: int = 3) -> list[tuple[float, int, int, str]]:
    """The worst of each tier, kept first."""
    return [entry for tier in TIERS for entry in worst_experts(report, count, (tier,))]


def percent(part: int, whole: int) -> str:
    """Two digits; a handful among millions is less than a number of percents can say."""
    share = 100 * part / whole
    if share < LEAST_PERCENT:
        return f"below {LEAST_PERCENT} %"
    return f"{share:.0f} %" if share >= 10 else f"{share:.2g} %"


def worst_experts(report: Report, count: int, tiers: Collection[str] = TIERS) -> list[tuple[float, int, int, str]]:
    """(SQNR in dB, layer, expert, tier) of the quantised experts that lost most, worst first."""
    found = (
        (sqnr, entry.layer, expert, entry.tier)
        for entry in report.experts_quantized
        for expert, sqnr in zip(entry.experts, entry.sqnr_db, strict=True)
        if sqnr is not None and entry.tier in tiers
    )
    return heapq.nsmallest(count, found)


def _layer_errors(layers: list[tuple[float, int]]) -> str:
    """SQNR of layers, ascending (SQNR in dB, layer); infinite where nothing was lost."""
    (worst, layer), (best, _), middle = layers[0], layers[-1], median(sqnr for sqnr, _ in layers)
    if worst == math.inf:
        return "exactly, in every layer"
    top, most = ("exact" if sqnr == math.inf else f"{sqnr:.2f}" for sqnr in (best, middle))
    return f"SQNR of a layer {worst:.2f} (layer {layer}) to {top}, median {most}{'' if most == 'exact' else ' dB'}"


def quantized_lines(report: Report) -> list[str]:
    """For each tier: how many experts were quantised, from what and how, errors of layers and of the worst expert."""
    lines = []
    for tier in TIERS:
        entries = [entry for entry in report.experts_quantized if entry.tier == tier]
        if not entries:
            continue
        experts = sum(len(entry.experts) for entry in entries)
        sources = "+".join(sorted({name.upper() for entry in entries for name in entry.sources}))
        methods = ", ".join(sorted({entry.method for entry in entries}))
        layers = sorted((math.inf if e.tier_sqnr_db is None else e.tier_sqnr_db, e.layer) for e in entries)
        groups = sum(entry.groups for entry in entries)
        zero, subnormal, saturated = (
            sum(getattr(entry, name) for entry in entries)
            for name in ("groups_zero_scale", "scales_subnormal", "scales_saturated")
        )
        text = f"{_count(experts, f'{tier} expert')} quantised from {sources} ({methods}): {_layer_errors(layers)}"
        for sqnr, layer, expert, _ in worst_experts(report, 1, (tier,)):
            text += f"; worst expert {sqnr:.2f} dB, layer {layer} expert {expert}"
        shares = [(zero, "zero"), (subnormal, "subnormal"), (saturated, "saturated")]
        told = [f"{percent(number, groups)} {what}" for number, what in shares if number]
        lines.append(text + (f"; scales: {', '.join(told)}" if told else ""))
        ratios = [entry.gptq_to_rtn for entry in entries if entry.gptq_to_rtn is not None]
        if ratios:
            lines.append(
                f"GPTQ of the {tier}: {median(ratios):.2f} times the error of rounding to nearest on "
                f"the same Hessians (median of {_count(len(ratios), 'layer')}, at most {max(ratios):.2f}), "
                "which SQNR does not weigh"
            )
        elif "weighted" in methods:
            lines.append(f"the {tier}'s scales are the best by importance of channels; SQNR does not weigh")
        lines += _too_good(entries) + _lost(entries)
    return lines


def _too_good(entries: Sequence[QuantizedTier]) -> list[str]:
    """A warning of Hessians by which nearly every channel follows from the others.

    Only the worst: a Hessian of fewer tokens than channels has as low a rank, and fits those tokens alone, long before
    this ratio tells.
    """
    found = [e.layer for e in entries if e.gptq_to_rtn is not None and e.gptq_to_rtn < TOO_GOOD]
    if not found:
        return []
    return [
        f"WARNING: GPTQ of {_layers(found)}: below {TOO_GOOD} times the error of rounding to nearest is no success: "
        "by such Hessians nearly every channel follows from the others, as it seems where far fewer tokens were seen "
        "than there are channels; on other tokens errors may be larger than without GPTQ. Collect them over more text"
    ]


def _layers(numbers: Sequence[int]) -> str:
    return f"layer{'s' if len(numbers) > 1 else ''} {spans(sorted(numbers))}"


def _lost(entries: Sequence[QuantizedTier]) -> list[str]:
    """A warning that names the experts of a tier that are far from the source's, and why as far as scales tell."""
    bad = sorted(
        (sqnr, entry.layer, expert)
        for entry in entries
        for expert, sqnr in zip(entry.experts, entry.sqnr_db, strict=True)
        if sqnr is not None and sqnr < BAD_DB
    )
    if not bad:
        return []
    named = first_of([f"layer {layer} expert {expert} ({sqnr:.2f})" for sqnr, layer, expert in bad])
    return [
        f"WARNING: {_count(len(bad), f'{entries[0].tier} expert')} below {BAD_DB:g} dB, far from the source's "
        f"weights: {named}; "
        f"{_reason(entries, {layer for _, layer, _ in bad}, len(bad))}"
    ]


def _reason(entries: Sequence[QuantizedTier], layers: Collection[int], bad: int) -> str:
    """Why the experts below ``BAD_DB`` of these layers are: counts are of a layer's tier, not of an expert.

    A few groups of small weights are no reason, but a single one of weights that are too large can be.
    """
    theirs = [entry for entry in entries if entry.layer in layers]
    tier, groups = theirs[0].tier, sum(entry.groups for entry in theirs)
    least = 0.01 * groups * bad / sum(len(entry.experts) for entry in theirs)  # of the experts' own groups
    counts = {what: number for key, what in _ENDS if (number := sum(getattr(entry, key) for entry in theirs))}
    many = [f"{percent(number, groups)} {what}" for what, number in counts.items() if number >= least]
    subject = f"of the {tier} scales of {_layers(sorted(layers))} are"
    saturated = counts.get(_TOO_LARGE, 0)
    if many and not 0 < saturated < least:
        return f"{subject} {', '.join(many)}"
    if saturated:
        single = f"{percent(saturated, groups)} {_TOO_LARGE}, and one such group can be all of the error"
        return f"{subject} {', '.join((*many, single))}" + ("" if many else f"; or else {_other_reason(theirs)}")
    if tier == "kept":  # MXFP4's scales are not counted, nor are NVFP4's that were lifted
        return f"counts of scales do not tell why: {_other_reason(theirs)}"
    return f"{'nearly all ' if counts else ''}scales are within range: {_other_reason(theirs)}"


def _other_reason(entries: Sequence[QuantizedTier]) -> str:
    """Why experts may be far from the source's that no count of scales explains."""
    if any(entry.gptq_to_rtn is not None for entry in entries):
        return "GPTQ minimises the error on the Hessians, which may be of too few tokens"
    apart = "the weights of a group differ too much in size for the format"
    return f"{apart}, or are too small for its smallest scale" if entries[0].tier == "kept" else apart


def differences(report: Report) -> tuple[str, ...]:
    """A line for each kind of difference."""
    lines = []
    if report.experts_requantized:
        worst = max(report.experts_requantized, key=lambda entry: entry.worst_relative_error)
        lines.append(
            f"{_count(len(report.experts_requantized), 'expert')} requantised, worst relative scale error "
            f"{worst.worst_relative_error:.2g} in layer {worst.layer} expert {worst.expert}"
        )
    lines += quantized_lines(report)
    if report.experts_cast:
        lines.append(f"{_count(report.experts_cast, 'expert')} of MXFP4 are NVFP4 now, with the same values")
    if report.blocks_flushed:
        lines.append(
            f"{_count(report.blocks_flushed, 'kept block')} too small for the kernel beside the largest of the "
            "matrix, flushed to zero"
        )
    if report.scales_saturated:
        lines.append(f"{_count(report.scales_saturated, 'MXFP4 scale')} above the kernel's largest, saturated")
    if report.layers_omitted:
        lines.append(f"layers omitted, their experts are not in the pack: {spans(sorted(report.layers_omitted))}")
    return tuple(lines)
