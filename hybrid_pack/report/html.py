"""The report as one HTML page that needs nothing else: no network, no library, and no script to be read."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from statistics import median

from hybrid_pack.report.charts import error_lines, histograms, rank_bars
from hybrid_pack.report.data import TIERS, PackView, QuantizedView
from hybrid_pack.report.maps import error_map, tier_map, values_of
from hybrid_pack.report.scales import Scales
from hybrid_pack.report.text import counted, escaped, size

LISTED = 50
"""Rows of tables that could be as long as there are experts."""

WORST = 5


def _panel(name: str, title: str, about: str, content: str) -> str:
    intro = f'<p class="soft">{about}</p>' if about else ""
    return (
        f'<section class="panel" id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>'
        f"{intro}{content}</section>"
    )


def _nothing(why: str) -> str:
    return f'<p class="empty">{why}</p>'


def _facts(rows: Iterable[tuple[str, str]]) -> str:
    """Rows of a name and a value, both HTML."""
    return f'<table class="facts">{"".join(f"<tr><th scope=row>{k}</th><td>{v}</td></tr>" for k, v in rows)}</table>'


def _listing(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of short cells, HTML; all columns but ``format`` are numbers."""
    number = [name != "format" for name in head]

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if is_number else ''}>{cell}</{tag}>"
            for is_number, cell in zip(number, row, strict=True)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="table"><table class="listing">'
        f"<tr>{cells('th', head)}</tr>{body}</table></div>"
    )


def _numbers(view: PackView) -> str:
    quantized = sum(len(entry.sqnr_db) for entry in view.quantized)
    everyone = len(view.layers) * view.num_experts
    came = "all of them" if quantized == everyone else f"{'the others' if quantized else 'all'} came in their format"
    rows = (
        ("experts", f"{everyone:,}",
         f"{view.experts_kept:,} kept, {view.experts_tail:,} tail, in {counted(len(view.layers), 'layer')}"),
        ("experts of a rank", size(view.largest_rank.nbytes),
         f"{counted(len(view.ranks), 'rank')}: tp {view.tensor_parallel}, ep {view.expert_parallel}"),
        ("bits a weight", f"{view.bits_per_weight:.2f}", "of the experts, scales included"),
        ("whole pack", size(view.total_bytes), f"{size(view.base_bytes)} of it are no experts"),
        ("shape", f"{view.hidden}×{view.intermediate}",
         f"{counted(view.num_experts, 'expert')}, top\u2011{view.top_k}, {escaped(view.activation)}"),
        ("quantised here", f"{quantized:,}", came),
    )  # fmt: skip
    return (
        '<dl class="numbers">'
        + "".join(f"<div><dt>{k}</dt><dd>{v}<small>{more}</small></dd></div>" for k, v, more in rows)
        + "</dl>"
    )


def _gptq(entries: Sequence[QuantizedView]) -> str:
    """What GPTQ gained over rounding to nearest; nothing where it was not used."""
    ratios = [entry.gptq_to_rtn for entry in entries if entry.gptq_to_rtn is not None]
    if not ratios:
        return ""
    return (
        f" On the Hessians GPTQ has {median(ratios):.2f} times the error of rounding to nearest (median of "
        f"{counted(len(ratios), 'layer')}, {min(ratios):.2f} to {max(ratios):.2f}), which SQNR does not weigh."
    )


def _errors(view: PackView) -> str:
    if not view.quantized:
        return _nothing(
            "No expert was quantised when this pack was made: codes were moved as the source stores them, so there is "
            "no error to show."
        )
    parts = [error_lines(view)]
    for tier in TIERS:
        entries = [entry for entry in view.quantized if entry.tier == tier]
        drawn = error_map(view, tier)
        if not drawn:
            why = "Nothing in this tier was quantised here." if view.experts(tier) else "No expert is in this tier."
            parts.append(f"<h3>{view.tier_name(tier)}</h3>{_nothing(why)}")
            continue
        methods = sorted({f"{e.method} from {', '.join(e.sources)}" for e in entries})
        values = values_of(entries)
        words = f"median {median(values):.2f} dB" if values else "no difference at all"
        counts = ", ".join(
            f"{sum(number):,} {what}"
            for what, number in (
                ("groups", [e.groups for e in entries]),
                ("of scale zero", [e.zero for e in entries]),
                ("with a subnormal scale", [e.subnormal for e in entries]),
                ("with a scale that was cut", [e.saturated for e in entries]),
            )
        )
        about = f"{escaped('; '.join(methods))}: {words}; {counts}.{_gptq(entries)}"
        parts.append(f'<h3>{view.tier_name(tier)}</h3><p class="soft">{about}</p>{drawn}')
        worst = sorted((db, e.layer, expert) for e in entries for expert, db in e.sqnr_db.items() if db is not None)[
            :WORST
        ]
        if worst:
            listed = ", ".join(f"layer {layer} expert {expert} ({db:.2f} dB)" for db, layer, expert in worst)
            parts.append(f'<p class="soft worst">Largest errors: {listed}.</p>')
    return "".join(parts)


def _scales(view: PackView, scales: Scales | None) -> str:
    if scales is None:
        return _nothing('Scales were not read (<code class="flag">--quick</code>).')
    notes = "".join(f"<li>{escaped(note)}</li>" for note in scales.notes)
    listed = f"<ul>{notes}</ul>" if notes else ""
    if not scales.histograms:
        return _nothing("No expert shard of this pack could be read in this folder.") + listed
    return histograms(view, scales) + listed


