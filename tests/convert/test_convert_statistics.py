"""Files of Hessians and importances that are wrong, mended or touched: nothing is begun in vain, nothing lost."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from hybrid_pack.cli.main import run
from hybrid_pack.convert import Conversion, convert
from hybrid_pack.convert.journal import STATE
from hybrid_pack.errors import DataError, UsageError
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.io.progress import Silent
from hybrid_pack.io.quantization import QuantizeOptions
from hybrid_pack.plan import make_plan
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec
from tests.convert.conftest import Sources
from tests.convert.interrupted import Stop, stop_after
from tests.convert.support import stamps, tree, weights

SPEC = Spec(
    hidden=128, intermediate=128, num_experts=2, kept=1, vocab=8, moe_layers=(1, 2, 3), dense_layers=(0,),
    mtp_layer=False, stored=("bf16",), seed=77,
)  # fmt: skip
KINDS = ("hessians", "importance")
F32 = NDArray[np.float32]
Edit = Callable[[F32], object]


def hessian(seed: int) -> F32:
    x = np.random.default_rng(seed).standard_normal((300, 128))
    x[:, 1:] += x[:, :-1]
    return (x.T @ x).astype(np.float32)


@pytest.fixture
def source(sources: Sources) -> Path:
    return sources(SPEC)


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Path]:
    """Good files of both kinds."""
    (tmp_path / "hessians").mkdir()
    shares: dict[str, F32] = {}
    for layer in SPEC.moe_layers:
        made = {matrix: hessian(10 * layer + i) for i, matrix in enumerate(("gate_up", "down"))}
        tensors = {f"shared.{matrix}.hessian": values for matrix, values in made.items()}
        save_file(tensors, tmp_path / "hessians" / f"layer-{layer}.safetensors")
        shares |= {f"{layer}.shared.{matrix}": values.diagonal().copy() for matrix, values in made.items()}
    save_file(shares, tmp_path / "importance.safetensors")
    return {"hessians": tmp_path / "hessians", "importance": tmp_path / "importance.safetensors"}


def change(kind: str, given: dict[str, Path], layer: int, edit: Edit) -> None:
    """Edit a layer's statistics of the inputs of down."""
    path = given[kind] / f"layer-{layer}.safetensors" if kind == "hessians" else given[kind]
    tensors = load_file(path)
    edit(tensors["shared.down.hessian" if kind == "hessians" else f"{layer}.shared.down"])
    save_file(tensors, path)


def twice(values: F32) -> None:
    """Another strength of the first channels."""
    values[:40] *= 16
    if values.ndim == 2:
        values[:, :40] *= 16


def negate(values: F32) -> None:
    """Nothing but factoring tells that this is no Hessian."""
    values[:] = 2 * np.diag(values.diagonal()) - values


def pack(source: Path, out: Path, kind: str, path: Path, **options: Any) -> Conversion:
    chosen = QuantizeOptions(**{kind: path}, search="weighted" if kind == "importance" else "mse")
    return convert(make_plan(open_checkpoint(source), Topology(1), options=chosen), out, workers=1, **options)


def layers_done(out: Path) -> list[str]:
    return [name for name in weights(out) if "layer-" in name]


