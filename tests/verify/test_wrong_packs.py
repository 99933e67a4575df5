"""Packs that are wrong but consistent, digests and all: the rules or the source must tell."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import write_checkpoint
from hybrid_pack.verify import verify_pack
from tests.checkpoints import KEPT, SMALL, TAIL, edit_tensors
from tests.verify.conftest import make_pack
from tests.verify.packs import PackEditor, editing, text_of

Change = Callable[[PackEditor], object]


def rank_and_row(editor: PackEditor, expert: int) -> tuple[int, str, int]:
    """(first rank, tier, row) of an expert of layer 3."""
    rank = 2 * (expert // 2)
    for tier in ("kept", "tail"):
        if f"{tier}.expert_ids" in editor.shard(3, rank)["tensors"]:
            ids = editor.array(3, rank, f"{tier}.expert_ids").tolist()
            if expert in ids:
                return rank, tier, ids.index(expert)
    raise AssertionError(expert)


def alter(expert: int, name: str, offset: int, change: Callable[[int], int]) -> Change:
    """Change one byte of an expert's row of a tensor of layer 3 (``w13``, ``w2_scale``, ...)."""

    def edit(editor: PackEditor) -> None:
        rank, tier, row = rank_and_row(editor, expert)
        values = editor.array(3, rank, f"{tier}.{name}")
        flat = values.reshape(values.shape[0], -1).view(np.uint8)
        flat[row, offset] = change(int(flat[row, offset])) & 0xFF
        editor.put(3, rank, f"{tier}.{name}", values)

    return edit


def set_global(expert: int, name: str, factor: float) -> Change:
    def edit(editor: PackEditor) -> None:
        rank, tier, row = rank_and_row(editor, expert)
        values = editor.array(3, rank, f"{tier}.{name}_global_scale")
        values[row] *= np.float32(factor)
        editor.put(3, rank, f"{tier}.{name}_global_scale", values)

    return edit


def swap_rows(layer: int, rank: int, *names: str) -> Change:
    """Swap the first two experts of a tier in some tensors."""

    def edit(editor: PackEditor) -> None:
        for name in names:
            values = editor.array(layer, rank, name)
            values[[0, 1]] = values[[1, 0]]
            editor.put(layer, rank, name, values)

    return edit


def swap_ranks(editor: PackEditor) -> None:
    one, other = (editor.root / editor.shard(5, rank)["path"] for rank in (0, 1))
    one.rename(editor.root / "x")
    other.rename(one)
    (editor.root / "x").rename(other)


def edit_base(editor: PackEditor) -> None:
    path = editor.root / editor.document["base"]["files"][0]["path"]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def rename_base(editor: PackEditor) -> None:
    path = editor.root / editor.document["base"]["files"][0]["path"]
    path.write_bytes(path.read_bytes().replace(b'"lm_head.weight"', b'"lm_heed.weight"'))
    editor.edit_json(
        "model.safetensors.index.json",
        lambda i: i["weight_map"].update({"lm_heed.weight": i["weight_map"].pop("lm_head.weight")}),
    )


def retype_base(editor: PackEditor) -> None:
    path = editor.root / editor.document["base"]["files"][0]["path"]
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    text = data[8:begin].replace(b'"BF16"', b'"F16"', 1)
    path.write_bytes(data[:8] + text.ljust(begin - 8) + data[begin:])


def add_small(editor: PackEditor) -> None:
    (editor.root / "extra.txt").write_text("x")
    editor.document["files"].append({"path": "extra.txt", "bytes": 0, "digest": "blake3:" + 64 * "0"})


def drop_small(editor: PackEditor) -> None:
    (editor.root / "LICENSE").unlink()
    editor.document["files"].remove(editor.file("LICENSE"))


def ids_swapped(editor: PackEditor) -> None:
    values = editor.array(5, 0, "kept.expert_ids")
    editor.put(5, 0, "kept.expert_ids", values[::-1].copy())


def swap_map(editor: PackEditor) -> None:
    """Say everywhere that kept experts are tail and the other way round, as far as shapes allow: not at all here."""
    editor.edit_config(lambda c: c["quantization_config"]["hybrid_bit_map"].update({"3": [4, 4, 3, 3]}))


