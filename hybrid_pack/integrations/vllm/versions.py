"""Which versions of vLLM the plugin is for. Imports nothing of vLLM."""

from __future__ import annotations

import re

FIRST, LAST = (0, 22, 1), (0, 27)
"""The interface of 0.22.1, 0.25.1 and 0.27.1 is held against their sources (tests/integrations/interface.json)."""

SUPPORTED = "0.22.1 to 0.27.x"


def release_of(version: str) -> tuple[int, ...] | None:
    """``0.27.1rc1+cu130`` -> (0, 27, 1); None for a version without a number, such as ``dev``."""
    match = re.match(r"\d+(\.\d+)*", version)
    return None if match is None else tuple(map(int, match[0].split(".")))


def why_not_version(version: str) -> str | None:
    """Why a version of vLLM is not supported, or None if it is."""
    release = release_of(version)
    if release is not None and release >= FIRST and release[: len(LAST)] <= LAST:
        return None
    return f"packs are served by vLLM {SUPPORTED}; this is vLLM {version}"
