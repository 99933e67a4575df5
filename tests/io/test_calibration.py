"""Files of Hessians and of importance: what is read, who shares, and every way to be refused."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hybrid_pack.errors import DataError, EnvironmentFailure, HybridPackError
from hybrid_pack.io import calibration, hessians, importance
from hybrid_pack.io.calibration import Scanned, Statistics, Wanted
from hybrid_pack.io.digest import blake3_file
from hybrid_pack.io.hessians import open_hessians
from hybrid_pack.io.importance import open_importance
from hybrid_pack.quantize.gptq_hessian import SYMMETRY, prepare_hessian
from tests.checkpoints import Stored
from tests.io.calibration_files import (
    INNER,
    WANTED,
    H,
    edit,
    f32,
    hessian,
    put,
    value,
    write_hessians,
    write_importance,
)
from tests.io.mutation import Case

FILE = "importance.safetensors"
L3, L11 = "layer-3.safetensors", "layer-11.safetensors"
KINDS = ("hessians", "importance")


def make(kind: str, root: Path) -> Path:
    return (write_hessians if kind == "hessians" else write_importance)(root)


def open_kind(kind: str, root: Path, wanted: Wanted = WANTED) -> Statistics:
    return open_hessians(root, wanted) if kind == "hessians" else open_importance(root / FILE, wanted)


def read_all(kind: str, root: Path) -> None:
    """One by one and, what must find the same, in one scan."""
    with open_kind(kind, root) as statistics:
        failed: list[Exception] = []
        try:
            statistics.scan()
        except HybridPackError as error:
            failed.append(error)
        try:
            _read_each(statistics)
        except HybridPackError as error:
            assert list(map(str, failed)) == [str(error)]
            raise
        assert not failed


def _read_each(statistics: Statistics) -> None:
    for layer, experts in WANTED.experts.items():
        for expert in experts:
            for matrix in WANTED.channels:
                statistics.read(layer, expert, matrix)


@pytest.mark.parametrize("kind", KINDS)
def test_values(kind: str, tmp_path: Path) -> None:
    make(kind, tmp_path / "x")
    with open_kind(kind, tmp_path / "x") as statistics:
        for layer, expert, stored in ((3, 0, "0"), (3, 2, "2"), (11, 1, "shared")):
            for matrix, channels in WANTED.channels.items():
                found = statistics.read(layer, expert, matrix)
                assert found.dtype == np.float32 and found.flags.writeable
                assert found.shape == ((channels, channels) if kind == "hessians" else (channels,))
                assert np.array_equal(found, value(kind, layer, stored, matrix))


@pytest.mark.parametrize("kind", KINDS)
def test_who_shares(kind: str, tmp_path: Path) -> None:
    make(kind, tmp_path / "x")
    noun = "Hessian" if kind == "hessians" else "importance"
    with open_kind(kind, tmp_path / "x") as some:
        assert some.notes == tuple(
            f"1 of 3 experts use the {noun} their layer shares for {matrix}" for matrix in ("gate_up", "down")
        )
    with open_kind(kind, tmp_path / "x", Wanted({3: (0, 1, 2)}, WANTED.channels)) as none:
        assert none.notes == ()
        assert none.located(3, 0, "down") != none.located(3, 1, "down")
    with open_kind(kind, tmp_path / "x", Wanted({3: range(7), 11: range(2)}, {"down": INNER})) as most:
        assert most.notes == (f"6 of 9 experts use the {noun} their layer shares for down",)
        assert most.located(3, 5, "down") == most.located(3, 6, "down") != most.located(11, 0, "down")


@pytest.mark.parametrize("kind", KINDS)
def test_what_nobody_wants_is_not_looked_at(kind: str, tmp_path: Path) -> None:
    make(kind, tmp_path / "x")
    name, tensor = (L3, "1.down.hessian") if kind == "hessians" else (FILE, "3.1.down")
    edit(name, lambda t: t.update({tensor: Stored("U8", (3,), b"abc")}))(tmp_path / "x")
    read_all(kind, tmp_path / "x")


HESSIAN_CASES = (
    Case("no folder", lambda r: shutil.rmtree(r), r"x: no such folder"),
    Case("a file in its place", lambda r: (shutil.rmtree(r), r.write_text("")), r"x: no such folder"),
    Case("empty folder", lambda r: [p.unlink() for p in r.iterdir()],
         r"x: no Hessians for layer 3, 11 \(expected layer-3\.safetensors, found no such file at all\)"),
    Case("no file for a layer", lambda r: (r / L11).unlink(),
         r"x: no Hessians for layer 11 \(expected layer-11\.safetensors, found layer 3, 12\)"),
    Case("leading zero in a file name", lambda r: (r / L3).rename(r / "layer-03.safetensors"),
         r"layer-03\.safetensors: a file of Hessians with a name that is no layer's \(expected layer-<L>\.safet"),
    Case("broken file", lambda r: (r / L3).write_bytes((r / L3).read_bytes()[:-1]), rf"{L3}: the file is truncated"),
    Case("pointer", lambda r: (r / L3).write_text("version https://git-lfs.github.com/spec/v1\n"), "git-lfs pointer"),
    Case("misspelt tensor", edit(L3, lambda t: t.update({"0.gateup.hessian": t.pop("0.gate_up.hessian")})),
         rf"{L3}: tensor 0\.gateup\.hessian has a name that is no Hessian's \(expected <expert>\.<matrix>\.hessian or"),
    Case("leading zero in an expert", edit(L3, lambda t: t.update({"00.down.hessian": t.pop("0.down.hessian")})),
         rf"{L3}: tensor 00\.down\.hessian has a name that is no Hessian's"),
    Case("no expert, and none shared",
         edit(L3, lambda t: [t.pop(f"{e}.down.hessian") for e in ("2", "shared")]),
         r"x: no Hessian for layer 3 expert 2 down \(expected a tensor 2\.down\.hessian or shared\.down\.hessian, "
         r"found those of 2 other experts\)"),
    Case("nothing for a matrix", edit(L11, lambda t: t.pop("shared.down.hessian")),
         r"x: no Hessian for layer 11 expert 1 down \(expected .*, found none for this matrix of this layer\)"),
    Case("half precision", edit(L3, lambda t: t.update({"0.down.hessian": Stored("F16", (INNER, INNER), bytes(2048))})),
         rf"{L3}: 0\.down\.hessian: Hessian of the wrong dtype or shape \(expected F32 .*, found F16 \[32, 32\]"),
    Case("other size", edit(L3, lambda t: t.update({"2.gate_up.hessian": t["2.down.hessian"]})),
         rf"{L3}: 2\.gate_up\.hessian: .* \(expected F32 \[64, 64\], found F32 \[32, 32\]\)"),
    Case("only the diagonal", edit(L3, lambda t: t.update({"2.gate_up.hessian": f32(np.ones(H))})),
         rf"{L3}: 2\.gate_up\.hessian: .* \(expected F32 \[64, 64\], found F32 \[64\]\)"),
    Case("shared of another size", edit(L11, lambda t: t.update({"shared.down.hessian": f32(np.ones((1, 1)))})),
         rf"{L11}: shared\.down\.hessian: .* \(expected F32 \[32, 32\], found F32 \[1, 1\]\)"),
    Case("not a number", put(L3, "0.down.hessian", (5, 7), np.nan),
         rf"{L3}: 0\.down\.hessian: a value is not finite at \[5, 7\] \(found nan\); collect it again, in float32"),
    Case("infinite", put(L11, "shared.gate_up.hessian", (63, 0), -np.inf),
         rf"{L11}: shared\.gate_up\.hessian: a value is not finite at \[63, 0\] \(found -inf\)"),
    Case("negative diagonal", put(L3, "0.down.hessian", (5, 5), -2),
         rf"{L3}: 0\.down\.hessian: the Hessian's diagonal is negative at channel 5 \(-2\.0\); give X\^T X of the"),
    Case("all zero", put(L3, "0.down.hessian", ..., 0),
         rf"{L3}: 0\.down\.hessian: the Hessian's diagonal is all zero: no token was seen; collect it again"),
    Case("not symmetric", put(L3, "2.gate_up.hessian", (7, 60), 11.5),
         rf"{L3}: 2\.gate_up\.hessian: the Hessian is not symmetric: 11\.5 at \[7, 60\], .* at \[60, 7\]; give the"),
    Case("products without a square", put(L11, "shared.down.hessian", (9, 9), 0),
         rf"{L11}: shared\.down\.hessian: channel 9 of the Hessian has products .* a zero on the diagonal; give X"),
)  # fmt: skip

IMPORTANCE_CASES = (
    Case("no file", lambda r: (r / FILE).unlink(), rf"{FILE}: no such file"),
    Case("broken file", lambda r: (r / FILE).write_bytes(b"12345678"), rf"{FILE}: the header does not fit"),
    Case("a folder in its place", lambda r: ((r / FILE).unlink(), (r / FILE).mkdir()), "cannot read",
         EnvironmentFailure),
    Case("misspelt tensor", edit(FILE, lambda t: t.update({"3.0.gate": t.pop("3.0.gate_up")})),
         rf"{FILE}: tensor 3\.0\.gate has a name that is no importance's \(expected <layer>\.<expert>\.<matrix> or"),
    Case("a layer's name", edit(FILE, lambda t: t.update({"model.layers.3.0.down": t.pop("3.0.down")})),
         rf"{FILE}: tensor model\.layers\.3\.0\.down has a name that is no importance's"),
    Case("no layer", edit(FILE, lambda t: [t.pop(n) for n in list(t) if n.startswith("11.")]),
         rf"{FILE}: no importance for layer 11 expert 1 gate_up \(expected a tensor 11\.1\.gate_up or "
         r"11\.shared\.gate_up, found none for this matrix of this layer\)"),
    Case("no expert, and none shared", edit(FILE, lambda t: [t.pop(f"3.{e}.down") for e in ("2", "shared")]),
         rf"{FILE}: no importance for layer 3 expert 2 down .*found those of 2 other experts"),
    Case("double precision", edit(FILE, lambda t: t.update({"3.0.down": Stored("F64", (INNER,), bytes(8 * INNER))})),
         rf"{FILE}: 3\.0\.down: importance of the wrong dtype or shape \(expected F32 \[32\], found F64 \[32\]\)"),
    Case("other size", edit(FILE, lambda t: t.update({"3.2.gate_up": t["3.2.down"]})),
         rf"{FILE}: 3\.2\.gate_up: .* \(expected F32 \[64\], found F32 \[32\]\)"),
    Case("two dimensions", edit(FILE, lambda t: t.update({"11.shared.down": f32(np.ones((1, INNER)))})),
         rf"{FILE}: 11\.shared\.down: .* \(expected F32 \[32\], found F32 \[1, 32\]\)"),
    Case("not a number", put(FILE, "3.0.down", 31, np.nan),
         rf"{FILE}: 3\.0\.down: a value is not finite at \[31\] \(found nan\)"),
    Case("negative", put(FILE, "3.2.gate_up", 8, -0.5),
         rf"{FILE}: 3\.2\.gate_up: the importance of channel 8 is negative \(-0\.5\); give mean squares"),
    Case("all zero", put(FILE, "11.shared.down", ..., 0),
         rf"{FILE}: 11\.shared\.down: the importance of every channel is zero: no token was seen; collect it again"),
)  # fmt: skip

CASES = tuple(
    (kind, case) for kind, cases in zip(KINDS, (HESSIAN_CASES, IMPORTANCE_CASES), strict=True) for case in cases
)


def fail(kind: str, root: Path, case: Case) -> HybridPackError:
    make(kind, root)
    read_all(kind, root)
    case.change(root)
    with pytest.raises(HybridPackError) as caught:
        read_all(kind, root)
    return caught.value


@pytest.mark.parametrize(("kind", "case"), CASES, ids=lambda part: part if isinstance(part, str) else part.id)
def test_mutation(kind: str, case: Case, tmp_path: Path) -> None:
    error = fail(kind, tmp_path / "x", case)
    assert type(error) is case.error
    assert re.search(case.message, str(error)), str(error)


def raises_of(module: ModuleType) -> int:
    return sum(isinstance(node, ast.Raise) for node in ast.walk(ast.parse(inspect.getsource(module))))


def test_every_raise_has_a_line(tmp_path: Path) -> None:
    """All but three, which have the tests after this."""
    reached = set()
    for number, (kind, case) in enumerate(CASES):
        last = fail(kind, tmp_path / f"{number}x", case).__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        assert last is not None
        reached.add((last.tb_frame.f_code.co_filename, last.tb_lineno))
    modules = (calibration, hessians, importance)
    found = {place for place in reached if place[0] in {module.__file__ for module in modules}}
    assert len(found) == sum(map(raises_of, modules)) - 3


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root can list every folder, so that taking the permission away would not do."""

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    root = write_hessians(tmp_path / "x")
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(EnvironmentFailure, match=r"x: cannot read \(found Permission denied\)"):
        open_hessians(root, WANTED)


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    root = write_hessians(tmp_path / "x")
    with open_hessians(root, WANTED) as opened:
        (root / L3).write_bytes((root / L3).read_bytes()[:5000])
        with pytest.raises(HybridPackError, match="the file became shorter while it was read"):
            opened.read(3, 2, "gate_up")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_changes_while_it_is_used(kind: str, tmp_path: Path) -> None:
    """A layer that uses other files, or none, does not mind."""
    make(kind, tmp_path / "x")
    root = tmp_path / "x"
    file, noun = (root / L11, "Hessian") if kind == "hessians" else (root / FILE, "importance")
    with open_kind(kind, tmp_path / "x") as opened:
        for layer in (3, 11, 12):
            opened.require_unchanged(layer)
        os.utime(file, ns=(0, 0))
        opened.require_unchanged(12)
        if kind == "hessians":
            opened.require_unchanged(3)
        with pytest.raises(DataError, match=rf"{file.name}: the {noun} file changed while it was in use; .*--resume"):
            opened.require_unchanged(11)
        file.unlink()
        with pytest.raises(EnvironmentFailure, match=rf"{file.name}: cannot read \(found No such file"):
            opened.require_unchanged(11)


