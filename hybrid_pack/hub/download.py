"""One file of a repository into a folder: bounded, stoppable, tried again."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybrid_pack.errors import DataError
from hybrid_pack.hub.errors import Stopped, at, errors, retrying
from hybrid_pack.hub.logs import announce


class TooLong(DataError):
    """More bytes came than the file has."""


def _meter(limit: int, advance: Callable[[int], None], stop: threading.Event) -> type:
    """What huggingface_hub takes for a progress bar: counts bytes, ends a download that is stopped or too long."""

    class Meter:
        def __init__(self, *_: object, **__: object) -> None:
            self.n, self.total = 0, limit

        def update(self, n: int = 1) -> None:
            """Bytes that arrived; negative where some are to be fetched again."""
            if stop.is_set():
                raise Stopped
            self.n += n
            if self.n > limit:
                raise TooLong("more bytes come than the file has", expected=f"{limit} bytes")
            advance(n)

        def update_transfer(self, _: int = 1) -> None:
            if stop.is_set():
                raise Stopped

        def set_transfer_postfix_str(self, *_: object, **__: object) -> None: ...
        def set_postfix_str(self, *_: object, **__: object) -> None: ...
        def set_description(self, *_: object, **__: object) -> None: ...
        def refresh(self, *_: object, **__: object) -> None: ...
        def close(self) -> None: ...

        def __enter__(self) -> Meter:
            return self

        def __exit__(self, *_: object) -> None: ...

    return Meter


def download(
    repo_id: str,
    commit: str,
    path: str,
    nbytes: int,
    folder: Path,
    *,
    again: bool = False,
    stop: threading.Event | None = None,
    advance: Callable[[int], None] = lambda _: None,
    tell: Callable[[str], None] = announce,
) -> Path:
    """Fetch one file; what arrives is neither hashed nor trusted.

    Args:
        repo_id: ``org/name``.
        commit: Its commit.
        path: In the repository; checked by the caller, for it becomes a path below ``folder``.
        nbytes: Its size.
        folder: Folder of our own; gets the file, and huggingface_hub's notes beside it.
        again: Do not take a copy that is in the folder or in a cache.
        stop: Ends the download from another thread.
        advance: Told of bytes that arrived, from any thread; negative when they must be fetched again.
        tell: Told of waits.

    Returns:
        The file, a regular one.

    Raises:
        DataError: The repository does not have it, or sends something else.
        EnvironmentFailure: No network, no access, no room.
        Stopped: As asked.
    """
    from huggingface_hub import hf_hub_download

    stopped = stop or threading.Event()
    folder = folder.resolve()  # as huggingface_hub does, in what it returns
    counted = 0

    def count(n: int) -> None:
        nonlocal counted
        counted += n
        advance(n)

    options: dict[str, Any] = {}
    if "tqdm_class" in inspect.signature(hf_hub_download).parameters:  # since huggingface_hub 1
        options["tqdm_class"] = _meter(nbytes, count, stopped)

    def fetch() -> str:
        nonlocal counted
        advance(-counted)
        counted = 0
        if stopped.is_set():
            raise Stopped
        return str(hf_hub_download(repo_id, path, revision=commit, local_dir=folder, force_download=again, **options))

    with errors(f"{at(repo_id, commit)}: {path}"):
        try:
            found = Path(retrying(fetch, tell=lambda text: tell(f"{path}: {text}"), stop=stopped))
        except BaseException:
            advance(-counted)
            raise
        status = found.lstat()
        if found != folder / path or not stat.S_ISREG(status.st_mode):
            raise DataError("not a regular file", where=found)
        advance(status.st_size - counted)  # of a copy that was there, nobody counted the bytes
    return found


def abort() -> None:
    """End downloads by Xet, which do not look at ``stop``; those by HTTP do."""
    with contextlib.suppress(ImportError):  # huggingface_hub before 1 has no such session
        session: Any = importlib.import_module("huggingface_hub.utils._xet")
        session.abort_xet_session()


def forget(folder: Path, path: str) -> None:
    """Remove a file and what huggingface_hub noted about it."""
    notes = folder / ".cache" / "huggingface" / "download"
    for name in (folder / path, notes / f"{path}.metadata", notes / f"{path}.lock"):
        with contextlib.suppress(FileNotFoundError):
            name.unlink()


def fetch_bytes(repo_id: str, commit: str, path: str, nbytes: int, tell: Callable[[str], None] = announce) -> bytes:
    """The bytes of a small file, through a folder of its own.

    Raises:
        DataError: The repository sends another size than it lists.
        EnvironmentFailure: No network, no access, no room.
    """
    folder = Path(tempfile.mkdtemp(prefix="hybrid-pack-"))
    try:
        found = download(repo_id, commit, path, nbytes, folder, tell=tell)
        if found.stat().st_size != nbytes:
            raise DataError(
                "not of the size the Hub lists", where=path, expected=f"{nbytes} bytes", found=found.stat().st_size
            )
        return found.read_bytes()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
