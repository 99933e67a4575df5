"""``hybrid-pack report``."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from hybrid_pack.report import plots
from tests.cli.conftest import Command
from tests.convert.support import tree


def test_the_page_is_written_where_it_is_asked_for(packed: Path, tmp_path: Path, command: Command) -> None:
    before = tree(packed)
    target = tmp_path / "deep" / "page.html"
    result = command("report", packed, "--html", target)
    assert (result.code, result.out) == (0, f"wrote {target}\n")
    assert target.read_text().startswith("<!DOCTYPE html>")
    assert "groups read" in target.read_text()
    assert tree(packed) == before


def test_by_default_here(packed: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("report", packed).out == "wrote report.html\n"
    assert (tmp_path / "report.html").exists()


def test_quick_reads_no_payload(
    packed: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid_pack.io.reader.TensorReader.read", lambda *_: pytest.fail("payload was read"))
    assert command("report", packed, "--html", tmp_path / "page.html", "--quick").code == 0
    assert "Scales were not read" in (tmp_path / "page.html").read_text()


def test_json_alone_writes_nothing(packed: Path, tmp_path: Path, command: Command) -> None:
    result = command("report", packed, "--json", "--full")
    document = json.loads(result.out)
    assert (result.code, result.err, document["written"]) == (0, "", [])
    assert document["pack"]["tensor_parallel"] == 2
    assert len(document["pack"]["layers"]) == 2
    histograms = document["scales"]["histograms"]
    assert sum(h["nbytes"] for h in histograms) == sum(sum(h["counts"]) + h["zero"] for h in histograms) > 0


def test_pictures(packed: Path, tmp_path: Path, command: Command) -> None:
    result = command("report", packed, "--png", tmp_path / "png")
    names = ["tier_map.png", "bytes.png", "scales.png"]
    assert (result.code, result.out.splitlines()) == (0, [f"wrote {tmp_path / 'png' / name}" for name in names])


def test_without_matplotlib(packed: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    result = command("report", packed, "--png", tmp_path / "png", "--html", tmp_path / "page.html")
    assert result.code == 3
    assert 'pip install "hybrid-pack[report]"' in result.line
    assert tree(tmp_path) == {}
    assert command("report", packed, "--html", tmp_path / "page.html").code == 0


@pytest.mark.parametrize("option", ["--html", "--png"])
def test_never_into_the_pack(option: str, packed: Path, tmp_path: Path, command: Command) -> None:
    link = tmp_path / "link"
    link.symlink_to(packed)
    for target in (packed / "report", link / "experts" / "report"):
        result = command("report", packed, option, target)
        assert result.code == 2
        assert "would lie in the pack" in result.line


@pytest.mark.parametrize("kind", ["hard link", "symlink"])
def test_links_into_the_pack_are_replaced_not_followed(
    kind: str, packed: Path, tmp_path: Path, command: Command
) -> None:
    pack = Path(shutil.copytree(packed, tmp_path / "pack"))
    before = tree(pack)
    out = tmp_path / "out"
    out.mkdir()
    shard = next(pack.rglob("experts/**/*.safetensors"))
    for name in ("tier_map.png", "bytes.png"):
        os.link(shard, out / name) if kind == "hard link" else (out / name).symlink_to(shard)
    os.link(shard, out / "page.html")
    assert command("report", pack, "--png", out, "--html", out / "page.html").code == 0
    assert tree(pack) == before
    assert (out / "bytes.png").read_bytes()[:4] == b"\x89PNG"
    assert (out / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert sorted(path.name for path in out.iterdir()) == ["bytes.png", "page.html", "scales.png", "tier_map.png"]


def test_a_page_into_a_pipe(packed: Path, tmp_path: Path, command: Command) -> None:
    assert command("report", packed, "--html", "/dev/null").code == 0
    assert Path("/dev/null").is_char_device()


def test_one_rank_alone(packed: Path, tmp_path: Path, command: Command) -> None:
    pack = Path(shutil.copytree(packed, tmp_path / "pack"))
    shutil.rmtree(pack / "experts" / "tp2-ep1" / "rank-1")
    assert command("report", pack, "--html", tmp_path / "page.html").code == 0
    text = (tmp_path / "page.html").read_text()
    assert "Only rank 0 of 2 is whole in this folder" in text
    assert "2 of 4 shards are not here" in text


def test_no_shard_here_is_no_progress(packed: Path, tmp_path: Path, command: Command) -> None:
    pack = Path(shutil.copytree(packed, tmp_path / "pack"))
    shutil.rmtree(pack / "experts")
    result = command("report", pack, "--html", tmp_path / "page.html")
    assert (result.code, result.err) == (0, "")


def test_what_is_no_pack(source: Path, tmp_path: Path, command: Command) -> None:
    assert "this is a checkpoint, not a pack" in command("report", source, "--html", tmp_path / "x.html").line
    assert "no such folder" in command("report", tmp_path / "none", "--html", tmp_path / "x.html").line
    assert "give one of them" in command("report", source, "--quick", "--full").line
    assert not (tmp_path / "x.html").exists()


def test_a_page_that_cannot_be_written(packed: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "file").write_text("in the way")
    result = command("report", packed, "--html", tmp_path / "file" / "page.html")
    assert result.code == 3
    assert str(tmp_path / "file") in result.line
