"""Sources that are not, or not quite, what the pack was made from: what differs is said first."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.io.config import CONFIG
from hybrid_pack.synthetic import write_checkpoint
from hybrid_pack.verify import verify_pack
from tests.checkpoints import SMALL, edit_config, edit_index
from tests.verify.packs import text_of


def another(root: Path, source: Path) -> Path:
    other = root.parent / "other"
    shutil.copytree(source, other)
    return other


def test_a_source_with_other_weights(pack: Path, small_checkpoint: Path) -> None:
    other = pack.parent / "other"
    write_checkpoint(other, replace(SMALL, seed=SMALL.seed, vocab=32))
    found = text_of(verify_pack(pack, source=other))
    assert found.startswith(
        f"{other}: config.json and hf_quant_config.json: not the source this pack was made from, or changed"
    )
    assert "vocab_size: not as in the source's" in found


def test_a_source_of_other_sizes(pack: Path) -> None:
    other = pack.parent / "other"
    write_checkpoint(other, replace(SMALL, hidden=256))
    report = verify_pack(pack, source=other)
    found = text_of(report)
    assert found.startswith(f"{other}: config.json and hf_quant_config.json")
    assert "hidden size: not that of the source (expected 256, found 128)" in found
    assert "experts of layers 3, 4, 5 against the source" in [left.what for left in report.not_checked]


def test_a_source_with_another_number_of_experts(pack: Path) -> None:
    other = pack.parent / "other"
    write_checkpoint(other, replace(SMALL, num_experts=8))
    report = verify_pack(pack, source=other)
    assert not report.ok
    assert "8" in text_of(report)


def test_a_source_with_fewer_layers(pack: Path) -> None:
    other = pack.parent / "other"
    write_checkpoint(other, replace(SMALL, mtp_layer=False))
    found = text_of(verify_pack(pack, source=other))
    assert "layer 5: the source has no experts to pack in this layer" in found


def test_a_source_with_more_layers(pack: Path) -> None:
    other = pack.parent / "other"
    write_checkpoint(other, replace(SMALL, moe_layers=(3, 4, 5)))
    found = text_of(verify_pack(pack, source=open_checkpoint(other)))
    assert "layers omitted: not that of the source (expected (6,), found ())" in found


def test_a_source_with_another_kept_format(pack: Path) -> None:
    other = pack.parent / "other"
    write_checkpoint(other, replace(SMALL, kept_format="mxfp4"))
    found = text_of(verify_pack(pack, source=other))
    assert "layer 3: not that of the source (expected e8m0_k32, found e4m3_k16)" in found


def test_a_source_whose_own_map_is_wrong_is_read_by_the_packs(pack: Path, small_checkpoint: Path) -> None:
    other = another(pack, small_checkpoint)
    with edit_config(other) as config:
        bits = config["quantization_config"]["hybrid_bit_map"]["3"]
        config["quantization_config"]["hybrid_bit_map"]["3"] = [7 - b for b in bits]
    report = verify_pack(pack, source=other)
    assert {finding.check for finding in report.findings} == {"source identity", "small files against the source"}


def test_a_source_whose_config_was_reformatted(pack: Path, small_checkpoint: Path) -> None:
    other = another(pack, small_checkpoint)
    (other / CONFIG).write_text(json.dumps(json.loads((other / CONFIG).read_text())))
    report = verify_pack(pack, source=other)
    assert [finding.where for finding in report.findings] == ["config.json and hf_quant_config.json"]


def test_a_source_whose_index_changed(pack: Path, small_checkpoint: Path) -> None:
    other = another(pack, small_checkpoint)
    with edit_index(other) as index:
        index["metadata"]["total_size"] = 1
    report = verify_pack(pack, source=other)
    assert [finding.where for finding in report.findings] == ["index"]


def test_a_source_cut_into_other_files_says_so_but_is_compared(pack: Path) -> None:
    other = pack.parent / "other"
    write_checkpoint(other, replace(SMALL, shard_bytes=1 << 30))
    report = verify_pack(pack, source=other)
    assert {finding.check for finding in report.findings} == {"source identity"}
    assert next(check.count for check in report.checks if check.name == "experts against the source") == 12


def test_a_source_that_is_broken(pack: Path, small_checkpoint: Path) -> None:
    other = another(pack, small_checkpoint)
    min(other.glob("*.safetensors")).unlink()
    report = verify_pack(pack, source=other)
    assert "no such file" in text_of(report)
    assert verify_pack(pack, source=pack.parent / "nowhere").findings[0].message.startswith("no such file")
