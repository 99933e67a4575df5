"""What quantising came to, for the manifest: by layer and tier, and what was lost, from finished files' records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from hybrid_pack.convert.encode import MXFP4_ADVICE, ROLES
from hybrid_pack.convert.journal import Record
from hybrid_pack.io.declared import BAD_DB, first_of, percent
from hybrid_pack.plan import Plan

DECIMALS = 3
"""Of an SQNR in dB."""

SMALL_SHARE = 0.1
"""Of a matrix's groups: fewer that are too small for any scale are no news, such as rows of a channel that is dead."""

Place = tuple[int, int, int, str]
"""Layer, expert, and a matrix by its place in the expert and its role."""


def sqnr_db(signal: float, error: float) -> float | None:
    """10 log10(signal / error), rounded; None where there is no error."""
    if error <= 0:
        return None
    return round(10 * math.log10(signal / error), DECIMALS) if signal > 0 else 0.0


def lost_notes(plan: Plan, records: Mapping[str, Record]) -> list[str]:
    """Warnings of matrices that are lost, or nearly, in experts whose own SQNR hides it.

    An expert's SQNR is of all its weights together, and small ones hardly count in it; but without its up matrix it
    gives nothing. Nor do they count in the matrix's SQNR, if a few of its weights are that much larger.
    """
    lost: set[Place] = set()
    weak: dict[Place, float] = {}
    small: dict[Place, str] = {}
    for shard in plan.shards:
        record = records[shard.path]
        for text, roles in record.get("lost", {}).items():  # a journal of an earlier version has none
            lost |= {(shard.layer, int(text), ROLES.index(role), role) for role in roles}
        for text, quantized in record["quantized"].items():
            whole = sqnr_db(quantized["signal"], quantized["error"])
            for role, sums in quantized.get("matrices", {}).items():
                own, place = sqnr_db(*sums), (shard.layer, int(text), ROLES.index(role), role)
                if own is not None and own < BAD_DB:
                    if whole is None or whole >= BAD_DB:
                        weak[place] = own
                elif told := _too_small(*quantized.get("small", {}).get(role, (0, 1, 0.0, 0.0))):
                    small[place] = told
    notes = []
    if lost:
        what = first_of([f"layer {layer} expert {expert} {role}" for layer, expert, _, role in sorted(lost)])
        number = "1 matrix is" if len(lost) == 1 else f"{len(lost):,} matrices are"
        notes.append(f"WARNING: {number} all zero to the kernel and not in the source, below the least scale: {what}")
    if weak:
        what = first_of([f"layer {at[0]} expert {at[1]} {at[3]} ({db:.2f} dB)" for at, db in sorted(weak.items())])
        number = "1 matrix" if len(weak) == 1 else f"{len(weak):,} matrices"
        notes.append(f"WARNING: {number} below {BAD_DB:g} dB, which the SQNR of the whole expert hides: {what}")
    if small:
        what = first_of([f"layer {at[0]} expert {at[1]} {at[3]} ({told})" for at, told in sorted(small.items())])
        number = "1 matrix" if len(small) == 1 else f"{len(small):,} matrices"
        notes.append(
            f"WARNING: little is left of the small weights of {number}, which want scales below the least there is "
            f"and hardly count in SQNR: {what}{_small_advice(plan, small)}"
        )
    return notes


def _too_small(number: int, groups: int, signal: float, error: float) -> str | None:
    """In words, what groups that want smaller scales come to, if it is much that was lost.

    Args:
        number: Of these groups.
        groups: Of the matrix.
        signal: Sum of squares of their weights.
        error: Of the differences.
    """
    own = sqnr_db(signal, error)
    if number < SMALL_SHARE * groups or own is None or own >= BAD_DB:
        return None
    return f"{percent(number, groups)} of its groups, at {own:.2f} dB"


def _small_advice(plan: Plan, places: Iterable[Place]) -> str:
    """What would hold them; nothing for the tail, which has one format."""
    layers = plan.source.layers
    made = {(layers[layer].kept_format, expert in layers[layer].kept) for layer, expert, _, _ in places}
    return f"; {MXFP4_ADVICE} holds those of kept experts" if ("nvfp4", True) in made else ""


def quantized_tiers(plan: Plan, records: Mapping[str, Record]) -> list[Record]:
    """An entry for each tier with quantised experts, in the order of the manifest."""
    experts: dict[tuple[int, str], dict[int, Record]] = {}
    for shard in plan.shards:
        for text, record in records[shard.path]["quantized"].items():
            expert = int(text)
            tier = experts.setdefault((shard.layer, "kept" if expert in shard.kept else "tail"), {})
            if expert in tier:
                tier[expert]["zero"] += record["zero"]  # each rank counts its own; the rest is of the whole expert
            else:
                tier[expert] = dict(record)
    return [_entry(plan, *key, found) for key, found in sorted(experts.items())]


def _entry(plan: Plan, layer: int, tier: str, found: Mapping[int, Record]) -> Record:
    ids = sorted(found)
    totals = {key: sum(found[e][key] for e in ids) for key in ("groups", "zero", "subnormal", "saturated")}
    chosen = plan.quantization
    method = "gptq" if tier == "tail" and chosen.hessians is not None else chosen.search
    gptq, rtn = (math.fsum(found[e]["on_hessians"][i] for e in ids) for i in range(2))
    return {
        "layer": layer,
        "tier": tier,
        "method": method,
        "sources": sorted({name for e in ids for name in found[e]["sources"]}),
        "experts": ids,
        "sqnr_db": [sqnr_db(found[e]["signal"], found[e]["error"]) for e in ids],
        "tier_sqnr_db": sqnr_db(*(math.fsum(found[e][key] for e in ids) for key in ("signal", "error"))),
        "gptq_to_rtn": (round(gptq / rtn, 4) if rtn > 0 else 1.0) if method == "gptq" else None,
        "groups": totals["groups"],
        "groups_zero_scale": totals["zero"],
        "scales_subnormal": totals["subnormal"],
        "scales_saturated": totals["saturated"],
    }
