"""Importances, Hessians, padding and the other options of quantising, through the whole conversion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from hybrid_pack.cli.main import run
from hybrid_pack.convert import Conversion, check, convert
from hybrid_pack.errors import DataError, EnvironmentFailure, UsageError
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.io.quantization import QuantizeOptions
from hybrid_pack.plan import make_plan
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec, write_checkpoint
from hybrid_pack.verify import verify_pack
from tests.checkpoints import edit_config, edit_tensors
from tests.convert.support import tree
from tests.convert.test_convert_sources import differences
from tests.verify.packs import editing

SPEC = Spec(
    hidden=128, intermediate=96, num_experts=4, kept=1, vocab=8, moe_layers=(1,), dense_layers=(0,), mtp_layer=False,
    stored=("bf16",),
)  # fmt: skip
SIZES = {"gate_up": SPEC.hidden, "down": SPEC.intermediate}
F32 = NDArray[np.float32]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "source", SPEC)
    return tmp_path / "source"


def importance(folder: Path) -> dict[str, F32]:
    """A few loud channels."""
    rng = np.random.default_rng(5)
    found = {name: np.where(rng.random(k) < 0.1, 100.0, 1.0).astype(np.float32) for name, k in SIZES.items()}
    save_file({f"1.shared.{name}": values for name, values in found.items()}, folder / "importance.safetensors")
    return found


def hessians(folder: Path) -> dict[str, F32]:
    """Of autoregressive inputs."""
    found = {}
    for seed, (name, k) in enumerate(SIZES.items()):
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((4 * k, k))
        for i in range(1, k):
            x[:, i] = 0.9 * x[:, i - 1] + 0.4 * x[:, i]
        found[name] = (x.T @ x).astype(np.float32)
    (folder / "hessians").mkdir()
    tensors = {f"shared.{name}.hessian": values for name, values in found.items()}
    save_file(tensors, folder / "hessians" / "layer-1.safetensors")
    return found


def pack(source: Path, out: Path, opened: dict[str, Any] | None = None, tp: int = 1, **options: Any) -> Conversion:
    plan = make_plan(
        open_checkpoint(source, **(opened or {})), Topology(tp), pad=True, options=QuantizeOptions(**options)
    )
    return convert(plan, out, workers=2)


def weighted_error(root: Path, source: Path, done: Conversion, cost: Callable[[str, NDArray[Any]], float]) -> float:
    """Sum over tail experts and matrices of a cost of the differences."""
    total = 0.0
    hidden, inner = SPEC.hidden, SPEC.intermediate
    for _, _, name, _, error in differences(root, open_checkpoint(source), done.manifest):
        if name == "nf3":
            gate, up, down = np.split(error, [inner * hidden, 2 * inner * hidden])
            total += cost("gate_up", gate.reshape(inner, hidden)) + cost("gate_up", up.reshape(inner, hidden))
            total += cost("down", down.reshape(hidden, inner))
    return total


def test_importance_lowers_the_weighted_error(source: Path, tmp_path: Path) -> None:
    given = importance(tmp_path)
    plain = pack(source, tmp_path / "plain")
    file = tmp_path / "importance.safetensors"
    done = pack(source, tmp_path / "weighted", search="weighted", importance=file)

    def cost(name: str, error: NDArray[Any]) -> float:
        return float((error**2 * given[name]).sum())

    before = weighted_error(tmp_path / "plain", source, plain, cost)
    after = weighted_error(tmp_path / "weighted", source, done, cost)
    assert after < before
    report = done.manifest.report
    assert {entry.method for entry in report.experts_quantized} == {"weighted"}
    assert report.options.importance is not None and report.options.importance.startswith("blake3:")
    assert any("experts use the importance their layer shares" in note for note in report.notes)
    assert verify_pack(tmp_path / "weighted", source=source).ok


def test_gptq_lowers_the_error_of_the_outputs(source: Path, tmp_path: Path) -> None:
    given = hessians(tmp_path)
    plain = pack(source, tmp_path / "plain")
    done = pack(source, tmp_path / "gptq", hessians=tmp_path / "hessians")

    def cost(name: str, error: NDArray[Any]) -> float:
        return float(np.einsum("nk,kl,nl->", error, given[name].astype(np.float64), error))

    before = weighted_error(tmp_path / "plain", source, plain, cost)
    after = weighted_error(tmp_path / "gptq", source, done, cost)
    assert after < 0.6 * before
    entries = {entry.tier: entry for entry in done.manifest.report.experts_quantized}
    assert {tier: entry.method for tier, entry in entries.items()} == {"tail": "gptq", "kept": "mse"}
    ratio = entries["tail"].gptq_to_rtn
    assert entries["kept"].gptq_to_rtn is None and ratio is not None
    assert after / before == pytest.approx(ratio, rel=0.1), (
        "rounding to nearest has better scales there than plain ones"
    )
    report = verify_pack(tmp_path / "gptq", source=source)
    assert report.ok, report.findings
    pack(source, tmp_path / "again", hessians=tmp_path / "hessians")
    assert tree(tmp_path / "gptq") == tree(tmp_path / "again")


def test_gptq_has_one_worker_unless_told_and_the_bytes_do_not_depend_on_it(source: Path, tmp_path: Path) -> None:
    hessians(tmp_path)
    checkpoint = open_checkpoint(source)
    plain = make_plan(checkpoint, Topology(1), pad=True)
    chosen = QuantizeOptions(hessians=tmp_path / "hessians")
    plan = make_plan(checkpoint, Topology(1), pad=True, options=chosen)
    assert check(plain, tmp_path / "one")[0].workers > 1 == check(plan, tmp_path / "one")[0].workers
    assert check(plan, tmp_path / "one", workers=2)[0].workers == 2
    assert (convert(plan, tmp_path / "one").workers, convert(plan, tmp_path / "two", workers=2).workers) == (1, 2)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


def test_options_that_do_not_go_together(source: Path, tmp_path: Path) -> None:
    importance(tmp_path)
    for options in ({"search": "weighted"}, {"importance": tmp_path / "importance.safetensors"}):
        with pytest.raises(UsageError, match="--search weighted and --importance go together"):
            pack(source, tmp_path / "out", **options)


def test_statistics_of_another_model_are_refused_before_the_work(source: Path, tmp_path: Path) -> None:
    save_file({"1.shared.gate_up": np.ones(64, np.float32)}, tmp_path / "importance.safetensors")
    with pytest.raises(DataError, match=r"importance of the wrong dtype .*expected F32 \[128\], found F32 \[64\]"):
        pack(source, tmp_path / "out", search="weighted", importance=tmp_path / "importance.safetensors")
    (tmp_path / "hessians").mkdir()
    with pytest.raises(DataError, match="no Hessians for layer 1"):
        pack(source, tmp_path / "out", hessians=tmp_path / "hessians")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_gpu_that_is_not_there(source: Path, tmp_path: Path) -> None:
    plan = make_plan(open_checkpoint(source), Topology(1), pad=True, options=QuantizeOptions(device="cuda"))
    for action in (convert, check):
        with pytest.raises(EnvironmentFailure, match="--device cuda: torch sees no CUDA GPU"):
            action(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_weight_that_is_no_number_is_named(source: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    with edit_tensors(source) as tensors:
        stored = tensors[name]
        values = np.frombuffer(stored.data, "<u2").copy()
        values[5 * SPEC.hidden + 7] = 0x7FC0
        tensors[name] = replace(stored, data=values.tobytes())
    with pytest.raises(DataError, match=rf"{name}: layer 1 expert 2: weight \[5, 7\] .*finite.*nan"):
        pack(source, tmp_path / "out")


@pytest.mark.parametrize("tp", [1, 2])
def test_padding_is_told_and_proved(source: Path, tmp_path: Path, tp: int) -> None:
    with pytest.raises(UsageError, match=r"96/2 = 48 is not a multiple of 64; legal sizes: none; or --pad, to 128"):
        make_plan(open_checkpoint(source), Topology(2))
    manifest = pack(source, tmp_path / "out", tp=tp).manifest
    assert (manifest.geometry.intermediate_size, manifest.geometry.intermediate_size_padded) == (96, 128)
    assert "intermediate size 96 is padded with zeros to 128" in manifest.report.notes
    report = verify_pack(tmp_path / "out", source=source)
    assert report.ok, report.findings


def test_padding_that_is_no_zero_is_found(source: Path, tmp_path: Path) -> None:
    """With digests that are right again, as an attacker would make them."""
    pack(source, tmp_path / "out")
    with editing(tmp_path / "out", consistent=True) as editor:
        scales = editor.array(1, 0, "tail.w2_scale")
        assert not scales[0, 3].any() and scales[0, 2].any(), "the last of four groups of columns is padding"
        scales[0, 3, 5] = 0x30
        editor.put(1, 0, "tail.w2_scale", scales)
    report = verify_pack(tmp_path / "out", source=source)
    assert [finding.message for finding in report.findings] == ["padding that does not mean zero"]


@pytest.mark.parametrize("bias", [127, 125])
def test_bias_of_old_exports(bias: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", replace(SPEC, intermediate=128, stored=("ct_mxfp4",), kept=4))
    opened = {"mx_bias": bias}
    manifest = pack(tmp_path / "source", tmp_path / "out", opened).manifest
    assert manifest.report.options.mx_bias == bias
    source = open_checkpoint(tmp_path / "source", mx_bias=bias)
    sums = [float((w**2).sum()) for *_, w, error in differences(tmp_path / "out", source, manifest) if not error.any()]
    assert len(sums) == 4
    report = verify_pack(tmp_path / "out", source=tmp_path / "source")
    assert report.ok, report.findings
    plain = open_checkpoint(tmp_path / "source")
    other = [float((w**2).sum()) for *_, w, _ in differences(tmp_path / "out", plain, manifest)]
    assert np.allclose(sums, np.array(other) * (16 if bias == 125 else 1))


def test_a_code_that_is_not_the_nearest_is_found(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "out")
    with editing(tmp_path / "out", consistent=True) as editor:
        words = editor.array(1, 0, "tail.w13")
        words[0, 2] ^= 1  # a top bit: half the code book away
        editor.put(1, 0, "tail.w13", words)
    report = verify_pack(tmp_path / "out", source=source)
    assert any("codes are not the nearest levels" in finding.message for finding in report.findings), report.findings


def test_a_scale_that_is_not_the_best_is_found(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "out")
    with editing(tmp_path / "out", consistent=True) as editor:
        scales = editor.array(1, 0, "tail.w13_scale")
        scales[0, 1, 9] += 8  # one octave
        editor.put(1, 0, "tail.w13_scale", scales)
    report = verify_pack(tmp_path / "out", source=source)
    messages = " ".join(finding.message for finding in report.findings)
    assert "scales have a neighbour of less squared error" in messages or "not the nearest levels" in messages


def test_a_global_scale_that_is_not_of_these_weights_is_found(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "out")
    with editing(tmp_path / "out", consistent=True) as editor:
        values = editor.array(1, 0, "kept.w13_global_scale")
        editor.put(1, 0, "kept.w13_global_scale", values * np.float32(1.25))
    report = verify_pack(tmp_path / "out", source=source)
    assert any("not a global scale of these weights" in finding.message for finding in report.findings)


def test_an_error_that_is_told_wrong_is_found(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "out")
    with editing(tmp_path / "out") as editor:
        editor.document["report"]["experts_quantized"][-1]["sqnr_db"][0] += 0.5
    (finding,) = verify_pack(tmp_path / "out", source=source).findings
    assert finding.message == "not the error of the packed weights"


def test_an_expert_that_is_not_told_of_is_found(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "out")
    with editing(tmp_path / "out") as editor:
        editor.document["report"]["experts_quantized"].pop()
    report = verify_pack(tmp_path / "out", source=source)
    assert any("the report does not say that this expert was quantised" in f.message for f in report.findings)


def enlarge(root: Path, weight: int) -> None:
    """Put one huge weight, BF16 bits, into every expert's up matrix."""
    name = "model.layers.1.mlp.experts.{}.up_proj.weight"
    with edit_tensors(root) as tensors:
        for expert in range(SPEC.num_experts):
            stored = tensors[name.format(expert)]
            values = np.frombuffer(stored.data, "<u2").copy()
            values[7] = weight
            tensors[name.format(expert)] = replace(stored, data=values.tobytes())


