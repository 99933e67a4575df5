"""Options of the plugin: ``--additional-config '{"hybrid_pack": {...}}'``, all optional. Imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

from hybrid_pack.errors import UsageError
from hybrid_pack.runtime.layer import Check

KEY = "hybrid_pack"
BACKENDS = ("auto", "b12x", "torch")
WHERE = f"--additional-config {KEY}"


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
    allowed: dict[str, tuple[str, ...]] = {"backend": BACKENDS, "check": get_args(Check)}
    for key, value in given.items():
        if key not in allowed:
            raise UsageError("no such option", where=WHERE, expected=" or ".join(allowed), found=repr(key))
        if value not in allowed[key]:
            raise UsageError(
                "no such choice", where=f"{WHERE}.{key}", expected=" or ".join(allowed[key]), found=repr(value)
            )
    return Options(given.get("backend", "auto"), cast("Check | None", given.get("check")))
