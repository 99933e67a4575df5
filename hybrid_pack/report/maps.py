"""The two maps of layers by experts: which tier, and how large the error."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from hybrid_pack.report.axes import column_ticks, framed, row_ticks
from hybrid_pack.report.data import LayerView, PackView, QuantizedView, Tier
from hybrid_pack.report.svg import heat_map
from hybrid_pack.report.text import counted, escaped

CLASSES = 8
"""Colours of an error map, from the worst (q0) to the best (q7)."""

CELL_PX = 28
"""Cells of small maps grow no larger."""


MIN_SPAN_DB = 0.5
"""Least span of a scale: differences that mean nothing do not fill it."""


def row_height(rows: int) -> int:
    """Pixels of a row: large for few layers, still to be told apart for a hundred."""
    return next(px for limit, px in ((4, 28), (12, 20), (40, 12), (100, 8), (1 << 31, 5)) if rows <= limit)


def embedded(value: Any) -> str:
    """JSON that can stand inside a script element."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def key(name: str, text: str) -> str:
    """A colour and what it means."""
    return f'<span class="key"><i class="{name}"></i>{text}</span>'


def _figure(name: str, drawing: str, layers: Sequence[int], experts: int, legend: str, data: dict[str, Any]) -> str:
    """A map with its axes, its legend and the controls that the script fills."""
    px = row_height(len(layers))
    plot = framed(
        "map-plot", f"{px * len(layers)}px", drawing, row_ticks(layers, px), column_ticks(range(experts)),
        ("layer", "expert"),
    )  # fmt: skip
    options = "".join(f"<option>{layer}</option>" for layer in layers)
    width = f' style="max-width:{CELL_PX * experts + 48}px"' if experts <= 40 else ""
    return (
        f'<figure class="map" id="{name}"><div{width}>{plot}</div><figcaption>{legend}</figcaption>'
        f'<div class="pick" hidden><label>Layer <select>{options}</select></label>'
        f'<label>Expert <input type="number" inputmode="numeric" min="0" max="{experts - 1}" value="0"></label>'
        f'<output aria-live="polite">Point at a cell, tap it, or choose one.</output></div>'
        f'<script type="application/json">{embedded({"experts": experts, "layers": list(layers), **data})}</script>'
        f"</figure>"
    )


def _hex_bits(layer: LayerView, experts: int) -> str:
    """A digit for four experts, the first in bit 0."""
    kept = set(layer.kept)
    return "".join(f"{sum((e + i in kept) << i for i in range(4)):x}" for e in range(0, experts, 4))


def tier_map(view: PackView) -> str:
    """Kept and tail experts of every layer."""
    kinds = {
        "tail": [layer.tail for layer in view.layers],
        "kept": [layer.kept if layer.kept_format == "NVFP4" else () for layer in view.layers],
        "mx": [layer.kept if layer.kept_format == "MXFP4" else () for layer in view.layers],
    }
    names = {"kept": "kept in NVFP4, 4 bits", "mx": "kept in MXFP4, 4 bits", "tail": "tail in NF3, 3 bits"}
    counts = {kind: sum(map(len, rows)) for kind, rows in kinds.items()}
    legend = "".join(key(kind, f"{names[kind]}: {counts[kind]:,}") for kind in names if counts[kind])
    words = ", ".join(f"{counts[kind]:,} {names[kind]}" for kind in names if counts[kind])
    label = escaped(f"Tier map, {counted(len(view.layers), 'layer')} by {counted(view.num_experts, 'expert')}: {words}")
    drawing = heat_map(label, view.num_experts, len(view.layers), kinds)
    data = {
        "kept": [_hex_bits(layer, view.num_experts) for layer in view.layers],
        "formats": [layer.kept_format for layer in view.layers],
    }
    return _figure("tier-map", drawing, [layer.layer for layer in view.layers], view.num_experts, legend, data)


def values_of(entries: Iterable[QuantizedView]) -> list[float]:
    """All finite SQNR, ascending."""
    return sorted(db for entry in entries for db in entry.sqnr_db.values() if db is not None)


