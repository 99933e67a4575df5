"""What a verification checked, what it did not, and what it found."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_pack.errors import DataError, EnvironmentFailure, HybridPackError

LISTED = 20
"""Findings of one check that are listed; further ones are counted."""

_KEPT = 1000
"""Findings of one check that are held, so that the ones listed do not depend on the threads' order."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        check: Name of the check that found it.
        path: File, inside the pack where it is the pack's.
        where: Tensor, layer, expert or key; None for the file as a whole.
        message: What is wrong, and what to do about it.
        expected: What would have been right.
        found: What was there instead.
    """

    check: str
    path: str
    where: str | None
    message: str
    expected: str | None = None
    found: str | None = None

    def __str__(self) -> str:
        place = ": ".join(part for part in (self.path, self.where) if part)
        details = [
            f"{key} {value}" for key, value in (("expected", self.expected), ("found", self.found)) if value is not None
        ]
        text = f"{place}: {self.message}"
        return " ".join((f"{text} ({', '.join(details)})" if details else text).split())


@dataclass(frozen=True)
class Check:
    """One kind of check that was carried out.

    Attributes:
        name: What was checked.
        count: How many.
        unit: Of what.
        nbytes: Bytes read for it.
        seconds: Time it took.
    """

    name: str
    count: int
    unit: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class NotChecked:
    """What was left out, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class VerifyReport:
    """The result of a verification.

    Attributes:
        root: The pack.
        checks: What was checked, in order.
        not_checked: What was not.
        declared: In what the pack differs from its source by its own manifest's report; no findings.
        unread: Files that could not be read; what depends on them was not checked.
        findings: What is wrong, at most ``LISTED`` of each check, in order of check.
        findings_total: How many there are.
        seconds: Time of the whole.
    """

    root: str
    checks: tuple[Check, ...]
    not_checked: tuple[NotChecked, ...]
    declared: tuple[str, ...]
    unread: tuple[Finding, ...]
    findings: tuple[Finding, ...]
    findings_total: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Nothing was found and all could be read; ``not_checked`` says what that does not cover."""
        return not self.findings_total and not self.unread

    @property
    def exit_code(self) -> int:
        """0 nothing found; 1 something is wrong; 3 nothing is, as far as it could be read."""
        if self.findings_total:
            return DataError.exit_code
        return EnvironmentFailure.exit_code if self.unread else 0

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"ok": self.ok, **dataclasses.asdict(self)}


class Tally:
    """Counts of one check while it runs; threads may add to it."""

    def __init__(self) -> None:
        self.count = 0
        self.nbytes = 0
        self._lock = threading.Lock()

    def add(self, count: int, nbytes: int = 0) -> None:
        """Add things checked and bytes read for them."""
        with self._lock:
            self.count += count
            self.nbytes += nbytes


class Recorder:
    """Collects a report; safe for many threads.

    Args:
        root: The pack.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._checks: list[Check] = []
        self._not_checked: list[NotChecked] = []
        self._findings: dict[str, list[Finding]] = {}
        self._counts: dict[str, int] = {}
        self._unordered: set[str] = set()
        self.bad_paths: set[str] = set()
        """Files whose structure is wrong, so that reading their tensors would only repeat it."""
        self._unread: dict[str, Finding] = {}
        self._told: set[tuple[str, str | None]] = set()
        self.declared: tuple[str, ...] = ()
        """In what the pack differs from its source by its own account."""

    def find(
        self,
        check: str,
        path: str,
        message: str,
        *,
        where: str | None = None,
        expected: object = None,
        found: object = None,
    ) -> None:
        """Add a finding."""

        def text(value: object) -> str | None:
            return None if value is None else str(value)

        finding = Finding(check, path, where, message, text(expected), text(found))
        with self._lock:
            self._counts[check] = self._counts.get(check, 0) + 1
            held = self._findings.setdefault(check, [])
            if len(held) < _KEPT:
                held.append(finding)

    def find_error(self, check: str, path: str, error: HybridPackError, where: str | None = None) -> None:
        """Add a finding that a lower part of the package raised, or a file that it could not read."""
        if isinstance(error, EnvironmentFailure):
            self.cannot_read(check, path, error)
            return
        place = where or (error.where or "").removeprefix(f"{self._root}/")
        if place.startswith(path):
            place = place.removeprefix(path).lstrip(":/ ")
        elif place == str(self._root) or place.endswith(path):  # the same file, by its full path
            place = ""
        message = f"{error.problem}; {error.hint}" if error.hint else error.problem
        self.find(check, path, message, where=place or None, expected=error.expected, found=error.found)

    def cannot_read(self, check: str, path: str, error: EnvironmentFailure) -> None:
        """Remember that a file could not be read; once for each, whatever was to be read of it."""
        place = (error.where or path).split(": ", 1)[0].removeprefix(f"{self._root}/")  # of the pack or of the source
        reason = None if error.found is None else str(error.found)
        with self._lock:
            self._unread.setdefault(place, Finding(check, place, None, "could not be read", None, reason))
            self.bad_paths.add(place)

    @property
    def unread_paths(self) -> set[str]:
        """Files that could not be read."""
        with self._lock:
            return set(self._unread)

    def tell(self, path: str, where: str | None = None) -> None:
        """Remember that a finding says that a file's, or a tensor's, bytes are wrong: its digest need not repeat it."""
        with self._lock:
            self._told.add((path, where))

    def was_told(self, path: str, where: str | None = None) -> bool:
        """Whether ``tell`` was called."""
        with self._lock:
            return (path, where) in self._told

    def skip(self, what: str, why: str) -> None:
        """Say what is not checked."""
        with self._lock:
            self._not_checked.append(NotChecked(what, why))

    def spoil(self, path: str) -> None:
        """Remember that a file's structure is wrong."""
        with self._lock:
            self.bad_paths.add(path)

    @contextmanager
    def checking(self, name: str, unit: str, *, threads: bool = False) -> Iterator[Tally]:
        """Time one check and put it into the report; findings that threads made are put in order of place."""
        tally, began = Tally(), time.monotonic()
        with self._lock:
            self._findings.setdefault(name, [])  # so that findings come in the order of checks
        if threads:
            self._unordered.add(name)
        yield tally
        with self._lock:
            self._checks.append(Check(name, tally.count, unit, tally.nbytes, time.monotonic() - began))

    def report(self, root: object) -> VerifyReport:
        """The report so far."""
        listed: list[Finding] = []
        for check, held in self._findings.items():
            by_place = sorted(held, key=lambda f: (f.path, f.where or "", f.message))
            listed += (by_place if check in self._unordered else held)[:LISTED]
        return VerifyReport(
            root=str(root),
            checks=tuple(self._checks),
            not_checked=tuple(self._not_checked),
            declared=self.declared,
            unread=tuple(self._unread[path] for path in sorted(self._unread)),
            findings=tuple(listed),
            findings_total=sum(self._counts.values()),
            seconds=time.monotonic() - self._began,
        )
