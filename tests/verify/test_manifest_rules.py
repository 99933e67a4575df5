"""Every rule of the manifest: an edit that breaks it, self digest made right again, and what verify says."""

from __future__ import annotations

import ast
import copy
import inspect
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from hybrid_pack.convert import journal
from hybrid_pack.errors import DataError, EnvironmentFailure, UsageError
from hybrid_pack.io import manifest as rules
from hybrid_pack.io.manifest import MANIFEST, STATE, decode_manifest, encode_manifest, read_manifest
from hybrid_pack.verify import verify_pack
from tests.verify.packs import read_document, text_of

Document = dict[str, Any]
Edit = Callable[[Document], object]
DIGEST = "blake3:" + 64 * "0"


def shard(document: Document, index: int = 0) -> Document:
    return document["shards"][index]


def tensor(document: Document, name: str) -> Document:
    return next(s for s in document["shards"] if name in s["tensors"])["tensors"][name]


def duplicate_file(document: Document, path: str) -> None:
    document["files"].append({"path": path, "bytes": 0, "digest": DIGEST})


def reverse_layers(document: Document) -> None:
    document["layers"] = dict(reversed(document["layers"].items()))


def no_base(document: Document) -> None:
    document["base"]["files"] = []


def quantized(document: Document, **changes: Any) -> None:
    """Say that the first tail expert of the first layer was quantised, with something wrong."""
    layer, tiers = next((int(k), v) for k, v in document["layers"].items() if v["tail"])
    entry = {
        "layer": layer, "tier": "tail", "method": "mse", "sources": ["bf16"], "experts": tiers["tail"][:1],
        "sqnr_db": [15.5], "tier_sqnr_db": 15.5, "gptq_to_rtn": None, "groups": 8, "groups_zero_scale": 0,
        "scales_subnormal": 0, "scales_saturated": 0,
    }  # fmt: skip
    document["report"]["experts_quantized"] = [entry | changes]


def quantized_twice(document: Document) -> None:
    quantized(document)
    document["report"]["experts_quantized"] *= 2


