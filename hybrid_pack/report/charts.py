"""Charts beside the maps: bytes of ranks, error by layer, histograms of scales."""

from __future__ import annotations

import math
from itertools import groupby

from hybrid_pack.report.axes import Tick, column_ticks, framed, nice_step
from hybrid_pack.report.data import TIERS, PackView, RankView, Tier
from hybrid_pack.report.maps import MIN_SPAN_DB, key
from hybrid_pack.report.scales import Histogram, Scales
from hybrid_pack.report.svg import band, bars, line, line_chart
from hybrid_pack.report.text import counted, escaped, size

RANKS_SHOWN = 32
"""Above that, neighbours of equal sizes share a bar."""


def _rank_groups(view: PackView) -> list[list[RankView]]:
    if len(view.ranks) <= RANKS_SHOWN:
        return [[rank] for rank in view.ranks]
    alike = groupby(view.ranks, lambda r: (r.kept_bytes, r.tail_bytes, r.shards_here == r.shards))
    return [list(group) for _, group in alike]


def rank_bars(view: PackView) -> str:
    """A stacked bar for every rank."""
    most = view.largest_rank.nbytes
    rows = []
    for group in _rank_groups(view):
        rank = group[0]
        name = f"rank {rank.rank}" if len(group) == 1 else f"ranks {rank.rank}–{group[-1].rank}, each"
        whole = rank.shards_here == rank.shards
        here = "" if whole else f", {rank.shards_here or 'none'} of {rank.shards} files here"
        label = f"{name}: {size(rank.kept_bytes)} kept, {size(rank.tail_bytes)} tail{here}"
        parts = "".join(
            f'<i class="{tier}" style="width:{100 * rank.tier_bytes(tier) / most:.3f}%"></i>'
            for tier in TIERS
            if rank.tier_bytes(tier)
        )
        rows.append(
            f'<div class="{"here" if whole else "away"}"><span>{name}</span>'
            f'<div class="bar" role="img" aria-label="{label}">{parts}</div><span>{size(rank.nbytes)}</span></div>'
        )
    legend = ""
    for tier in TIERS:
        sizes = [rank.tier_bytes(tier) for rank in view.ranks]
        if max(sizes):
            most_or_all = "" if min(sizes) == max(sizes) else " at most"
            legend += key(tier, f"{view.tier_name(tier)}: {size(max(sizes))} a rank{most_or_all}")
    if len(view.ranks_here) < len(view.ranks):
        legend += "<span>fainter: not all of its files are in this folder</span>"
    return f'<figure><div class="ranks">{"".join(rows)}</div><figcaption>{legend}</figcaption></figure>'


Point = tuple[int, float, float, float]
"""(position of the layer, of all its experts together, worst expert, best expert); dB."""


def _tier_points(view: PackView, tier: Tier) -> list[Point]:
    at = {layer.layer: i for i, layer in enumerate(view.layers)}
    points = []
    for entry in view.quantized:
        found = [db for db in entry.sqnr_db.values() if db is not None]
        if entry.tier == tier and found and entry.tier_sqnr_db is not None:
            points.append((at[entry.layer], entry.tier_sqnr_db, min(found), max(found)))
    return sorted(points)


