"""The page in a real browser: nothing overflows, is empty or is fetched, and cells are where they should be.

Skipped where there is no Chromium, unless HYBRID_PACK_REQUIRE_BROWSER=1, which CI sets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.browser import Browser, browser, executable
from tests.report.manifests import GLM
from tests.report.pages import STATES, of_pack
from tests.report.pixels import decode

MEASURE = (Path(__file__).parent / "measure.js").read_text("utf-8")
WIDTHS = (400, 1400)
NAMES = [*STATES, "real"]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = executable()
    if path is None:
        if os.environ.get("HYBRID_PACK_REQUIRE_BROWSER") == "1":
            pytest.fail("HYBRID_PACK_REQUIRE_BROWSER=1, but there is no chromium", pytrace=False)
        pytest.skip("no chromium")
    with browser(path, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, packed: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    texts = {name: make() for name, make in STATES.items()} | {"real": of_pack(packed)[0]}
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_every_state(name: str, width: int, dark: bool, chromium: Browser, pages: dict[str, Path]) -> None:
    chromium.show(pages[name], width, dark=dark)
    assert chromium.evaluate("innerWidth") == width, "a page wider than the screen makes a phone zoom out"
    assert chromium.evaluate(MEASURE) == []
    assert chromium.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)") is None
    assert chromium.evaluate(MEASURE) == [], "with all tables opened"
    assert chromium.requests == [pages[name].as_uri()], "nothing is fetched"
    assert chromium.problems == []
    assert chromium.evaluate("window.hacked === undefined")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["glm", "hostile"])
def test_without_scripts(name: str, width: int, chromium: Browser, pages: dict[str, Path]) -> None:
    """Complete but for the controls, which would do nothing."""
    chromium.show(pages[name], width, javascript=False)
    assert chromium.problems == []
    assert chromium.evaluate("[...document.querySelectorAll('.pick')].some(p => p.checkVisibility())") is False
    assert chromium.evaluate(MEASURE) == []


def center(chromium: Browser, figure: str, layer: int, expert: int) -> tuple[int, int]:
    """Pixel in the middle of a cell of GLM-5.2's map, from the top of the page."""
    left, top, width, height = chromium.evaluate(
        f"(() => {{ const b = document.querySelector('#{figure} svg').getBoundingClientRect();"
        " return [b.left + scrollX, b.top + scrollY, b.width, b.height]; })()"
    )
    row = list(GLM).index(layer)
    return int(left + (expert + 0.5) * width / 256), int(top + (row + 0.5) * height / len(GLM))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_cells_on_the_screen_have_the_color_of_their_tier(
    dark: bool, chromium: Browser, pages: dict[str, Path]
) -> None:
    """All 19,456 of GLM-5.2, in a screenshot."""
    chromium.show(pages["glm"], 1400, dark=dark)
    left, top = center(chromium, "tier-map", 3, 0)
    right, bottom = center(chromium, "tier-map", 78, 255)
    rows = decode(chromium.screenshot(left, top, right - left + 1, bottom - top + 1))
    kept, tail = ((0x6F, 0xB7, 0xFF), (0x57, 0x48, 0x2A)) if dark else ((0x0B, 0x5C, 0xAD), (0xF0, 0xDC, 0xAE))
    for i, (layer, (ids, _)) in enumerate(GLM.items()):
        row = rows[round(i * (bottom - top) / 75)]
        found = [row[round(expert * (right - left) / 255)] for expert in range(256)]
        assert found == [kept if expert in ids else tail for expert in range(256)], layer


@pytest.mark.parametrize("width", WIDTHS)
def test_a_tapped_cell_is_told(width: int, chromium: Browser, pages: dict[str, Path]) -> None:
    chromium.show(pages["glm"], width)
    layer, expert = 41, 200
    x, y = center(chromium, "tier-map", layer, expert)
    chromium.evaluate(f"scrollTo(0, {y - 300})")
    chromium.click(x, y - chromium.evaluate("scrollY"))
    told = chromium.evaluate("document.querySelector('#tier-map output').textContent")
    start = f"layer 41, expert 200: {'kept, NVFP4' if expert in GLM[layer][0] else 'tail, NF3'}, "
    assert re.fullmatch(r"\d+\.\d\d dB|exact, no difference", told.removeprefix(start))
    marker = chromium.evaluate(
        "(() => { const b = document.querySelector('#tier-map .cursor').getBoundingClientRect();"
        " return [b.left, b.top + scrollY, b.right, b.bottom + scrollY]; })()"
    )
    assert marker[0] <= x + 1 and x - 1 <= marker[2]
    assert marker[1] <= y <= marker[3]
    assert chromium.evaluate(MEASURE) == []


