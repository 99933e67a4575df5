"""Text and JSON of plans, conversions and inspections."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from hybrid_pack.cli.progress import counted, size
from hybrid_pack.convert import Conversion, Resources, Survey
from hybrid_pack.inspection import Inspection, LayerView, PackView, inspect_checkpoint
from hybrid_pack.io.bitmap import spans
from hybrid_pack.io.declared import differences, worst_of_tiers
from hybrid_pack.plan import Plan
from hybrid_pack.schemas.manifest import Report

MAP_COLUMNS = 64
SHADES = "·░▒▓█"
NUMBER = re.compile(r"-|[\d.,]+( [kMGT]?B)?")


def table(rows: Iterable[Sequence[object]], indent: str = "  ") -> str:
    """Rows in aligned columns; a column of nothing but numbers and sizes under its head is put to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    columns = range(max(map(len, cells)))
    widths = [max(len(row[i]) for row in cells if i < len(row)) for i in columns]
    numeric = [i > 0 and all(NUMBER.fullmatch(row[i]) for row in cells[1:] if i < len(row)) for i in columns]
    lines = (
        "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(row, widths, numeric, strict=False))
        for row in cells
    )
    return "\n".join(f"{indent}{line}".rstrip() for line in lines)


def tier_map(layers: Sequence[LayerView], num_experts: int) -> str:
    """A line for each layer; a cell is one or more neighbouring experts, darker where more of them are kept."""
    each = -(-num_experts // MAP_COLUMNS)
    lines = []
    for view in layers:
        kept = set(view.kept)
        cells = []
        for first in range(0, num_experts, each):
            group = range(first, min(first + each, num_experts))
            share = sum(e in kept for e in group) / len(group)
            cells.append(SHADES[0] if share == 0 else SHADES[max(1, round(share * 4))])
        split = f"{len(view.kept)} {view.kept_format} + {len(view.tail)} NF3" if view.kept else f"{len(view.tail)} NF3"
        split = split if view.stored is None else _stored(view.stored)
        errors = [
            f"{tier} {sqnr:.2f} dB"
            for tier, sqnr in (("kept", view.kept_sqnr_db), ("tail", view.tail_sqnr_db))
            if sqnr is not None
        ]
        lines.append(f"  {view.layer:>3} {''.join(cells)} {split}{'; ' if errors else ''}{', '.join(errors)}")
    legend = f"a cell is {each} experts" if each > 1 else "a cell is one expert"
    return "\n".join([f"tier map ({legend}; {SHADES[0]} all tail, {SHADES[4]} all kept)", *lines])


def _stored(stored: Mapping[str, int]) -> str:
    return " + ".join(f"{count} {kind}" for kind, count in stored.items())


def stored_text(layers: Sequence[LayerView]) -> str:
    """What experts are stored as, where no tiers are known; neighbours that are alike share a row."""
    rows = [
        (f"{spans(view.layer for view in views)}:", stored)
        for stored, views in groupby(layers, key=lambda view: _stored(view.stored or {}))
    ]
    return "\n".join(["experts as they are stored, by layer (there is no bit map yet)", table(rows)])


def worst_text(worst: Sequence[tuple[float, int, int, str]], indent: str = "") -> str:
    """The quantised experts that lost most."""
    rows: list[Sequence[object]] = [("worst experts", "layer", "expert", "SQNR")]
    rows += [(tier, layer, expert, f"{sqnr:.2f} dB") for sqnr, layer, expert, tier in worst]
    return table(rows, indent)


def errors_text(report: Report) -> list[str]:
    """SQNR of every layer and tier with quantised experts, and the worst experts; nothing where none were quantised."""
    found: dict[int, dict[str, str]] = {}
    for entry in report.experts_quantized:
        sqnr = "exact" if entry.tier_sqnr_db is None else f"{entry.tier_sqnr_db:.2f} dB"
        found.setdefault(entry.layer, {})[entry.tier] = f"{sqnr} ({entry.method}, {len(entry.experts)})"
    if not found:
        return []
    rows: list[Sequence[object]] = [("layer", "kept: SQNR (how, experts)", "tail: SQNR (how, experts)")]
    rows += [(layer, tiers.get("kept", "-"), tiers.get("tail", "-")) for layer, tiers in sorted(found.items())]
    return [table(rows), worst_text(worst_of_tiers(report), "  ")]


def _head(view: Inspection) -> list[Sequence[object]]:
    """What it is and where; of a pack also who made it."""
    if view.pack is None:
        return [(view.kind, view.name), ("bit map", view.bit_map_from or "none")]
    tiles = "x".join(map(str, view.topologies[0].tiles or ()))
    return [
        (view.kind, view.folder),
        ("source", view.name),
        ("made for", f"tp {view.pack.tensor_parallel}, ep {view.pack.expert_parallel}; tiles {tiles}"),
        ("made by", view.pack.created_by),
        ("abi", view.pack.abi),
        ("self digest", view.pack.self_digest),
    ]


def _topology_rows(view: Inspection) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = [("tp", "kept/rank", "tail/rank", "experts/rank", "tiles or reason")]
    for t in view.topologies:
        if t.kept_bytes is None or t.tail_bytes is None:
            rows.append((t.tp, "-", "-", "-", t.why_not or ""))
        else:
            tiles = "x".join(map(str, t.tiles or ()))
            rows.append((t.tp, size(t.kept_bytes), size(t.tail_bytes), size(t.kept_bytes + t.tail_bytes), tiles))
    return rows


def _pack_rows(pack: PackView) -> list[Sequence[object]]:
    """Sizes of all ranks; neighbours of equal sizes share a row."""
    rows: list[Sequence[object]] = [("rank", "kept/rank", "tail/rank", "experts/rank")]
    for sizes, ranks in groupby(pack.ranks, key=lambda r: (r.kept_bytes, r.tail_bytes)):
        rows.append((spans(r.rank for r in ranks), *map(size, (*sizes, sum(sizes)))))
    return rows


def _geometry(view: Inspection) -> str:
    padded = f", padded to {view.intermediate_padded}" if view.intermediate_padded != view.intermediate else ""
    experts = counted(view.num_experts, "expert")
    return f"hidden {view.hidden}, intermediate {view.intermediate}{padded}, {experts}, top-{view.top_k}"


def inspection_text(view: Inspection, *, with_map: bool = True, with_notes: bool = True) -> str:
    """The whole of ``inspect``."""
    rows: list[Sequence[object]] = [
        *_head(view),
        ("model", f"{view.model_type}, activation {view.activation}"),
        ("geometry", _geometry(view)),
        ("layers", f"{len(view.layers)} packed: {spans(v.layer for v in view.layers)}"),
        ("experts", ", ".join(f"{count} {kind}" for kind, count in view.expert_formats.items())),
        (
            "base",
            "; ".join(f"{kind}: {counted(n, 'tensor')}, {size(b)}" for kind, (n, b) in view.base_dtypes.items())
            or "none",
        ),
        ("base matrices", view.base_dialect),
        ("size", size(view.file_bytes)),
    ]
    parts = [table(rows, ""), table(_topology_rows(view) if view.pack is None else _pack_rows(view.pack))]
    if view.kind == "checkpoint":
        legal = (
            f"legal sizes: tp {', '.join(map(str, view.legal_tp)) or 'none'}; ep {', '.join(map(str, view.legal_ep))}"
        )
        parts.append(legal)
    if with_map and view.layers:
        undecided = all(layer.stored is not None and not layer.tail for layer in view.layers)
        parts.append(stored_text(view.layers) if undecided else tier_map(view.layers, view.num_experts))
    if view.pack is None:
        parts += [f"note: {note}" for note in view.notes if with_notes]
    else:
        if view.pack.worst_experts:
            parts.append(worst_text(view.pack.worst_experts))
        if view.pack.declared:
            parts.append("\n".join(f"by the report: {line}" for line in view.pack.declared))
    return "\n\n".join(parts)


def _rank_rows(plan: Plan) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = [("rank", "kept", "tail", "experts")]
    for rank in range(plan.topology.ranks):
        tiers = plan.rank_bytes(rank)
        rows.append((rank, size(tiers["kept"]), size(tiers["tail"]), size(sum(tiers.values()))))
    return rows


def _small(plan: Plan) -> int:
    return len(plan.copied) + len(plan.written) + 1  # the manifest


def _planned_source(plan: Plan) -> Inspection:
    """The source, with the size it is padded to."""
    return replace(inspect_checkpoint(plan.source), intermediate_padded=plan.intermediate)


def plan_json(plan: Plan, needs: Resources, found: Survey) -> dict[str, Any]:
    """``convert --dry-run --json``."""
    return {
        "source": _planned_source(plan).as_dict(),
        "topology": {
            "tensor_parallel": plan.topology.tensor_parallel,
            "expert_parallel": plan.topology.expert_parallel,
        },
        "layers": list(plan.layers),
        "layers_omitted": list(plan.omitted),
        "tiles": plan.geometry.tiles,
        "files": [
            *({"path": s.path, "bytes": s.nbytes} for s in plan.shards),
            *({"path": b.path, "bytes": b.nbytes} for b in plan.base),
        ],
        "ranks": [{"rank": r, **plan.rank_bytes(r)} for r in range(plan.topology.ranks)],
        "workers": needs.workers,
        "memory_bytes": needs.memory_bytes,
        "disk_bytes": needs.disk_bytes,
        "needed_bytes": found.space.needed,
        "reclaimed_bytes": found.space.reclaimed,
        "free_bytes": found.space.free,
        "complete": found.complete,
        "files_finished": sorted(found.done),
        "notes": plan.announcements,
    }


def plan_text(plan: Plan, needs: Resources, found: Survey, out: Path) -> str:
    """``convert --dry-run``."""
    space = found.space
    enough = "enough" if space.enough else "NOT ENOUGH"
    removed = f", {size(space.reclaimed)} removed first" if space.reclaimed else ""
    shards = counted(len(plan.shards), "expert shard")
    left_out = f"; left out: {spans(plan.omitted)}" if plan.omitted else ""
    rows: list[Sequence[object]] = [
        ("layers", f"{spans(plan.layers)}{left_out}"),
        ("files", f"{shards}, {counted(len(plan.base), 'base file')}, {_small(plan)} small"),
        ("tiles", "x".join(map(str, plan.geometry.tiles))),
        ("read", size(plan.source_bytes)),
        ("disk", f"{size(space.needed)} needed, {size(space.free)} free at {out}{removed}: {enough}"),
        ("memory", f"about {size(needs.memory_bytes)} with {counted(needs.workers, 'worker')}"),
    ]
    if found.complete:
        rows.append(("finished", "everything: the pack there is complete"))
    elif found.done:
        rows.append(("finished", f"{counted(len(found.done), 'weight file')}, kept from before"))
    head = inspection_text(_planned_source(plan), with_map=False, with_notes=False)
    title = f"plan for tp {plan.topology.tensor_parallel}, ep {plan.topology.expert_parallel}"
    notes = ["\n".join(f"note: {note}" for note in plan.announcements)] * bool(plan.announcements)
    return "\n\n".join([head, title, table(rows), table(_rank_rows(plan)), *notes, "dry run: nothing was written"])


def report_lines(report: Report) -> list[str]:
    """What conversion met that a person should know."""
    zero = report.groups_zero_scale
    warnings = [note for note in report.notes if note.startswith("WARNING")]
    return [f"{counted(zero, 'group')} with scale zero, kept exactly zero"] * bool(zero) + [
        *differences(report),
        *warnings,
    ]


def conversion_json(done: Conversion, out: Path) -> dict[str, Any]:
    """``convert --json``."""
    return {
        "out": str(out),
        "files_written": done.files_written,
        "files_kept": done.files_kept,
        "source_bytes": done.source_bytes,
        "seconds": done.seconds,
        "workers": done.workers,
        "self_digest": done.manifest.self_digest,
        "report": done.manifest.report.model_dump(mode="json"),
    }


def conversion_text(done: Conversion, plan: Plan, out: Path, src: str) -> str:
    """The summary after ``convert``."""
    if not done.files_written:
        files = counted(done.files_kept, "file")
        return (
            f"{out} is complete: its {files}, of the same source and options, have their size; verify proves the rest"
        )
    rate = f"{done.source_bytes / 1e9 / max(done.seconds, 1e-9):.2f} GB/s"
    workers = counted(done.workers, "worker")
    report = done.manifest.report
    rows: list[Sequence[object]] = [
        (
            "written",
            counted(done.files_written, "file") + (f", {done.files_kept} kept from before" if done.files_kept else ""),
        ),
        ("read", f"{size(done.source_bytes)} in {done.seconds:.1f} s ({rate}) with {workers}"),
        ("experts", f"{report.experts_kept} kept, {report.experts_tail} tail"),
    ]
    lines = [
        f"packed {plan.source.name} for tp {plan.topology.tensor_parallel}, "
        f"ep {plan.topology.expert_parallel} into {out}"
    ]
    lines += [table(rows), table(_rank_rows(plan)), *errors_text(report)]
    lines += [f"  {line}" for line in report_lines(report)]
    verify = shlex.join(["hybrid-pack", "verify", str(out), "--source", src])
    return "\n".join([*lines, f"next: {verify}"])
