"""Matrices of which nothing is left, or little, in experts whose own SQNR hides it: the conversion says so."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hybrid_pack.cli.main import run
from hybrid_pack.convert import convert
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.io.declared import declared
from hybrid_pack.io.quantization import QuantizeOptions
from hybrid_pack.plan import make_plan
from hybrid_pack.schemas.manifest import Report
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec, write_checkpoint
from hybrid_pack.verify import verify_pack
from tests.checkpoints import Stored, edit_tensors, write_file
from tests.convert.test_convert_sources import BASE, differences

PREFIX = "model.layers.1.mlp.experts"
BF16 = replace(BASE, stored=("bf16",), kept=0)
KEPT = replace(BASE, stored=("bf16",), kept=4)


def set_sigma(root: Path, expert: int, role: str, sigma: float) -> None:
    values = np.random.default_rng(expert).normal(0, sigma, (128, 128)).astype("<f4")
    with edit_tensors(root) as tensors:
        tensors[f"{PREFIX}.{expert}.{role}_proj.weight"].data = (values.view("<u4") >> 16).astype("<u2").tobytes()


def write_hessians(folder: Path) -> Path:
    folder.mkdir()
    x = np.random.default_rng(0).standard_normal((300, 128))
    values = (x.T @ x).astype("<f4")
    tensors = {f"shared.{name}.hessian": Stored("F32", (128, 128), values.tobytes()) for name in ("gate_up", "down")}
    write_file(folder / "layer-1.safetensors", tensors)
    return folder


def report_of(root: Path, out: Path, tp: int = 2, options: QuantizeOptions | None = None) -> Report:
    plan = make_plan(open_checkpoint(root, kept_format="nvfp4"), Topology(tp), options=options or QuantizeOptions())
    return convert(plan, out, workers=2, on_scale_mismatch="requantize").manifest.report


def warnings_of(report: Report) -> list[str]:
    return [note for note in report.notes if note.startswith("WARNING")]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("gptq", [False, True], ids=["mse", "gptq"])
def test_a_lost_matrix_is_named(gptq: bool, tp: int, tmp_path: Path) -> None:
    root = tmp_path / "source"
    write_checkpoint(root, BF16)
    set_sigma(root, 2, "up", 1e-6)
    set_sigma(root, 1, "down", 1e-6)
    set_sigma(root, 0, "gate", 0.0)  # zero in the source: nothing is lost
    options = QuantizeOptions(hessians=write_hessians(tmp_path / "hessians")) if gptq else None
    report = report_of(root, tmp_path / "out", tp, options)
    [line] = warnings_of(report)
    assert line.startswith("WARNING: 2 matrices are all zero to the kernel and not in the source")
    assert line.endswith(": layer 1 expert 1 down, layer 1 expert 2 up")
    assert line in declared(report), "inspect and verify tell it too"
    [entry] = report.experts_quantized
    assert min(db for db in entry.sqnr_db if db is not None) > 10, "which hides it"


@pytest.mark.parametrize("role", ["gate", "up"])
def test_a_matrix_lost_beside_one_with_the_same_second_level_scale(role: str, tmp_path: Path) -> None:
    root = tmp_path / "source"
    write_checkpoint(root, KEPT)
    set_sigma(root, 3, role, 1e-9)
    [line] = warnings_of(report_of(root, tmp_path / "out"))
    assert line.startswith("WARNING: 1 matrix is all zero") and line.endswith(f": layer 1 expert 3 {role}")


@pytest.mark.parametrize("stored", [("nvfp4",), ("nvfp4", "nvfp4", "bf16")], ids=["all moved", "down quantised"])
def test_a_moved_matrix_that_is_flushed(stored: tuple[str, ...], tmp_path: Path) -> None:
    root = tmp_path / "source"
    spec: Spec = replace(BASE, stored=stored, mix_matrices=len(stored) > 1, num_experts=3, kept=3)  # type: ignore[arg-type]
    write_checkpoint(root, spec)
    with edit_tensors(root) as tensors:
        scale = tensors[f"{PREFIX}.0.up_proj.weight_scale_2"]
        scale.data = (np.frombuffer(scale.data, "<f4") * np.float32(2.0**-60)).tobytes()
    report = report_of(root, tmp_path / "out")
    assert report.blocks_flushed
    [line] = warnings_of(report)
    assert line.endswith(": layer 1 expert 0 up")


@pytest.mark.parametrize("stored", [("mxfp4",), ("mxfp4", "bf16", "mxfp4")], ids=["all moved", "up quantised"])
def test_an_mxfp4_matrix_that_the_kernel_flushes(stored: tuple[str, ...], tmp_path: Path) -> None:
    """Beside a gate whose scales are 2^120 at least; what is zero by its codes is neither lost nor left."""
    root, out = tmp_path / "source", tmp_path / "out"
    spec: Spec = replace(BASE, stored=stored, mix_matrices=len(stored) > 1, num_experts=3, kept=3)  # type: ignore[arg-type]
    write_checkpoint(root, spec)
    if len(stored) > 1:
        set_sigma(root, 0, "up", 1e-4)
    with edit_tensors(root) as tensors:
        gate = tensors[f"{PREFIX}.0.gate_proj.weight_scale"]
        gate.data = bytes([247]) * len(gate.data)
        if len(stored) == 1:
            up = f"{PREFIX}.0.up_proj.weight"
            codes, scales = bytearray(tensors[up].data), bytearray([110] * 128 * 4)
            codes[:16], scales[0] = bytes([0x80] * 16), 247
            tensors[up].data, tensors[f"{up}_scale"].data = bytes(codes), bytes(scales)
    manifest = convert(make_plan(open_checkpoint(root, kept_format="mxfp4"), Topology(2)), out).manifest
    assert manifest.report.blocks_flushed == 128 * 4 - (len(stored) == 1)
    assert [line.endswith(": layer 1 expert 0 up") for line in warnings_of(manifest.report)] == [True]
    checked = verify_pack(out, source=root)
    assert checked.ok, checked.findings


def test_many_are_counted(tmp_path: Path) -> None:
    root = tmp_path / "source"
    write_checkpoint(root, BF16)
    for expert in range(4):
        set_sigma(root, expert, "up", 1e-6)
        set_sigma(root, expert, "gate", 1e-6)
    [line] = warnings_of(report_of(root, tmp_path / "out"))
    assert line.startswith("WARNING: 8 matrices") and line.endswith("layer 1 expert 1 up and 4 more")


def test_a_matrix_of_which_little_is_left(tmp_path: Path) -> None:
    root = tmp_path / "source"
    write_checkpoint(root, BF16)
    set_sigma(root, 1, "up", 3e-4)
    source = open_checkpoint(root, kept_format="nvfp4")
    manifest = convert(make_plan(source, Topology(2)), tmp_path / "out").manifest
    [line] = warnings_of(manifest.report)
    found = re.search(r"WARNING: 1 matrix below 10 dB, .*: layer 1 expert 1 up \((.*) dB\)$", line)
    assert found
    up = slice(128 * 128, 2 * 128 * 128)
    for _, expert, _, weights, error in differences(tmp_path / "out", source, manifest):
        own = 10 * np.log10((weights[up] ** 2).sum() / (error[up] ** 2).sum())
        assert (own < 10) == (expert == 1)
        assert expert != 1 or own == pytest.approx(float(found[1]), abs=0.006)


def set_outlier(root: Path, expert: int, role: str, sigma: float, largest: float, width: int = 1) -> np.ndarray:
    """One weight or some that are that large among usual ones; f64 [128, 128], as they are stored."""
    values = np.random.default_rng(expert).normal(0, sigma, (128, 128)).astype("<f4")
    values[3, 32 : 32 + width] = largest
    stored = values.view("<u4") >> 16
    with edit_tensors(root) as tensors:
        tensors[f"{PREFIX}.{expert}.{role}_proj.weight"].data = stored.astype("<u2").tobytes()
    return (stored << 16).astype("<u4").view("<f4").astype(np.float64)


LITTLE = "WARNING: little is left of the small weights of 1 matrix, which want scales below the least there is"


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("largest", [1e3, 1e4, 5e5])
def test_small_weights_beside_one_that_is_thousands_of_times_larger(largest: float, tp: int, tmp_path: Path) -> None:
    root = tmp_path / "source"
    write_checkpoint(root, KEPT)
    exact = set_outlier(root, 2, "down", 0.02, largest)
    source = open_checkpoint(root, kept_format="nvfp4")
    manifest = convert(make_plan(source, Topology(tp)), tmp_path / "out").manifest
    [(weights, error)] = [
        (weights[-128 * 128 :].reshape(128, 128), error[-128 * 128 :].reshape(128, 128))
        for _, expert, _, weights, error in differences(tmp_path / "out", source, manifest)
        if expert == 2
    ]
    assert np.array_equal(weights, exact)
    blocks = (np.abs(weights).reshape(128, -1, 16).max(axis=2) < 1).repeat(16, axis=1)
    left = 10 * np.log10((weights[blocks] ** 2).sum() / (error[blocks] ** 2).sum())
    lines = warnings_of(manifest.report)
    assert len(lines) == (left < 10) == (largest > 1e3)
    for line in lines:
        found = re.search(r": layer 1 expert 2 down \((.*) % of its groups, at (.*) dB\); --kept-format mxfp4", line)
        assert line.startswith(LITTLE) and found
        assert float(found[1]) > 90 and float(found[2]) == pytest.approx(left, abs=0.3)
    held = convert(make_plan(open_checkpoint(root, kept_format="mxfp4"), Topology(tp)), tmp_path / "mx").manifest
    assert not warnings_of(held.report), "nor is it lost there"
    report = verify_pack(tmp_path / "out", source=root)
    assert report.ok, report.findings


@pytest.mark.parametrize("gptq", [False, True], ids=["mse", "gptq"])
def test_so_in_the_tail(gptq: bool, tmp_path: Path) -> None:
    root = tmp_path / "source"
    write_checkpoint(root, BF16)
    set_outlier(root, 2, "down", 1e-5, 1.0, 32)  # all of a group, which is itself no trouble
    options = QuantizeOptions(hessians=write_hessians(tmp_path / "hessians")) if gptq else None
    [line] = warnings_of(report_of(root, tmp_path / "out", options=options))
    assert line.startswith(LITTLE) and line.endswith(": layer 1 expert 2 down (100 % of its groups, at 0.00 dB)")


@pytest.mark.parametrize("rows", [8, 32])
def test_rows_that_are_nearly_zero(rows: int, tmp_path: Path) -> None:
    """A few are what dead channels leave."""
    root = tmp_path / "source"
    write_checkpoint(root, KEPT)
    values = np.random.default_rng(1).normal(0, 0.02, (128, 128)).astype("<f4")
    values[:rows] *= 1e-9
    with edit_tensors(root) as tensors:
        tensors[f"{PREFIX}.1.down_proj.weight"].data = (values.view("<u4") >> 16).astype("<u2").tobytes()
    lines = warnings_of(report_of(root, tmp_path / "out"))
    assert [line.partition(": layer ")[2].partition(";")[0] for line in lines] == (
        ["1 expert 1 down (25 % of its groups, at 0.00 dB)"] if rows == 32 else []
    )


@pytest.mark.parametrize("roles", [(), ("gate", "up", "down")], ids=["usual", "an expert that is bad as a whole"])
def test_no_warning_that_says_nothing_new(roles: tuple[str, ...], tmp_path: Path) -> None:
    root = tmp_path / "source"
    write_checkpoint(root, BF16)
    for role in roles:
        set_sigma(root, 1, role, 3e-4)
    assert not warnings_of(report_of(root, tmp_path / "out"))


def test_the_summary_tells_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "source"
    write_checkpoint(root, BF16)
    set_sigma(root, 2, "up", 1e-6)
    assert run(["convert", str(root), "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("WARNING: 1 matrix is all zero" in line and "layer 1 expert 2 up" in line for line in lines) == 1