def color_range(values: Sequence[float]) -> tuple[float, float]:
    """Bounds of the inner colours: a few outliers do not take the colours from all the others.

    To the hundredth that is shown, and at least ``MIN_SPAN_DB`` apart.

    Args:
        values: Ascending, at least one.
    """
    last = len(values) - 1
    low, high = round(values[round(last * 0.01)], 2), round(values[round(last * 0.99)], 2)
    if high - low < MIN_SPAN_DB:
        middle = (low + high) / 2
        low, high = round(middle - MIN_SPAN_DB / 2, 2), round(middle + MIN_SPAN_DB / 2, 2)
    return low, high


def color_class(value: float, low: float, high: float) -> int:
    """0 for the worst to 7 for the best; values that are written alike, to the hundredth, get one colour."""
    at, first, last = (round(100 * db) for db in (value, low, high))
    return min(CLASSES - 1, max(0, (at - first) * CLASSES // (last - first)))


def span_text(low: float, high: float) -> str:
    """``21.81 to 21.84 dB``: with more digits where two would make different values alike."""
    digits = next((d for d in (2, 3, 4) if f"{low:.{d}f}" != f"{high:.{d}f}"), 2)
    return " to ".join(dict.fromkeys(f"{db:.{digits}f}" for db in (low, high))) + " dB"


def _ramp(values: Sequence[float], low: float, high: float) -> str:
    """Legend of the colours of some values, ascending; of a span that fills no scale, the values too."""
    used = {color_class(value, low, high) for value in values}
    if len(used) == 1:
        return key(f"q{used.pop()}", span_text(values[0], values[-1]))
    swatches = "".join(f'<i class="q{i}"></i>' for i in range(CLASSES))
    digits = 1 if high - low >= 1 else 2
    ramp = f'<span class="ramp">≤ {low:.{digits}f} dB<span>{swatches}</span>≥ {high:.{digits}f} dB</span>'
    if values[-1] - values[0] < MIN_SPAN_DB:
        ramp += f"<span>all of {span_text(values[0], values[-1])}</span>"
    return ramp


def error_map(view: PackView, tier: Tier) -> str:
    """SQNR of every expert of a tier that was quantised; empty if none was."""
    by_layer: dict[int, dict[int, float | None]] = {}
    for entry in view.quantized:
        if entry.tier == tier:
            by_layer.setdefault(entry.layer, {}).update(entry.sqnr_db)
    if not by_layer:
        return ""
    layers = sorted(by_layer)
    values = values_of(entry for entry in view.quantized if entry.tier == tier)
    exact = sum(db is None for found in by_layer.values() for db in found.values())
    low, high = color_range(values) if values else (0.0, 1.0)
    rows: dict[str, list[list[int]]] = {name: [] for name in (*(f"q{i}" for i in range(CLASSES)), "exact")}
    for layer in layers:
        for name in rows:
            rows[name].append([])
        for expert, db in sorted(by_layer[layer].items()):
            rows["exact" if db is None else f"q{color_class(db, low, high)}"][-1].append(expert)
    span = span_text(values[0], values[-1]) if values else "all exact"
    total = len(values) + exact
    label = escaped(f"SQNR of {counted(total, 'expert')} of the {tier} tier in {counted(len(layers), 'layer')}, {span}")
    legend = _ramp(values, low, high) if values else ""
    if exact:
        legend += key("exact", f"exact: {exact:,}")
    if total < len(layers) * view.num_experts:
        legend += key("none", "not quantised here")
    by_cell = [
        [
            None if e not in found else "=" if (value := found[e]) is None else round(100 * value)
            for e in range(view.num_experts)
        ]
        for found in (by_layer[layer] for layer in layers)
    ]
    drawing = heat_map(label, view.num_experts, len(layers), rows)
    return _figure(f"errors-{tier}", drawing, layers, view.num_experts, legend, {"db": by_cell})
