"""``hybrid-pack verify``: what it prints, and its exit codes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.cli.main import run
from hybrid_pack.io.manifest import MANIFEST, STATE
from tests.verify.packs import editing, flip

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(["verify", *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


def deny(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As root nothing is denied."""
    real = os.open

    def denied(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith(name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", denied)


def test_unread_files_are_3_and_findings_go_before(pack: Path, monkeypatch: pytest.MonkeyPatch, verify: Run) -> None:
    deny(monkeypatch, "LICENSE")
    code, out, err = verify(pack)
    assert code == 3
    assert "  UNREAD       LICENSE: could not be read (found Permission denied)\n" in out
    last = err.splitlines()[-1]
    assert last == f"hybrid-pack: {pack}: 1 file could not be read; first: LICENSE: could not be read " + (
        "(found Permission denied)"
    )
    flip(pack / "tokenizer.json", 3)
    code, out, err = verify(pack, "--json")
    report = json.loads(out)
    assert (code, report["ok"], len(report["unread"]), report["findings_total"]) == (1, False, 1, 1)
    last = err.splitlines()[-1]
    assert "1 finding; first: tokenizer.json: " in last and "; 1 file could not be read; " in last


def test_the_report_is_shown(pack: Path, verify: Run) -> None:
    with editing(pack) as editor:
        editor.document["report"].update(blocks_flushed=3, notes=["an oddity"])
    code, out, _ = verify(pack)
    assert code == 0
    assert "  by the report: 3 kept blocks too small for the kernel beside the largest of the matrix, flushed" in out
    assert "  by the report: an oddity\n" in out
    assert json.loads(verify(pack, "--json")[1])["declared"][-1] == "an oddity"


def test_an_unfinished_conversion(pack: Path, verify: Run) -> None:
    (pack / MANIFEST).unlink()
    (pack / STATE).touch()
    code, out, err = verify(pack)
    assert code == 1
    assert out.count("WRONG") == 1 and "remove" not in out
    assert "1 finding" in err and err.rstrip().endswith("finish it with convert --resume")


def test_quick_shows_no_progress(good_pack: Path, small_checkpoint: Path, verify: Run) -> None:
    code, out, err = verify(good_pack, "--quick", "--source", small_checkpoint)
    assert (code, err) == (0, "")
    for what in ("scale bytes", "experts against the source", "bytes of base tensors against the source"):
        assert f"  not checked  {what}: a quick verification was asked for\n" in out
    assert "  checked      scale bytes: " in verify(good_pack)[1]


def test_a_checkpoint(small_checkpoint: Path, verify: Run) -> None:
    code, _, err = verify(small_checkpoint)
    assert code == 1 and "this is a checkpoint, not a pack" in err


def test_a_bit_map_needs_a_source(good_pack: Path, small_checkpoint: Path, tmp_path: Path, verify: Run) -> None:
    assert verify(good_pack, "--bit-map", small_checkpoint / "config.json")[0] == 2
    code, _, err = verify(good_pack, "--bit-map", tmp_path / "no.json", "--source", small_checkpoint)
    assert code == 2 and "--bit-map" in err and "no.json" in err
    code, _, err = verify(good_pack, "--bit-map", small_checkpoint / "config.json", "--source", small_checkpoint)
    assert code == 0, err


def test_no_warning_of_numpy_is_printed(pack: Path, small_checkpoint: Path) -> None:
    """Also of a pack with a global scale that is a signalling NaN."""
    source = shutil.copytree(small_checkpoint, pack.parent / "source")
    with editing(pack, consistent=True) as editor:
        values = editor.array(5, 0, "kept.w2_global_scale")
        values.view("<u4")[:] = 0x7FA00000
        editor.put(5, 0, "kept.w2_global_scale", values)
    command = [sys.executable, "-m", "hybrid_pack.cli", "verify", str(pack), "--source", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "."})
    assert done.returncode == 1
    assert "Warning" not in done.stderr
    assert "not a global scale" in done.stdout
