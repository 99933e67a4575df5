"""The journal of an unfinished conversion: which files are done, for which source and options, and who is at work.

Lines of JSON are added to ``hybrid_pack.state.partial``, never changed; a torn line is as if it had not been written:

==============================  ================================================================================
``{"begin": fingerprint}``      a conversion of this source and options starts from nothing; with ``"manifest"``, the
                                text of one, it repairs that finished pack: all its files count as recorded
``{"path": ..., ...}``          this file is whole. The line is durable before the file gets its name
``{"resume": fingerprint}``     from here on with these options, which differ from the earlier ones in nothing that the
                                files recorded so far were made with
``{"forget": path}``            that file is not there after all. Durable before it is written anew
``{"clear": [paths]}``          these files are being removed, whoever comes next goes on with that
==============================  ================================================================================
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hybrid_pack.errors import UsageError
from hybrid_pack.io.manifest import README
from hybrid_pack.io.output import PARTIAL, fsync_folder
from hybrid_pack.schemas.manifest import is_pack_path

STATE = f"hybrid_pack.state{PARTIAL}"

Record = dict[str, Any]
"""``path``, ``bytes``, ``digest`` and what the manifest needs besides."""


def manifest_records(text: str) -> dict[str, Record]:
    """Records of all files a manifest lists; counts are left out, the manifest has them in all."""
    document = json.loads(text)
    records = {
        shard["path"]: {
            "path": shard["path"],
            "bytes": shard["bytes"],
            "digest": shard["digest"],
            "tensors": {name: tensor["digest"] for name, tensor in shard["tensors"].items()},
        }
        for shard in document["shards"]
    }
    return records | {f["path"]: f for f in (*document["base"]["files"], *document["files"])}


class State:
    """What a journal says.

    Attributes:
        fingerprint: Of the run that began it; None if none did.
        records: By path.
        clearing: Paths whose removal was begun and not ended; None where there is nothing to remove.
        manifest: Text of the manifest of the finished pack that is being repaired; None where none is.
    """

    def __init__(self) -> None:
        """Nothing was begun."""
        self.fingerprint: Record | None = None
        self.records: dict[str, Record] = {}
        self.clearing: frozenset[str] | None = None
        self.manifest: str | None = None

    @property
    def begun(self) -> bool:
        """Whether it holds anything that a later run must know."""
        return self.fingerprint is not None or self.clearing is not None

    @property
    def holds_work(self) -> bool:
        """Whether a later run has something to go on with: a finished file, or a removal that was not ended."""
        return bool(self.records) or self.clearing is not None or self.manifest is not None

    def load(self, fd: int) -> tuple[int, int]:
        """Carry out all lines of a file; (bytes up to a torn one, bytes in all)."""
        text = b""
        while chunk := os.read(fd, 1 << 20):
            text += chunk
        whole = 0
        for line in text.splitlines(keepends=True):
            if not self.take(line):
                break
            whole += len(line)
        return whole, len(text)

    def take(self, text: bytes) -> bool:
        """Carry out one line; false if it is torn."""
        try:
            line = json.loads(text) if text.endswith(b"\n") else None
        except ValueError:
            return False
        if not isinstance(line, dict) or not _is_sound(line):
            return False
        if "begin" in line:
            self.manifest = line.get("manifest")
            records = {} if self.manifest is None else manifest_records(self.manifest)
            self.fingerprint, self.records, self.clearing = line["begin"], records, None
        elif "clear" in line:
            self.fingerprint, self.records, self.clearing = None, {}, frozenset(line["clear"])
            self.manifest = None
        elif "resume" in line:
            self.fingerprint = line["resume"]
        elif "forget" in line:
            self.records.pop(line["forget"], None)
        elif "path" in line:
            self.records[line["path"]] = line
        else:
            return False
        return True


def _is_sound(line: dict[str, Any]) -> bool:
    """Whether a line is one this program wrote; a path in it must never lead out of the pack."""

    def ours(path: Any) -> bool:
        return isinstance(path, str) and is_pack_path(path) and path != README

    if "begin" in line:
        return isinstance(line["begin"], dict) and isinstance(line.get("manifest", ""), str | None)
    if "resume" in line:
        return isinstance(line["resume"], dict)
    if "clear" in line:
        return isinstance(line["clear"], list) and all(map(ours, line["clear"]))
    if "forget" in line:
        return ours(line["forget"])
    return ours(line.get("path")) and type(line.get("bytes")) is int and isinstance(line.get("digest", ""), str)


def _lock(fd: int, root: Path, kind: int) -> None:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise UsageError(
            "another conversion is writing here", where=root, hint="wait for it, or choose another --out"
        ) from None


def peek(root: Path) -> State:
    """What the journal of an output folder says, if there is one; nothing is written.

    Raises:
        UsageError: Another conversion is writing there.
    """
    state = State()
    try:
        fd = os.open(root / STATE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return state
    _lock(fd, root, fcntl.LOCK_SH)
    try:
        state.load(fd)
    finally:
        os.close(fd)
    return state


class Journal(State):
    """An open, locked journal."""

    def __init__(self, root: Path) -> None:
        """Open or create the journal of an output folder and lock it.

        Raises:
            UsageError: Another conversion is writing there.
        """
        super().__init__()
        self.path = root / STATE
        self._writing = threading.Lock()
        while True:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            _lock(self._fd, root, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if self.path.stat().st_ino == os.fstat(self._fd).st_ino:
                    break
            os.close(self._fd)  # the other finished and removed it between our open and our lock
        self.removed = False
        try:
            whole, size = self.load(self._fd)
            if whole != size:
                os.ftruncate(self._fd, whole)
        except BaseException:
            os.close(self._fd)
            raise

    def begin(self, fingerprint: Record, manifest: str | None = None) -> None:
        """Start over for a source and options, or start to repair the finished pack of a manifest."""
        self._append({"begin": fingerprint} if manifest is None else {"begin": fingerprint, "manifest": manifest})
        fsync_folder(self.path.parent)

    def resume(self, fingerprint: Record) -> None:
        """Go on with other options. Files that these would make otherwise must have been forgotten before."""
        self._append({"resume": fingerprint})

    def clear(self, paths: Iterable[str]) -> None:
        """Say that these files are going to be removed, and that no record counts any more."""
        self._append({"clear": sorted(paths)})
        fsync_folder(self.path.parent)

    def add(self, record: Record) -> None:
        """Record a finished file, durably. Safe for many threads."""
        self._append(record)

    def forget(self, path: str) -> None:
        """Take back the record of a file that is not there: it may be written anew, and be unfinished, from now on."""
        if path in self.records:
            self._append({"forget": path})

    def _append(self, line: Record) -> None:
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        with self._writing:
            end = os.lseek(self._fd, 0, os.SEEK_END)
            try:
                left = memoryview(data)
                while left.nbytes:  # a full disk takes a part first, and says so the next time
                    left = left[os.write(self._fd, left) :]
                os.fsync(self._fd)
            except BaseException:
                with contextlib.suppress(OSError):  # other threads may still add lines: no torn one before theirs
                    os.ftruncate(self._fd, end)
                raise
            self.take(data)

    def remove(self) -> None:
        """Remove the journal: the conversion is complete, or no file was finished."""
        self.path.unlink(missing_ok=True)
        self.removed = True
        fsync_folder(self.path.parent)

    def close(self) -> None:
        """Unlock."""
        os.close(self._fd)
