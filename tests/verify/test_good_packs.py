"""Packs of every dialect verify against their source, and what could not be held exactly is counted right."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec, write_checkpoint
from hybrid_pack.verify import verify_pack
from tests.checkpoints import KEPT_GATE, SMALL, edit_tensors
from tests.verify.conftest import make_pack
from tests.verify.packs import editing, read_document, text_of

DIALECTS = {
    "nvfp4": SMALL,
    "mxfp4": replace(SMALL, kept_format="mxfp4"),
    "kquant": replace(SMALL, nf3_scales="e4m3_x16", base_dialect="mxfp8", map_in="hf_quant", scalar_shape=(1,)),
    "deepseek": replace(SMALL, kept_format="mxfp4", family=1, map_keys="zero_padded", input_scale=False),
    "nested config, one file": replace(SMALL, family=2, single_file=True, map_in="quantization"),
    "latent experts": replace(SMALL, family=5, base_dialect="fp8_row"),
    "gate and up a power of two apart": replace(SMALL, second_scale="power_of_two"),
    "no kept": replace(SMALL, kept=0, mtp_layer=False),
    "all kept": replace(SMALL, kept=4),
}


def converted(tmp_path: Path, spec: Spec, topology: Topology, **options: object) -> tuple[Path, Path]:
    source = tmp_path / "source"
    write_checkpoint(source, spec)
    return source, make_pack(source, tmp_path / "pack", topology, **options)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("topology", [Topology(1, 1), Topology(2, 2)], ids=["1x1", "2x2"])
def test_a_good_pack_of_every_dialect_is_its_source(tmp_path: Path, dialect: str, topology: Topology) -> None:
    source, pack = converted(tmp_path, DIALECTS[dialect], topology)
    report = verify_pack(pack, source=source)
    assert report.ok, text_of(report)
    experts = next(check for check in report.checks if check.name == "experts against the source")
    assert experts.count == 4 * len(read_document(pack)["layers"])


def test_a_source_that_was_opened_before_is_taken_as_it_is(good_pack: Path, small_checkpoint: Path) -> None:
    assert verify_pack(good_pack, source=open_checkpoint(small_checkpoint)).ok


def test_a_source_without_a_map_is_opened_with_the_packs_own(tmp_path: Path) -> None:
    source, given = tmp_path / "source", tmp_path / "map.json"
    write_checkpoint(source, SMALL)
    given.write_text(
        json.dumps(json.loads((source / "config.json").read_text())["quantization_config"]["hybrid_bit_map"])
    )
    write_checkpoint(source, replace(SMALL, map_in="none"))
    from hybrid_pack.convert import convert
    from hybrid_pack.plan import make_plan

    convert(make_plan(open_checkpoint(source, bit_map_file=given), Topology()), tmp_path / "pack")
    report = verify_pack(tmp_path / "pack", source=source)
    assert report.ok, text_of(report)


def test_blocks_the_kernel_wants_zero_are_counted_and_allowed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_checkpoint(source, SMALL)
    with edit_tensors(source) as tensors:
        scales = np.full(tensors[f"{KEPT_GATE}.weight_scale"].shape, 0x7E, np.uint8)  # 448, so that the factor is 1
        scales[:, 1] = 0x07  # 7 * 2^-9 < 2^-6: flushed
        scales[:, 2] = 0x08  # 2^-6: held
        scales[:, 3] = 0x80  # -0
        tensors[f"{KEPT_GATE}.weight_scale"].data = scales.tobytes()
    pack = make_pack(source, tmp_path / "pack", Topology(2, 1))
    assert read_document(pack)["report"]["blocks_flushed"] >= 128
    report = verify_pack(pack, source=source)
    assert report.ok, text_of(report)


def test_scales_above_the_largest_are_counted_and_allowed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_checkpoint(source, replace(SMALL, kept_format="mxfp4"))
    with edit_tensors(source) as tensors:
        stored = tensors[f"{KEPT_GATE}.weight_scale"]
        scales = np.full(stored.shape, 246, np.uint8)
        scales[:, 0], scales[:, 1], scales[:, 2] = 247, 248, 254
        stored.data = scales.tobytes()
    pack = make_pack(source, tmp_path / "pack", Topology(2, 1))
    assert read_document(pack)["report"]["scales_saturated"] == 256
    report = verify_pack(pack, source=source)
    assert report.ok, text_of(report)


def test_requantised_experts_may_differ_by_what_is_reported(tmp_path: Path) -> None:
    spec = replace(SMALL, second_scale="unequal")
    source, pack = converted(tmp_path, spec, Topology(2, 1), on_scale_mismatch="requantize")
    assert read_document(pack)["report"]["experts_requantized"]
    report = verify_pack(pack, source=source)
    assert report.ok, text_of(report)


def test_a_pack_of_some_layers_says_which_are_not_in_it(tmp_path: Path) -> None:
    source, pack = converted(tmp_path, SMALL, Topology(1, 1), layers=[4])
    report = verify_pack(pack, source=source)
    assert report.ok, text_of(report)
    assert "experts of layers 3, 5" in [left.what for left in report.not_checked]


def test_the_report_names_every_check_with_counts_and_bytes(good_pack: Path, small_checkpoint: Path) -> None:
    report = verify_pack(good_pack, source=small_checkpoint)
    document = read_document(good_pack)
    checks = {check.name: check for check in report.checks}
    assert list(checks) == [
        "manifest",
        "file set",
        "config.json",
        "base headers and index",
        "shard headers, expert ids and global scales",
        "source identity",
        "source structure",
        "file digests",
        "tensor digests",
        "scale bytes",
        "small files against the source",
        "base tensors against the source",
        "experts against the source",
    ]
    assert checks["tensor digests"].count == sum(len(shard["tensors"]) for shard in document["shards"])
    payload = sum(t["end"] - t["begin"] for shard in document["shards"] for t in shard["tensors"].values())
    assert checks["tensor digests"].nbytes == payload
    scales = [name for shard in document["shards"] for name in shard["tensors"] if re.fullmatch(r".*w\d+_scale", name)]
    assert checks["scale bytes"].count == len(scales)
    assert checks["file digests"].nbytes == sum(f["bytes"] for f in (*document["base"]["files"], *document["files"]))
    assert json.loads(json.dumps(report.as_dict()))["ok"] is True


def test_the_same_pack_with_any_number_of_workers(good_pack: Path) -> None:
    assert all(verify_pack(good_pack, workers=workers).ok for workers in (1, 3, 8))


def test_what_a_pack_declares_is_said(tmp_path: Path) -> None:
    """By the report: rounding, blocks flushed, scales saturated, layers omitted, notes. No findings."""
    source = tmp_path / "source"
    write_checkpoint(source, replace(SMALL, second_scale="unequal"))
    pack = make_pack(source, tmp_path / "pack", Topology(1, 1), on_scale_mismatch="requantize", layers=[3])
    report = verify_pack(pack)
    assert report.ok
    requantised, omitted = report.declared[0], next(line for line in report.declared if "omitted" in line)
    worst = max(entry["worst_relative_error"] for entry in read_document(pack)["report"]["experts_requantized"])
    assert re.fullmatch(
        rf"2 experts requantised, worst relative scale error {worst:.2g} in layer 3 expert \d", requantised
    )
    assert omitted == "layers omitted, their experts are not in the pack: 4-5"
    with editing(pack) as editor:
        editor.document["report"].update(blocks_flushed=1, scales_saturated=1234, notes=["an oddity"])
    assert verify_pack(pack).declared == (
        requantised,
        "1 kept block too small for the kernel beside the largest of the matrix, flushed to zero",
        "1,234 MXFP4 scales above the kernel's largest, saturated",
        omitted,
        "an oddity",
    )
    assert verify_pack(pack).as_dict()["declared"][-1] == "an oddity"


def test_an_exact_pack_declares_nothing(good_pack: Path) -> None:
    assert verify_pack(good_pack).declared == ()


def test_no_number_in_a_config_is_the_same_as_itself(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_checkpoint(source, SMALL)
    config = json.loads((source / "config.json").read_text())
    config["odd"] = {"value": [float("nan"), float("inf")]}
    config["quantization_config"]["odd"] = float("nan")
    (source / "config.json").write_text(json.dumps(config))
    report = verify_pack(make_pack(source, tmp_path / "pack", Topology()), source=source)
    assert report.ok, text_of(report)
