"""A pack holds the source's codes and scales, bit for bit, whatever the dialect and the topology."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hybrid_pack.synthetic import Spec
from tests.convert.conftest import Sources
from tests.convert.stored import EXPERT, Experts, join, manifest, read_file, shard_path, source_experts, source_tensors
from tests.convert.support import pack, small

WIDE = {"intermediate": 512}
"""Can be split by eight."""

DIALECTS = {
    "nvfp4": small(**WIDE, scalar_shape=(), input_scale=True),
    "nvfp4_power_of_two": small(**WIDE, seed=1, scalar_shape=(1,), input_scale=False, second_scale="power_of_two"),
    "mxfp4": small(**WIDE, seed=2, kept_format="mxfp4", base_dialect="mxfp8", shard_bytes=200_000),
    "mxfp4_kquant": small(**WIDE, seed=3, kept_format="mxfp4", nf3_scales="e4m3_x16", scalar_shape=(1,)),
    "nvfp4_kquant": small(**WIDE, seed=4, nf3_scales="e4m3_x16", base_dialect="fp8_row", single_file=True),
    "deepseek_v4": small(**WIDE, seed=5, family=1, kept_format="mxfp4", mtp_layer=False),
}
TOPOLOGIES = [(tp, ep) for tp in (1, 2, 4, 8) for ep in (1, 2)]

OTHERS = {
    "qwen_text_config": (small(seed=10, family=2, map_in="quantization"), 2, 1),
    "minimax_m2": (small(seed=11, family=3, map_keys="zero_padded"), 1, 2),
    "minimax_m3_text_config": (small(seed=12, family=4, kept_format="mxfp4"), 2, 2),
    "kimi_k3_latent_text_config": (small(seed=13, family=5, map_in="hf_quant"), 2, 4),
    "kimi_k25_text_config": (small(seed=14, family=6), 1, 1),
    "gemma4_text_config": (small(seed=15, family=7), 2, 1),
    "all_kept": (small(seed=16, kept=4), 2, 2),
    "all_tail": (small(seed=17, kept=0, mtp_layer=False), 2, 2),
    "one_kept": (small(seed=18, kept=1), 1, 4),
    "odd_sizes": (small(seed=19, hidden=384, intermediate=192, num_experts=6, kept=3), 3, 3),
    "large_tiles": (small(seed=20, hidden=256, intermediate=256), 1, 1),
    "three_layers": (small(seed=21, moe_layers=(2, 5, 11), dense_layers=(0,)), 2, 1),
}


def check_experts(out: Path, tp: int, ep: int, experts: Experts) -> None:
    """The ranks together are the source: every code, and every scale as a float64."""
    wholes = join(out, tp, ep, experts)
    assert set(wholes) == {
        (layer, e, role) for layer, es in experts.items() for e, roles in es.items() for role in roles
    }
    for (layer, expert, role), whole in wholes.items():
        stored = experts[layer][expert][role]
        where = f"layer {layer} expert {expert} {role}"
        assert np.array_equal(whole.codes, stored.codes), where
        assert np.array_equal(whole.scales, stored.scales), where


def check_base(root: Path, out: Path) -> None:
    """Every other tensor is there with its bytes, dtype and shape, and the index is right."""
    wanted = {name: raw for name, raw in source_tensors(root).items() if not EXPERT.fullmatch(name)}
    files = {path.name: read_file(path) for path in sorted(out.glob("*.safetensors"))}
    found = {name: raw for tensors in files.values() for name, raw in tensors.items()}
    assert {n: (r.dtype, r.shape, r.data) for n, r in found.items()} == {
        n: (r.dtype, r.shape, r.data) for n, r in wanted.items()
    }
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    assert index["metadata"]["total_size"] == sum(len(raw.data) for raw in found.values())


def check_small_files(root: Path, out: Path) -> None:
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "LICENSE"):
        assert (out / name).read_bytes() == (root / name).read_bytes()
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (out, root))
    block = ours.pop("quantization_config")
    stored = theirs.pop("quantization_config", None)
    assert ours == theirs
    assert block["quant_method"] == "hybrid_pack"
    if stored is not None:
        assert block["source_quantization_config"] == stored


def check_manifest(out: Path, tp: int, ep: int, experts: Experts) -> None:
    """What it says of tensors is what the files say; what it counts is what the source holds."""
    document = manifest(out)
    assert document["topology"] == {"tensor_parallel": tp, "expert_parallel": ep}
    for entry in document["shards"]:
        path = shard_path(out, tp, ep, entry["rank"], entry["layer"])
        assert (entry["path"], entry["bytes"]) == (path.relative_to(out).as_posix(), path.stat().st_size)
        tensors = read_file(path)
        assert {n: (t["dtype"], tuple(t["shape"]), t["begin"]) for n, t in entry["tensors"].items()} == {
            n: (raw.dtype, raw.shape, raw.begin) for n, raw in tensors.items()
        }
        assert min(raw.begin for raw in tensors.values()) % 4096 == 0
    tiers = {layer: [e for e, m in es.items() if m["gate"].name != "nf3"] for layer, es in experts.items()}
    assert {int(layer): entry["kept"] for layer, entry in document["layers"].items()} == tiers
    report = document["report"]
    matrices = [m for es in experts.values() for roles in es.values() for m in roles.values()]
    assert report["groups_zero_scale"] == sum(int((m.scales == 0).sum()) for m in matrices)
    assert report["experts_kept"] == sum(map(len, tiers.values()))
    assert report["experts_tail"] == sum(map(len, experts.values())) - report["experts_kept"]
    assert (report["blocks_flushed"], report["scales_saturated"], report["experts_requantized"]) == (0, 0, [])


def check(root: Path, out: Path, tp: int, ep: int) -> None:
    experts = source_experts(root)
    check_experts(out, tp, ep, experts)
    check_base(root, out)
    check_small_files(root, out)
    check_manifest(out, tp, ep, experts)


@pytest.mark.parametrize(("tp", "ep"), TOPOLOGIES)
@pytest.mark.parametrize("dialect", DIALECTS)
def test_dialects_and_topologies(dialect: str, tp: int, ep: int, sources: Sources, tmp_path: Path) -> None:
    root = sources(DIALECTS[dialect])
    pack(root, tmp_path / "out", tp, ep)
    check(root, tmp_path / "out", tp, ep)


@pytest.mark.parametrize("case", OTHERS)
def test_families_tiers_and_sizes(case: str, sources: Sources, tmp_path: Path) -> None:
    spec, tp, ep = OTHERS[case]
    root = sources(spec)
    pack(root, tmp_path / "out", tp, ep)
    check(root, tmp_path / "out", tp, ep)


def test_every_family_is_among_them() -> None:
    specs: list[Spec] = [*DIALECTS.values(), *(spec for spec, _, _ in OTHERS.values())]
    assert {spec.family for spec in specs} == set(range(8))


def test_several_base_files(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_pack.plan.BASE_FILE_BYTES", 150_000)
    pack(source, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    check(source, tmp_path / "out", 1, 1)


def test_base_files_larger_than_a_piece(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_pack.convert.base.CHUNK_BYTES", 8192)
    pack(source, tmp_path / "out")
    check(source, tmp_path / "out", 1, 1)
