"""Marks of the charts as SVG: they stretch to any width, so that all text stays outside, in HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

AA_FROM = 300
"""From so many columns on, a cell can be less than a pixel wide and must be blended, not snapped away."""


def runs(cells: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending numbers as (first, how many)."""
    found: list[tuple[int, int]] = []
    for cell in cells:
        if found and cell == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((cell, 1))
    return found


def cells_path(rows: Iterable[Iterable[int]]) -> str:
    """Path data of unit cells, neighbours in a row joined.

    Args:
        rows: Columns to fill, ascending, for each row from the top.
    """
    return "".join(f"M{x} {y}h{n}v1h-{n}z" for y, row in enumerate(rows) for x, n in runs(row))


def heat_map(label: str, columns: int, rows: int, layers: Mapping[str, Sequence[Iterable[int]]]) -> str:
    """A map of cells that fills its box, whatever its size.

    Args:
        label: Text alternative, escaped.
        columns: Cells across.
        rows: Cells down.
        layers: For each CSS class the columns to fill in every row.
    """
    rendering = "crispEdges" if columns < AA_FROM else "auto"
    paths = "".join(f'<path class="{name}" d="{d}"/>' for name, at in layers.items() if (d := cells_path(at)))
    lines = "".join(f"M0 {y}h{columns}" for y in range(1, rows))
    if columns <= 64:
        lines += "".join(f"M{x} 0v{rows}" for x in range(1, columns))
    grid = f'<path class="grid" d="{lines}"/>' if lines else ""
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {columns} {rows}" preserveAspectRatio="none" '
        f'shape-rendering="{rendering}">{paths}{grid}</svg>'
    )


def line_chart(label: str, marks: str) -> str:
    """A chart over the unit square (0, 0 at the top left) of 1000 by 1000.

    Args:
        label: Text alternative, escaped.
        marks: Its elements.
    """
    return f'<svg role="img" aria-label="{label}" viewBox="0 0 1000 1000" preserveAspectRatio="none">{marks}</svg>'


def line(name: str, points: Sequence[tuple[float, float]]) -> str:
    """A line with a dot at each point; neither is distorted when the chart is stretched.

    Args:
        name: CSS class.
        points: In 0..1, y from the top.
    """
    at = [f"{x * 1000:.0f} {y * 1000:.0f}" for x, y in points]
    dots = "".join(f"M{point}h0" for point in at)
    return f'<path class="line {name}" d="M{"L".join(at)}"/><path class="dots {name}" d="{dots}"/>'


def band(name: str, points: Sequence[tuple[float, float, float]]) -> str:
    """The area between two lines.

    Args:
        name: CSS class.
        points: (x, upper y, lower y) in 0..1.
    """
    there = [f"{x * 1000:.0f} {y * 1000:.0f}" for x, y, _ in points]
    back = [f"{x * 1000:.0f} {y * 1000:.0f}" for x, _, y in reversed(points)]
    return f'<path class="band {name}" d="M{"L".join(there + back)}z"/>'


def bars(name: str, found: Sequence[tuple[float, float, float]]) -> str:
    """Bars on the lower edge.

    Args:
        name: CSS class.
        found: (left, right, height) in 0..1.
    """
    paths = "".join(
        f"M{1000 * (left + gap):.1f} 1000V{1000 * (1 - h):.0f}H{1000 * (right - gap):.1f}V1000z"
        for left, right, h in found
        if h > 0 and (gap := (right - left) * 0.05) >= 0
    )
    return f'<path class="bars {name}" d="{paths}"/>'
