"""What a pack says of itself: in which respects it is not its source, by the report in its manifest."""

from __future__ import annotations

from hybrid_pack.io.bitmap import spans
from hybrid_pack.schemas.manifest import Report


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def declared(report: Report) -> tuple[str, ...]:
    """The differences, then the notes of the conversion; nothing where all was moved exactly."""
    return (*differences(report), *report.notes)


def differences(report: Report) -> tuple[str, ...]:
    """A line for each kind of difference."""
    lines = []
    if report.experts_requantized:
        worst = max(report.experts_requantized, key=lambda entry: entry.worst_relative_error)
        lines.append(
            f"{_count(len(report.experts_requantized), 'expert')} requantised, worst relative scale error "
            f"{worst.worst_relative_error:.2g} in layer {worst.layer} expert {worst.expert}"
        )
    if report.blocks_flushed:
        lines.append(
            f"{_count(report.blocks_flushed, 'NVFP4 block')} too small for the kernel's scale byte, flushed to zero"
        )
    if report.scales_saturated:
        lines.append(f"{_count(report.scales_saturated, 'MXFP4 scale')} above the kernel's largest, saturated")
    if report.layers_omitted:
        lines.append(f"layers omitted, their experts are not in the pack: {spans(sorted(report.layers_omitted))}")
    return tuple(lines)
