"""SRC on the command line: a folder, or a Hub id that is fetched into the Hugging Face cache."""

from __future__ import annotations

import re
from pathlib import Path

from hybrid_pack.errors import UsageError

HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")


def local_source(text: str) -> tuple[Path, str | None]:
    """(folder, name to remember or None for its own) of SRC; downloads a Hub id's files that are needed.

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
            expected="a folder, or a Hub id such as org/name or org/name@revision",
        )
    from hybrid_pack.hub import fetch_checkpoint

    return fetch_checkpoint(match[1], match[2]), match[1]
