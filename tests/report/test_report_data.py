"""The view says what the manifest says, counted a second time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hybrid_pack.io.manifest import read_manifest
from hybrid_pack.report.data import make_view, shards_here
from hybrid_pack.report.text import counted, escaped, plain, size
from hybrid_pack.sharding import Topology
from tests.report.manifests import GLM, document, errors, manifest, random_tiers

TIERS = random_tiers(range(3, 6), 16, 5, mtp=9)


def test_of_a_real_pack(packed: Path) -> None:
    found = read_manifest(packed)
    view = make_view(found, shards_here(packed, found))
    files = [
        path for path in packed.rglob("*") if path.is_file() and path.name not in ("README.md", "hybrid_pack.json")
    ]
    assert (view.files, view.total_bytes) == (len(files), sum(path.stat().st_size for path in files))
    assert view.base_bytes == sum(path.stat().st_size for path in packed.glob("*.safetensors"))
    assert [layer.layer for layer in view.layers] == [3, 4, 5]
    assert (view.experts_kept, view.experts_tail) == (3 + 3 + 8, 5 + 5)
    assert view.ranks_here == (0, 1)
    assert view.quantized == ()
    payload = sum(t.end - t.begin for s in found.shards for t in s.tensors.values())
    assert view.expert_bytes == payload
    assert view.bits_per_weight == pytest.approx(8 * payload / (3 * 8 * 3 * 256 * 256))


def test_glm_has_its_known_sizes() -> None:
    """GLM-5.2 in four ranks: about 82 GB a rank, and the bits of the two formats."""
    view = make_view(manifest(GLM, 256), [])
    assert [round(rank.nbytes / 1e9) for rank in view.ranks] == [82] * 4
    shares = (view.experts_kept * 4.5 + view.experts_tail * 3.25) / (76 * 256)
    assert view.bits_per_weight == pytest.approx(shares, rel=1e-4)
    assert view.tier_name("kept") == "kept (NVFP4)"


def test_ranks_that_are_not_here() -> None:
    found = manifest(TIERS, 16, topology=Topology(2))
    here = [shard.path for shard in found.shards if shard.rank == 1] + [found.shards[0].path]
    view = make_view(found, here)
    assert [(rank.shards, rank.shards_here) for rank in view.ranks] == [(4, 1), (4, 4)]
    assert view.ranks_here == (1,)


def test_expert_parallel_ranks_have_bytes_of_their_own() -> None:
    found = manifest({0: ([0, 1], "e4m3_k16")}, 4, topology=Topology(1, 2), hidden=256, intermediate=256)
    view = make_view(found, [])
    assert view.ranks[0].tail_bytes == view.ranks[1].kept_bytes == 0
    assert view.largest_rank.rank == 0


def test_quantised_tiers_are_taken_over() -> None:
    made = errors(TIERS, 16)
    view = make_view(manifest(TIERS, 16, quantized=made), [])
    for entry, given in zip(view.quantized, made, strict=True):
        assert (entry.layer, entry.tier) == (given["layer"], given["tier"])
        assert list(entry.sqnr_db.items()) == list(zip(given["experts"], given["sqnr_db"], strict=True))
        assert (entry.sources, entry.gptq_to_rtn) == (("BF16",), None)
        assert (entry.zero, entry.subnormal, entry.saturated) == (12, 3, 0)


def test_an_expert_without_a_gate_has_two_matrices() -> None:
    from hybrid_pack.schemas.manifest import Manifest

    made = document(TIERS, 16)
    made["layout"]["w13_order"] = "up"
    made["self_digest"] = f"blake3:{'0' * 64}"
    import json

    view = make_view(Manifest.model_validate_json(json.dumps(made)), [])
    assert (view.matrices, view.matrix_name("w13"), view.matrix_name("w2")) == (2, "up", "down")


def test_views_are_frozen() -> None:
    view = make_view(manifest(TIERS, 16), [])
    with pytest.raises(dataclasses.FrozenInstanceError):
        view.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain ä 中", "plain ä 中"),
        ("a\nb\x00\x7f", "a\\u000ab\\u0000\\u007f"),
        ("\u202egnp.exe\u200b", "\\u202egnp.exe\\u200b"),
        ("half \ud800", "half \\ud800"),
    ],
)
def test_nothing_is_invisible(given: str, shown: str) -> None:
    assert plain(given) == shown


def test_markup_is_text() -> None:
    assert escaped("<a href='x'>&\"") == "&lt;a href=&#x27;x&#x27;&gt;&amp;&quot;"


def test_sizes_and_counts() -> None:
    assert [size(n) for n in (0, 999, 1000, 82_049_000_000, 1.25e12)] == ["0 B", "999 B", "1 kB", "82 GB", "1.25 TB"]
    assert (counted(1, "rank"), counted(2000, "rank")) == ("1 rank", "2,000 ranks")
