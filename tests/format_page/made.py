"""Small packs for the tests of FORMAT.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybrid_pack.convert import convert
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.plan import make_plan
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec, write_checkpoint

SMALL = Spec(
    hidden=128, intermediate=128, num_experts=4, kept=2, vocab=16, moe_layers=(0,), dense_layers=(), mtp_layer=False
)


@dataclass(frozen=True)
class Made:
    """A source and its pack, for reading only."""

    source: Path
    root: Path
    topology: Topology


def make(folder: Path, spec: Spec, topology: Topology) -> Made:
    write_checkpoint(folder / "source", spec)
    convert(make_plan(open_checkpoint(folder / "source"), topology), folder / "pack")
    return Made(folder / "source", folder / "pack", topology)