def _differences(view: PackView) -> str:
    rows = [(escaped(what), f"{number:,}") for what, number in view.counts]
    rows.append(("experts brought to the tier's format without loss", f"{view.experts_cast:,}"))
    rows.append(("experts requantised to one second scale", f"{len(view.requantized):,}"))
    content = _facts(rows)
    if view.requantized:
        shown = sorted(view.requantized, key=lambda entry: -entry[2])[:LISTED]
        left = len(view.requantized) - len(shown)
        content += "<h3>Requantised, the worst first</h3>" + _listing(
            ("layer", "expert", "scale error"), [(str(a), str(b), f"{c:.2g}") for a, b, c in shown]
        )
        content += f'<p class="soft">and {left:,} more</p>' if left else ""
    lines = [*view.differs, *view.notes]
    if lines:
        content += "<h3>Notes</h3><ul>" + "".join(f"<li><bdi>{escaped(note)}</bdi></li>" for note in lines) + "</ul>"
    return content


def _origin(view: PackView) -> str:
    rows = [
        ("source", f"<bdi>{escaped(view.name)}</bdi>"),
        ("its weights", f"{size(view.source_bytes)} in {counted(view.source_files, 'file')}"),
        *((f"its {what}", f"<code>{escaped(digest)}</code>") for what, digest in view.source_digests),
        ("manifest of this pack", f"<code>{escaped(view.self_digest)}</code>"),
        ("made by", f"<bdi>{escaped(view.made_by)}</bdi>"),
        ("layout", f"<code>{escaped(view.abi)}</code>"),
        *((f"option: {what}", escaped(value)) for what, value in view.options),
    ]
    return _facts(rows)


def _layers(view: PackView) -> str:
    db = {
        (entry.layer, entry.tier): "exact" if entry.tier_sqnr_db is None else f"{entry.tier_sqnr_db:.2f}"
        for entry in view.quantized
    }
    head = ["layer", "kept", "format", "tail"]
    gptq = {(e.layer, e.tier): f"{e.gptq_to_rtn:.3f}" for e in view.quantized if e.gptq_to_rtn is not None}
    extra = [tier for tier in TIERS if any(key[1] == tier for key in db)]
    improved = [tier for tier in TIERS if any(key[1] == tier for key in gptq)]
    rows = [
        [
            str(layer.layer),
            str(len(layer.kept)),
            layer.kept_format or "–",
            str(len(layer.tail)),
            *(db.get((layer.layer, tier), "–") for tier in extra),
            *(gptq.get((layer.layer, tier), "–") for tier in improved),
        ]
        for layer in view.layers
    ]
    head += [f"{tier} SQNR dB" for tier in extra] + [f"{tier} GPTQ to nearest" for tier in improved]
    table = _listing(head, rows)
    return f"<details><summary>All layers in numbers</summary>{table}</details>"


def _away(view: PackView) -> str:
    """What to say where not every file is in the folder."""
    whole, count = view.ranks_here, len(view.ranks)
    if len(whole) == count:
        return ""
    if not whole:
        here = "No rank of this pack is whole in this folder."
    elif len(whole) == 1:
        here = f"Only rank {whole[0]} of {count} is whole in this folder."
    else:
        here = f"Of {count} ranks only {', '.join(map(str, whole))} are whole in this folder."
    return f'<p class="soft">{here} What was counted and measured is the whole pack\'s, by its manifest.</p>'


def page(view: PackView, scales: Scales | None) -> str:
    """The whole page.

    Args:
        view: Of the pack.
        scales: From ``read_scales``; None where they were not to be read.
    """
    folder = files("hybrid_pack.report")
    style = (folder / "page.css").read_text("utf-8")
    script = (folder / "page.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    title = escaped(view.name)
    made_for = f"tensor parallel {view.tensor_parallel}" + (
        f", expert parallel {view.expert_parallel}" if view.expert_parallel > 1 else ""
    )
    sampled = (
        ""
        if scales is None or scales.full
        else ' A fixed sample of experts is read; <code class="flag">--full</code> reads all.'
    )
    panels = (
        _panel("tiers", "Tier map", "Which experts of each layer keep 4 bits, and which are squeezed to 3.",
               tier_map(view) + _layers(view)),
        _panel("bytes", "Bytes of each rank",
               f"What a rank loads of the experts; beside them every rank has its share of {size(view.base_bytes)} of "
               "other tensors.", rank_bars(view)),
        _panel("errors", "Error of quantised experts",
               "Signal to quantisation noise: 10 log<sub>10</sub> of the sum of squares of the source's weights over "
               "that of the differences. Higher is better." if view.quantized else "", _errors(view)),
        _panel("scales", "Block scales",
               f"How large the scale of a group of weights is, global scale included, read from the shards.{sampled}",
               _scales(view, scales)),
        _panel("differences", "What differs from the source", "", _differences(view)),
        _panel("origin", "Source, digests and options", "", _origin(view)),
    )  # fmt: skip
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}: hybrid-pack report</title><style>{style}</style></head><body><main>"
        f'<h1><bdi>{title}</bdi></h1><p class="soft">hybrid-pack for {made_for}</p>{_away(view)}{_numbers(view)}'
        f"{''.join(panels)}</main><script>{script}</script></body></html>\n"
    )
