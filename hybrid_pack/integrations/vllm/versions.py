"""Which versions of vLLM the plugin is for. Imports nothing of vLLM."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hybrid_pack.errors import EnvironmentFailure

FIRST, LAST = (0, 22, 1), (0, 27)
"""The interface of 0.22.1, 0.25.1 and 0.27.1 is held against their sources (tests/integrations/interface.json)."""

SUPPORTED = "0.22.1 to 0.27.x"
KNOWN = "0.22.1, 0.25.1 or 0.27.1"


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


def why_not_known(version: str, error: ImportError | AttributeError) -> str:
    """What a missing name means: vLLM's, or a module that the plugin needs beside it."""
    home = (error.name or "").partition(".")[0]
    if isinstance(error, AttributeError) or home == "vllm":
        return f"vLLM {version} is not as hybrid-pack knows it ({error})"
    return f"the plugin cannot be imported ({error})"


@contextmanager
def known_names(version: str) -> Iterator[None]:
    """Say of a name that is not where it was that this vLLM is another.

    Args:
        version: Of vLLM.

    Raises:
        EnvironmentFailure: In the place of an ``ImportError`` or ``AttributeError``.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        reason = why_not_known(version, error)
        raise EnvironmentFailure(reason, where="hybrid_pack", hint=f"vLLM {KNOWN} is known to work") from error


def indexer_keys(version: str) -> Mapping[str, str]:
    """What a version of vLLM reads the sparse indexer's ``wk`` from (``_try_load_fp8_indexer_wk``).

    Returns:
        By format, what the name of the scale must have in it.
    """
    release = release_of(version) or ()
    scale = "weight_scale" if release >= (0, 25) else "weight_scale_inv"
    return dict.fromkeys(("fp8_block", "fp8_row") if release >= (0, 27) else ("fp8_block",), scale)