RULES: list[tuple[str, Edit, str]] = [
    # what was quantised
    ("quantised tier twice", quantized_twice, "experts_quantized is not in order"),
    ("quantised layer that is not there", lambda d: quantized(d, layer=77), "experts_quantized of layer 77 tail.*ids"),
    (
        "quantised expert of the other tier",
        lambda d: quantized(d, tier="kept"),
        "experts_quantized of layer .* kept.*ids",
    ),
    ("quantised, no expert", lambda d: quantized(d, experts=[]), "experts_quantized of layer .* tail.*ascending"),
    ("quantised, errors missing", lambda d: quantized(d, sqnr_db=[]), "sqnr_db .expected 1, found 0"),
    (
        "quantised, method of no option",
        lambda d: quantized(d, method="gptq"),
        "method is not that of the options.*mse, found gptq",
    ),
    (
        "quantised, gptq's ratio",
        lambda d: quantized(d, gptq_to_rtn=0.5),
        "gptq_to_rtn .expected a number for gptq alone",
    ),
    ("quantised, counts", lambda d: quantized(d, groups_zero_scale=9), "counts .expected at most 8, found 9"),
    ("cast too often", lambda d: d["report"].update(experts_cast=99), "experts_cast is above the number of kept NVFP4"),
    # layout, topology, geometry
    ("another abi", lambda d: d["layout"].update(abi="b12x-9"), r"layout\.abi is not one .*found b12x-9"),
    (
        "padded below size",
        lambda d: d["geometry"].update(intermediate_size_padded=64),
        "padded is below intermediate_size",
    ),
    (
        "tp that cannot be",
        lambda d: d["topology"].update(tensor_parallel=3),
        "topology does not fit geometry.*not divisible by 3",
    ),
    (
        "ep that cannot be",
        lambda d: d["topology"].update(expert_parallel=3),
        "topology does not fit geometry.*4 experts",
    ),
    ("absurd tp", lambda d: d["topology"].update(tensor_parallel=2**31 - 1), "topology does not fit geometry"),
    ("top_k above experts", lambda d: d["geometry"].update(top_k=5), r"top_k is above num_experts.*<= 4.*found 5"),
    ("other tiles", lambda d: d["layout"].update(tiles=[64, 256, 64, 256]), r"layout\.tiles are not the tiles"),
    ("levels that do not ascend", lambda d: d["layout"]["nf3_levels"].reverse(), r"nf3_levels do not ascend"),
    # layers
    ("no layers", lambda d: d.update(layers={}), "layers is empty"),
    ("layers out of order", reverse_layers, "layers are not in order"),
    ("ids that descend", lambda d: d["layers"]["3"]["tail"].reverse(), r"layers\.3\.tail is not ascending"),
    (
        "an id twice",
        lambda d: d["layers"]["3"]["kept"].append(d["layers"]["3"]["kept"][-1]),
        r"layers\.3\.kept is not ascending",
    ),
    (
        "an expert lost",
        lambda d: d["layers"]["3"]["tail"].pop(),
        r"layers\.3: kept and tail together are not every expert once",
    ),
    ("an expert in both", lambda d: d["layers"]["5"]["tail"].append(0), r"layers\.5: kept and tail together"),
    ("absurd number of experts", lambda d: d["geometry"].update(num_experts=2**31 - 2), "kept and tail together"),
    ("kept without format", lambda d: d["layers"]["3"].update(kept_scale_format=None), r"layers\.3\.kept_scale_format"),
    # shards
    ("a shard lost", lambda d: d["shards"].pop(), r"not one for each layer and rank.*expected 12, found 11"),
    ("shards out of order", lambda d: d["shards"].reverse(), r"not in the order of layer and rank.*\(3, 0\)"),
    (
        "a shard elsewhere",
        lambda d: shard(d).update(path="experts/other.safetensors"),
        "path of the shard of layer 3 rank 0",
    ),
    ("a tensor lost", lambda d: shard(d)["tensors"].popitem(), r"layer-003\.safetensors: tensors"),
    ("another dtype", lambda d: tensor(d, "tail.w13_scale").update(dtype="F32"), r"tail\.w13_scale .*found F32"),
    ("another shape", lambda d: tensor(d, "tail.w13").update(shape=[1, 1]), r"tail\.w13 .*found I32 \[1, 1\]"),
    ("another offset", lambda d: tensor(d, "kept.w2").update(begin=0), r"kept\.w2 .*found .* at 0\.\."),
    (
        "another kind of digest",
        lambda d: tensor(d, "kept.w2").update(digest=DIGEST),
        r"digest of kept\.w2.*blake3-rows",
    ),
    ("another size", lambda d: shard(d).update(bytes=1), r"layer-003\.safetensors: bytes .*found 1"),
    (
        "another shard digest",
        lambda d: shard(d).update(digest=f"blake3-shard:{64 * '0'}"),
        "not that of its header and tensors",
    ),
    (
        "another tensor digest",
        lambda d: tensor(d, "kept.w2").update(digest=f"blake3-rows:{64 * '0'}"),
        "not that of its header",
    ),
    # files
    ("digest of a file", lambda d: d["files"][0].update(digest=f"blake3-rows:{64 * '0'}"), "digest .*expected blake3,"),
    ("the manifest listed", lambda d: duplicate_file(d, MANIFEST), "a path that cannot be listed here"),
    ("the model card listed", lambda d: duplicate_file(d, "README.md"), "a path that cannot be listed here"),
    ("a shard among files", lambda d: duplicate_file(d, "experts/x"), "a path that cannot be listed here"),
    ("a dot file listed", lambda d: duplicate_file(d, ".git/config"), "a path that cannot be listed here"),
    ("a partial file listed", lambda d: duplicate_file(d, "x.partial"), "a path that cannot be listed here"),
    ("a file below the manifest", lambda d: duplicate_file(d, f"{MANIFEST}/x"), "a path that cannot be listed here"),
    ("a file below the model card", lambda d: duplicate_file(d, "readme.md/x"), "a path that cannot be listed here"),
    ("a file for the experts", lambda d: duplicate_file(d, "experts"), "a path that cannot be listed here"),
    ("the same in full width", lambda d: duplicate_file(d, "\uff25xperts"), "a path that cannot be listed here"),
    ("a file below a partial one", lambda d: duplicate_file(d, "x.partial/y"), "a path that cannot be listed here"),
    ("a file below a file", lambda d: duplicate_file(d, "config.json/x"), "a path goes through a file"),
    ("the same in capitals", lambda d: duplicate_file(d, "CONFIG.json/x"), "a path goes through a file"),
    ("a long name", lambda d: duplicate_file(d, "a/" + 121 * "\u00e9"), "not a plain relative path"),
    ("an index without base", no_base, r"base\.index .*a path where there are base files"),
    (
        "no config listed",
        lambda d: d["files"].remove(next(f for f in d["files"] if f["path"] == "config.json")),
        "config.json",
    ),
    (
        "index under another name",
        lambda d: d["base"].update(index="config.json"),
        r"base\.index .*model\.safetensors\.index",
    ),
    # report
    (
        "kept experts miscounted",
        lambda d: d["report"].update(experts_kept=7),
        r"report\.experts_kept .*expected 8, found 7",
    ),
    (
        "tail experts miscounted",
        lambda d: d["report"].update(experts_tail=0),
        r"report\.experts_tail .*expected 4, found 0",
    ),
    (
        "a packed layer omitted",
        lambda d: d["report"].update(layers_omitted=[4]),
        "layers_omitted names a layer that is packed",
    ),
    (
        "requantised twice",
        lambda d: d["report"].update(experts_requantized=2 * [{"layer": 5, "expert": 0, "worst_relative_error": 0.01}]),
        "experts_requantized is not in order",
    ),
    (
        "requantised tail",
        lambda d: d["report"].update(
            experts_requantized=[{"layer": 3, "expert": d["layers"]["3"]["tail"][0], "worst_relative_error": 0.01}]
        ),
        "names an expert that is not kept",
    ),
    # schema
    ("another format", lambda d: d.update(format="other"), "not a hybrid-pack manifest.*'other'"),
    ("another version", lambda d: d.update(format_version=2), "unsupported format_version.*expected 1, found 2"),
    ("version true", lambda d: d.update(format_version=True), "unsupported format_version"),
    ("version real", lambda d: d.update(format_version=1.0), "unsupported format_version"),
    ("an unknown key", lambda d: d["layout"].update(extra=1), r"layout\.extra: Extra inputs are not permitted"),
    ("a missing key", lambda d: d["layout"].pop("activation"), r"layout\.activation: Field required"),
    (
        "a number as text",
        lambda d: d["topology"].update(tensor_parallel="2"),
        r"topology\.tensor_parallel: Input should be",
    ),
    ("a layer with zeros", lambda d: d["layers"].update({"003": d["layers"].pop("3")}), r"layers\.003.*pattern"),
    (
        "a path upwards",
        lambda d: d["files"][0].update(path="../config.json"),
        "not a plain relative path inside the pack",
    ),
    (
        "an absolute path",
        lambda d: d["files"][0].update(path="/etc/passwd"),
        "not a plain relative path inside the pack",
    ),
    ("a path with dots", lambda d: d["files"][0].update(path="a/./b"), "not a plain relative path inside the pack"),
    ("a backslash", lambda d: d["files"][0].update(path="a\\b"), "not a plain relative path inside the pack"),
    ("a control character", lambda d: d["files"][0].update(path="a\nb"), "not a plain relative path inside the pack"),
    ("a decomposed name", lambda d: d["files"][0].update(path="e\u0301"), "not a plain relative path inside the pack"),
    ("an empty path", lambda d: d["files"][0].update(path=""), "at least 1 character"),
    ("case twins", lambda d: duplicate_file(d, "CONFIG.json"), "two files with one name: config.json and CONFIG.json"),
    ("width twins", lambda d: duplicate_file(d, "conﬁg.json"), "two files with one name"),
    ("a source path upwards", lambda d: d["source"]["files"][0].update(path="../x"), "not a plain relative path"),
    (
        "another digest algorithm",
        lambda d: d["files"][0].update(digest="md5:0"),
        r"files\.0\.digest: String should match",
    ),
    ("a negative size", lambda d: d["files"][0].update(bytes=-1), r"files\.0\.bytes: Input should be greater"),
]


