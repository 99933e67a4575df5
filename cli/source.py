"""SRC on the command line: a folder, or a Hub id that is fetched into the Hugging Face cache."""

from __future__ import annotations

import atexit
import re
import shutil
import tempfile
from pathlib import Path

from hybrid_pack.errors import UsageError

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