def tab_in_base_header(editor: PackEditor) -> None:
    path = editor.root / editor.document["base"]["files"][0]["path"]
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[: begin - 1] + b"\t" + data[begin:])


RULES: list[tuple[str, Change, str]] = [
    ("base header padded otherwise", tab_in_base_header, "its header is not written as a pack's headers are"),
    (
        "a key more in quantization_config",
        lambda e: e.edit_config(lambda c: c["quantization_config"].update({"extra": 1})),
        r"config\.json: quantization_config: not the keys a pack has",
    ),
    (
        "expert ids swapped",
        ids_swapped,
        r"kept\.expert_ids\[0\]: not the expert the manifest has in this row .expected 0, found 1",
    ),
    ("map altered", swap_map, r"config\.json: layer 3 expert \d: the bit map is not the manifest's"),
    (
        "kept global scale zero",
        set_global(KEPT, "w13", 0.0),
        r"kept\.w13_global_scale\[\d\]: not a global scale .*finite positive",
    ),
    ("kept global scale negative", set_global(KEPT, "w2", -1.0), "not a global scale"),
    ("kept global scale infinite", set_global(KEPT, "w2", np.inf), "not a global scale .*found inf"),
    ("kept global scale no number", set_global(KEPT, "w2", np.nan), "not a global scale .*found nan"),
    (
        "tail global scale doubled",
        set_global(TAIL, "w2", 2.0),
        r"tail\.w2_global_scale.*expected 8\.3.*e\+34, that of every NF3",
    ),
    (
        "a scale byte that is infinite",
        alter(KEPT, "w13_scale", 5, lambda b: 0xF8),
        r"kept\.w13_scale: a scale byte that no pack",
    ),
    (
        "a scale byte that is NaN",
        alter(TAIL, "w2_scale", 5, lambda b: 0xFF),
        r"tail\.w2_scale: a scale byte that no pack .*found 0xFF",
    ),
    (
        "an NVFP4 scale byte the kernel would read wrongly",
        alter(KEPT, "w13_scale", 5, lambda b: 0x40),
        r"kept\.w13_scale: a scale byte that no pack .*expected zero or 0x80..0xF6, found 0x40",
    ),
    (
        "an NF3 scale byte of 32 or more",
        alter(TAIL, "w2_scale", 5, lambda b: 0x90),
        r"tail\.w2_scale: a scale byte that no pack .*expected zero or 0x01..0x7F, found 0x90",
    ),
]


def same_weights_other_global(editor: PackEditor) -> None:
    """Every block scale halved and the global scale doubled: the same numbers, nearer to being flushed."""
    for rank in range(2):
        scales = editor.array(5, rank, "kept.w13_scale")
        editor.put(5, rank, "kept.w13_scale", np.where(scales >= 0x88, scales - 8, scales).astype(np.uint8))
        editor.put(5, rank, "kept.w13_global_scale", editor.array(5, rank, "kept.w13_global_scale") * 2)


