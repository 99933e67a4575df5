"""A tiny pack, converted once, and copies of it to break."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hybrid_pack.convert import convert
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.plan import make_plan
from hybrid_pack.sharding import Topology


def make_pack(source: Path, out: Path, topology: Topology, **options: object) -> Path:
    plan = make_plan(open_checkpoint(source), topology, options.pop("layers", None))  # type: ignore[arg-type]
    convert(plan, out, workers=2, **options)  # type: ignore[arg-type]
    return out


@pytest.fixture(scope="session")
def good_pack(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks (tp 2, ep 2), layers 3, 4 and 5; for reading only."""
    return make_pack(small_checkpoint, tmp_path_factory.mktemp("pack") / "good", Topology(2, 2))


@pytest.fixture
def pack(good_pack: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    root = tmp_path / "pack"
    shutil.copytree(good_pack, root)
    return root
