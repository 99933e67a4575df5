"""Every flipped bit in any file of a pack is found by a plain verification."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from hybrid_pack.io.manifest import MANIFEST, README
from hybrid_pack.verify import verify_pack
from tests.verify.packs import flip, read_document, text_of

RANDOM = 16


@pytest.fixture(scope="module")
def victim(good_pack: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy whose bits are flipped and flipped back."""
    root = tmp_path_factory.mktemp("flipped") / "pack"
    shutil.copytree(good_pack, root)
    return root


def places(root: Path, path: str) -> list[int]:
    """First, last and random bytes; of a shard also the first and last byte of every tensor and of the header."""
    size = (root / path).stat().st_size
    rng = np.random.default_rng(len(path))
    chosen = {0, 1, 7, 8, size - 1, *rng.integers(0, size, RANDOM).tolist()}
    for shard in read_document(root)["shards"]:
        if shard["path"] == path:
            for tensor in shard["tensors"].values():
                chosen |= {tensor["begin"], tensor["end"] - 1}
            chosen |= {min(t["begin"] for t in shard["tensors"].values()) - 1, 100, 1500}
    return sorted(place for place in chosen if place < size)


def every_file(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def test_the_undamaged_copy_is_good(victim: Path) -> None:
    report = verify_pack(victim)
    assert report.ok, text_of(report)


@pytest.mark.parametrize("part", range(6))
def test_a_flipped_bit_is_found_wherever_it_is(victim: Path, part: int) -> None:
    """All files in six tests, so that they can run side by side."""
    files = every_file(victim)
    assert MANIFEST in files
    assert len(files) > 15
    for path in files[part::6]:
        for number, place in enumerate(places(victim, path)):
            flip(victim / path, place, number % 8)
            try:
                report = verify_pack(victim, workers=1)
            finally:
                flip(victim / path, place, number % 8)
            if path == README:
                assert report.ok and README in {left.what for left in report.not_checked}, "people may edit it"
                continue
            assert not report.ok, f"bit {number % 8} of byte {place} of {path}"
            assert {finding.path for finding in report.findings} == {path}, text_of(report)


def test_each_of_the_eight_bits(victim: Path) -> None:
    path = read_document(victim)["shards"][0]["path"]
    for bit in range(8):
        flip(victim / path, 5000, bit)
        assert not verify_pack(victim).ok
        flip(victim / path, 5000, bit)


def test_the_model_card_may_be_edited(victim: Path) -> None:
    (victim / "README.md").write_text("# hello")
    report = verify_pack(victim)
    assert report.ok
    assert "README.md" in [left.what for left in report.not_checked]
    (victim / "README.md").unlink()
