"""Short calls, and what a folder looks like, for tests of conversion."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybrid_pack.convert import Conversion, convert
from hybrid_pack.convert.journal import STATE
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.plan import Plan, make_plan
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec

Stamps = dict[str, tuple[int, int, int]]


def small(**changes: Any) -> Spec:
    """Layer 1 by the map and the MTP layer 2; a half of the intermediate size is the smallest share there is."""
    fixed = {"hidden": 128, "intermediate": 128, "num_experts": 4, "moe_layers": (1,), "dense_layers": (0,), "vocab": 8}
    return Spec(**{**fixed, **changes})


def plan_of(source: Path, tp: int = 1, ep: int = 1, **options: Any) -> Plan:
    layers = options.pop("layers", None)
    return make_plan(open_checkpoint(source, **options), Topology(tp, ep), layers)


def pack(source: Path, out: Path, tp: int = 1, ep: int = 1, **options: Any) -> Conversion:
    """Convert a folder; two workers."""
    return convert(plan_of(source, tp, ep), out, **{"workers": 2, **options})


def replace_in_os(put: Callable[[Any, str, Any], object], name: str, function: Callable[..., Any]) -> None:
    """Put a function of os in the place of another, for pathlib too, which kept its own before Python 3.11."""
    accessor, real = getattr(pathlib, "_NormalAccessor", None), getattr(os, name)
    put(os, name, function)
    if getattr(accessor, name, None) is real:
        put(accessor, name, staticmethod(function))


def tree(root: Path) -> dict[str, bytes]:
    """Every file, links not followed, by its path."""
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def names(root: Path) -> list[str]:
    """Everything that is no folder, links not followed."""
    return [p.relative_to(root).as_posix() for p in sorted(root.rglob("*")) if p.is_symlink() or not p.is_dir()]


def partials(root: Path) -> list[str]:
    """Unfinished files, the journal aside."""
    return [name for name in names(root) if name.endswith(".partial") and name != STATE]


def weights(root: Path) -> list[str]:
    """Finished shards and base files."""
    return [name for name in names(root) if name.endswith(".safetensors")]


def stamps(root: Path, files: list[str] | None = None) -> Stamps:
    """Inode, size and modification time of files: equal only if nobody wrote them anew."""
    found = {}
    for name in names(root) if files is None else files:
        status = (root / name).stat()
        found[name] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return found