def test_a_chosen_cell_is_told(chromium: Browser, pages: dict[str, Path]) -> None:
    """By keyboard, without a pointer; numbers out of range are brought into it."""
    chromium.show(pages["glm"], 400)
    choose = (
        "((layer, expert) => {{ const f = document.querySelector('#{0}');"
        " const [s, i] = [f.querySelector('select'), f.querySelector('input')];"
        " s.value = layer; i.value = expert; i.dispatchEvent(new Event('change'));"
        " return f.querySelector('output').textContent; }})('{1}', '{2}')"
    )
    kept, tail = GLM[50][0][0], next(e for e in range(256) if e not in GLM[50][0])
    assert chromium.evaluate(choose.format("tier-map", 50, kept)).startswith(f"layer 50, expert {kept}: kept, NVFP4, ")
    assert chromium.evaluate(choose.format("tier-map", 50, tail)).startswith(f"layer 50, expert {tail}: tail, NF3, ")
    assert chromium.evaluate(choose.format("tier-map", 78, 999)).startswith("layer 78, expert 255: kept, NVFP4, ")
    told = chromium.evaluate(choose.format("errors-tail", 50, kept))
    assert told == f"layer 50, expert {kept}: not quantised here in this tier"
    assert chromium.evaluate(choose.format("errors-kept", 50, kept)).endswith((" dB", "exact, no difference"))


def test_the_tier_map_tells_the_error_too(chromium: Browser, pages: dict[str, Path]) -> None:
    """The same that the map of errors says of the cell."""
    for name, layer, expert in (("glm", 50, GLM[50][0][0]), ("glm", 50, 255 - (255 in GLM[50][0])), ("real", 3, 0)):
        chromium.show(pages[name], 1400)
        told = [
            chromium.evaluate(
                f"(() => {{ const f = document.querySelector('#{figure}'); if (!f) return null;"
                " const [s, i] = [f.querySelector('select'), f.querySelector('input')];"
                f" s.value = {layer}; i.value = {expert}; i.dispatchEvent(new Event('change'));"
                " return f.querySelector('output').textContent; })()"
            )
            for figure in ("tier-map", "errors-kept", "errors-tail")
        ]
        errors = [text.partition(": ")[2] for text in told[1:] if text and "not quantised" not in text]
        assert len(errors) == (name == "glm")
        words = told[0].partition(": ")[2].split(", ", 2)
        assert words[:1] + words[2:] == ["kept" if told[2] and "not quantised" in told[2] else words[0], *errors]


def test_colors_of_errors_mean_the_same_in_the_dark(chromium: Browser, pages: dict[str, Path]) -> None:
    """From dark for the worst to light for the best, each told apart from what was not quantised."""
    script = (
        "[...document.querySelectorAll('#errors-tail .ramp i'), document.querySelector('#errors-tail i.none')]"
        ".map((i) => getComputedStyle(i).backgroundColor)"
    )
    found = {}
    for dark in (False, True):
        chromium.show(pages["glm"], 1400, dark=dark)
        *ramp, none = chromium.evaluate(script)
        assert len({*ramp, none}) == 9
        found[dark] = ramp
        light = [sum(w * int(c) for w, c in zip((2, 7, 1), re.findall(r"\d+", color), strict=True)) for color in ramp]
        assert light == sorted(light)
    assert found[True] == found[False]


def test_paper_has_no_controls(chromium: Browser, pages: dict[str, Path]) -> None:
    chromium.show(pages["glm"], 1400)
    chromium.call("Emulation.setEmulatedMedia", media="print")
    assert chromium.evaluate("[...document.querySelectorAll('.pick')].some(p => p.checkVisibility())") is False
    assert chromium.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