def scanned(kind: str, root: Path) -> Scanned:
    with open_kind(kind, root) as opened:
        found = opened.scan()
        assert found.files == tuple(blake3_file(path) for path in opened.paths)
        assert set(found.layers) == set(WANTED.experts)
        return found


@pytest.mark.parametrize("kind", KINDS)
def test_digests_tell_which_layers_a_change_concerns(kind: str, tmp_path: Path) -> None:
    make(kind, tmp_path / "x")
    before = scanned(kind, tmp_path / "x")
    name, layer3 = (L3, "") if kind == "hessians" else (FILE, "3.")
    end = ".hessian" if kind == "hessians" else ""
    at = (5, 5) if kind == "hessians" else (5,)
    put(name, f"{layer3}1.down{end}", at, 77.0)(tmp_path / "x")
    unwanted = scanned(kind, tmp_path / "x")
    assert unwanted.files != before.files and unwanted.layers == before.layers
    put(name, f"{layer3}2.down{end}", at, 77.0)(tmp_path / "x")
    wanted = scanned(kind, tmp_path / "x")
    assert wanted.layers[11] == before.layers[11] and wanted.layers[3] != before.layers[3]
    edit(name, lambda tensors: tensors.pop(f"{layer3}2.down{end}"))(tmp_path / "x")
    shared = scanned(kind, tmp_path / "x")
    assert shared.layers[11] == before.layers[11]
    assert len({s.layers[3] for s in (before, wanted, shared)}) == 3