BAD: dict[str, tuple[str, Edit]] = {
    "nan": (r"a value is not finite at \[3, 4\]", lambda h: h.__setitem__((3, 4), np.nan)),
    "asymmetric": ("the Hessian is not symmetric", lambda h: h.__setitem__((3, 4), 3 * h.max())),
    "negative": ("diagonal is negative at channel 7", lambda h: h.__setitem__((7, 7), -1)),
    "zero": ("diagonal is all zero", lambda h: h.fill(0)),
    "dead channel": ("channel 7 of the Hessian has products", lambda h: h.__setitem__((7, 7), 0)),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_hessian_of_the_last_layer_is_found_before_the_first(
    case: str, source: Path, given: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message, edit = BAD[case]
    change("hessians", given, 3, edit)
    with pytest.raises(DataError, match=rf"layer-3.*down\.hessian: .*{message}"):
        pack(source, tmp_path / "out", "hessians", given["hessians"])
    assert not (tmp_path / "out").exists()
    options = ["--hessians", str(given["hessians"]), "--dry-run"]
    assert run(["convert", str(source), "--out", str(tmp_path / "out"), *options]) == 1
    assert "layer-3" in capsys.readouterr().err


def test_a_mended_hessian_costs_no_finished_layer(source: Path, given: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    change("hessians", given, 3, negate)
    with pytest.raises(DataError, match=r"layer-3.*not positive definite"):
        pack(source, out, "hessians", given["hessians"])
    assert len(layers_done(out)) == 2
    before = stamps(out, layers_done(out))
    change("hessians", given, 3, negate)  # its own inverse, but for rounding
    done = pack(source, out, "hessians", given["hessians"], resume=True)
    assert stamps(out, list(before)) == before and done.files_kept >= 2
    pack(source, tmp_path / "anew", "hessians", given["hessians"])
    assert tree(out) == tree(tmp_path / "anew")


def unfinish(monkeypatch: pytest.MonkeyPatch, files: int, make: Callable[[], object]) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, files)
        with pytest.raises(Stop):
            make()


@pytest.mark.parametrize("kind", KINDS)
def test_only_layers_whose_statistics_changed_are_written_anew(
    kind: str, source: Path, given: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, path = tmp_path / "out", given[kind]
    base = sum(b.nbytes > 0 for b in make_plan(open_checkpoint(source), Topology(1)).base)
    unfinish(monkeypatch, base + 2, lambda: pack(source, out, kind, path))
    first, second = layers_done(out)
    kept = stamps(out, [second])
    stale = (out / first).read_bytes()
    change(kind, given, 1, twice)
    notes: list[str] = []

    class Told(Silent):
        def note(self, line: str) -> None:
            notes.append(line)

    # interrupted once more right away: what was forgotten stays so
    unfinish(monkeypatch, 0, lambda: pack(source, out, kind, path, resume=True, progress=Told()))
    assert any("files that are written anew" in line and line.endswith(": 1") for line in notes), notes
    assert layers_done(out) == [second]
    pack(source, out, kind, path, resume=True)
    assert stamps(out, [second]) == kept and (out / first).read_bytes() != stale
    pack(source, tmp_path / "anew", kind, path)
    assert tree(out) == tree(tmp_path / "anew")


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_the_files_is_the_same(
    kind: str, source: Path, given: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    unfinish(monkeypatch, 2, lambda: pack(source, out, kind, given[kind]))
    before = stamps(out, weights(out))
    copy = tmp_path / "copy"
    (shutil.copytree if kind == "hessians" else shutil.copyfile)(given[kind], copy)
    pack(source, out, kind, copy, resume=True)
    assert stamps(out, list(before)) == before


@pytest.mark.parametrize("kind", KINDS)
def test_another_method_is_another_conversion(
    kind: str, source: Path, given: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    unfinish(monkeypatch, 2, lambda: pack(source, out, kind, given[kind]))
    plain = make_plan(open_checkpoint(source), Topology(1))
    with pytest.raises(UsageError, match=rf"--(search|{kind}) was .*, now (mse|not given)"):
        convert(plain, out, workers=1, resume=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_journal_that_knows_no_layers(
    kind: str, source: Path, given: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an earlier version: the same files are gone on with, others refused."""
    out = tmp_path / "out"
    unfinish(monkeypatch, 2, lambda: pack(source, out, kind, given[kind]))
    first, *more = (out / STATE).read_text().splitlines(keepends=True)
    begin = json.loads(first)
    del begin["begin"]["statistics"]
    (out / STATE).write_text(json.dumps(begin) + "\n" + "".join(more))
    before, files = tree(out), stamps(out, weights(out))
    other = {kind: tmp_path / "other"}
    (shutil.copytree if kind == "hessians" else shutil.copyfile)(given[kind], other[kind])
    change(kind, other, 3, twice)
    with pytest.raises(UsageError, match=rf"other options: what --{kind} gives has changed; "):
        pack(source, out, kind, other[kind], resume=True)
    assert tree(out) == before
    pack(source, out, kind, given[kind], resume=True)
    assert stamps(out, list(files)) == files


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_written_to_meanwhile_spoils_no_finished_layer(
    kind: str, source: Path, given: dict[str, Path], tmp_path: Path
) -> None:
    """The layer at hand is not recorded, and what was is gone on with."""
    out = tmp_path / "out"
    file = given[kind] / "layer-2.safetensors" if kind == "hessians" else given[kind]

    class Touching(Silent):
        def advance(self, nbytes: int) -> None:
            if len(layers_done(out)) == 1:
                os.utime(file, ns=(0, 0))

    with pytest.raises(DataError, match=rf"{file.name}: the .* file changed while it was in use; .*--resume"):
        pack(source, out, kind, given[kind], progress=Touching())
    assert len(layers_done(out)) == 1
    before = stamps(out, layers_done(out))
    pack(source, out, kind, given[kind], resume=True)
    assert stamps(out, list(before)) == before
    pack(source, tmp_path / "anew", kind, given[kind])
    assert tree(out) == tree(tmp_path / "anew")
