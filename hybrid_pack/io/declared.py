"""What a pack says of itself: in which respects it is not its source, by the report in its manifest."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection

from hybrid_pack.io.bitmap import spans
from hybrid_pack.schemas.manifest import Report

TIERS = ("kept", "tail")
BAD_DB = 10.0
"""SQNR of an expert that nobody would want: NF3 of usual weights has 15, the worst seen in trained ones 13."""


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def declared(report: Report) -> tuple[str, ...]:
    """The differences, then the notes of the conversion; nothing where all was moved exactly."""
    return (*differences(report), *report.notes)


def worst_of_tiers(report: Report, count: int = 3) -> list[tuple[float, int, int, str]]:
    """The worst of each tier, kept first."""
    return [entry for tier in TIERS for entry in worst_experts(report, count, (tier,))]


def _percent(part: int, whole: int) -> str:
    share = 100 * part / whole
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
        middle = layers[len(layers) // 2][0]
        text = (
            f"{_count(experts, f'{tier} expert')} quantised from {sources} ({methods}): SQNR of a layer "
            f"{layers[0][0]:.2f} (layer {layers[0][1]}) to {layers[-1][0]:.2f}, median {middle:.2f} dB"
        )
        for sqnr, layer, expert, _ in worst_experts(report, 1, (tier,)):
            text += f"; worst expert {sqnr:.2f} dB, layer {layer} expert {expert}"
        shares = [(zero, "zero"), (subnormal, "subnormal"), (saturated, "saturated")]
        told = [f"{_percent(number, groups)} {what}" for number, what in shares if number]
        lines.append(text + (f"; scales: {', '.join(told)}" if told else ""))
        ratios = [entry.gptq_to_rtn for entry in entries if entry.gptq_to_rtn is not None]
        if ratios:
            lines.append(
                f"GPTQ of the {tier}: {sorted(ratios)[len(ratios) // 2]:.2f} times the error of rounding to nearest on "
                f"the same Hessians (median of {_count(len(ratios), 'layer')}, at most {max(ratios):.2f}), "
                "which SQNR does not weigh"
            )
        elif "weighted" in methods:
            lines.append(f"the {tier}'s scales are the best by importance of channels; SQNR does not weigh")
        bad = sum(sqnr is not None and sqnr < BAD_DB for entry in entries for sqnr in entry.sqnr_db)
        if bad:
            lines.append(f"WARNING: {_count(bad, f'{tier} expert')} below {BAD_DB:g} dB: its weights are mostly lost")
    return lines


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
            f"{_count(report.blocks_flushed, 'NVFP4 block')} too small for the kernel's scale byte, flushed to zero"
        )
    if report.scales_saturated:
        lines.append(f"{_count(report.scales_saturated, 'MXFP4 scale')} above the kernel's largest, saturated")
    if report.layers_omitted:
        lines.append(f"layers omitted, their experts are not in the pack: {spans(sorted(report.layers_omitted))}")
    return tuple(lines)