def error_lines(view: PackView) -> str:
    """SQNR of each layer's tiers, with the span of its experts; empty where every difference is zero."""
    points = {tier: found for tier in TIERS if (found := _tier_points(view, tier))}
    if not points:
        return ""
    every = [value for found in points.values() for point in found for value in point[1:]]
    step = nice_step(max(max(every) - min(every), MIN_SPAN_DB), 4)
    low, high = math.floor(min(every) / step) * step, math.ceil(max(every) / step) * step
    while high - low < MIN_SPAN_DB:
        low, high = low - step, high + step

    def y(value: float) -> float:
        return (high - value) / (high - low)

    marks = ""
    for tier, found in points.items():
        # A layer without such experts interrupts the line.
        for _, run in groupby(enumerate(found), lambda pair: pair[1][0] - pair[0]):
            part = [point for _, point in run]
            x = [(point[0] + 0.5) / len(view.layers) for point in part]
            marks += band(tier, [(at, y(best), y(worst)) for at, (_, _, worst, best) in zip(x, part, strict=True)])
            marks += line(tier, [(at, y(point[1])) for at, point in zip(x, part, strict=True)])
    digits = 0 if step >= 1 else 1 if step >= 0.1 else 2
    count = round((high - low) / step)
    left: list[Tick] = [(i / count, f"{high - i * step:.{digits}f}") for i in range(count + 1)]
    rules = "".join(f'<div class="rule" style="top:{100 * at:.2f}%"></div>' for at, _ in left[:-1])
    worst = {tier: min(found, key=lambda point: point[2]) for tier, found in points.items()}
    words = "; ".join(
        f"{view.tier_name(tier)} worst expert {point[2]:.2f} dB in layer {view.layers[point[0]].layer}"
        for tier, point in worst.items()
    )
    chart = line_chart(escaped(f"SQNR by layer: {words}"), marks)
    plot = framed(
        "chart", "220px", rules + chart, left, column_ticks([layer.layer for layer in view.layers]), ("dB", "layer")
    )
    styles = {"kept": "full line", "tail": "dashed line"}
    legend = "".join(
        key("kept" if tier == "kept" else "edge", f"{view.tier_name(tier)}, {styles[tier]}") for tier in points
    )
    return (
        f'<figure id="error-lines">{plot}<figcaption>{legend}<span>shaded: from the worst expert to the best</span>'
        f"</figcaption></figure>"
    )


def histograms(view: PackView, scales: Scales) -> str:
    """A small chart for each tier, format and matrix, all over the same range."""
    found = scales.histograms
    filled = [h for h in found if h.counts]
    low = min((math.floor(h.first / h.per_octave) for h in filled), default=0)
    high = max((math.ceil((h.first + len(h.counts)) / h.per_octave) for h in filled), default=1)
    return f'<div class="many">{"".join(_histogram(view, h, low, high) for h in found)}</div>'


def _share(part: int, whole: int) -> str:
    percent = 100 * part / whole
    return f"{percent:.2g} %" if percent < 10 else f"{percent:.0f} %"


def _histogram(view: PackView, found: Histogram, low: int, high: int) -> str:
    title = escaped(f"{found.tier}, {found.format}: {view.matrix_name(found.matrix)}")
    experts = f"{found.experts:,} of {counted(found.experts_all, 'expert slice')}"
    zero = f"{_share(found.zero, found.nbytes)} of them zero" if found.zero else "none zero"
    if found.counts:
        drawing = _bars(found, title, low, high)
    else:
        drawing = '<p class="empty">Every scale that was read is zero.</p>'
    about = f"{counted(found.nbytes, 'group')} read, of {experts}; {zero}"
    return f'<figure class="histogram"><h3>{title}</h3>{drawing}<figcaption>{about}</figcaption></figure>'


def _bars(found: Histogram, title: str, low: int, high: int) -> str:
    """Bars of a histogram with at least one bin, over the octaves from ``low`` to ``high``."""
    most, span = max(found.counts), high - low

    def x(number: int) -> float:
        return ((found.first + number) / found.per_octave - low) / span

    heights = [(x(i), x(i + 1), 0.94 * groups / most) for i, groups in enumerate(found.counts)]
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64, 128) if span / s <= 6)
    below = [((b - low) / span, f"2<sup>{b}</sup>") for b in range(low, high + 1) if b % step == 0]
    mode = (found.first + found.counts.index(most)) / found.per_octave
    words = f"{counted(found.nbytes, 'group')}, most often 2^{mode:g}, {found.zero:,} zero"
    kind = "tail" if found.tier == "tail" else "mx" if found.format == "MXFP4" else "kept"
    chart = line_chart(f"Scales of {title}: {words}", bars(kind, heights))
    left = [(0.06, _share(most, found.nbytes)), (1.0, "0")]
    return framed("chart", "130px", chart, left, below, ("of groups", "scale"))
