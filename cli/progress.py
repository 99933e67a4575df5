"""Progress on stderr: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from types import TracebackType
from typing import Any

import click

from hybrid_pack.errors import plain
from hybrid_pack.report.text import counted, size

__all__ = ["ByteProgress", "counted", "size"]

LINE_SECONDS = 10.0


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that went away stops no conversion
        click.echo(plain(text), err=True)


class ByteProgress:
    """Counts bytes; shows rate and time left.

    Args:
        label: What is being done.
        quiet: Show nothing.
        lines: Lines even on a terminal.
    """

    def __init__(self, label: str, quiet: bool = False, lines: bool = False) -> None:
        self._label, self._quiet, self._lines = label, quiet, lines
        self._bar: Any = None
        self._lock = threading.Lock()
        self._total = self._done = self._before = 0
        self._began = self._said = time.monotonic()

    def start(self, total_bytes: int, done_bytes: int = 0) -> None:
        """Set the total and what was done before."""
        self._total, self._done, self._before = total_bytes, done_bytes, done_bytes
        self._began = self._said = time.monotonic()
        if self._quiet:
            return
        if not self._lines and sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total_bytes,
                initial=done_bytes,
                desc=self._label,
                unit="B",
                unit_scale=True,
                file=sys.stderr,
                leave=False,
            )
        else:
            kept = f", {size(done_bytes)} of it done before" if done_bytes else ""
            _say(f"{self._label}: {size(total_bytes)}{kept}")

    def advance(self, nbytes: int) -> None:
        """Add bytes; called from any thread."""
        with self._lock:
            self._done += nbytes
            if self._bar is not None:
                self._bar.update(nbytes)
            elif not self._quiet and time.monotonic() - self._said >= LINE_SECONDS:
                self._said = time.monotonic()
                self._line()

    def _line(self) -> None:
        rate = (self._done - self._before) / max(time.monotonic() - self._began, 1e-9)
        left = f", {(self._total - self._done) / rate:.0f} s left" if rate else ""
        percent = 100 * self._done / max(self._total, 1)
        _say(f"{self._label}: {percent:.0f} % of {size(self._total)}, {rate / 1e9:.2f} GB/s{left}")

    def note(self, text: str) -> None:
        """A line of its own."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.write(plain(text), file=sys.stderr)
        else:
            _say(text)

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