@pytest.mark.parametrize(("edit", "message"), [line[1:] for line in RULES], ids=[line[0] for line in RULES])
def test_a_manifest_that_breaks_a_rule(good_pack: Path, edit: Edit, message: str) -> None:
    document = copy.deepcopy(read_document(good_pack))
    edit(document)
    with pytest.raises(DataError, match=message) as caught:
        decode_manifest(encode_manifest(document), MANIFEST)
    assert "\n" not in str(caught.value)
    assert caught.value.where == MANIFEST


def test_no_kept_anywhere_needs_no_format(good_pack: Path) -> None:
    document = read_document(good_pack)
    document["layers"]["3"].update(kept=[], tail=[0, 1, 2, 3])
    with pytest.raises(DataError, match=r"layers\.3\.kept_scale_format"):
        decode_manifest(encode_manifest(document), MANIFEST)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_levels_that_are_no_numbers(good_pack: Path, value: str) -> None:
    text = json.dumps(read_document(good_pack)).replace("-0.6047", value)
    document = json.loads(text)
    body = json.dumps(document, indent=1).encode().removesuffix(b"\n}")
    encoded = encode_manifest({"x": 0}).replace(b'{\n "x": 0', body, 1)  # encode_manifest itself writes no such number
    at = encoded.rindex(b"blake3:")
    encoded = encoded[: at + 7] + blake3(body).hexdigest().encode() + encoded[at + 71 :]
    with pytest.raises(DataError, match="nf3_levels do not ascend"):
        decode_manifest(encoded, MANIFEST)


