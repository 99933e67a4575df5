"""Damaged packs: what was done to a good one, and what a verification without the source says."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hybrid_pack.io.manifest import MANIFEST
from hybrid_pack.verify import verify_pack
from tests.verify.packs import editing, read_document, text_of

SHARD = "experts/tp2-ep2/rank-1/layer-004.safetensors"
OTHER = "experts/tp2-ep2/rank-0/layer-004.safetensors"
BASE = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], object]


def truncate(path: str, by: int) -> Damage:
    return lambda root: os.truncate(root / path, (root / path).stat().st_size - by)


def extend(path: str) -> Damage:
    return lambda root: (root / path).write_bytes((root / path).read_bytes() + b"\0")


def remove(path: str) -> Damage:
    return lambda root: (root / path).unlink()


def add(path: str, data: bytes = b"x") -> Damage:
    def damage(root: Path) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)

    return damage


def swap(one: str, other: str) -> Damage:
    def damage(root: Path) -> None:
        (root / one).rename(root / "x")
        (root / other).rename(root / one)
        (root / "x").rename(root / other)

    return damage


def link(path: str, target: Callable[[Path], Path]) -> Damage:
    """Replace a file by a link to a copy of it elsewhere."""

    def damage(root: Path) -> None:
        to = target(root)
        to.parent.mkdir(parents=True, exist_ok=True)
        (root / path).rename(to)
        (root / path).symlink_to(to)

    return damage


def link_folder(root: Path) -> None:
    (root / "experts").rename(root.parent / "elsewhere")
    (root / "experts").symlink_to(root.parent / "elsewhere")


def replace_by(path: str, make: Callable[[Path], object]) -> Damage:
    def damage(root: Path) -> None:
        (root / path).unlink()
        make(root / path)

    return damage


def stale_index(change: Callable[[dict[str, str]], object]) -> Damage:
    """Change the weight map and make the digests right again."""

    def damage(root: Path) -> None:
        with editing(root, consistent=True) as editor:
            editor.edit_json(INDEX, lambda index: change(index["weight_map"]))

    return damage


def config(change: Callable[[dict], object]) -> Damage:  # type: ignore[type-arg]
    """Change config.json and make the digests right again."""

    def damage(root: Path) -> None:
        with editing(root, consistent=True) as editor:
            editor.edit_config(change)

    return damage


def bit_map(change: Callable[[dict[str, list[int]]], object]) -> Damage:
    return config(lambda c: change(c["quantization_config"]["hybrid_bit_map"]))


def raw_config(text: bytes) -> Damage:
    def damage(root: Path) -> None:
        with editing(root, consistent=True):
            (root / "config.json").write_bytes(text)

    return damage


def flip_bits(layer: dict[str, list[int]]) -> None:
    layer["3"] = [7 - bits for bits in layer["3"]]


DAMAGES: list[tuple[str, Damage, str]] = [
    # files
    ("truncated shard", truncate(SHARD, 1), f"^{SHARD}: truncated; get it again .expected [0-9]+ bytes, found"),
    ("shard cut in its header", lambda root: os.truncate(root / SHARD, 600), f"^{SHARD}: truncated"),
    ("empty shard", lambda root: os.truncate(root / SHARD, 0), f"^{SHARD}: truncated.*found 0"),
    ("extended shard", extend(SHARD), f"^{SHARD}: longer than it should be"),
    ("truncated base file", truncate(BASE, 1), f"^{BASE}: truncated"),
    ("extended base file", extend(BASE), f"^{BASE}: longer"),
    ("truncated tokenizer", truncate("tokenizer.json", 1), "^tokenizer.json: truncated"),
    ("missing shard", remove(SHARD), f"^{SHARD}: missing; get it again"),
    ("missing base file", remove(BASE), f"^{BASE}: missing"),
    ("missing index", remove(INDEX), f"^{INDEX}: missing"),
    ("missing config", remove("config.json"), "^config.json: missing"),
    ("missing licence", remove("LICENSE"), "^LICENSE: missing"),
    (
        "missing rank",
        lambda root: shutil.rmtree(root / "experts/tp2-ep2/rank-3"),
        "^experts/tp2-ep2/rank-3/layer-003.safet.*missing",
    ),
    ("extra file", add("extra.txt"), "^extra.txt: not in the manifest; remove it"),
    (
        "extra shard",
        add("experts/tp2-ep2/rank-1/layer-009.safetensors"),
        "^experts/tp2-ep2/rank-1/layer-009.*not in the manifest",
    ),
    (
        "extra folder of another topology",
        add("experts/tp1-ep1/rank-0/layer-003.safetensors"),
        "tp1-ep1.*not in the manifest",
    ),
    ("extra weights", add("model-00002-of-00002.safetensors"), "^model-00002-of-00002.*not in the manifest"),
    ("hidden file deeper", add("experts/.hidden"), "^experts/.hidden: not in the manifest"),
    ("model card deeper", add("experts/README.md"), "^experts/README.md: not in the manifest"),
    ("case twin", add("CONFIG.json"), "^CONFIG.json: not in the manifest"),
    (
        "leftover state",
        add("hybrid_pack.state.partial"),
        "state.partial: left by an unfinished conversion; finish it with convert --resume",
    ),
    ("leftover shard", add(SHARD + ".partial"), f"^{SHARD}.partial: left by an unfinished conversion"),
    ("leftover dot file", add(".x.partial"), "^.x.partial: left by an unfinished conversion"),
    ("swapped ranks", swap(SHARD, OTHER), f"^{SHARD}: .*bytes are not the ones that were written"),
    ("swapped layers", swap(SHARD, SHARD.replace("004", "003")), f"^{SHARD}: "),
    ("swapped small files", swap("LICENSE", "tokenizer.json"), "^LICENSE: longer"),
    # links and things that are no files
    (
        "shard linked from outside",
        link(SHARD, lambda r: r.parent / "out.safetensors"),
        f"^{SHARD}: a symbolic link that leads out of",
    ),
    (
        "manifest linked from outside",
        link(MANIFEST, lambda r: r.parent / "m.json"),
        f"^{MANIFEST}: a symbolic link that leads out",
    ),
    (
        "config linked from outside",
        link("config.json", lambda r: r.parent / "c.json"),
        "^config.json: a symbolic link that leads out",
    ),
    (
        "linked from a folder of like name",
        link(SHARD, lambda r: Path(f"{r}-2") / "x"),
        "a symbolic link that leads out of the pack",
    ),
    ("folder linked from outside", link_folder, "^experts: .*(leads out of the pack|not a regular file)"),
    (
        "extra link outside",
        lambda r: (r / "x").symlink_to("/etc/hostname"),
        "^x: not in the manifest: a symbolic link that leads out",
    ),
    (
        "link to nothing",
        replace_by("LICENSE", lambda p: p.symlink_to("gone")),
        "^LICENSE: a symbolic link to a file that is not there",
    ),
    ("link to itself", replace_by("LICENSE", lambda p: p.symlink_to("LICENSE")), "^LICENSE: a symbolic link"),
    (
        "link to a folder",
        replace_by("LICENSE", lambda p: p.symlink_to("experts")),
        "^LICENSE: not a regular file .*a link to a folder",
    ),
    ("a pipe", replace_by("LICENSE", os.mkfifo), "^LICENSE: not a regular file"),
    ("a folder", replace_by("LICENSE", Path.mkdir), "^LICENSE: missing"),
    # index and base headers, digests right
    (
        "index names another file",
        stale_index(lambda m: m.update({"lm_head.weight": "model-2.safetensors"})),
        r"lm_head\.weight: the index",
    ),
    (
        "index lacks a tensor",
        stale_index(lambda m: m.pop("lm_head.weight")),
        r"lm_head\.weight: the index .*found not listed",
    ),
    (
        "index has one too many",
        stale_index(lambda m: m.update(x=BASE)),
        "x: the index and the base .*expected no such tensor",
    ),
    ("index without a map", lambda r: _rewrite(r, INDEX, b"{}"), f"^{INDEX}: no weight_map"),
    ("index that is no JSON", lambda r: _rewrite(r, INDEX, b"{"), f"^{INDEX}: not valid JSON"),
    ("base file that is none", lambda r: _rewrite(r, BASE, b"x" * 100), f"^{BASE}: the header does not fit"),
    (
        "an expert in the base",
        lambda r: _rename_in_base(r, b"lm_head.weight", b"model.layers.3.mlp.experts.0.up_proj.weight"),
        "an expert of a packed layer among the base tensors",
    ),
    ("a tensor in two base files", lambda r: _copy_base(r), "lm_head.weight: stored twice .found also in model-00001"),
    # config.json, digests right
    (
        "other quant_method",
        config(lambda c: c["quantization_config"].update(quant_method="fp8")),
        "quant_method: .*expected hybrid_pack",
    ),
    ("other manifest", config(lambda c: c["quantization_config"].update(manifest="x")), "quantization_config.manifest"),
    ("no quantization_config", config(lambda c: c.pop("quantization_config")), "no quantization_config"),
    ("no map", config(lambda c: c["quantization_config"].pop("hybrid_bit_map")), "the bit map is not an object"),
    (
        "map altered",
        bit_map(flip_bits),
        "layer 3 expert [0-3]: the bit map is not the manifest's .expected (kept|tail)",
    ),
    ("map without a layer", bit_map(lambda m: m.pop("3")), "layer 3 expert [0-3]: the bit map is not the manifest's"),
    (
        "map with another layer",
        bit_map(lambda m: m.update({"9": [3] * 4})),
        "layer 9: in the bit map, but neither packed nor",
    ),
    (
        "map of five experts",
        bit_map(lambda m: m["4"].append(3)),
        "layer 4: the bit map is of another number of experts",
    ),
    ("map with a two", bit_map(lambda m: m["4"].append(2)), "layer 4 expert 4 of the bit map"),
    (
        "other hidden size",
        config(lambda c: c.update(hidden_size=256)),
        "hidden size: not the manifest's .expected 128, found 256",
    ),
    ("other width", config(lambda c: c.update(moe_intermediate_size=64)), "intermediate size: not the manifest's"),
    ("other top_k", config(lambda c: c.update(num_experts_per_tok=1)), "experts a token visits: not the manifest's"),
    (
        "other activation",
        config(lambda c: c.update(hidden_act="gelu")),
        "activation: not the manifest's .expected silu, found gelu",
    ),
    (
        "other levels",
        config(lambda c: c["quantization_config"]["source_quantization_config"].update(nf3_levels=[0.0] * 8)),
        "nf3_levels",
    ),
    ("a size lost", config(lambda c: c.pop("hidden_size")), "none of hidden_size is given"),
    ("config that is a list", raw_config(b"[]"), "config.json: not a JSON object"),
    (
        "config edited only",
        lambda r: (r / "config.json").write_text((r / "config.json").read_text().replace("glm", "gml")),
        "config.json: its digest is not the manifest's: edited or damaged",
    ),
]


def _rewrite(root: Path, name: str, data: bytes) -> None:
    with editing(root, consistent=True):
        (root / name).write_bytes(data)


def _rename_in_base(root: Path, old: bytes, new: bytes) -> None:
    with editing(root, consistent=True):
        data = (root / BASE).read_bytes()
        padding = len(new) - len(old)
        assert data.count(old) == 1
        length = int.from_bytes(data[:8], "little")
        header = data[: 8 + length].replace(old, new)
        assert header.endswith(b" " * padding)
        (root / BASE).write_bytes(header[:-padding] + data[8 + length :])


def _copy_base(root: Path) -> None:
    with editing(root, consistent=True) as editor:
        shutil.copyfile(root / BASE, root / "model-2.safetensors")
        editor.document["base"]["files"].append({**editor.document["base"]["files"][0], "path": "model-2.safetensors"})


@pytest.mark.parametrize(("damage", "message"), [line[1:] for line in DAMAGES], ids=[line[0] for line in DAMAGES])
def test_damage_is_found_and_named(pack: Path, damage: Damage, message: str) -> None:
    damage(pack)
    report = verify_pack(pack)
    assert not report.ok
    assert re.search(message, text_of(report), re.MULTILINE), text_of(report)
    assert all("\n" not in str(finding) for finding in report.findings)


STRUCTURAL = [line for line in DAMAGES if line[0] not in ("swapped ranks", "swapped layers")]


@pytest.mark.parametrize(("damage", "message"), [x[1:] for x in STRUCTURAL], ids=[x[0] for x in STRUCTURAL])
def test_a_quick_verification_finds_what_is_structure(pack: Path, damage: Damage, message: str) -> None:
    damage(pack)
    assert re.search(message, text_of(verify_pack(pack, quick=True)), re.MULTILINE)


def test_a_damaged_header_is_found_quickly_with_its_place(pack: Path) -> None:
    with (pack / SHARD).open("r+b") as file:
        file.seek(300)
        file.write(b"#")
    report = verify_pack(pack, quick=True)
    assert re.search(f"^{SHARD}: byte 300: the header is not the one the manifest implies", text_of(report))


def test_links_inside_the_pack_are_files(pack: Path) -> None:
    (pack / ".store").mkdir()
    link(SHARD, lambda root: root / ".store" / "blob")(pack)
    assert verify_pack(pack).ok


def test_a_snapshot_in_the_hub_cache_may_link_to_its_own_blobs(pack: Path, tmp_path: Path) -> None:
    home = tmp_path / "hub" / "models--me--pack"
    snapshot, blobs = home / "snapshots" / "abc", home / "blobs"
    shutil.copytree(pack, snapshot)
    blobs.mkdir()
    for number, shard in enumerate(read_document(pack)["shards"]):
        (snapshot / shard["path"]).rename(blobs / str(number))
        (snapshot / shard["path"]).symlink_to(os.path.relpath(blobs / str(number), (snapshot / shard["path"]).parent))
    assert verify_pack(snapshot).ok
    (blobs / "0").rename(home / "0")
    (snapshot / SHARD).unlink()
    (snapshot / SHARD).symlink_to(home / "0")
    assert "leads out of the pack" in text_of(verify_pack(snapshot))


def test_dot_names_at_the_top_are_left_alone_and_said(pack: Path) -> None:
    add(".git/config")(pack)
    add(".gitattributes")(pack)
    report = verify_pack(pack)
    assert report.ok
    assert ".git, .gitattributes" in [left.what for left in report.not_checked]


def test_many_findings_are_counted_and_the_first_listed(pack: Path) -> None:
    for number in range(200):
        add(f"extra/{number:03d}")(pack)
    report = verify_pack(pack)
    assert report.findings_total == 200
    assert [finding.path for finding in report.findings] == [f"extra/{number:03d}" for number in range(20)]


def test_damage_of_several_kinds_is_all_listed(pack: Path) -> None:
    truncate(SHARD, 1)(pack)
    add("extra.txt")(pack)
    remove("LICENSE")(pack)
    assert {finding.path for finding in verify_pack(pack).findings} == {SHARD, "extra.txt", "LICENSE"}


@pytest.mark.parametrize("name", ["config.json", INDEX, "LICENSE", MANIFEST])
@pytest.mark.parametrize("with_source", [False, True])
@pytest.mark.parametrize("old", [b"a", b'"'])
def test_one_edited_file_is_one_finding(
    pack: Path, small_checkpoint: Path, name: str, with_source: bool, old: bytes
) -> None:
    data = (pack / name).read_bytes()
    (pack / name).write_bytes(data.replace(old, b"b", 1) if old in data else b"b" + data[1:])
    report = verify_pack(pack, source=small_checkpoint if with_source else None)
    assert [finding.path for finding in report.findings] == [name], text_of(report)


@pytest.mark.parametrize("tensor", ["kept.expert_ids", "kept.w13_global_scale"])
def test_one_damaged_small_tensor_is_one_finding(pack: Path, tensor: str) -> None:
    entry = next(s for s in read_document(pack)["shards"] if s["path"] == SHARD.replace("004", "005"))
    with (pack / entry["path"]).open("r+b") as file:
        file.seek(entry["tensors"][tensor]["begin"])
        file.write(b"\xff\xff\xff\xff")
    assert [(finding.path, finding.where) for finding in verify_pack(pack).findings] == [
        (entry["path"], f"{tensor}[0]")
    ]


def test_a_truncated_base_file_is_one_finding_with_a_source_too(pack: Path, small_checkpoint: Path) -> None:
    truncate(BASE, 1)(pack)
    report = verify_pack(pack, source=small_checkpoint)
    assert [finding.path for finding in report.findings] == [BASE]
    assert f"base tensors of {BASE} against the source" in [left.what for left in report.not_checked]
