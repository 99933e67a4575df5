"""SRC on the command line: a folder, or a Hub id that is fetched into the Hugging Face cache."""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid_pack.errors import UsageError

if TYPE_CHECKING:
    from hybrid_pack.hub import HubSupply
    from hybrid_pack.io.progress import Progress

HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")


def hub_id(text: str, revision: str | None = None) -> tuple[str, str | None]:
    """(``org/name``, revision or None) of a Hub id on the command line.

    Args:
        text: ``org/name`` or ``org/name@revision``.
        revision: Given by an option of its own.

    Raises:
        UsageError: No Hub id, or two revisions.
    """
    match = HUB_ID.fullmatch(text)
    if match is None:
        raise UsageError("not a Hub id", where=text, expected="org/name or org/name@revision")
    if match[2] is not None and revision is not None:
        raise UsageError("two revisions", where=text, expected="one", found=f"--revision {revision} too")
    return match[1], match[2] or revision


def stream_folder(out: Path) -> Path:
    """Where shards lie that are not to be kept: beside the pack."""
    out = out.absolute()
    return out.parent / f".{out.name}.source"


def streamed_source(text: str, out: Path, progress: Progress) -> tuple[Path, str | None, HubSupply | None]:
    """(folder, name to remember, what brings its shards) of a Hub id that is not to be kept.

    The folder lies beside the output and holds few shards at a time; what is whole in the Hugging Face cache is used
    from there, and nothing brings anything.

    Args:
        text: As given on the command line.
        out: Folder of the pack.
        progress: Told what is worth a line.

    Raises:
        UsageError: No Hub id, or none the Hub has.
        EnvironmentFailure: It cannot be fetched.
    """
    from hybrid_pack import hub

    repo_id, revision = hub_id(text)
    cached = hub.cached_checkpoint(repo_id, revision)
    if cached is not None:
        return cached, repo_id, None
    folder = stream_folder(out)
    return folder, repo_id, hub.stream_checkpoint(repo_id, revision, folder, progress=progress)


def local_source(text: str, *, headers_only: bool = False) -> tuple[Path, str | None]:
    """(folder, name to remember or None for its own) of SRC; downloads a Hub id's files that are needed.

    Args:
        text: As given on the command line.
        headers_only: No payload will be read: of a Hub id's shards fetch the headers alone.

    Raises:
        UsageError: Neither an existing folder nor a Hub id.
        EnvironmentFailure: It cannot be fetched.
    """
    path = Path(text).expanduser()
    if path.is_dir():
        return path, None
    match = HUB_ID.fullmatch(text)
    if path.exists() or match is None or text.startswith((".", "~")):
        raise UsageError(
            "not a checkpoint folder",
            where=text,
            expected="a folder, or a Hub id: org/name or org/name@revision",
        )
    from hybrid_pack import hub

    if not headers_only:
        return hub.fetch_checkpoint(match[1], match[2]), match[1]
    folder = Path(tempfile.mkdtemp(prefix="hybrid-pack-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    hub.fetch_headers(match[1], match[2], folder)
    return folder, match[1]