WITH_SOURCE: list[tuple[str, Change, str]] = [
    (
        "a global scale of no prescribed size",
        same_weights_other_global,
        r"w13_global_scale.*not the global scale of these",
    ),
    (
        "kept code altered",
        alter(KEPT, "w13", 100, lambda b: b ^ 1),
        rf"layer 3 expert {KEPT} (gate|up) .kept\.w13\[\d\]. row \d+ byte \d+: 1 bytes of codes are not the source's",
    ),
    (
        "kept down code altered",
        alter(KEPT, "w2", 7, lambda b: b ^ 0x80),
        rf"layer 3 expert {KEPT} down .*codes are not the source's",
    ),
    ("tail code altered", alter(TAIL, "w13", 0, lambda b: b ^ 4), rf"layer 3 expert {TAIL} (gate|up) .*codes are not"),
    (
        "tail down code altered",
        alter(TAIL, "w2", -1, lambda b: b ^ 0x40),
        rf"layer 3 expert {TAIL} down .*codes are not",
    ),
    (
        "kept scale altered",
        alter(KEPT, "w13_scale", 3, lambda b: b ^ 1),
        rf"layer 3 expert {KEPT} gate .*group 0: 1 scales are not the source's .expected [0-9.e-]+, found",
    ),
    ("kept scale flushed", alter(KEPT, "w2_scale", 3, lambda b: 0), rf"layer 3 expert {KEPT} down .*1 scales are not"),
    (
        "tail scale altered",
        alter(TAIL, "w13_scale", 3, lambda b: b - 1),
        rf"layer 3 expert {TAIL} .*1 scales are not the source's",
    ),
    ("tail scale zeroed", alter(TAIL, "w2_scale", 0, lambda b: 0), rf"layer 3 expert {TAIL} down .*1 scales are not"),
    (
        "kept global scale doubled",
        set_global(KEPT, "w13", 2.0),
        rf"layer 3 expert {KEPT} gate .*scales are not the source's",
    ),
    (
        "kept global scale one bit off",
        set_global(KEPT, "w2", 1 + 2.0**-23),
        rf"layer 3 expert {KEPT} down .*scales are not",
    ),
    (
        "two experts swapped",
        swap_rows(
            5, 0, *(f"kept.{n}" for n in ("w13", "w2", "w13_scale", "w2_scale", "w13_global_scale", "w2_global_scale"))
        ),
        "layer 5 expert 0 gate .*codes are not the source's",
    ),
    (
        "scales of two experts swapped",
        swap_rows(5, 3, "kept.w2_scale"),
        "layer 5 expert 2 down .*scales are not the source's",
    ),
    ("two ranks swapped", swap_ranks, "rank-0/layer-005.*layer 5 expert 0 gate .*codes are not the source's"),
    ("a base tensor altered", edit_base, r"model-00001.*safetensors: .* byte \d+: not the source's bytes"),
    (
        "a base tensor renamed",
        rename_base,
        r"lm_head\.weight: a tensor that the pack does not have\n.*lm_heed\.weight: not a base tensor of the source",
    ),
    ("a base tensor of another dtype", retype_base, r"not as in the source .expected BF16 .*, found F16"),
    (
        "a small file altered",
        lambda e: (e.root / "tokenizer.json").write_text("{}"),
        "tokenizer.json: not the source's bytes",
    ),
    ("a small file added", add_small, "extra.txt: not a file of the source"),
    ("a small file dropped", drop_small, "LICENSE: a file of the source that the pack does not have"),
    (
        "a config key altered",
        lambda e: e.edit_config(lambda c: c.update(rms_norm_eps=1.0)),
        "config.json: rms_norm_eps: not as in the source's",
    ),
    (
        "a config key dropped",
        lambda e: e.edit_config(lambda c: c.pop("vocab_size")),
        "vocab_size: not as in .*found no such key",
    ),
    (
        "a config key added",
        lambda e: e.edit_config(lambda c: c.update(auto_map={})),
        "auto_map: not as in .*expected no such key",
    ),
    (
        "source's quantization altered",
        lambda e: e.edit_config(lambda c: c["quantization_config"]["source_quantization_config"].pop("ignore")),
        "source_quantization_config: not the source's",
    ),
    (
        "zero groups miscounted",
        lambda e: e.document["report"].update(groups_zero_scale=1),
        r"report\.groups_zero_scale: not what .*found 1",
    ),
    (
        "flushed miscounted",
        lambda e: e.document["report"].update(blocks_flushed=9),
        r"report\.blocks_flushed: not what .*expected 0, found 9",
    ),
    (
        "saturated miscounted",
        lambda e: e.document["report"].update(scales_saturated=9),
        r"report\.scales_saturated: not what .*found 9",
    ),
]


@pytest.mark.parametrize(("change", "message"), [line[1:] for line in RULES], ids=[line[0] for line in RULES])
def test_rules_tell(pack: Path, change: Change, message: str) -> None:
    with editing(pack, consistent=True) as editor:
        change(editor)
    report = verify_pack(pack)
    assert re.search(message, text_of(report)), text_of(report)