@pytest.fixture(scope="module")
def said(good_pack: Path) -> str:
    """Everything the lines of the table make ``decode_manifest`` say."""
    messages = []
    for _, edit, _ in RULES:
        document = copy.deepcopy(read_document(good_pack))
        edit(document)
        with pytest.raises(DataError) as caught:
            decode_manifest(encode_manifest(document), MANIFEST)
        messages.append(str(caught.value))
    return "\n".join(messages)


def test_every_refusal_has_a_line(said: str) -> None:
    """Read from the rules' own source, so that a new rule cannot come without a line above."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(rules))) if isinstance(node, ast.Call)]
    problems = [call.args[0] for call in calls if getattr(call.func, "id", "") == "refuse"]
    texts = []
    for problem in problems:
        parts = problem.values if isinstance(problem, ast.JoinedStr) else [problem]
        texts.append(max((str(part.value) for part in parts if isinstance(part, ast.Constant)), key=len).strip(" :"))
    assert len(texts) > 25
    assert [text for text in texts if text not in said] == []


def test_verify_gives_a_broken_rule_as_its_only_finding(pack: Path) -> None:
    document = read_document(pack)
    document["report"]["experts_kept"] = 1
    (pack / MANIFEST).write_bytes(encode_manifest(document))
    report = verify_pack(pack)
    assert [finding.path for finding in report.findings] == [MANIFEST]
    assert "report.experts_kept" in text_of(report)
    assert [left.what for left in report.not_checked] == ["everything else"]


# the file itself


def test_an_edited_manifest(pack: Path) -> None:
    text = (pack / MANIFEST).read_bytes().replace(b'"silu"', b'"gelu"')
    (pack / MANIFEST).write_bytes(text)
    assert "self_digest does not match its bytes: it was edited or damaged" in text_of(verify_pack(pack))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not valid JSON"),
        (b"[]", "not a hybrid-pack manifest.*list"),
        (b"\xff", "not valid JSON"),
        (b'{"format": "hybrid-pack", "format": "hybrid-pack"}', "the key 'format' occurs twice"),
        (b'{"format": "hybrid-pack", "format_version": 1}', "self_digest does not match"),
        (b"[" * 100_000, "not valid JSON"),
    ],
    ids=["empty", "a list", "not text", "a key twice", "no digest", "deep"],
)
def test_a_manifest_that_is_none(pack: Path, text: bytes, message: str) -> None:
    (pack / MANIFEST).write_bytes(text)
    assert re.search(message, text_of(verify_pack(pack)))


def test_no_manifest(pack: Path) -> None:
    (pack / MANIFEST).unlink()
    report = verify_pack(pack)
    assert not report.ok
    assert "not a pack: it has no manifest; finish the conversion with --resume" in text_of(report)
    with pytest.raises(UsageError, match="nowhere: no such folder"):
        read_manifest(pack / "nowhere")
    with pytest.raises(UsageError, match=r"config\.json: not a folder"):
        read_manifest(pack / "config.json")
    shutil.rmtree(pack / "experts")
    (pack / STATE).touch()
    with pytest.raises(DataError, match="it has no manifest; finish the conversion with --resume"):
        read_manifest(pack)


def test_the_journal_is_that_of_a_conversion() -> None:
    assert STATE == journal.STATE


def test_an_unfinished_conversion_is_one_finding(pack: Path) -> None:
    (pack / MANIFEST).unlink()
    (pack / STATE).touch()
    (pack / f"{MANIFEST}.partial").touch()
    shard = next((pack / "experts").rglob("*.safetensors"))
    shard.rename(f"{shard}.partial")
    report = verify_pack(pack)
    assert text_of(report) == (
        f"{MANIFEST}: not there: an unfinished conversion, or one that is running: finish it with convert --resume"
    )
    assert "remove" not in text_of(report)


def test_a_folder_in_its_place(pack: Path) -> None:
    (pack / MANIFEST).unlink()
    (pack / MANIFEST).mkdir()
    assert "it has no manifest" in text_of(verify_pack(pack))


def test_a_link_to_nothing(pack: Path) -> None:
    (pack / MANIFEST).unlink()
    (pack / MANIFEST).symlink_to("gone.json")
    with pytest.raises(DataError, match="symbolic link to a file that is not there"):
        read_manifest(pack)
    assert "symbolic link to a file that is not there" in text_of(verify_pack(pack))


def test_one_too_large(pack: Path) -> None:
    os.truncate(pack / MANIFEST, (1 << 30) + 1)
    assert "too large for a manifest" in text_of(verify_pack(pack))


def test_one_that_cannot_be_read(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(EnvironmentFailure, match=r"cannot read.*Input/output error"):
        read_manifest(pack)
    report = verify_pack(pack)
    assert [str(entry) for entry in report.unread] == [f"{MANIFEST}: could not be read (found Input/output error)"]
    assert not report.findings and report.exit_code == 3
