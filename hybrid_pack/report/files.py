"""Writing the page, and where nothing may be written."""

from __future__ import annotations

from pathlib import Path

from hybrid_pack.errors import UsageError
from hybrid_pack.report.data import PackView
from hybrid_pack.report.html import page
from hybrid_pack.report.scales import Scales


def require_outside(target: Path, pack: Path) -> None:
    """Refuse to write into a pack: its manifest lists every file.

    Raises:
        UsageError: The target lies in it, links followed.
    """
    at, root = target.resolve(), pack.resolve()
    if at == root or root in at.parents:
        raise UsageError(
            "the report would lie in the pack, and verify refuses files that no manifest lists",
            where=target,
            hint="choose another place",
        )


def write_page(path: Path, view: PackView, scales: Scales | None) -> Path:
    """Write the page; folders on the way are made.

    Raises:
        OSError: It cannot be written.
    """
    text = page(view, scales)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
