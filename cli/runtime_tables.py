"""Text of ``doctor`` and ``bench``."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_pack.cli.progress import size
from hybrid_pack.cli.tables import table
from hybrid_pack.runtime.b12x_probe import VERSION
from hybrid_pack.runtime.backends import Accepted
from hybrid_pack.runtime.doctor import Diagnosis
from hybrid_pack.runtime.timing import MoETiming


def diagnosis_text(found: Diagnosis) -> str:
    """The whole of ``doctor``."""
    rows: list[Sequence[object]] = [(name, version or "none") for name, version in found.versions.items()]
    for gpu in found.gpus:
        rows.append(
            ("GPU", f"{gpu.name}, {size(gpu.memory_bytes)}, compute capability {gpu.capability}: {gpu.verdict}")
        )
    if not found.gpus:
        rows.append(("GPU", "none"))
    for name, version in found.packages.items():
        note = ""
        if name == "b12x" and version is not None:
            note = f" ({'has' if found.b12x_has_nf3 else 'has no'} nf3_2p1; NF3 is only in {VERSION})"
        rows.append((name, f"{version or 'not installed'}{note}"))
    lines = [table(rows, ""), "", f"backends for {found.pack or 'any layer'}, best first"]
    for choice in found.backends:
        if isinstance(choice, Accepted):
            lines.append(f"  {choice.backend:<5} can run")
        else:
            lines.append(f"  {choice.backend:<5} cannot: {choice.reason}")
    if found.advice:
        lines += ["", "what to do", *(f"  {advice}" for advice in found.advice)]
    return "\n".join(lines)


def timings_text(timings: Sequence[MoETiming]) -> str:
    """The table of ``bench``."""
    rows: list[Sequence[object]] = [("tokens", "us", "floor us", "tokens/s", "timed by")]
    for timing in timings:
        floor = "-" if timing.floor_seconds is None else f"{timing.floor_seconds * 1e6:.1f}"
        per_second = f"{timing.tokens / timing.seconds:,.0f}"
        rows.append((timing.tokens, f"{timing.seconds * 1e6:,.1f}", floor, per_second, timing.how))
    return table(rows)
