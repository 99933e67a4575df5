"""Whole plans: laws of budgets in bytes, MTP layers, formats, and everything that is refused."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_pack.errors import DataError, UsageError
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.io.config import read_bit_map_file, read_config
from hybrid_pack.sharding import Topology, legal_tp
from hybrid_pack.synthetic import Spec, write_checkpoint
from hybrid_pack.tiers import Budget, Keep, KeepFraction, Rule, TierPlan, plan_tiers, read_model
from hybrid_pack.tiers.mapfile import map_bytes
from hybrid_pack.tiers.select import order, shares
from hybrid_pack.tiers.sizing import Split, geometry_of, kept_cost, rank_bytes
from tests.tiers.models import any_saliency, model, saliency_of

SMALL = model(num_experts=8, layers={1: "nvfp4", 2: "nvfp4", 4: "nvfp4"}, num_layers=5)


def plan(rule: Rule, seed: int = 0, topology: Topology | None = None, **options: Any) -> TierPlan:
    return plan_tiers(SMALL, any_saliency(SMALL, seed), rule, topology or Topology(), **options)


ALL_TAIL, ALL_KEPT = (plan(Keep(count)).largest.total for count in (0, 8))


@given(
    st.integers(0, 99),
    st.integers(ALL_TAIL // 8, ALL_KEPT + 9),
    st.sampled_from([Topology(1, 1), Topology(2, 1), Topology(1, 4), Topology(2, 2)]),
    st.sampled_from(["share", "raw"]),
    st.sampled_from(["nvfp4", "mxfp4"]),
    st.integers(0, 3),
)
def test_budget(seed: int, nbytes: int, topology: Topology, rank_by: Any, kept_format: str, floor: int) -> None:
    try:
        made = plan(Budget(nbytes, floor, rank_by), seed, topology, kept_format=kept_format)
    except UsageError as error:
        assert "too small even with" in str(error)
        return
    geometry = geometry_of(128, 128, 8, topology)
    cost = kept_cost(geometry, kept_format)
    splits = {layer: Split(kept, kept_format) for layer, kept in made.choice.kept.items()}
    assert made.ranks == rank_bytes(geometry, topology, 8, splits, made.base.per_rank)
    for rank in made.ranks:  # never over, and where something is left in the tail, one more would be
        assert rank.total <= nbytes
        held = topology.experts(rank.rank, 8)
        if any(len(set(kept) & set(held)) < len(held) for kept in made.choice.kept.values()):
            assert rank.total + cost > nbytes
    assert all(len(kept) >= floor for kept in made.choice.kept.values())


@given(st.integers(0, 99), st.integers(ALL_TAIL, ALL_KEPT), st.integers(ALL_TAIL, ALL_KEPT))
def test_more_budget_only_keeps_more(seed: int, one: int, other: int) -> None:
    less, more = (plan(Budget(nbytes, 0), seed) for nbytes in sorted((one, other)))
    for layer, kept in less.choice.kept.items():
        assert set(kept) <= set(more.choice.kept[layer])
    assert less.retained.layer_mean is not None
    assert more.retained.layer_mean is not None
    assert less.retained.layer_mean <= more.retained.layer_mean


@given(st.integers(0, 99), st.integers(0, 24))
def test_budget_for_exactly_so_many(seed: int, count: int) -> None:
    """The first ``count`` of all by their share, and no more for one byte less than the next."""
    cost = kept_cost(geometry_of(128, 128, 8, Topology()), "nvfp4")
    for nbytes in (ALL_TAIL + count * cost, ALL_TAIL + (count + 1) * cost - 1):
        made = plan(Budget(nbytes, 0), seed)
        kept = {(layer, expert) for layer, experts in made.choice.kept.items() for expert in experts}
        assert kept == set(order(shares(made.scores))[:count])


@given(st.integers(0, 99), st.integers(0, 8), st.sampled_from([Topology(1, 1), Topology(1, 2), Topology(2, 4)]))
def test_the_least_named_is_the_least(seed: int, floor: int, topology: Topology) -> None:
    with pytest.raises(UsageError, match=r"^--budget: too small even with") as caught:
        plan(Budget(1, floor), seed, topology)
    least = int(str(caught.value).partition("expected ")[2].split(" ")[0].replace(",", ""))
    assert all(len(kept) >= floor for kept in plan(Budget(least, floor), seed, topology).choice.kept.values())
    with pytest.raises(UsageError):
        plan(Budget(least - 1, floor), seed, topology)


def test_default_floor_is_top_k() -> None:
    assert plan(Budget(ALL_KEPT)).floor == SMALL.top_k == 1
    wide = model(top_k=3)
    made = plan_tiers(wide, any_saliency(wide), Budget(ALL_KEPT), Topology())
    assert made.floor == 3
    assert plan(Keep(2)).floor == 0


def test_raw_and_share_compare_layers_otherwise() -> None:
    """A layer of large numbers takes all by the raw ones; by shares the sharper layer comes first."""
    saliency = saliency_of({1: [90.0, 80.0, 85.0, 95.0], 2: [8.0, 1.0, 0.5, 0.5]})
    cost = kept_cost(geometry_of(128, 128, 4, Topology()), "nvfp4")
    nbytes = plan_tiers(model(), saliency, Keep(0), Topology()).largest.total + 2 * cost
    raw, share = (plan_tiers(model(), saliency, Budget(nbytes, 0, by), Topology()) for by in ("raw", "share"))  # type: ignore[arg-type]
    assert raw.choice.kept == {1: (0, 3), 2: ()}
    assert share.choice.kept == {1: (3,), 2: (0,)}


@pytest.mark.parametrize(
    ("rule", "count"),
    [(Keep(0), 0), (Keep(3), 3), (Keep(8), 8), (KeepFraction(Fraction(1, 4)), 2), (KeepFraction(Fraction(3, 16)), 2)],
)
def test_same_number_in_each_layer(rule: Rule, count: int) -> None:
    made = plan(rule)
    assert made.counts == (count, count, count)
    assert {len(bits) for bits in made.bit_map.values()} == {8}
    assert all(bits.count(4) == count and bits.count(3) == 8 - count for bits in made.bit_map.values())


def test_retained_by_hand() -> None:
    saliency = saliency_of({1: [1.0, 3.0, 0.0, 0.0], 2: [5.0, 5.0, 5.0, 5.0]})
    share = plan_tiers(model(), saliency, Keep(1), Topology()).retained
    assert (share.overall, share.layer_mean, share.worst, share.worst_layer) == (8 / 24, 0.5, 0.25, 2)
    nothing = plan_tiers(model(), saliency_of({1: [0.0] * 4, 2: [0.0] * 4}), Keep(1), Topology())
    assert (nothing.retained.overall, nothing.retained.worst_layer) == (None, None)
    assert len(nothing.choice.tied) == 6


def test_mtp_layers() -> None:
    """4-bit: left out, packed all kept. Wide: named all kept, or it would stay in the base. Asked for: chosen."""
    for stored, mapped in (("nvfp4", False), ("mxfp4", False), ("bf16", True)):
        source = model(layers={1: "nvfp4", 2: "nvfp4", 3: stored})
        saliency = any_saliency(source)
        assert source.mtp == (3,)
        made = plan_tiers(source, saliency, Keep(1), Topology())
        assert made.fixed == {3: Split((0, 1, 2, 3), "nvfp4" if mapped else stored)}
        assert made.bit_map.get(3) == ((4, 4, 4, 4) if mapped else None)
        assert set(made.choice.kept) == {1, 2}
        asked = plan_tiers(source, saliency, Keep(1), Topology(), include_mtp=True)
        assert asked.fixed == {}
        assert asked.bit_map[3].count(4) == 1
        assert asked.largest.kept < made.largest.kept
        assert any("MTP layer 3" in note for note in made.notes)
        assert not any("MTP layer" in note for note in asked.notes)


def test_mtp_layers_count_in_the_budget() -> None:
    source = model(layers={1: "nvfp4", 2: "nvfp4", 3: "nvfp4"})
    made = plan_tiers(source, any_saliency(source), Keep(1), Topology())
    again = plan_tiers(source, any_saliency(source), Budget(made.largest.total, 1), Topology())
    assert again.counts == (1, 1, 1)


def test_layers_unknown_to_the_config() -> None:
    """Without ``num_hidden_layers`` no layer is known to be an MTP layer, and the cache is not estimated."""
    source = model(num_layers=0)
    made = plan_tiers(source, any_saliency(source), Keep(1), Topology())
    assert set(made.bit_map) == {1, 2}
    assert made.kv.kind is None


@pytest.mark.parametrize(
    ("stored", "given", "used", "noted"),
    [
        ("nvfp4", None, "nvfp4", False),
        ("mxfp4", None, "mxfp4", False),
        ("bf16", None, "nvfp4", False),
        ("bf16", "mxfp4", "mxfp4", False),
        ("mxfp4", "nvfp4", "nvfp4", True),
    ],
)
def test_kept_format(stored: str, given: str | None, used: str, noted: bool) -> None:
    source = model(layers=dict.fromkeys((1, 2), stored))
    made = plan_tiers(source, any_saliency(source), Keep(4), Topology(), kept_format=given)
    assert made.kept_format == used
    weights = 2 * 4 * 3 * 128 * 128
    assert made.largest.kept == weights // 2 + weights // (16 if used == "nvfp4" else 32) + 2 * 4 * 12
    assert any("stored as MXFP4, sizes are for NVFP4" in note for note in made.notes) == noted


def test_two_stored_formats_default_to_nvfp4() -> None:
    source = model(layers={1: "nvfp4", 2: "mxfp4"})
    assert plan_tiers(source, any_saliency(source), Keep(1), Topology()).kept_format == "nvfp4"


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Keep(9), r"--keep: not a number of experts \(expected 0 to 8, found 9\)"),
        (Keep(-1), r"--keep: not a number of experts \(expected 0 to 8, found -1\)"),
        (KeepFraction(Fraction(3, 2)), r"--keep-fraction: not a fraction \(expected 0 to 1, found 1\.5\)"),
        (KeepFraction(Fraction(-1, 2)), r"--keep-fraction: not a fraction"),
        (Budget(10**9, 9), r"--floor: not a number of experts \(expected 0 to 8, found 9\)"),
        (Budget(10**9, -1), r"--floor: not a number of experts"),
        (Budget(0, 0), r"too small even with 0 kept experts a layer \(expected [\d,]+ bytes a rank or more .*--tp$"),
        (Budget(ALL_TAIL, 1), r"too small even with 1 kept .*; raise --budget or --tp, or lower --floor$"),
    ],
    ids=str,
)
def test_refused_rules(rule: Rule, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(rule)


@pytest.mark.parametrize(("topology", "option"), [(Topology(4), "--tp"), (Topology(1, 3), "--ep")])
def test_refused_topology(topology: Topology, option: str) -> None:
    with pytest.raises(UsageError, match=rf"^{option}: .*legal sizes: 1, 2"):
        plan(Keep(1), topology=topology)


def test_refused_saliency() -> None:
    with pytest.raises(DataError, match=r"file: the saliency has no layer 2"):
        plan_tiers(model(), saliency_of({1: [1.0] * 4}), Keep(1), Topology())


def test_only_mtp_layers() -> None:
    source = model(layers={3: "nvfp4"})
    with pytest.raises(UsageError, match=r"only MTP layers have experts \(found 3\); give --include-mtp"):
        plan_tiers(source, any_saliency(source), Keep(1), Topology())


@given(st.dictionaries(st.integers(0, 999), st.lists(st.sampled_from([3, 4]), min_size=1), min_size=1))
def test_the_map_file_is_read_back(bits: dict[int, list[int]]) -> None:
    text = map_bytes({layer: tuple(entries) for layer, entries in sorted(bits.items())})
    assert json.loads(text) == {str(layer): entries for layer, entries in bits.items()}


SHARED = Path(os.environ.get("HYBRID_PACK_SHARED", Path(__file__).parents[3] / "shared"))
CONFIGS = SHARED / "data" / "configs"


@pytest.mark.skipif(not CONFIGS.is_dir(), reason=f"no real configs in {CONFIGS}; set HYBRID_PACK_SHARED")
def test_real_configs(tmp_path: Path) -> None:
    """Every real geometry is planned at its largest size up to 8; the floor of top-k and the budget hold."""
    planned = 0
    for path in sorted(CONFIGS.glob("*_config.json")):
        if "_hf_quant" in path.name:
            continue
        shutil.copy(path, tmp_path / "config.json")
        config = read_config(tmp_path)
        sizes = legal_tp(config.hidden, config.intermediate, 8)
        source = model(
            hidden=config.hidden, intermediate=config.intermediate, num_experts=config.num_experts,
            top_k=config.top_k, num_layers=config.num_layers or 2, layers={0: "bf16", 1: "bf16"}, config=config.raw,
        )  # fmt: skip
        if not sizes:
            with pytest.raises(UsageError, match=r"--tp: .*legal sizes: none"):
                plan_tiers(source, any_saliency(source), Keep(1), Topology(4))
            continue
        low, high = (
            plan_tiers(source, any_saliency(source), Keep(count), Topology(sizes[-1])).largest.total
            for count in (config.top_k, config.num_experts)
        )
        made = plan_tiers(source, any_saliency(source), Budget((low + high) // 2), Topology(sizes[-1]))
        assert low <= made.largest.total <= (low + high) // 2
        assert made.counts[0] >= config.top_k == made.floor
        planned += 1
    assert planned > 20


SPEC = Spec(hidden=128, intermediate=128, kept=8, map_in="none", vocab=8)
"""Layers 3 and 4 of eight NVFP4 experts, MTP layer 5."""


def test_a_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", SPEC)
    source = read_model(open_checkpoint(tmp_path / "source", require_map=False))
    assert source.layers == {3: "nvfp4", 4: "nvfp4", 5: "nvfp4"}
    assert source.mtp == (5,)
    assert (source.hidden, source.intermediate, source.num_experts, source.top_k) == (128, 128, 8, 2)
    made = plan_tiers(source, any_saliency(source), Keep(3), Topology(2))
    (tmp_path / "map.json").write_bytes(map_bytes(made.bit_map))
    assert read_bit_map_file(tmp_path / "map.json") == made.bit_map
    assert set(made.bit_map) == {3, 4}


def test_text_config_is_laid_over_the_top(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", Spec(kept=8, map_in="none", family=2, vocab=8))
    source = read_model(open_checkpoint(tmp_path / "source", require_map=False))
    assert source.config["num_hidden_layers"] == 5
    assert source.num_layers == 5


def test_no_layer_at_all(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", SPEC)
    source = open_checkpoint(tmp_path / "source", require_map=False)
    nothing = replace(source, layers={}, notes=("layer 3 is not packed (BF16): its experts stay in the base",))
    with pytest.raises(DataError, match=r"source: no layer whose experts can be planned; layer 3 is not packed"):
        read_model(nothing)


def test_a_hybrid_checkpoint_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", Spec(kept=2, vocab=8))
    source = open_checkpoint(tmp_path / "source")
    first = source.layers[3].tail[0]
    with pytest.raises(DataError, match=rf"source: layer 3 expert {first} is NF3 already.*; plan from the checkpoint"):
        read_model(source)


@given(st.permutations(range(8)), st.integers(ALL_TAIL, ALL_KEPT))
def test_renumbered_experts(renumbered: list[int], nbytes: int) -> None:
    saliency = any_saliency(SMALL)
    moved = saliency_of({layer: [values[old] for old in renumbered] for layer, values in saliency.layers.items()})
    rule = Budget(nbytes, 0)
    kept = plan_tiers(SMALL, saliency, rule, Topology()).choice.kept
    again = plan_tiers(SMALL, moved, rule, Topology()).choice.kept
    assert {layer: sorted(renumbered[new] for new in ids) for layer, ids in again.items()} == {
        layer: list(ids) for layer, ids in kept.items()
    }


def test_a_size_that_cuts_groups_has_no_tail() -> None:
    """``convert`` could not make one, with ``--pad`` neither."""
    of = model(intermediate=80)
    with pytest.raises(DataError, match=r"no expert can become tail: .*expected a multiple of 32, found 80"):
        plan_tiers(of, any_saliency(of), Keep(2), Topology(1), pad=True)
    assert plan_tiers(of, any_saliency(of), Keep(4), Topology(1), pad=True).intermediate == 128