@pytest.mark.parametrize(
    ("change", "message"), [line[1:] for line in WITH_SOURCE], ids=[line[0] for line in WITH_SOURCE]
)
def test_the_source_tells(pack: Path, small_checkpoint: Path, change: Change, message: str) -> None:
    with editing(pack, consistent=True) as editor:
        change(editor)
    alone = verify_pack(pack)
    assert alone.ok, "the change is meant to be consistent: " + text_of(alone)
    report = verify_pack(pack, source=small_checkpoint)
    assert re.search(message, text_of(report)), text_of(report)


def test_a_tier_said_wrong_everywhere(tmp_path: Path, small_checkpoint: Path) -> None:
    """Map, manifest and shards agree on the wrong tiers: the pack of another checkpoint, as it were."""
    other = tmp_path / "other"
    write_checkpoint(other, replace(SMALL, seed=5))
    pack = make_pack(other, tmp_path / "pack", Topology(2, 2))
    assert verify_pack(pack).ok
    report = verify_pack(pack, source=small_checkpoint)
    found = text_of(report)
    assert found.startswith(
        f"{small_checkpoint}: config.json and hf_quant_config.json: not the source this pack was made from"
    )
    assert "layer 3 expert" in found
    assert "the bit map and the stored format disagree" in found
    assert "everything against the source" in [left.what for left in report.not_checked]


@pytest.mark.parametrize("byte", [-1, 1])
def test_every_single_wrong_code_of_an_expert_is_found(pack: Path, small_checkpoint: Path, byte: int) -> None:
    """All rows and columns of the source are covered: any altered source byte shows."""
    source = pack.parent / "source"
    shutil.copytree(small_checkpoint, source)
    rng = np.random.default_rng(byte + 1)
    with edit_tensors(source) as tensors:
        names = [
            n
            for n in tensors.matching("model.layers.3.mlp.experts.")
            if n.endswith(("weight", "weight_packed", "weight_scale"))
        ]
        for name in names:
            data = bytearray(tensors[name].data)
            at = int(rng.integers(0, len(data)))
            data[at] = (data[at] + byte) & 0x7F if name.endswith("scale") else (data[at] + byte) & 0xFF
            tensors[name].data = bytes(data)
    report = verify_pack(pack, source=source)
    assert report.findings_total >= len(names)
    for expert in range(4):
        assert f"layer 3 expert {expert}" in text_of(report)


@pytest.mark.parametrize("dialect", ["mxfp4", "kquant", "power of two apart"])
def test_one_altered_byte_in_any_tensor_of_any_shard(tmp_path: Path, dialect: str) -> None:
    spec = {
        "mxfp4": replace(SMALL, kept_format="mxfp4"),
        "kquant": replace(SMALL, nf3_scales="e4m3_x16"),
        "power of two apart": replace(SMALL, second_scale="power_of_two"),
    }[dialect]
    source = tmp_path / "source"
    write_checkpoint(source, spec)
    pack = make_pack(source, tmp_path / "pack", Topology(2, 1))
    rng, altered = np.random.default_rng(0), []
    with editing(pack, consistent=True) as editor:
        for shard in editor.document["shards"]:
            for name in shard["tensors"]:
                if name.endswith(("_global_scale", "expert_ids")):
                    continue
                values = editor.array(shard["layer"], shard["rank"], name)
                row, at = int(rng.integers(len(values))), int(rng.integers(values[0].nbytes))
                values.reshape(len(values), -1).view(np.uint8)[row, at] ^= 1
                editor.put(shard["layer"], shard["rank"], name, values)
                altered.append(name)
    assert verify_pack(pack).ok
    assert verify_pack(pack, source=source).findings_total == len(altered)


def test_a_requantised_expert_must_keep_to_its_reported_error(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_checkpoint(source, replace(SMALL, second_scale="unequal"))
    pack = make_pack(source, tmp_path / "pack", Topology(1, 1), on_scale_mismatch="requantize")
    with editing(pack) as editor:
        for entry in editor.document["report"]["experts_requantized"]:
            entry["worst_relative_error"] /= 2
    assert "scales are not the source's" in text_of(verify_pack(pack, source=source))
    with editing(pack) as editor:
        editor.document["report"]["experts_requantized"] = []
    found = text_of(verify_pack(pack, source=source))
    assert re.search(r"layer 3 expert \d gate .*scales are not the source's", found)