def test_weights_too_large_for_the_kernel_are_refused(source: Path, tmp_path: Path) -> None:
    enlarge(source, 0x4980)  # 2^20
    with pytest.raises(
        DataError, match=r"up_proj.weight: .*weights too large for the kernel's NVFP4 .*below 512.*--kept-format mxfp4"
    ):
        pack(source, tmp_path / "out")
    pack(source, tmp_path / "mxfp4", {"kept_format": "mxfp4"})
    report = verify_pack(tmp_path / "mxfp4", source=source)
    assert report.ok, report.findings


@pytest.mark.parametrize(("weight", "held"), [(0x7CBF, True), (0x7CC0, False)])
def test_the_other_format_is_advised_where_it_holds_them(weight: int, held: bool, source: Path, tmp_path: Path) -> None:
    """E2M1's 6 times 2^120, the largest scale the kernel has of MXFP4, and the BF16 number before it."""
    enlarge(source, weight)
    hint = r"--kept-format mxfp4 .* holds them" if held else "no format of the kept tier holds them"
    with pytest.raises(DataError, match=rf"up_proj.weight: .*weights too large .*; {hint}"):
        pack(source, tmp_path / "out")
    if held:
        for search in ("mse", "absmax"):
            pack(source, tmp_path / search, {"kept_format": "mxfp4"}, search=search)


