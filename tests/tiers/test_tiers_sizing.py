"""Bytes of experts: what ``convert`` plans, and what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_pack.convert import convert
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.layouts.shard import RankGeometry
from hybrid_pack.plan import make_plan
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec, write_checkpoint
from hybrid_pack.tiers.sizing import RankBytes, Split, geometry_of, kept_cost, rank_bytes

HIDDEN, INTERMEDIATE, EXPERTS = 128, 256, 8


@pytest.fixture(scope="module", params=["nvfp4", "mxfp4"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers 1 and 2 with three kept of eight, and an MTP layer that is NVFP4 either way."""
    root = tmp_path_factory.mktemp("sizing") / request.param
    spec = Spec(
        hidden=HIDDEN, intermediate=INTERMEDIATE, num_experts=EXPERTS, kept=3, kept_format=request.param,
        moe_layers=(1, 2), dense_layers=(0,), vocab=8,
    )  # fmt: skip
    write_checkpoint(root, spec)
    return root


def counted(root: Path, topology: Topology) -> tuple[RankBytes, ...]:
    source = open_checkpoint(root)
    splits = {i: Split(layer.kept, layer.kept_format or "nvfp4") for i, layer in source.layers.items()}
    geometry = geometry_of(source.hidden, source.intermediate, EXPERTS, topology)
    return rank_bytes(geometry, topology, EXPERTS, splits, 7)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 4), (1, 8)])
def test_as_planned(hybrid: Path, tp: int, ep: int) -> None:
    plan = make_plan(open_checkpoint(hybrid), Topology(tp, ep))
    ranks = counted(hybrid, Topology(tp, ep))
    assert [rank.rank for rank in ranks] == list(range(tp * ep))
    for rank in ranks:
        assert {"kept": rank.kept, "tail": rank.tail} == plan.rank_bytes(rank.rank)
        assert rank.experts == sum(shard.nbytes for shard in plan.shards if shard.rank == rank.rank)
        assert (rank.base, rank.total) == (7, rank.experts + 7)


def test_as_written(hybrid: Path, tmp_path: Path) -> None:
    topology = Topology(2, 2)
    convert(make_plan(open_checkpoint(hybrid), topology), tmp_path / "pack", workers=2)
    for rank in counted(hybrid, topology):
        files = (tmp_path / f"pack/experts/tp2-ep2/rank-{rank.rank}").iterdir()
        assert rank.experts == sum(file.stat().st_size for file in files)


@settings(max_examples=40)
@given(st.lists(st.sets(st.integers(0, EXPERTS - 1)), min_size=1, max_size=4), st.sampled_from(["nvfp4", "mxfp4"]))
def test_each_kept_expert_costs_the_same(kept: list[set[int]], kept_format: str) -> None:
    """On the ranks that hold it; headers do not grow, empty tiers or not."""
    topology = Topology(2, 2)
    geometry = geometry_of(HIDDEN, INTERMEDIATE, EXPERTS, topology)

    def total(layers: list[set[int]]) -> list[int]:
        splits = {i: Split(tuple(sorted(ids)), kept_format) for i, ids in enumerate(layers)}
        return [rank.total for rank in rank_bytes(geometry, topology, EXPERTS, splits, 0)]

    empty, cost = total([set() for _ in kept]), kept_cost(geometry, kept_format)
    assert total(kept) == [
        nbytes + cost * sum(expert in topology.experts(rank, EXPERTS) for ids in kept for expert in ids)
        for rank, nbytes in enumerate(empty)
    ]


@pytest.mark.parametrize(("kept_format", "group"), [("nvfp4", 16), ("mxfp4", 32)])
def test_cost_by_hand(kept_format: str, group: int) -> None:
    """4 bits and a scale byte a group against 3 bits and a byte for 32, over all weights of an expert."""
    weights = 3 * 6144 * 512
    cost = kept_cost(RankGeometry(6144, 512, (64, 256, 64, 256)), kept_format)
    assert cost == weights // 2 + weights // group - (weights * 3 // 8 + weights // 32)


def test_glm_on_four_ranks() -> None:
    """GLM-5.2 with 64 of 256 kept: about 82 GB of experts a rank, as serving reports say."""
    topology = Topology(4)
    geometry = geometry_of(6144, 2048, 256, topology)
    layers = {i: Split(tuple(range(64)), "nvfp4") for i in range(3, 78)} | {78: Split(tuple(range(256)), "nvfp4")}
    (size,) = {rank.experts for rank in rank_bytes(geometry, topology, 256, layers, 0)}
    assert 81e9 < size < 84e9
