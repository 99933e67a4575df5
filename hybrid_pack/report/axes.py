"""Ticks, and the boxes of HTML text round a chart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hybrid_pack.report.labels import labelled

Tick = tuple[float, str]
"""(place in 0..1 from the left or the top, text as HTML)."""

ROW_LABEL_PX = 20
LABELS_ACROSS = 6
"""As many as fit beside each other on a phone."""


def nice_step(span: float, wanted: int) -> float:
    """1, 2 or 5 times a power of ten, so that about ``wanted`` steps fill a span above 0."""
    rough = span / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def row_ticks(numbers: Sequence[int], row_px: float) -> list[Tick]:
    """Labels of rows."""
    return _ticks(numbers, ROW_LABEL_PX / row_px)


def column_ticks(numbers: Sequence[int]) -> list[Tick]:
    """Labels of columns."""
    return _ticks(numbers, len(numbers) / LABELS_ACROSS)


def _ticks(numbers: Sequence[int], room: float) -> list[Tick]:
    return [((at + 0.5) / len(numbers), str(numbers[at])) for at in labelled(numbers, room)]


def framed(
    kind: str, height: str, area: str, left: Iterable[Tick], below: Iterable[Tick], names: tuple[str, str]
) -> str:
    """A drawing with labels at its left and below it.

    Args:
        kind: CSS class of the box.
        height: Of the drawing, in CSS.
        area: The drawing.
        left: Its labels.
        below: Its labels.
        names: What is shown upwards and across.
    """
    left_spans = "".join(f'<span style="top:{100 * at:.2f}%">{text}</span>' for at, text in left)
    widest = max((len(text) for _, text in left), default=0)
    below_spans = "".join(
        f'<span{" class=end" if at > 0.97 else ""} style="left:{100 * at:.2f}%">{text}</span>' for at, text in below
    )
    return (
        f'<div class="plot {kind}"><div class="yname" aria-hidden="true">{names[0]}</div>'
        f'<div class="ylabels" aria-hidden="true" style="width:{max(widest, 3) * 0.6:.1f}em">{left_spans}</div>'
        f'<div class="area" style="height:{height}">{area}</div>'
        f'<div class="xlabels" aria-hidden="true">{below_spans}</div>'
        f'<div class="xname" aria-hidden="true">{names[1]}</div></div>'
    )
