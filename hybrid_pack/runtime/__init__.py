"""Packs at run time: open one, map a layer, run it.

Names are imported when first used. Opening a pack needs no torch; the rest does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hybrid_pack.runtime.backends import Accepted, Rejected
    from hybrid_pack.runtime.buffers import LoadBuffers
    from hybrid_pack.runtime.layer import LayerGeometry, PackedMoELayer, TierWeights
    from hybrid_pack.runtime.moe import HybridMoE
    from hybrid_pack.runtime.moe_runtime import MoERuntime
    from hybrid_pack.runtime.pack import Pack, open_pack
    from hybrid_pack.runtime.report import LoadedRank, LoadReport

__all__ = [
    "Accepted",
    "HybridMoE",
    "LayerGeometry",
    "LoadBuffers",
    "LoadReport",
    "LoadedRank",
    "MoERuntime",
    "Pack",
    "PackedMoELayer",
    "Rejected",
    "TierWeights",
    "open_pack",
]

_HOME = {
    "Accepted": "backends",
    "HybridMoE": "moe",
    "LayerGeometry": "layer",
    "MoERuntime": "moe_runtime",
    "LoadBuffers": "buffers",
    "LoadReport": "report",
    "LoadedRank": "report",
    "Pack": "pack",
    "PackedMoELayer": "layer",
    "Rejected": "backends",
    "TierWeights": "layer",
    "open_pack": "pack",
}


def __getattr__(name: str) -> object:
    """Import a public name from its module when it is first asked for (PEP 562)."""
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
