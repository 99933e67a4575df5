"""Pictures of a pack as PNG files, for cards and slides; all but the tier map are drawn by matplotlib."""

from __future__ import annotations

import io
from importlib.util import find_spec
from math import isnan
from pathlib import Path
from typing import Any

from hybrid_pack.errors import EnvironmentFailure, writing
from hybrid_pack.report.data import TIERS, PackView, Tier
from hybrid_pack.report.files import put
from hybrid_pack.report.labels import labelled
from hybrid_pack.report.maps import color_range, values_of
from hybrid_pack.report.png import TIER_MAP, tier_map_png
from hybrid_pack.report.scales import Histogram, Scales
from hybrid_pack.report.text import plain

COLORS = {"kept": "#0b5cad", "tail": "#f0dcae"}
EDGES = {"kept": "#0b5cad", "tail": "#8a6514"}
DPI = 150

EXACT, NOT_HERE = "#d6478f", "#e6e8eb"
"""Of experts without any difference, and of those that were not quantised: the page's colours, of no colour scale."""

TITLE_CHARS = 70
"""Of a name: more does not fit beside each other."""


def require_matplotlib() -> None:
    """Say how to get it before any work is done.

    Raises:
        EnvironmentFailure: It is not installed.
    """
    if find_spec("matplotlib") is None:
        raise EnvironmentFailure(
            "pictures need matplotlib, which is not installed",
            hint='pip install "hybrid-pack[report]"; --html needs nothing',
        )


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """(figure, its axes as an array of rows and columns); no global state of pyplot is touched."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI, metadata={"Software": None})
    return put(path, drawn.getvalue())


def _ranks(view: PackView) -> Any:
    figure, axes = _figure(8, 1.6 + 0.3 * len(view.ranks))
    unit, scale = next(((u, s) for u, s in (("GB", 1e9), ("MB", 1e6)) if view.largest_rank.nbytes >= s), ("kB", 1e3))
    axis = axes[0, 0]
    names = [str(rank.rank) for rank in view.ranks]
    left = [0.0] * len(names)
    for tier in filter(view.experts, TIERS):
        sizes = [rank.tier_bytes(tier) / scale for rank in view.ranks]
        axis.barh(names, sizes, left=left, label=view.tier_name(tier), color=COLORS[tier], edgecolor=EDGES[tier])
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axis.invert_yaxis()
    axis.set(title="What each rank loads of the experts", xlabel=unit, ylabel="rank")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


Grid = list[list[float]]
NAN = float("nan")


def _error_grids(view: PackView, tier: Tier) -> tuple[list[int], Grid, Grid]:
    """(layers, dB by layer and expert, 1 for each expert without a difference); NaN elsewhere."""
    found: dict[int, tuple[list[float], list[float]]] = {}
    for entry in view.quantized:
        if entry.tier == tier:
            row = found.setdefault(entry.layer, ([NAN] * view.num_experts, [NAN] * view.num_experts))
            for expert, db in entry.sqnr_db.items():
                row[db is None][expert] = 1.0 if db is None else db
    layers = sorted(found)
    return layers, [found[layer][0] for layer in layers], [found[layer][1] for layer in layers]


def _key(figure: Any, exact: bool, gaps: bool) -> None:
    """What the colours mean that are on no scale."""
    from matplotlib.patches import Patch

    shown = [(EXACT, "exact: no difference")] * exact + [(NOT_HERE, "not quantised here")] * gaps
    if shown:
        handles = [Patch(facecolor=color, edgecolor="#545d68", label=text) for color, text in shown]
        figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)


def _errors(view: PackView) -> Any:
    from matplotlib.colors import ListedColormap

    tiers = [tier for tier in TIERS if any(entry.tier == tier for entry in view.quantized)]
    grids = {tier: _error_grids(view, tier) for tier in tiers}
    height = 0.8 + sum(1.0 + max(0.05, 0.4 / len(layers)) * len(layers) for layers, _, _ in grids.values())
    figure, axes = _figure(9, height, rows=len(tiers))
    for axis, tier in zip(axes.flat, tiers, strict=True):
        layers, grid, exact = grids[tier]
        values = values_of(entry for entry in view.quantized if entry.tier == tier)
        low, high = color_range(values) if values else (0.0, 1.0)
        axis.set_facecolor(NOT_HERE)
        how = {"aspect": "auto", "interpolation": "nearest"}
        image = axis.imshow(grid, cmap="viridis", vmin=low, vmax=high, **how)
        axis.imshow(exact, cmap=ListedColormap([EXACT]), vmin=0, vmax=1, **how)
        rows, columns = labelled(layers, len(layers) / 10), labelled(range(view.num_experts), view.num_experts / 10)
        axis.set_yticks(rows, [str(layers[at]) for at in rows])
        axis.set_xticks(columns, [str(at) for at in columns])
        axis.set(title=f"{view.tier_name(tier)}: SQNR of each expert, dB", xlabel="expert", ylabel="layer")
        if values:
            figure.colorbar(image, ax=axis, extend="both", label="dB", aspect=12, pad=0.01)
    cells = [(db, none) for _, grid, exact in grids.values() for a, b in zip(grid, exact, strict=True)
             for db, none in zip(a, b, strict=True)]  # fmt: skip
    _key(figure, any(none == 1 for _, none in cells), any(isnan(db) and isnan(none) for db, none in cells))
    return figure


def _scales(view: PackView, found: tuple[Histogram, ...]) -> Any:
    figure, axes = _figure(9, 2.4 * -(-len(found) // 2), rows=-(-len(found) // 2), columns=2)
    filled = [h for h in found if h.counts]
    low = min((h.first / h.per_octave for h in filled), default=0)
    high = max(((h.first + len(h.counts)) / h.per_octave for h in filled), default=1)
    for axis in list(axes.flat)[len(found) :]:
        axis.set_axis_off()
    for axis, h in zip(axes.flat, found, strict=False):
        at = [(h.first + i + 0.5) / h.per_octave for i in range(len(h.counts))]
        share = [100 * groups / h.nbytes for groups in h.counts]
        axis.bar(at, share, width=0.9 / h.per_octave, color=COLORS[h.tier], edgecolor=EDGES[h.tier])
        axis.set(title=f"{h.tier}, {h.format}: {view.matrix_name(h.matrix)}")
        axis.set(xlim=(low, high), xlabel="log2 of the scale", ylabel="% of groups")
    return figure


def write_pictures(folder: Path, view: PackView, scales: Scales | None) -> list[Path]:
    """Write every picture there is something to draw in; others of these names are removed.

    Args:
        folder: Made if it is not there.
        view: Of the pack.
        scales: From ``read_scales``; None where they were not to be read.

    Returns:
        Their paths.

    Raises:
        EnvironmentFailure: matplotlib is not installed, or they cannot be written.
    """
    require_matplotlib()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    figures = {"bytes.png": _ranks(view)}
    if view.quantized:
        figures["errors.png"] = _errors(view)
    if scales is not None and scales.histograms:
        figures["scales.png"] = _scales(view, scales.histograms)
    for name in ("errors.png", "scales.png"):
        if name not in figures:
            with writing(folder / name):
                (folder / name).unlink(missing_ok=True)
    put(folder / TIER_MAP, tier_map_png(view.num_experts, {layer.layer: layer.kept for layer in view.layers}))
    for figure in figures.values():
        name = plain(view.name)
        shown = name if len(name) <= TITLE_CHARS else f"{name[:TITLE_CHARS]}…"
        figure.suptitle(shown, fontsize=13, fontweight="bold", parse_math=False)
    return [folder / TIER_MAP, *(_save(figure, folder / name) for name, figure in figures.items())]
