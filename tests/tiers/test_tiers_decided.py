"""What is needed where tiers are decided: what planning said of the same map, and what lies on the disk."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hybrid_pack.convert import convert
from hybrid_pack.errors import DataError
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.io.manifest import read_manifest
from hybrid_pack.plan import make_plan
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec, bit_map, write_checkpoint
from hybrid_pack.tiers import Budget, Keep, Rule, plan_tiers, read_model
from hybrid_pack.tiers.base import base_bytes
from hybrid_pack.tiers.decided import checkpoint_needs, pack_needs
from hybrid_pack.tiers.mapfile import write_map
from hybrid_pack.tiers.needs import Needs, decoder_layers
from hybrid_pack.tiers.source import BaseTensor, base_tensors, decoder_config
from tests.checkpoints import edit_config
from tests.tiers.models import any_saliency, saliency_of

SPEC = Spec(hidden=256, intermediate=256, num_experts=4, kept=2, vocab=8, map_in="none", second_scale="equal")
HEADS, WIDTH = 2, 16
STORED = {
    "nvfp4": replace(SPEC, stored=("nvfp4",)),
    "mxfp4": replace(SPEC, stored=("mxfp4",)),
    "mixed": replace(SPEC, stored=("mxfp4", "bf16")),
    "padded": replace(SPEC, intermediate=192, stored=("bf16",)),
    "MTP of another format": replace(SPEC, kept=4, kept_format="mxfp4"),
}


def made(root: Path, spec: Spec) -> Path:
    write_checkpoint(root, spec)
    with edit_config(root) as config:
        config.update(num_attention_heads=8, num_key_value_heads=HEADS, head_dim=WIDTH)
    return root


@pytest.fixture(scope="module", autouse=True)
def quick_fsync() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda fd: None)
        yield


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("decided")
    return {name: made(root / name.replace(" ", "-"), spec) for name, spec in STORED.items()}


def parts(needs: Needs) -> tuple[Any, ...]:
    """A plan has more than these."""
    return needs.topology, needs.intermediate, needs.ranks, needs.base, needs.kv


def packed(source: Path, out: Path, topology: Topology, *, pad: bool = False, **options: Any) -> Needs:
    """What a pack made of it says, its files held against that."""
    checkpoint = open_checkpoint(source, **options)
    convert(make_plan(checkpoint, topology, pad=pad), out, workers=2)
    needs = pack_needs(out, read_manifest(out))
    for rank in needs.ranks:
        files = (out / f"experts/{topology.folder}/rank-{rank.rank}").iterdir()
        assert sum(file.stat().st_size for file in files) == rank.experts
    assert needs.base.total == sum(at.header.nbytes for at in checkpoint.base)
    return needs


@settings(max_examples=30, deadline=None)
@given(
    stored=st.sampled_from(sorted(STORED)),
    size=st.integers(0, 4),
    budget=st.booleans(),
    include_mtp=st.booleans(),
    kept_format=st.sampled_from([None, "nvfp4", "mxfp4"]),
    topology=st.builds(Topology, st.sampled_from([1, 2]), st.sampled_from([1, 2, 4])),
    seed=st.integers(0, 99),
)
@example(
    stored="MTP of another format",
    size=1,
    budget=False,
    include_mtp=True,
    kept_format=None,
    topology=Topology(),
    seed=0,
)
@example(stored="mixed", size=2, budget=True, include_mtp=False, kept_format=None, topology=Topology(2, 2), seed=0)
def test_a_pack_needs_what_was_planned(
    stored: str,
    size: int,
    budget: bool,
    include_mtp: bool,
    kept_format: Any,
    topology: Topology,
    seed: int,
    sources: dict[str, Path],
) -> None:
    """For any rule, sizes and formats; and a checkpoint with that map, where no format is forced."""
    source, pad = sources[stored], stored == "padded"
    model = read_model(open_checkpoint(source, require_map=False))
    options: dict[str, Any] = {"pad": pad, "include_mtp": include_mtp, "kept_format": kept_format}

    def planned(rule: Rule) -> Any:
        return plan_tiers(model, any_saliency(model, seed), rule, topology, **options)

    plan = planned(Keep(size))
    if budget:  # layers then keep different numbers
        plan = planned(Budget(plan.largest.total, 0))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "map.json"
        write_map(file, plan.bit_map)
        opened = {"bit_map_file": file, "kept_format": plan.kept_format if plan.forced else None}
        needs = packed(source, Path(folder) / "pack", topology, pad=pad, **opened)
        assert parts(needs) == parts(plan)
        if not plan.forced:
            assert parts(checkpoint_needs(open_checkpoint(source, bit_map_file=file), topology, pad=pad)) == parts(plan)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 4)])
@pytest.mark.parametrize("kept_format", ["nvfp4", "mxfp4"])
def test_a_hybrid_checkpoint(kept_format: Any, tp: int, ep: int, tmp_path: Path) -> None:
    """As its pack, and as was planned for the checkpoint of four bits it could be made of."""
    spec = replace(SPEC, map_in="config", kept_format=kept_format, mtp_layer=kept_format == "nvfp4")
    topology, source = Topology(tp, ep), made(tmp_path / "source", spec)
    needs = checkpoint_needs(open_checkpoint(source), topology)
    assert parts(packed(source, tmp_path / "pack", topology)) == parts(needs)
    twin = read_model(
        open_checkpoint(made(tmp_path / "twin", replace(spec, stored=(kept_format,), map_in="none")), require_map=False)
    )
    saliency = saliency_of({int(layer): [float(b == 4) for b in bits] for layer, bits in bit_map(spec).items()})
    assert parts(plan_tiers(twin, saliency, Keep(spec.kept), topology)) == parts(needs)


def test_experts_that_stay_in_the_base_are_split_and_their_layer_has_a_cache(tmp_path: Path) -> None:
    """A wide MTP layer that the map does not name."""
    spec = replace(SPEC, stored=("bf16",), map_in="config")
    source, topology = made(tmp_path / "source", spec), Topology(2)
    checkpoint = open_checkpoint(source)
    assert spec.layers not in checkpoint.layers
    needs = checkpoint_needs(checkpoint, topology)
    assert parts(packed(source, tmp_path / "pack", topology)) == parts(needs)
    assert needs.kv.bf16 == 2 * 2 * (HEADS // 2) * WIDTH * (spec.layers + 1)
    experts = spec.num_experts * 3 * spec.hidden * spec.intermediate * 2
    assert needs.base.split >= experts
    others = [t for t in checkpoint.base if f"layers.{spec.layers}.mlp.experts." not in t.header.name]
    without = base_bytes(base_tensors(others), 2, decoder_config(checkpoint.config.raw))
    assert needs.base.per_rank - without.per_rank == experts // 2


@pytest.mark.parametrize(
    ("num_layers", "packed_layers", "base", "count"),
    [
        (0, (3, 4), (), 0),
        (5, (3, 4), (), 5),
        (5, (3, 4, 5), (), 6),
        (5, (3, 4), ("model.layers.5.mlp.experts.0.up_proj.weight",), 6),
        (5, (3, 4, 5), ("model.layers.5.mlp.experts.0.up_proj.bias",), 6),
        (5, (4, 5), ("model.layers.6.mlp.experts.0.up_proj.weight", "model.layers.3.mlp.experts.0.up_proj.weight"), 7),
        (5, (4,), ("visual.layers.20.mlp.up_proj.weight", "model.norm.weight"), 5),
    ],
)
def test_decoder_layers(num_layers: int, packed_layers: tuple[int, ...], base: tuple[str, ...], count: int) -> None:
    assert decoder_layers(num_layers, packed_layers, [BaseTensor(name, (2, 2), 8) for name in base]) == count


HINTS = {
    "nothing chosen": (replace(SPEC, stored=("nvfp4",)), "hybrid-pack plan chooses the tiers"),
    "chosen, but the map is lost": (SPEC, "give the map with --bit-map$"),
}


@pytest.mark.parametrize("case", HINTS)
def test_no_bit_map(case: str, tmp_path: Path) -> None:
    spec, hint = HINTS[case]
    checkpoint = open_checkpoint(made(tmp_path / "source", spec), require_map=False)
    with pytest.raises(DataError, match=rf"there is no bit map, so no sizes.*{hint}"):
        checkpoint_needs(checkpoint, Topology())
