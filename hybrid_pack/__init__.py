"""hybrid-pack: mixed-precision MoE checkpoints as per-rank shards in the layout the serving kernel reads.

Importing the package loads neither torch nor numpy; what needs them is imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from hybrid_pack._version import __version__
from hybrid_pack.errors import DataError, EnvironmentFailure, HybridPackError, UsageError

if TYPE_CHECKING:
    from hybrid_pack import runtime
    from hybrid_pack.runtime.pack import open_pack

__all__ = [
    "DataError",
    "EnvironmentFailure",
    "HybridPackError",
    "UsageError",
    "__version__",
    "open_pack",
    "runtime",
]


def __getattr__(name: str) -> object:
    """Import what needs more than the standard library when it is first asked for (PEP 562)."""
    if name == "runtime":
        return import_module("hybrid_pack.runtime")
    if name == "open_pack":
        value: object = import_module("hybrid_pack.runtime.pack").open_pack
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
