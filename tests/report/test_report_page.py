"""The page as text: well-formed, self-contained, bounded, and every number and cell that of the manifest."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_pack.report.data import make_view
from hybrid_pack.report.html import page
from hybrid_pack.report.maps import CLASSES, color_class, color_range
from hybrid_pack.report.svg import runs
from tests.report.manifests import errors, manifest, random_tiers
from tests.report.pages import FEW, HOSTILE, STATES, of_pack

VOID = {"meta", "link", "br", "hr", "img", "input"}
TIERS = random_tiers(range(3, 6), 16, 5, mtp=9)


class Tree(HTMLParser):
    """Checks that elements nest, and keeps what the tests look at."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute twice in {tag}"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] == "script" else self.texts).append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


@pytest.fixture(scope="module", params=STATES)
def text(request: pytest.FixtureRequest) -> str:
    return STATES[request.param]()


def test_it_is_well_formed(text: str) -> None:
    tree = Tree(text)
    ids = [attributes["id"] for _, attributes in tree.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    named = [a["aria-labelledby"] for _, a in tree.elements if "aria-labelledby" in a]
    assert len(named) == 6
    assert set(named) <= set(ids)
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        root = ElementTree.fromstring(drawing)
        assert root.get("role") == "img"
        assert len(root.get("aria-label", "")) > 10


def test_it_needs_nothing_else(text: str) -> None:
    """No address anywhere, no element that loads, and a policy that forbids it; the one script is the one allowed."""
    tree = Tree(text)
    allowed = {"html", "head", "meta", "title", "style", "body", "main", "script"}
    assert not {tag for tag, _ in tree.elements} & {"link", "img", "iframe", "object", "embed", "form", "a", "base"}
    assert allowed <= {tag for tag, _ in tree.elements}
    assert not [a for _, a in tree.elements if set(a) & {"src", "href", "action", "srcset", "data"}]
    assert not [a for _, a in tree.elements if any(name.startswith("on") for name in a)]
    assert not re.search(r"https?:|//[a-z]|url\(|@import|javascript:", text.replace(HOSTILE, ""))
    (policy,) = (a["content"] for _, a in tree.elements if a.get("http-equiv") == "Content-Security-Policy")
    code = next(script for script in tree.scripts if "querySelectorAll" in script)
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_its_size_is_bounded(text: str) -> None:
    assert len(text.encode()) < 1_000_000


def test_nothing_of_a_manifest_becomes_markup() -> None:
    text = STATES["hostile"]()
    tree = Tree(text)
    assert len(tree.scripts) == 3, "two maps and the script"
    assert not [tag for tag, _ in tree.elements if tag == "img"]
    assert tree.text.count("<script>window.hacked = 1</script>") >= 6
    assert "\u202e" not in text
    assert "\x00" not in text
    assert "\\u202e\\u0000" in text


def maps(text: str) -> dict[str, dict[str, Any]]:
    found = re.findall(r'<figure class="map" id="([\w-]+)">.*?<script type="application/json">(.*?)</script>', text)
    return {name: json.loads(data) for name, data in found}


def cells(text: str, name: str, kind: str) -> list[set[int]]:
    """Columns of every row that a path of a map fills."""
    drawing = re.search(rf'id="{name}">.*?(<svg.*?</svg>)', text, re.DOTALL)
    assert drawing
    rows = int(re.search(r'viewBox="0 0 \d+ (\d+)"', drawing[1])[1])  # type: ignore[index]
    path = re.search(rf'<path class="{kind}" d="([^"]*)"', drawing[1])
    found: list[set[int]] = [set() for _ in range(rows)]
    for x, y, n, back in re.findall(r"M(\d+) (\d+)h(\d+)v1h-(\d+)z", path[1] if path else ""):
        assert n == back
        found[int(y)] |= set(range(int(x), int(x) + int(n)))
    return found


def test_every_cell_of_the_tier_map() -> None:
    made = manifest(TIERS, 16)
    text = page(make_view(made, []), None)
    kept = [set(ids) for ids, _ in TIERS.values()]
    assert cells(text, "tier-map", "kept") == kept
    assert cells(text, "tier-map", "tail") == [set(range(16)) - ids for ids in kept]
    data = maps(text)["tier-map"]
    assert data["layers"] == [3, 4, 5, 9]
    assert [{e for e in range(16) if int(bits[e // 4], 16) >> e % 4 & 1} for bits in data["kept"]] == kept


def test_formats_have_colors_of_their_own() -> None:
    tiers = {**TIERS, 4: (TIERS[4][0], "e8m0_k32")}
    text = page(make_view(manifest(tiers, 16), []), None)
    assert cells(text, "tier-map", "mx") == [set(), set(TIERS[4][0]), set(), set()]
    assert "kept in MXFP4, 4 bits: 5" in Tree(text).text


def test_every_cell_of_the_error_maps() -> None:
    made = errors(TIERS, 16, exact=0.2)
    text = page(make_view(manifest(TIERS, 16, quantized=made), []), None)
    for tier in ("kept", "tail"):
        entries = [entry for entry in made if entry["tier"] == tier]
        data = maps(text)[f"errors-{tier}"]
        assert data["layers"] == [entry["layer"] for entry in entries]
        low, high = color_range(sorted(db for e in entries for db in e["sqnr_db"] if db is not None))
        for row, entry in enumerate(entries):
            for expert in range(16):
                classes = [k for k in (*(f"q{i}" for i in range(8)), "exact")
                           if expert in cells(text, f"errors-{tier}", k)[row]]  # fmt: skip
                if expert not in entry["experts"]:
                    assert (classes, data["db"][row][expert]) == ([], None)
                    continue
                db = entry["sqnr_db"][entry["experts"].index(expert)]
                assert classes == ["exact" if db is None else f"q{color_class(db, low, high)}"]
                assert data["db"][row][expert] == ("=" if db is None else round(100 * db))


@pytest.mark.parametrize(
    ("low", "high", "legend"),
    [
        (21.8131, 21.8131, "21.81 dB"),
        (21.8131, 21.8132, "21.8131 to 21.8132 dB"),
        (21.811, 21.842, "≤ 21.57 dB ≥ 22.07 dB all of 21.81 to 21.84 dB"),
        (21.7, 21.842, "≤ 21.52 dB ≥ 22.02 dB all of 21.70 to 21.84 dB"),
        (21.2, 21.842, "≤ 21.20 dB ≥ 21.84 dB not"),
        (20.0, 22.0, "≤ 20.0 dB ≥ 22.0 dB not"),
    ],
)
def test_the_legend_has_no_number_twice(low: float, high: float, legend: str) -> None:
    made = errors(TIERS, 16, exact=0)
    for entry in made:
        entry["sqnr_db"] = [low, *[high] * (len(entry["experts"]) - 1)]
    text = page(make_view(manifest(TIERS, 16, quantized=made), []), None)
    figure = text.partition('id="errors-kept"')[2].partition("<figcaption>")[2].partition("</figcaption>")[0]
    assert " ".join(Tree(f"<p>{figure}</p>").text.split()).startswith(legend)
    assert ("ramp" in figure) == ("≤" in legend)


def test_panels_without_anything_to_show_say_why() -> None:
    words = Tree(page(make_view(manifest(TIERS, 16), []), None)).text
    assert "No expert was quantised when this pack was made" in words
    assert "Scales were not read" in words
    assert "No rank of this pack is whole in this folder." in words
    assert "Nothing in this tier was quantised here." in Tree(STATES["hostile"]()).text
    assert "Only rank 1 of 4 is whole in this folder." in Tree(STATES["one rank"]()).text
    single = Tree(STATES["single"]()).text
    assert "No expert is in this tier." in single
    assert "Every scale that was read is zero." in single
    assert "No expert shard of this pack could be read in this folder." in Tree(STATES["hostile"]()).text


def test_numbers_of_a_real_pack(packed: Path) -> None:
    text, view = of_pack(packed)
    words = Tree(text).text
    assert view.self_digest in words
    assert "14 kept, 10 tail, in 3 layers" in words
    assert "kept, NVFP4: gate and up" in words
    assert "2 ranks: tp 2, ep 1" in words
    assert words.count(" zero") >= 4


def test_the_same_pack_is_the_same_page(packed: Path) -> None:
    assert of_pack(packed) == of_pack(packed)


def test_many_ranks_share_bars() -> None:
    """64 ranks: no more bars than runs of equal neighbours."""
    text = STATES["hostile"]()
    bars = re.findall(r'aria-label="ranks (\d+)–(\d+), each', text)
    assert len(bars) < 33
    numbers = [n for a, b in bars for n in range(int(a), int(b) + 1)]
    assert numbers == sorted(set(numbers))
    assert len(FEW[3][0]) == 13


@pytest.mark.parametrize(
    ("value", "expected"), [(-5.0, 0), (10.0, 0), (11.24, 0), (11.26, 1), (19.99, 7), (20.0, 7), (99.0, 7)]
)
def test_color_classes(value: float, expected: int) -> None:
    assert color_class(value, 10.0, 20.0) == expected


def test_outliers_do_not_take_the_colors() -> None:
    assert color_range([-50.0, *([10.0] * 100), *([20.0] * 100), 400.0]) == (10.0, 20.0)


@given(st.lists(st.floats(-20, 99), min_size=1, max_size=40).map(sorted))
def test_a_color_scale_is_never_narrow(values: list[float]) -> None:
    """Half a decibel at least, so that hundredths do not look like the difference of good and bad."""
    low, high = color_range(values)
    assert round(high - low, 2) >= 0.5
    classes = [color_class(value, low, high) for value in values]
    assert classes == sorted(classes)
    assert set(classes) <= set(range(CLASSES))
    if values[-1] - values[0] <= 0.02:
        assert max(classes) - min(classes) <= 1


def test_the_scale_of_the_lines_is_not_narrow() -> None:
    made = errors(TIERS, 16, exact=0)
    for entry in made:
        entry["sqnr_db"] = [21.81, *[21.83] * (len(entry["experts"]) - 1)]
        entry["tier_sqnr_db"] = 21.82
    text = page(make_view(manifest(TIERS, 16, quantized=made), []), None)
    labels = text.partition('id="error-lines"')[2].partition("ylabels")[2].partition("</div>")[0]
    numbers = [float(number) for number in re.findall(r">(-?[\d.]+)</span>", labels)]
    assert max(numbers) - min(numbers) >= 0.5
    assert len(numbers) == len(set(numbers))


def test_formats_are_in_upper_case_however_the_manifest_writes_them() -> None:
    words = Tree(page(make_view(manifest(TIERS, 16, quantized=errors(TIERS, 16)), []), None)).text
    assert "mse from BF16" in words
    assert "bf16" not in words


def test_what_gptq_gained_is_shown() -> None:
    ratios = {3: 0.5, 4: 0.25, 5: 0.75}
    words = Tree(page(make_view(manifest(TIERS, 16, quantized=errors(TIERS, 16, ratios=ratios)), []), None)).text
    assert "GPTQ has 0.50 times the error of rounding to nearest (median of 3 layers, 0.25 to 0.75)" in words
    table = words.partition("All layers in numbers")[2]
    assert "tail GPTQ to nearest" in table
    assert [f"{ratio:.3f}" for ratio in ratios.values()] == re.findall(r"\b0\.\d{3}\b", table)
    without = Tree(page(make_view(manifest(TIERS, 16, quantized=errors(TIERS, 16)), []), None)).text
    assert "GPTQ" not in without


def test_no_note_says_what_a_table_says() -> None:
    bad = errors(TIERS, 16, exact=0)
    bad[1]["sqnr_db"][0] = 3.0
    worst = [{"layer": 3, "expert": TIERS[3][0][0], "worst_relative_error": 0.03}]
    text = page(make_view(manifest(TIERS, 16, quantized=bad, requantized=worst, notes=["mine"]), []), None)
    notes = text.partition("<h3>Notes</h3><ul>")[2].partition("</ul>")[0]
    assert re.findall(r"<bdi>(\w+)", notes) == ["WARNING", "mine"]
    assert "<h3>Notes</h3>" not in page(make_view(manifest(TIERS, 16, quantized=errors(TIERS, 16)), []), None)


def test_runs() -> None:
    assert runs([]) == []
    assert runs([0, 1, 2, 5, 7, 8]) == [(0, 3), (5, 1), (7, 2)]
