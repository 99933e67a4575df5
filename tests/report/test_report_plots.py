"""PNG pictures by matplotlib: there is one for each thing there is to show."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from hybrid_pack.errors import EnvironmentFailure
from hybrid_pack.report import plots
from hybrid_pack.report.data import make_view
from hybrid_pack.report.plots import write_pictures
from tests.report.manifests import errors, manifest, random_tiers
from tests.report.pages import BELLS, HOSTILE, ZEROS
from tests.report.pixels import chunks

TIERS = random_tiers(range(3, 6), 16, 5, mtp=9)


def test_all_of_them(tmp_path: Path) -> None:
    view = make_view(manifest(TIERS, 16, quantized=errors(TIERS, 16, exact=0.1), name=HOSTILE + "$x_"), [])
    paths = write_pictures(tmp_path / "deep" / "pictures", view, BELLS)
    assert [path.name for path in paths] == ["tier_map.png", "bytes.png", "errors.png", "scales.png"]
    for path in paths:
        found = chunks(path.read_bytes())
        pixels = zlib.decompress(b"".join(content for name, content in found if name == b"IDAT"))
        assert len(set(pixels)) > 4, "more than paper"


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    """And what an earlier pack left there is not taken for this one's."""
    for name in ("errors.png", "scales.png"):
        (tmp_path / name).write_bytes(b"old")
    paths = write_pictures(tmp_path, make_view(manifest(TIERS, 16), []), None)
    assert [path.name for path in paths] == ["tier_map.png", "bytes.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bytes.png", "tier_map.png"]


def test_exact_experts_and_zero_scales(tmp_path: Path) -> None:
    view = make_view(manifest(TIERS, 16, quantized=errors(TIERS, 16, exact=1.0)), [])
    assert len(write_pictures(tmp_path, view, ZEROS)) == 4


def test_the_same_bytes_every_time(tmp_path: Path) -> None:
    view = make_view(manifest(TIERS, 16), [])
    one = [path.read_bytes() for path in write_pictures(tmp_path / "one", view, BELLS)]
    assert one == [path.read_bytes() for path in write_pictures(tmp_path / "two", view, BELLS)]


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFailure, match=r'pip install "hybrid-pack\[report\]"'):
        write_pictures(tmp_path / "out", make_view(manifest(TIERS, 16), []), None)
    assert not (tmp_path / "out").exists()
