"""Every dialect a good checkpoint can have opens, with the layers, tiers and formats it was written with."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.errors import DataError
from hybrid_pack.io.bitmap import KEY
from hybrid_pack.io.checkpoint import Checkpoint, open_checkpoint
from hybrid_pack.io.config import CONFIG, HF_QUANT_CONFIG, NO_ACTIVATION, read_config
from hybrid_pack.io.names import FAMILIES, parse
from hybrid_pack.io.safetensors import read_header
from hybrid_pack.io.shards import INDEX, SINGLE
from hybrid_pack.plan import make_plan
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec, bit_map, write_checkpoint
from tests.checkpoints import (
    KEPT_GATE,
    SMALL,
    Stored,
    edit_config,
    edit_header,
    edit_index,
    edit_tensors,
    first_shard,
    quantization,
    read_file,
    write_file,
)
from tests.io.content_mutations import stored

TINY = replace(SMALL, moe_layers=(3,), dense_layers=(0,))


def write(root: Path, spec: Spec) -> Checkpoint:
    write_checkpoint(root, spec)
    return open_checkpoint(root)


def check(source: Checkpoint, spec: Spec) -> None:
    """Layers, tiers, formats and sizes are those of the spec, and no tensor is lost."""
    expected = {int(layer): bits for layer, bits in bit_map(spec).items()}
    if spec.mtp_layer:
        expected[spec.layers] = [4] * spec.num_experts
    assert list(source.layers) == sorted(expected)
    for index, bits in expected.items():
        layer = source.layers[index]
        assert layer.kept == tuple(e for e, bit in enumerate(bits) if bit == 4)
        assert layer.tail == tuple(e for e, bit in enumerate(bits) if bit == 3)
        assert layer.mapped == (index != spec.layers)
        assert layer.kept_format == ((spec.kept_format if layer.mapped else "nvfp4") if layer.kept else None)
        for expert, stored_expert in layer.experts.items():
            for matrix in stored_expert.matrices:
                assert matrix.format.name == (layer.kept_format if expert in layer.kept else "nf3")
                assert (matrix.second is None) == (matrix.format.name != "nvfp4")
                if matrix.format.name == "nf3":
                    assert matrix.format.scale_times_16 == (spec.nf3_scales == "e4m3_x16")
    assert (source.hidden, source.intermediate) == (spec.hidden, spec.intermediate)
    assert (source.config.num_experts, source.config.top_k) == (spec.num_experts, spec.top_k)
    assert source.config.num_layers == spec.layers
    base = {located.header.name for located in source.base}
    assert base == {name for name in source.shards.tensors if parse(name) is None}
    if source.config.activation in ("gelu_pytorch_tanh", "silu(router_weight=input)"):
        (note,) = source.notes
        assert note.startswith("no runtime of this version runs these experts:") and source.config.activation in note
    else:
        assert source.notes == (() if spec.model.activation[0] else (NO_ACTIVATION,))


@pytest.mark.parametrize("family", [i for i, f in enumerate(FAMILIES) if not f.fused], ids=lambda i: FAMILIES[i].models)
@pytest.mark.parametrize("kept", ["nvfp4", "mxfp4"])
def test_family(tmp_path: Path, family: int, kept: str) -> None:
    spec = replace(TINY, family=family, kept_format=kept)
    source = write(tmp_path / "m", spec)
    check(source, spec)
    expert = source.layers[3].experts[0]
    assert expert.matrices[0].name == f"{FAMILIES[family].prefix.format(L=3, E=0)}.{FAMILIES[family].names[0]}"
    assert (expert.gate is None) == (not FAMILIES[family].gated)
    assert make_plan(source, Topology(2), pad=True).shards


@pytest.mark.parametrize(
    ("kept", "nf3", "base"),
    list(itertools.product(["nvfp4", "mxfp4"], ["e4m3", "e4m3_x16"], ["bf16", "mxfp8", "fp8_row"])),
)
def test_formats(tmp_path: Path, kept: str, nf3: str, base: str) -> None:
    spec = replace(TINY, kept_format=kept, nf3_scales=nf3, base_dialect=base)
    check(write(tmp_path / "m", spec), spec)


@pytest.mark.parametrize(
    "options",
    [
        {"map_in": "quantization"},
        {"map_in": "hf_quant"},
        {"map_in": "hf_quant", "family": 5, "kept_format": "mxfp4"},
        {"map_keys": "zero_padded"},
        {"scalar_shape": (1,)},
        {"input_scale": False},
        {"single_file": True},
        {"shard_bytes": 1},
        {"mtp_layer": False},
        {"kept": 0},
        {"kept": 4},
        {"dense_layers": (), "moe_layers": (0, 1)},
        {"second_scale": "unequal"},
    ],
    ids=str,
)
def test_spelling(tmp_path: Path, options: dict[str, Any]) -> None:
    spec = replace(TINY, **options)
    check(write(tmp_path / "m", spec), spec)


def test_map_given_as_a_file(tmp_path: Path) -> None:
    spec = replace(TINY, map_in="none")
    write_checkpoint(tmp_path / "m", spec)
    with pytest.raises(DataError, match="no hybrid_bit_map"):
        open_checkpoint(tmp_path / "m")
    for document in (bit_map(spec), {KEY: bit_map(spec)}, {"quantization": {KEY: bit_map(spec)}}):
        (tmp_path / "map.json").write_text(json.dumps(document))
        check(open_checkpoint(tmp_path / "m", bit_map_file=tmp_path / "map.json"), spec)


def test_given_map_replaces_a_wrong_one(checkpoint: Path, tmp_path: Path) -> None:
    with edit_config(checkpoint) as config:
        right = quantization(config)[KEY]
        quantization(config)[KEY] = {"3": [2]}
    (tmp_path / "map.json").write_text(json.dumps(right))
    check(open_checkpoint(checkpoint, bit_map_file=tmp_path / "map.json"), SMALL)


@pytest.mark.parametrize("place", ["top", "text_config", "text_config.quantization_config", "quantization"])
def test_map_elsewhere_in_the_config(tmp_path: Path, place: str) -> None:
    spec = replace(TINY, family=2)
    write_checkpoint(tmp_path / "m", spec)
    with edit_config(tmp_path / "m") as config:
        raw = config["quantization_config"].pop(KEY)
        holder = config
        for key in place.split(".") if place != "top" else ():
            holder = holder.setdefault(key, {})
        holder[KEY] = raw
    check(open_checkpoint(tmp_path / "m"), spec)


def test_the_same_map_in_both_documents(checkpoint: Path) -> None:
    padded = {f"{int(layer):03d}": bits for layer, bits in bit_map(SMALL).items()}
    (checkpoint / HF_QUANT_CONFIG).write_text(json.dumps({"quantization": {KEY: padded}}))
    check(open_checkpoint(checkpoint), SMALL)


def test_settings_beside_a_map_in_hf_quant_config_count(checkpoint: Path) -> None:
    """config.json has a quantization_config of its own, which must not hide them."""
    levels = [-2.0, -1.5, -1.0, -0.5, 0.5, 1.0, 1.5, 2.0]
    (checkpoint / HF_QUANT_CONFIG).write_text(json.dumps({"quantization": {"nf3_levels": levels}}))
    assert read_config(checkpoint).nf3_levels == tuple(levels)
    (checkpoint / HF_QUANT_CONFIG).write_text(json.dumps({"quantization": {"kept_format": "mxfp4_e8m0k32"}}))
    assert read_config(checkpoint).kept_format == "mxfp4"


def test_absent_optional_keys(checkpoint: Path) -> None:
    with edit_config(checkpoint) as config:
        quantization(config).update(
            quantized_layers=None, ignore=None, nf3_levels=None, kept_format=None, demoted_format=None
        )
    check(open_checkpoint(checkpoint), SMALL)
    with edit_config(checkpoint) as config:
        quantization(config).update(demoted_format="nf3_2p1", dense_format="mxfp8", ignored_layers=["lm_head"])
    check(open_checkpoint(checkpoint), SMALL)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, "absent", {"a": 1}])
def test_metadata_of_any_kind(checkpoint: Path, metadata: object) -> None:
    for shard in checkpoint.glob("*.safetensors"):
        edit_header(shard, lambda h: h.pop("__metadata__") if metadata == "absent" else h.update(__metadata__=metadata))
    check(open_checkpoint(checkpoint), SMALL)


def test_header_spelling(checkpoint: Path) -> None:
    """Any order of the entries and keys, any white space, a data start that is not aligned."""

    def turned(header: dict[str, dict[str, object]]) -> str:
        return json.dumps({n: dict(reversed(e.items())) for n, e in reversed(header.items())}, indent=3) + " " * 5

    expected = read_header(first_shard(checkpoint))
    edit_header(first_shard(checkpoint), turned)
    found = read_header(first_shard(checkpoint))
    assert list(found.tensors) == list(expected.tensors)
    assert found.data_begin % 4096
    check(open_checkpoint(checkpoint), SMALL)


def test_f32_at_an_odd_offset(checkpoint: Path) -> None:
    """As real shards have them: an odd number of bytes before a second-level scale."""
    with edit_tensors(checkpoint) as tensors:
        tensors.beside(f"{KEPT_GATE}.weight_scale_2", "odd", Stored("U8", (1,), b"\0"))
        tensors.move_last(f"{KEPT_GATE}.weight_scale_2")
    source = open_checkpoint(checkpoint)
    second = next(e.gate.second for e in source.layers[3].experts.values() if e.gate.name == KEPT_GATE)
    assert second is not None and second.header.begin % 2 == 1


def test_empty_tensors(checkpoint: Path) -> None:
    with edit_tensors(checkpoint) as tensors:
        tensors["nothing"] = Stored("F32", (0, 7), b"")
        tensors["nothing.more"] = Stored("BF16", (0,), b"")
    assert {"nothing", "nothing.more"} < {t.header.name for t in open_checkpoint(checkpoint).base}


@pytest.mark.parametrize("total", ["tensors", "files", "absent", "null metadata", "wrong"])
def test_total_size(checkpoint: Path, total: str) -> None:
    """The size counts tensor bytes in one published repository and file bytes in its sibling."""
    with edit_index(checkpoint) as index:
        size = index["metadata"]["total_size"]
        if total == "files":
            index["metadata"]["total_size"] = sum(p.stat().st_size for p in checkpoint.glob("*.safetensors"))
        elif total == "wrong":
            index["metadata"]["total_size"] = 1
        elif total == "absent":
            del index["metadata"]
        elif total == "null metadata":
            index["metadata"] = None
    notes = open_checkpoint(checkpoint).notes
    assert notes == (
        (f"{INDEX}: metadata.total_size is 1, the shards hold {size} tensor bytes",) if total == "wrong" else ()
    )


def test_shards_in_a_folder(checkpoint: Path) -> None:
    (checkpoint / "weights").mkdir()
    for shard in checkpoint.glob("*.safetensors"):
        shard.rename(checkpoint / "weights" / shard.name)
    with edit_index(checkpoint) as index:
        index["weight_map"] = {name: f"weights/{file}" for name, file in index["weight_map"].items()}
    check(open_checkpoint(checkpoint), SMALL)


def test_one_file_of_another_name(tmp_path: Path) -> None:
    spec = replace(TINY, single_file=True)
    write_checkpoint(tmp_path / "m", spec)
    (tmp_path / "m" / SINGLE).rename(tmp_path / "m" / "weights.safetensors")
    check(open_checkpoint(tmp_path / "m"), spec)


def test_tensors_and_files_the_index_omits_are_reported(checkpoint: Path) -> None:
    with edit_index(checkpoint) as index:
        del index["weight_map"]["model.norm.weight"]
        last = index["weight_map"]["lm_head.weight"]
    write_file(checkpoint / "extra.safetensors", {"a": read_file(checkpoint / last)["lm_head.weight"]})
    source = open_checkpoint(checkpoint)
    assert source.notes == (
        f"{last}: tensor model.norm.weight not in the index, kept",
        "1 safetensors file(s) that no index names, ignored: extra.safetensors",
    )
    assert "model.norm.weight" in {t.header.name for t in source.base}


def test_a_copy_the_index_does_not_mean_is_ignored(checkpoint: Path) -> None:
    with edit_index(checkpoint) as index:
        first, last = index["weight_map"]["model.embed_tokens.weight"], index["weight_map"]["lm_head.weight"]
    tensors = read_file(checkpoint / last)
    write_file(checkpoint / last, {**tensors, "model.embed_tokens.weight": tensors["lm_head.weight"]})
    source = open_checkpoint(checkpoint)
    (at,) = [t for t in source.base if t.header.name == "model.embed_tokens.weight"]
    assert at.path == checkpoint / first != checkpoint / last
    note = f"{last}: tensor model.embed_tokens.weight by the index in another file, this copy ignored"
    assert note in source.notes


def test_files_beside_a_single_one_are_reported(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", replace(TINY, single_file=True))
    shutil.copy(tmp_path / "m" / SINGLE, tmp_path / "m" / "copy.safetensors")
    assert open_checkpoint(tmp_path / "m").notes == (
        "1 safetensors file(s) that no index names, ignored: copy.safetensors",
    )


def test_wide_experts_outside_the_map_stay_in_the_base(checkpoint: Path) -> None:
    stored("model.layers.5.mlp.experts.", "bf16")(checkpoint)
    source = open_checkpoint(checkpoint)
    assert list(source.layers) == [3, 4]
    wide = [t for t in source.base if ".layers.5.mlp.experts." in t.header.name]
    assert {t.header.dtype for t in wide} == {"BF16"}
    assert len(wide) == 3 * SMALL.num_experts
    (note,) = source.notes
    assert "layer 5 is not in the bit map and not packed" in note and "weight is BF16" in note


def test_mxfp4_outside_the_map_is_kept(checkpoint: Path) -> None:
    stored("model.layers.5.mlp.experts.", "mxfp4")(checkpoint)
    assert open_checkpoint(checkpoint).layers[5].kept_format == "mxfp4"


def test_expert_like_names_are_reported(checkpoint: Path) -> None:
    """An MTP block beside the decoder, fused experts, a vision tower: not packed, and never silently."""
    with edit_tensors(checkpoint) as tensors:
        tensors["mtp.layers.0.mlp.experts.0.gate_proj.weight"] = tensors["model.norm.weight"]
        tensors["model.layers.3.mlp.experts.w13_weight"] = tensors["model.norm.weight"]
    (note,) = open_checkpoint(checkpoint).notes
    assert note.startswith("2 expert-like tensors match no known name and stay in the base, such as m")


def test_excluded_yet_quantised_is_reported(checkpoint: Path) -> None:
    with edit_config(checkpoint) as config:
        quantization(config)["ignore"].append("*.mlp.experts.*")
    (note,) = open_checkpoint(checkpoint).notes
    assert "the config excludes model.layers.3.mlp.experts.0.gate_proj (layer 3 expert 0) by '*.mlp.experts.*'" in note


def snapshot(small: Path, home: Path) -> Path:
    """The tree huggingface_hub makes: files of a snapshot are links to blobs."""
    repository = home / "hub" / "models--some-org--Some.Model-1"
    root = repository / "snapshots" / ("0" * 40)
    root.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, path in enumerate(sorted(small.iterdir())):
        shutil.copy(path, repository / "blobs" / f"{number:064x}")
        (root / path.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    return root


def test_snapshot_of_the_hugging_face_cache(
    small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = snapshot(small_checkpoint, tmp_path)
    source = open_checkpoint(root)
    check(source, SMALL)
    assert source.name == "some-org/Some.Model-1"
    monkeypatch.chdir(root)
    assert open_checkpoint(Path()).name == "some-org/Some.Model-1"
    assert set(make_plan(source, Topology()).copied) == {
        "LICENSE",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_snapshot_that_lost_a_blob(small_checkpoint: Path, tmp_path: Path) -> None:
    root = snapshot(small_checkpoint, tmp_path)
    first_shard(root).resolve().unlink()
    with pytest.raises(
        DataError, match=r"model-00001-of-00006\.safetensors: a symbolic link to .*blobs/0+\d.*download it again"
    ):
        open_checkpoint(root)


def test_name(small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_checkpoint(small_checkpoint).name == "small"
    assert open_checkpoint(small_checkpoint, name="a/b").name == "a/b"
    monkeypatch.chdir(small_checkpoint)
    assert open_checkpoint(Path()).name == "small"
    (tmp_path / "link").symlink_to(small_checkpoint)
    assert "/" not in open_checkpoint(tmp_path / "link").name


def test_read_only_tree_is_left_alone(checkpoint: Path) -> None:
    for path in checkpoint.iterdir():
        path.chmod(0o444)
    checkpoint.chmod(0o555)
    before = {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in checkpoint.iterdir()}
    try:
        make_plan(open_checkpoint(checkpoint), Topology(2))
        assert {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in checkpoint.iterdir()} == before
    finally:
        checkpoint.chmod(0o755)


def test_payload_is_not_read(checkpoint: Path) -> None:
    """A shard of holes, 64 GiB large: only headers are touched."""
    path = checkpoint / "huge.safetensors"
    entry = {"huge": {"dtype": "U8", "shape": [1 << 36], "data_offsets": [0, 1 << 36]}}
    text = json.dumps(entry).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + (1 << 36))
    with edit_index(checkpoint) as index:
        index["weight_map"]["huge"] = path.name
        del index["metadata"]
    assert open_checkpoint(checkpoint).base[0].header.nbytes == 1 << 36


def test_digests_follow_the_headers_and_documents(checkpoint: Path) -> None:
    first = open_checkpoint(checkpoint)
    again = open_checkpoint(checkpoint)
    assert (first.config_digest, first.index_digest) == (again.config_digest, again.index_digest)
    (checkpoint / CONFIG).write_text((checkpoint / CONFIG).read_text() + "\n")
    (checkpoint / INDEX).write_text((checkpoint / INDEX).read_text() + "\n")
    changed = open_checkpoint(checkpoint)
    assert first.config_digest != changed.config_digest
    assert first.index_digest != changed.index_digest
    assert [f.digest for f in first.shards.files] == [f.digest for f in changed.shards.files]


def test_a_config_without_activation_is_noted(checkpoint: Path) -> None:
    with edit_config(checkpoint) as config:
        del config["hidden_act"]
    source = open_checkpoint(checkpoint)
    assert source.config.activation == "silu"
    assert source.notes == ("config.json names no activation: silu is assumed",)


def test_mxfp4_without_kept_format_is_noted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", replace(SMALL, kept_format="mxfp4"))
    with edit_config(tmp_path / "m") as config:
        del config["quantization_config"]["kept_format"]
    (note,) = open_checkpoint(tmp_path / "m").notes
    assert note.startswith("layer 3: kept experts are stored as MXFP4, though the config has no kept_format")


def test_a_null_map_hides_no_other(checkpoint: Path) -> None:
    with edit_config(checkpoint) as config:
        config[KEY] = None
    assert set(open_checkpoint(checkpoint).config.bit_map or {}) == {3, 4}