def test_mxfp4_is_not_advised_where_it_has_just_failed(source: Path, tmp_path: Path) -> None:
    enlarge(source, 0x7F61)  # 3e38
    with pytest.raises(DataError, match="do not fit the kernel's scale byte") as caught:
        pack(source, tmp_path / "out", {"kept_format": "mxfp4"})
    assert caught.value.hint is None


def with_intermediate(root: Path, inner: int) -> None:
    """Cut every expert's BF16 matrices to another intermediate size."""
    with edit_tensors(root) as tensors:
        for name in list(tensors.weight_map):
            if ".mlp.experts." in name:
                stored = tensors[name]
                values = np.frombuffer(stored.data, "<u2").reshape(stored.shape)
                values = values[:, :inner] if ".down_proj." in name else values[:inner]
                tensors[name] = replace(stored, shape=values.shape, data=values.tobytes())
    with edit_config(root) as config:
        config["moe_intermediate_size"] = inner


@pytest.mark.parametrize("pad", [False, True])
def test_a_size_that_cuts_a_group_is_refused_and_no_padding_advised(
    source: Path, pad: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with_intermediate(source, 80)
    with pytest.raises(DataError, match=r"groups of 32 columns \(expected an intermediate .*found 80\); --pad cannot"):
        make_plan(open_checkpoint(source), Topology(1), pad=pad)
    assert run(["inspect", str(source)]) == 0
    assert "where nothing is quantised (80 is not a multiple of 32), --pad makes it 128" in capsys.readouterr().out
