"""Options of the plugin: ``--additional-config '{"hybrid_pack": {...}}'``, all optional. Imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, cast, get_args

from hybrid_pack.errors import UsageError
from hybrid_pack.runtime.layer import Check

KEY = "hybrid_pack"
BACKENDS = ("auto", "b12x", "torch")
ALLOWED: Mapping[str, tuple[str, ...]] = {"backend": BACKENDS, "check": get_args(Check)}
WHERE = f"--additional-config {KEY}"
LIKE = 0.8
"""Ratio of ``difflib`` from which a key is taken for a misspelt ``hybrid_pack``."""


@dataclass(frozen=True)
class Options:
    """What a user may choose.

    Attributes:
        backend: ``auto``, ``b12x`` or ``torch``.
        check: What is held against the manifest, ``structure`` or ``digest``; None is ``load_rank``'s default.
    """

    backend: str = "auto"
    check: Check | None = None


def parse_options(additional_config: Any) -> Options:
    """Options from vLLM's ``additional_config``.

    Raises:
        UsageError: Not an object, an unknown key, or a value that is none of those there are.
    """
    given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(given, Mapping):
        raise UsageError("not an object", where=WHERE, expected='such as {"backend": "b12x"}', found=repr(given))
    for key, value in given.items():
        if key not in ALLOWED:
            raise UsageError("no such option", where=WHERE, expected=" or ".join(ALLOWED), found=repr(key))
        if value not in ALLOWED[key]:
            raise UsageError(
                "no such choice", where=f"{WHERE}.{key}", expected=" or ".join(ALLOWED[key]), found=repr(value)
            )
    return Options(given.get("backend", "auto"), cast("Check | None", given.get("check")))


def misplaced(additional_config: Any) -> list[str]:
    """What to say about keys that look like the plugin's, but that it does not read; other plugins have theirs there.

    Args:
        additional_config: vLLM's.
    """
    keys = additional_config if isinstance(additional_config, Mapping) else ()
    found = []
    for key in keys:
        if key == KEY:
            continue
        if key in ALLOWED:
            found.append(f"--additional-config {key!r} is not read here; options go below {KEY!r}")
        elif SequenceMatcher(None, str(key).lower(), KEY).ratio() >= LIKE:
            found.append(f"--additional-config {key!r} is not read; did you mean {KEY!r}?")
    return found
