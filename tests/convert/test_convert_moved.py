"""Experts of which a part is moved and a part quantised: the error told is of all weights, moved ones too.

A scale that the device's byte does not hold changes weights that were moved: rounded where gate and up share one
second-level scale, flushed where it is too small, saturated where it is too large.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_pack.convert import convert
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.plan import make_plan
from hybrid_pack.schemas.manifest import Manifest
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec, write_checkpoint
from hybrid_pack.verify import verify_pack
from tests.checkpoints import edit_tensors
from tests.convert.test_convert_sources import BASE, differences

PREFIX = "model.layers.1.mlp.experts"
NVFP4 = replace(BASE, stored=("nvfp4", "nvfp4", "bf16"), mix_matrices=True, num_experts=3, kept=3)
"""Gate and up of expert 0 NVFP4, down BF16; of the others in turn."""
UNEQUAL = replace(NVFP4, second_scale="unequal")
MXFP4 = replace(NVFP4, stored=("mxfp4", "mxfp4", "bf16"))

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def set_scales(root: Path, most: int, one: int) -> None:
    """Scale bytes of gate and up: one of them a row large, all others another. Down of expert 0 has no error."""
    make_down_exact(root)
    with edit_tensors(root) as tensors:
        for name in tensors.weight_map:
            if name.endswith(("gate_proj.weight_scale", "up_proj.weight_scale")):
                stored = tensors[name]
                scales = np.full(stored.shape, most, np.uint8)
                scales[:, 0] = one
                stored.data = scales.tobytes()


def make_down_exact(root: Path) -> None:
    """Down of expert 0: what NVFP4 holds without any error."""
    random = np.random.default_rng(0)
    values = E2M1[random.integers(0, 8, (128, 128))] * random.choice([-1, 1], (128, 128)) * 2.0**-8
    values[:, ::16] = 6 * 2.0**-8
    bf16 = (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    with edit_tensors(root) as tensors:
        tensors[f"{PREFIX}.0.down_proj.weight"].data = bf16.tobytes()


def packed(root: Path, out: Path, spec: Spec, tp: int, change: Callable[[Path], object] | None) -> tuple[Any, Manifest]:
    """The opened source, and the manifest of its pack, which ``verify`` finds nothing wrong with."""
    write_checkpoint(root, spec)
    if change is not None:
        change(root)
    kept_format: Any = "mxfp4" if spec is MXFP4 else "nvfp4"
    source = open_checkpoint(root, kept_format=kept_format)
    manifest = convert(make_plan(source, Topology(tp)), out, workers=1, on_scale_mismatch="requantize").manifest
    report = verify_pack(out, source=root)
    assert report.ok, report.findings
    return source, manifest


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("spec", "change", "counted"),
    [
        (UNEQUAL, None, "experts_requantized"),
        (UNEQUAL, make_down_exact, "experts_requantized"),
        (NVFP4, lambda root: set_scales(root, 7, 0x7E), "blocks_flushed"),
        (UNEQUAL, lambda root: set_scales(root, 7, 0x7E), "blocks_flushed"),
        (MXFP4, lambda root: set_scales(root, 246, 249), "scales_saturated"),
    ],
    ids=["requantised", "requantised beside an exact one", "flushed", "requantised and flushed", "saturated"],
)
def test_the_error_is_of_all_weights(
    spec: Spec, change: Callable[[Path], object] | None, counted: str, tp: int, tmp_path: Path
) -> None:
    source, manifest = packed(tmp_path / "source", tmp_path / "out", spec, tp, change)
    assert getattr(manifest.report, counted)
    [entry] = manifest.report.experts_quantized
    assert entry.experts == (0, 1, 2)
    sums = np.zeros(2)
    for _, expert, _, weights, error in differences(tmp_path / "out", source, manifest):
        own = np.array([(weights**2).sum(), (error**2).sum()])
        sums += own
        assert expert or (error[: 2 * 128 * 128] ** 2).sum() > 0.01 * own[1], "the moved matrices have a part in it"
        assert entry.sqnr_db[expert] == pytest.approx(10 * np.log10(own[0] / own[1]), abs=0.001)
    assert entry.tier_sqnr_db == pytest.approx(10 * np.log10(sums[0] / sums[1]), abs=0.001)


def test_an_expert_without_any_error_has_no_number(tmp_path: Path) -> None:
    source, manifest = packed(tmp_path / "source", tmp_path / "out", NVFP4, 1, make_down_exact)
    [entry] = manifest.report.experts_quantized
    assert entry.sqnr_db[0] is None and None not in entry.sqnr_db[1:]
    for _, expert, _, weights, error in differences(tmp_path / "out", source, manifest):
        assert expert or (np.abs(error) <= 2.0**-23 * np.abs(weights)).all()


@pytest.mark.parametrize("tp", [1, 2])
def test_what_the_kernel_flushes_is_lost(tp: int, tmp_path: Path) -> None:
    """MXFP4 gate and up of small weights, beside groups that are zero by their codes and have a scale of 2^120."""

    def change(root: Path) -> None:
        set_scales(root, 118, 118)
        with edit_tensors(root) as tensors:
            for at in (0, 64 * 4):  # the first group of each rank
                stored = tensors[f"{PREFIX}.0.gate_proj.weight"], tensors[f"{PREFIX}.0.gate_proj.weight_scale"]
                codes, scales = (bytearray(each.data) for each in stored)
                codes[at * 16 : at * 16 + 16], scales[at] = bytes(16), 247
                stored[0].data, stored[1].data = bytes(codes), bytes(scales)

    source, manifest = packed(tmp_path / "source", tmp_path / "out", MXFP4, tp, change)
    [entry] = manifest.report.experts_quantized
    [(weights, error)] = [
        (w, e) for _, expert, _, w, e in differences(tmp_path / "out", source, manifest) if not expert
    ]
    moved = slice(2 * 128 * 128)
    assert not error[moved].any(), "they are stored all the same"
    lost = float((weights[moved] ** 2).sum() + (error**2).sum())
    assert entry.sqnr_db[0] == pytest.approx(10 * np.log10((weights**2).sum() / lost), abs=0.001)
    assert manifest.report.blocks_flushed >= 2 * 128 * 4 - 2 - 8
