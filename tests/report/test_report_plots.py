"""PNG pictures by matplotlib: there is one for each thing there is to show."""

from __future__ import annotations

import zlib
from collections import Counter
from pathlib import Path

import pytest

from hybrid_pack.errors import EnvironmentFailure
from hybrid_pack.report import plots
from hybrid_pack.report.data import make_view
from hybrid_pack.report.plots import write_pictures
from hybrid_pack.sharding import Topology
from tests.report.manifests import GLM, Tiers, errors, manifest, random_tiers
from tests.report.pages import BELLS, HOSTILE, ZEROS
from tests.report.pixels import chunks, decode

EXACT, GAP = (0xD6, 0x47, 0x8F), (0xE6, 0xE8, 0xEB)
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


@pytest.mark.parametrize("exact", [0.5, 0.0, 1.0])
def test_exact_experts_have_a_color_of_their_own_and_a_key(exact: float, tmp_path: Path) -> None:
    """Not that of experts which were not quantised, nor one of the scale of errors."""
    made = errors(TIERS, 16, exact=exact, seed=1)
    write_pictures(tmp_path, make_view(manifest(TIERS, 16, quantized=made), []), None)
    pixels = Counter(pixel for row in decode((tmp_path / "errors.png").read_bytes()) for pixel in row)
    share = {color: pixels[color] / pixels.total() for color in (EXACT, GAP)}
    assert (share[EXACT] > 0.01) == (exact > 0)
    assert share[GAP] > 0.05


def test_the_key_names_only_colors_that_are_there() -> None:
    everyone: Tiers = {layer: (list(range(16)), "e4m3_k16") for layer in (0, 1)}
    for exact, tiers, texts in (
        (0.5, TIERS, ["exact: no difference", "not quantised here"]),
        (0.0, TIERS, ["not quantised here"]),
        (0.0, everyone, []),
    ):
        figure = plots._errors(make_view(manifest(tiers, 16, quantized=errors(tiers, 16, exact=exact, seed=1)), []))
        assert [text.get_text() for legend in figure.legends for text in legend.get_texts()] == texts


def test_a_bar_of_a_rank_says_its_unit(tmp_path: Path) -> None:
    small = make_view(manifest(TIERS, 16, hidden=256, intermediate=256, topology=Topology(2)), [])
    for view, unit in ((make_view(manifest(GLM, 256), []), "GB"), (small, "MB")):
        (axis,) = plots._ranks(view).axes
        assert axis.get_xlabel() == unit
        assert 1 < axis.get_xlim()[1] < 1000


def test_the_same_bytes_every_time(tmp_path: Path) -> None:
    view = make_view(manifest(TIERS, 16), [])
    one = [path.read_bytes() for path in write_pictures(tmp_path / "one", view, BELLS)]
    assert one == [path.read_bytes() for path in write_pictures(tmp_path / "two", view, BELLS)]


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFailure, match=r'pip install "hybrid-pack\[report\]"'):
        write_pictures(tmp_path / "out", make_view(manifest(TIERS, 16), []), None)
    assert not (tmp_path / "out").exists()
