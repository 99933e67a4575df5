"""The journal of an unfinished conversion: which files are done, for which source and options, and who is at work.

One JSON object a line in ``hybrid_pack.state.partial``: first the fingerprint, then a record for each finished file. A
record is durable before its file gets its name, so a file with a record is whole; a torn last line is
as if it had not been written.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from pathlib import Path
from typing import Any

from hybrid_pack.errors import UsageError
from hybrid_pack.io.output import PARTIAL, fsync_folder

STATE = f"hybrid_pack.state{PARTIAL}"

Record = dict[str, Any]
"""``path``, ``bytes``, ``digest`` and what the manifest needs besides."""


class Journal:
    """An open, locked journal.

    Attributes:
        fingerprint: Of the run that began it; None if it is new.
        records: By path.
    """

    def __init__(self, root: Path) -> None:
        """Open or create the journal of an output folder and lock it.

        Raises:
            UsageError: Another conversion is writing there.
        """
        self.path = root / STATE
        self._lock = threading.Lock()
        while True:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._fd)
                raise UsageError(
                    "another conversion is writing here", where=root, hint="wait for it, or choose another --out"
                ) from None
            with contextlib.suppress(FileNotFoundError):
                if self.path.stat().st_ino == os.fstat(self._fd).st_ino:
                    break
            os.close(self._fd)  # the other finished and removed it between our open and our lock
        self.fingerprint, self.records = self._load()

    def _load(self) -> tuple[Record | None, dict[str, Record]]:
        text = b""
        while chunk := os.read(self._fd, 1 << 20):
            text += chunk
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            os.ftruncate(self._fd, len(whole))
        lines = [json.loads(line) for line in whole.splitlines()]
        return (lines[0] if lines else None), {record["path"]: record for record in lines[1:]}

    def begin(self, fingerprint: Record) -> None:
        """Start over for a source and options."""
        os.ftruncate(self._fd, 0)
        self.fingerprint, self.records = fingerprint, {}
        self._append(fingerprint)
        fsync_folder(self.path.parent)

    def add(self, record: Record) -> None:
        """Record a finished file, durably. Safe for many threads."""
        with self._lock:
            self._append(record)
            self.records[record["path"]] = record

    def forget(self, path: str) -> None:
        """Treat a recorded file as not done; a later record of it replaces the old."""
        self.records.pop(path, None)

    def _append(self, line: Record) -> None:
        os.lseek(self._fd, 0, os.SEEK_END)
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if os.write(self._fd, data) != len(data):
            raise OSError(28, os.strerror(28))
        os.fsync(self._fd)

    def remove(self) -> None:
        """Remove the journal: the conversion is complete, or nothing was begun."""
        self.path.unlink(missing_ok=True)
        fsync_folder(self.path.parent)

    def close(self) -> None:
        """Unlock."""
        os.close(self._fd)
