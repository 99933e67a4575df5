"""What quantising came to, for the manifest: by layer and tier, from the records of finished files."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hybrid_pack.convert.journal import Record
from hybrid_pack.plan import Plan

DECIMALS = 3
"""Of an SQNR in dB."""


def sqnr_db(signal: float, error: float) -> float | None:
    """10 log10(signal / error), rounded; None where there is no error."""
    if error <= 0:
        return None
    return round(10 * math.log10(signal / error), DECIMALS) if signal > 0 else 0.0


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
