"""What a config says of formats and headers do not: noted, or refused where headers leave it open."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.errors import DataError
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.synthetic import Spec, write_checkpoint
from tests.checkpoints import edit_config

SPEC = Spec(
    hidden=256, intermediate=192, num_experts=2, kept=1, vocab=8, moe_layers=(1,), dense_layers=(0,), mtp_layer=False,
    stored=("fp8_block",), map_in="none",
)  # fmt: skip


def notes(root: Path, spec: Spec, quantization: dict[str, Any], **options: Any) -> tuple[str, ...]:
    """What opening a checkpoint notes that has this in its quantisation config."""
    write_checkpoint(root, spec)
    with edit_config(root) as config:
        config["quantization_config"] = {**(config.get("quantization_config") or {}), **quantization}
    bits = [4 if e < spec.kept else 3 for e in range(spec.num_experts)]
    (root.parent / "map.json").write_text(json.dumps({str(layer): bits for layer in spec.moe_layers}))
    return open_checkpoint(root, bit_map_file=root.parent / "map.json", **options).notes


def in_groups(size: list[int]) -> dict[str, Any]:
    return {"weight_block_size": None, "config_groups": {"group_0": {"weights": {"block_structure": size}}}}


@pytest.mark.parametrize("where", ["weight_block_size", "config_groups.group_0.weights.block_structure"])
def test_a_block_size_that_fits_as_well_is_refused(where: str, tmp_path: Path) -> None:
    """192 and 256 are two blocks of 128 and of 150."""
    size = [150, 150]
    given = {where: size} if "." not in where else in_groups(size)
    with pytest.raises(DataError, match="layer 1 expert 0: its scales fit FP8 blocks of 128x128") as caught:
        notes(tmp_path / "m", SPEC, given)
    assert f"found blocks of 150x150 by {where} of config.json" in str(caught.value)
    assert "model.layers.1.mlp.experts.0.gate_proj.weight_scale_inv" in str(caught.value)


@pytest.mark.parametrize("size", [[96, 128], [64, 64], [128, 64], [256, 256], [128, 256]])
def test_a_block_size_that_cannot_be_is_noted(size: list[int], tmp_path: Path) -> None:
    (line,) = (n for n in notes(tmp_path / "m", SPEC, {"weight_block_size": size}) if "FP8 blocks" in n)
    assert line == (
        "layer 1 expert 0 is stored in FP8 blocks of 128x128, not in "
        f"blocks of {size[0]}x{size[1]} by weight_block_size of config.json"
    )


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        (SPEC, [128, 128]),
        (SPEC, None),
        (replace(SPEC, hidden=128, intermediate=128), [256, 512]),  # one block either way
        (replace(SPEC, stored=("bf16",)), [96, 128]),
    ],
)
def test_a_block_size_that_means_the_same_is_not_noted(spec: Spec, size: Any, tmp_path: Path) -> None:
    assert not [n for n in notes(tmp_path / "m", spec, {"weight_block_size": size}) if "blocks" in n]


@pytest.mark.parametrize("size", [[0, 128], "128", [128], [64, "64"]])
def test_a_block_size_that_is_none_is_noted(size: Any, tmp_path: Path) -> None:
    (line,) = (n for n in notes(tmp_path / "m", SPEC, {"weight_block_size": size}) if "weight_block_size" in n)
    assert line == f"weight_block_size is not two sizes, and not looked at: {size!r}"


CLAIMS: tuple[tuple[str, dict[str, Any], str | None], ...] = (
    ("bf16", {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized (format)"),
    ("mxfp4", {"quant_algo": "NVFP4"}, "NVFP4 (quant_algo)"),
    ("nvfp4", {"quant_algo": None, "quant_method": "mxfp4"}, "mxfp4 (quant_method)"),
    ("nvfp4", {"quant_algo": "NVFP4"}, None),
    ("nvfp4", {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, None),
    ("mxfp8", {"quant_method": "fp8"}, None),
    ("mxfp4", {"quant_method": "fp8"}, None),
    ("nvfp4", {"quant_algo": "MIXED_PRECISION", "format": 7}, None),
)


@pytest.mark.parametrize(("stored", "says", "told"), CLAIMS)
def test_a_format_nothing_is_stored_in_is_noted(
    stored: Any, says: dict[str, Any], told: str | None, tmp_path: Path
) -> None:
    spec = replace(SPEC, stored=(stored,))
    found = [n for n in notes(tmp_path / "m", spec, says) if n.startswith("the config says")]
    assert found == (
        [f"the config says {told}, yet no expert is stored so: they are {stored.upper()}, and read as such"]
        if told
        else []
    )


@pytest.mark.parametrize(("option", "noted"), [(None, True), ("nvfp4", True), ("mxfp4", False)])
def test_a_kept_format_that_will_not_be_packed_is_noted(option: Any, noted: bool, tmp_path: Path) -> None:
    spec = replace(SPEC, stored=("bf16",))
    found = notes(tmp_path / "m", spec, {"kept_format": "mxfp4_e8m0k32"}, kept_format=option)
    lines = [n for n in found if "kept_format says MXFP4" in n]
    assert len(lines) == noted and all("they are packed as NVFP4; --kept-format decides" in n for n in lines)


def test_hints_name_the_map_and_the_way_out(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", replace(SPEC, stored=("nf3", "nvfp4"), num_experts=2))
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({"1": [3, 3]}))
    with pytest.raises(DataError, match=r"give the right map with --bit-map, or --requantize to make tail experts"):
        open_checkpoint(tmp_path / "m", bit_map_file=path)
    open_checkpoint(tmp_path / "m", bit_map_file=path, requantize=True)
    path.write_text(json.dumps({"1": [4, 4]}))
    with pytest.raises(DataError, match=r"give the right map with --bit-map$"):
        open_checkpoint(tmp_path / "m", bit_map_file=path)
    path.write_text(json.dumps({"1": [3, 3, 3]}))
    with pytest.raises(DataError, match=r"wrong\.json: layer 1 of the bit map \(expected 2 entries, .*found 3\)"):
        open_checkpoint(tmp_path / "m", bit_map_file=path)
