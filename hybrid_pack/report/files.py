"""Writing the page, and where nothing may be written."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hybrid_pack.errors import UsageError, writing
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


def put(path: Path, data: bytes) -> Path:
    """Write a file whole or not at all; folders on the way are made.

    It takes the place of a file or link that is there. Bytes that another name shares, as a file of the pack that was
    linked there, stay as they are. A device or a pipe is written to.

    Raises:
        EnvironmentFailure: It cannot be written.
    """
    with writing(path):
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(data)
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            made = Path(folder) / path.name
            made.write_bytes(data)  # with the mode that the umask gives
            made.replace(path)
    return path


def write_page(path: Path, view: PackView, scales: Scales | None) -> Path:
    """Write the page.

    Raises:
        EnvironmentFailure: It cannot be written.
    """
    put(path.resolve(), page(view, scales).encode())
    return path
