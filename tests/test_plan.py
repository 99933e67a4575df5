"""Plans: bytes that add up, aligned and deterministic headers, and what cannot be planned."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from hybrid_pack import plan as plan_module
from hybrid_pack.errors import UsageError
from hybrid_pack.io.bitmap import KEY
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.io.config import CONFIG, HF_QUANT_CONFIG
from hybrid_pack.io.safetensors import ALIGNMENT, FileHeader, read_header
from hybrid_pack.io.shards import INDEX
from hybrid_pack.plan import BasePlan, Plan, ShardPlan, make_plan
from hybrid_pack.report.png import TIER_MAP
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import bit_map, write_checkpoint
from tests.checkpoints import BITS, SMALL, Stored, edit_config, edit_tensors, quantization
from tests.io.content_mutations import stored

TOPOLOGIES = [Topology(), Topology(2), Topology(1, 2), Topology(2, 4)]


def plan_of(root: Path, topology: Topology | None = None, layers: list[int] | None = None) -> Plan:
    return make_plan(open_checkpoint(root), topology or Topology(), layers)


def as_file(file: ShardPlan | BasePlan, tmp_path: Path) -> FileHeader:
    """The planned file with a payload of zeros, as the strict reader sees it."""
    path = tmp_path / "file"
    path.write_bytes(file.header)
    os.truncate(path, file.nbytes)
    return read_header(path)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: t.folder)
def test_shards(small_checkpoint: Path, tmp_path: Path, topology: Topology) -> None:
    plan = plan_of(small_checkpoint, topology)
    expected = [(layer, rank) for layer in (3, 4, 5) for rank in range(topology.ranks)]
    assert [(s.layer, s.rank) for s in plan.shards] == expected
    for shard in plan.shards:
        assert shard.path == f"experts/{topology.folder}/rank-{shard.rank}/layer-{shard.layer:03d}.safetensors"
        assert len(shard.header) % ALIGNMENT == 0
        read = as_file(shard, tmp_path)
        assert list(read.tensors.items()) == list(shard.placed.items())
        assert [(t.name, t.dtype, t.shape) for t in read.tensors.values()] == [
            (t.name, t.dtype, t.shape) for t in shard.tensors
        ]
        for tensor in shard.tensors:
            if tensor.nbytes % ALIGNMENT == 0:
                assert shard.placed[tensor.name].begin % ALIGNMENT == 0, tensor.name


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: t.folder)
def test_bytes_add_up(small_checkpoint: Path, topology: Topology) -> None:
    plan = plan_of(small_checkpoint, topology)
    for rank in range(topology.ranks):
        mine = [s for s in plan.shards if s.rank == rank]
        payload = sum(s.nbytes - len(s.header) for s in mine)
        assert sum(plan.rank_bytes(rank).values()) == payload
        assert sum(s.nbytes for s in mine) - payload == sum(len(s.header) for s in mine)
    small = sum(p.stat().st_size for p in plan.copied.values()) + sum(map(len, plan.written.values()))
    assert plan.nbytes == sum(f.nbytes for f in (*plan.shards, *plan.base)) + small


def test_packed_bytes_are_those_stored(small_checkpoint: Path) -> None:
    """Moving is no compression: codes and block scales take the bytes they took, whatever the split."""
    for topology in TOPOLOGIES:
        plan = plan_of(small_checkpoint, topology)
        packed = sum(
            t.nbytes for s in plan.shards for t in s.tensors if not t.name.endswith(("global_scale", "expert_ids"))
        )
        base = sum(t.header.nbytes for f in plan.base for t in f.tensors)
        assert packed + base == plan.source_bytes
    experts = [e for layer in plan.source.layers.values() for e in layer.experts.values()]
    sizes = [sum(at.header.nbytes for m in e.matrices for at in (m.codes, m.scales)) for e in experts]
    assert plan.expert_bytes == max(sizes)


def test_expert_parallel_blocks(small_checkpoint: Path) -> None:
    for topology in TOPOLOGIES:
        plan = plan_of(small_checkpoint, topology)
        block = SMALL.num_experts // topology.expert_parallel
        for shard in plan.shards:
            bits = BITS if shard.layer == 3 else bit_map(SMALL).get(str(shard.layer), [4] * SMALL.num_experts)
            first = shard.rank // topology.tensor_parallel * block
            held = range(first, first + block)
            assert shard.kept == tuple(e for e in held if bits[e] == 4)
            assert shard.tail == tuple(e for e in held if bits[e] == 3)
            assert {t.tier for t in shard.tensors} == {
                tier for tier, ids in (("kept", shard.kept), ("tail", shard.tail)) if ids
            }
            for tensor in shard.tensors:
                assert tensor.shape[0] == len(shard.kept if tensor.tier == "kept" else shard.tail)


def test_two_kept_formats_in_one_pack(tmp_path: Path) -> None:
    """The MTP layer outside the map stays NVFP4 where the mapped layers are MXFP4."""
    write_checkpoint(tmp_path / "m", replace(SMALL, kept_format="mxfp4"))
    plan = plan_of(tmp_path / "m")
    groups = {}
    for shard in plan.shards:
        shapes = {t.name: t.shape for t in shard.tensors}
        groups[shard.layer] = SMALL.hidden // shapes["kept.w13_scale"][1]
    assert groups == {3: 32, 4: 32, 5: 16}


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: t.folder)
def test_same_input_same_plan(small_checkpoint: Path, topology: Topology) -> None:
    first, second = plan_of(small_checkpoint, topology), plan_of(small_checkpoint, topology)
    assert [(s.path, s.header) for s in first.shards] == [(s.path, s.header) for s in second.shards]
    assert [(b.path, b.header) for b in first.base] == [(b.path, b.header) for b in second.base]
    assert first.written == second.written
    assert first.fingerprint() == second.fingerprint()


def test_fingerprint(checkpoint: Path, tmp_path: Path) -> None:
    """Equal exactly where finished files of another run can be used."""
    prints = [plan_of(checkpoint, topology).fingerprint() for topology in TOPOLOGIES]
    prints.append(plan_of(checkpoint, layers=[3]).fingerprint())
    with edit_config(checkpoint) as config:
        quantization(config)["ignore"] = []
    prints.append(plan_of(checkpoint).fingerprint())
    assert len({json.dumps(p) for p in prints}) == len(prints)
    moved = checkpoint.rename(tmp_path / "moved")
    assert plan_of(moved).fingerprint() == prints[-1]


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (
            Topology(3),
            r"^--tp: tensor-parallel size 3 is not possible: .* by 3; legal sizes: 1, 2; or --pad, to 192$",
        ),
        (Topology(4), r"^--tp: .*128/4 = 32 is not a multiple of 64; legal sizes: 1, 2; or --pad, to 256$"),
        (Topology(1, 3), r"^--ep: expert-parallel size 3 is not possible: 4 experts .*; legal sizes: 1, 2, 4$"),
    ],
    ids=["tp3", "tp4", "ep3"],
)
def test_illegal_sizes(small_checkpoint: Path, topology: Topology, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_of(small_checkpoint, topology)


def test_no_size_is_legal(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", replace(SMALL, hidden=96))
    with pytest.raises(UsageError, match=r"no kernel tile fits hidden size 96, .*legal sizes: none"):
        plan_of(tmp_path / "m")


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([2], r"--layers: no experts to pack in that layer \(expected layers of 3\.\.5, found 2\)"),
        ([3, 77], "found 77"),
        ([-1, 3], "found -1"),
        ([], "found none"),
    ],
    ids=str,
)
def test_layers_that_are_not_there(small_checkpoint: Path, layers: list[int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_of(small_checkpoint, layers=layers)


def test_only_some_layers(small_checkpoint: Path) -> None:
    plan, everything = plan_of(small_checkpoint, layers=[5, 3, 5]), plan_of(small_checkpoint)
    assert plan.layers == (3, 5) and plan.omitted == (4,)
    assert [s.layer for s in plan.shards] == [3, 5]
    assert plan.notes == ("only layers 3, 5 are packed; the experts of 1 layers are left out",)
    assert [b.header for b in plan.base] == [b.header for b in everything.base]
    assert everything.omitted == () and everything.notes == ()


@pytest.mark.parametrize("dialect", ["bf16", "mxfp8", "fp8_row"])
@pytest.mark.parametrize("limit", [5_000_000_000, 100_000, 1])
def test_base_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialect: str, limit: int) -> None:
    monkeypatch.setattr(plan_module, "BASE_FILE_BYTES", limit)
    write_checkpoint(tmp_path / "m", replace(SMALL, base_dialect=dialect))
    with edit_tensors(tmp_path / "m") as tensors:
        tensors["odd"] = Stored("U8", (3,), b"abc")
        tensors["wide"] = Stored("I64", (2,), bytes(16))
        tensors["empty"] = Stored("F64", (0,), b"")
        tensors["half"] = Stored("F4", (2,), b"a")
    plan = plan_of(tmp_path / "m")
    seen: dict[str, str] = {}
    for number, file in enumerate(plan.base, 1):
        assert file.path == f"model-{number:05d}-of-{len(plan.base):05d}.safetensors"
        assert len(file.tensors) == 1 or sum(t.header.nbytes for t in file.tensors) <= limit
        read = as_file(file, tmp_path)
        assert read.nbytes == file.nbytes and read.data_begin % ALIGNMENT == 0
        for located in file.tensors:
            new, old = read.tensors[located.header.name], located.header
            assert (new.dtype, new.shape, new.nbytes) == (old.dtype, old.shape, old.nbytes)
            count = 1
            for size in new.shape:
                count *= size
            assert count == 0 or new.begin % max(1, new.nbytes // count) == 0, new.name
            seen[new.name] = file.path
    assert set(seen) == {t.header.name for t in plan.source.base}
    assert not any(".experts." in name for name in seen)
    index = json.loads(plan.written[INDEX])
    assert index["weight_map"] == seen
    assert index["metadata"]["total_size"] == sum(t.header.nbytes for t in plan.source.base)


def test_nothing_but_experts(checkpoint: Path) -> None:
    with edit_tensors(checkpoint) as tensors:
        for name in [name for name in tensors.weight_map if ".mlp.experts." not in name]:
            del tensors[name]
    plan = plan_of(checkpoint)
    assert plan.base == () and set(plan.written) == {CONFIG, TIER_MAP}


def test_wide_layer_goes_to_the_base(checkpoint: Path) -> None:
    stored("model.layers.5.mlp.experts.", "bf16")(checkpoint)
    plan = plan_of(checkpoint)
    assert plan.layers == (3, 4)
    assert "model.layers.5.mlp.experts.0.gate_proj.weight" in json.loads(plan.written[INDEX])["weight_map"]
    assert any("layer 5" in note for note in plan.notes)


def test_written_config(checkpoint: Path) -> None:
    source = json.loads((checkpoint / CONFIG).read_text())
    config = json.loads(plan_of(checkpoint).written[CONFIG])
    block = config.pop("quantization_config")
    original = source.pop("quantization_config")
    assert list(config.items()) == list(source.items())
    assert block == {
        "quant_method": "hybrid_pack",
        "manifest": "hybrid_pack.json",
        "hybrid_bit_map": bit_map(SMALL),
        "source_quantization_config": original,
    }


def test_written_config_where_the_map_is_elsewhere(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", replace(SMALL, map_in="quantization", map_keys="zero_padded"))
    plan = plan_of(tmp_path / "m")
    block = json.loads(plan.written[CONFIG])["quantization_config"]
    original = json.loads((tmp_path / "m" / HF_QUANT_CONFIG).read_text())["quantization"]
    assert block["hybrid_bit_map"] == bit_map(SMALL)
    assert block["source_quantization_config"] == original
    assert HF_QUANT_CONFIG not in plan.copied


def test_given_map_is_the_one_written(checkpoint: Path, tmp_path: Path) -> None:
    with edit_config(checkpoint) as config:
        raw = quantization(config).pop(KEY)
    (tmp_path / "map.json").write_text(json.dumps(raw))
    plan = make_plan(open_checkpoint(checkpoint, bit_map_file=tmp_path / "map.json"), Topology())
    assert json.loads(plan.written[CONFIG])["quantization_config"]["hybrid_bit_map"] == bit_map(SMALL)


def test_small_files(checkpoint: Path) -> None:
    wanted = {"LICENSE", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    for name in ("chat_template.jinja", "mxfp8_tier_nokvb.json", "additional_chat_templates/tool_use.jinja"):
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_text("x")
        wanted.add(name)
    for name in (
        "README.md",
        "hybrid_pack.json",
        ".gitattributes",
        "pytorch_model.bin",
        "old.safetensors",
        "a.json.partial",
    ):
        (checkpoint / name).write_text("x")
    (checkpoint / "figures").mkdir()
    (checkpoint / "figures" / "a.png").write_text("x")
    (checkpoint / "gone.txt").symlink_to("nowhere")
    for name in ("a:b.txt", "．hidden", "ｅxperts", "x．partial"):
        (checkpoint / name).write_text("x")
    (checkpoint / "calibration.json").touch()
    os.truncate(checkpoint / "calibration.json", (64 << 20) + 1)
    plan = plan_of(checkpoint)
    assert set(plan.copied) == wanted
    assert [note for note in plan.notes if "not copied" in note] == [
        "not copied: a.json.partial, figures, pytorch_model.bin",
        "'a:b.txt' is not copied: a pack cannot hold a file of that name",
        "calibration.json is not copied: 67108865 bytes is no small file",
        "gone.txt is not copied: a link to a file that is not there",
        *(
            f"{name!r} is not copied: a pack cannot hold a file of that name"
            for name in ("x．partial", "．hidden", "ｅxperts")
        ),
    ]


def test_no_stale_bit_map_stays_in_the_config(checkpoint: Path, tmp_path: Path) -> None:
    """A map given by --bit-map replaces every other; the source's own block is kept as it was."""
    right = bit_map(SMALL)
    stale = {layer: [4] * SMALL.num_experts for layer in right}
    with edit_config(checkpoint) as config:
        config["hybrid_bit_map"] = stale
        config["quantization"] = {"hybrid_bit_map": stale}
        config["text_config"] = {"hybrid_bit_map": stale, "quantization_config": {"hybrid_bit_map": stale}}
        config["quantization_config"]["hybrid_bit_map"] = stale
    (tmp_path / "map.json").write_text(json.dumps(right))
    plan = make_plan(open_checkpoint(checkpoint, bit_map_file=tmp_path / "map.json"), Topology(1))
    written = json.loads(plan.written["config.json"])
    for holder in (written, written["quantization"], written["text_config"], written["quantization_config"]):
        assert holder["hybrid_bit_map"] == right
    assert written["text_config"]["quantization_config"]["hybrid_bit_map"] == right
    assert written["quantization_config"]["source_quantization_config"]["hybrid_bit_map"] == stale


def test_a_readme_of_any_case_is_not_copied(checkpoint: Path) -> None:
    (checkpoint / "readme.md").write_text("theirs")
    assert "readme.md" not in make_plan(open_checkpoint(checkpoint), Topology(1)).copied


def test_what_stays_behind_is_said(checkpoint: Path) -> None:
    (checkpoint / "original").mkdir()
    (checkpoint / "pytorch_model.bin").write_bytes(b"x")
    plan = make_plan(open_checkpoint(str(checkpoint)), Topology(1))
    assert "not copied: original, pytorch_model.bin" in plan.notes
