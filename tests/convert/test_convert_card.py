"""The model card and the tier map of a pack: written with it, and left alone where a person has edited the card."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybrid_pack.io.manifest import MANIFEST, README, read_manifest
from hybrid_pack.report.card import is_ours
from hybrid_pack.report.png import TIER_MAP, tier_map_png
from hybrid_pack.synthetic import write_checkpoint
from hybrid_pack.verify import verify_pack
from tests.convert.support import pack, small, tree
from tests.verify.packs import editing


class Told:
    """Progress that keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def start(self, total_bytes: int, done_bytes: int) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    write_checkpoint(root, small())
    return root


def test_a_pack_has_both_and_verifies(source: Path, tmp_path: Path) -> None:
    (source / README).write_text("---\nlicense: mit\nlanguage: [en, zh]\ntags:\n- chat\n---\n# Source\n")
    out = tmp_path / "out"
    manifest = pack(source, out, 2).manifest
    card = (out / README).read_text()
    assert is_ours(card.encode())
    assert card.startswith("---\nlicense: mit\nlanguage:\n- en\n- zh\n")
    assert manifest.self_digest in card
    kept = {int(layer): tiers.kept for layer, tiers in manifest.layers.items()}
    assert (out / TIER_MAP).read_bytes() == tier_map_png(manifest.geometry.num_experts, kept)
    assert TIER_MAP in {file.path for file in manifest.files}
    report = verify_pack(out, source=source)
    assert report.ok
    assert report.not_checked == ()


def test_another_picture_is_found_only_with_the_source(source: Path, tmp_path: Path) -> None:
    """Resealed, so that no digest tells."""
    out = tmp_path / "out"
    pack(source, out)
    with editing(out, consistent=True):
        (out / TIER_MAP).write_bytes((out / TIER_MAP).read_bytes()[:-1] + b"\x00")
    assert verify_pack(out).ok
    report = verify_pack(out, source=source, quick=True)
    assert [finding.path for finding in report.findings] == [TIER_MAP]


def test_an_edited_card_is_kept_and_said(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(source, out)
    edited = (out / README).read_text().replace("## Sizes", "## How large it is")
    (out / README).write_text(edited)
    told = Told()
    pack(source, out, overwrite=True, progress=told)
    assert (out / README).read_text() == edited
    assert [note for note in told.notes if README in note] == [f"{README} is not the one written here, so it is kept"]
    assert README in {left.what for left in verify_pack(out).not_checked}


def test_an_edited_card_of_another_pack_is_kept_and_said_to_be_stale(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(source, out, 1)
    edited = (out / README).read_text().replace("## Sizes", "## How large it is")
    (out / README).write_text(edited)
    told = Told()
    made = pack(source, out, 2, overwrite=True, progress=told).manifest
    assert (out / README).read_text() == edited
    (note,) = [note for note in told.notes if README in note]
    assert "describes another pack" in note
    assert made.self_digest in note


def test_a_card_that_was_not_edited_is_replaced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(source, out, 1)
    first = (out / README).read_text()
    told = Told()
    pack(source, out, 2, overwrite=True, progress=told)
    assert (out / README).read_text() != first
    assert "expect_tp=2" in (out / README).read_text()
    assert not any(README in note for note in told.notes)


@pytest.mark.parametrize("card", [b"# Mine\n", b"", b"\xff\xfe"], ids=["text", "empty", "not UTF-8"])
def test_a_card_that_was_there_before_is_kept(card: bytes, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / README).write_bytes(card)
    pack(source, out)
    assert (out / README).read_bytes() == card


def test_a_link_is_neither_followed_nor_replaced(source: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    pack(source, out)
    other.write_bytes((out / README).read_bytes())
    (out / README).unlink()
    (out / README).symlink_to(other)
    before = other.read_bytes()
    pack(source, out, 2, overwrite=True)
    assert (out / README).is_symlink()
    assert other.read_bytes() == before


def test_what_a_killed_run_left_of_a_card_is_removed(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(source, out)
    (out / f"{README}.partial").write_text("half")
    pack(source, out, 2, overwrite=True)
    assert f"{README}.partial" not in tree(out)


def test_a_card_of_the_source_that_cannot_be_read_is_none(source: Path, tmp_path: Path) -> None:
    os.mkfifo(source / README)
    pack(source, tmp_path / "out")
    assert "# not known here: license" in (tmp_path / "out" / README).read_text()


def test_a_picture_of_that_name_in_the_source_is_not_copied(source: Path, tmp_path: Path) -> None:
    (source / "Tier_Map.PNG").write_bytes(b"another")
    out = tmp_path / "out"
    pack(source, out)
    assert "Tier_Map.PNG" not in tree(out)
    assert any("Tier_Map.PNG is not copied" in note for note in read_manifest(out).report.notes)
    assert verify_pack(out, source=source).ok


def test_the_same_bytes_every_time(source: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        pack(source, tmp_path / name, 2)
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    assert one == two
    assert {README, TIER_MAP, MANIFEST} <= set(one)