@settings(max_examples=40, deadline=None)
@given(
    size=st.sampled_from([32, 64, 96]),
    seed=st.integers(0, 2**32 - 1),
    share=st.floats(0.2, 3),
    dead=st.booleans(),
    scale=st.sampled_from([1e-30, 1.0, 1e30]),
)
@example(size=32, seed=4784, share=1.0, dead=True, scale=1.0)  # nearer to the limit than float32 can tell
def test_symmetry_is_judged_as_where_it_is_factored(
    size: int, seed: int, share: float, dead: bool, scale: float
) -> None:
    """Never stricter, never laxer; tiles of another size say the same."""
    rng = np.random.default_rng(seed)
    values = hessian(size, seed).astype(np.float64)
    i, j = rng.choice(size, 2, replace=False)
    if dead:
        values[i] = values[:, i] = 0
    if not dead or rng.random() < 0.5:
        values[i, j] += share * SYMMETRY * np.abs(values).max()
    if dead and rng.random() < 0.5:
        values[j, i] = values[i, j]
    stored = (values * scale).astype(np.float32)
    try:
        prepare_hessian(torch.from_numpy(stored))
        refused = None
    except DataError as error:
        refused = str(error)
    found = hessians._problem(stored)
    assert (found is None) == (refused is None), (found, refused)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hessians, "TILE", 24)
        assert (hessians._problem(stored) is None) == (refused is None)
