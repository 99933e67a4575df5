"""``hybrid-pack inspect --cards``: the table of ``plan`` for what is decided already, and a line for every refusal."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.hub.pull import wanted_entries
from hybrid_pack.io.manifest import read_manifest
from hybrid_pack.synthetic import Spec, write_checkpoint
from tests.checkpoints import edit_config
from tests.cli.conftest import Command

HYBRID = Spec(hidden=256, intermediate=192, kept=3, vocab=8)
"""Layers 3 and 4 of eight experts with a tail, MTP layer 5; tp 2 needs padding."""

PLAIN = replace(HYBRID, intermediate=256, stored=("nvfp4",), map_in="none")
SALIENCY = {"3": [8, 1, 7, 2, 6, 3, 5, 4], "4": [1, 5, 3, 2, 8, 7, 6, 4]}
ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
FIT = ("topology", "intermediate_padded", "ranks", "base", "kv_cache", "cards")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``hybrid``, ``plain``, a map for it, and its ``pack`` for tp 2 and ep 2; for reading only."""
    from hybrid_pack.cli.main import run

    root = tmp_path_factory.mktemp("cards")
    for name, spec in (("hybrid", HYBRID), ("plain", PLAIN)):
        write_checkpoint(root / name, spec)
        with edit_config(root / name) as config:
            config.update(ATTENTION)
    (root / "s.json").write_text(json.dumps({"saliency": SALIENCY}))
    source, given = str(root / "plain"), str(root / "map.json")
    plan = ["plan", source, "--saliency", str(root / "s.json"), "--keep", "3", "--out", given]
    assert run(plan) == 0
    assert run(["convert", source, "--bit-map", given, "--out", str(root / "pack"), "--tp", "2", "--ep", "2"]) == 0
    return root


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def of(command: Command, arguments: str) -> Any:
    result = command(*arguments.split(), "--json")
    assert (result.code, result.err) == (0, "")
    return json.loads(result.out)


PLANNED = "plan plain --saliency s.json --keep 3 --tp 2 --ep 2 --cards 4x96GB --working-room 3GiB"
INSPECTED = {
    "a pack": "inspect pack --cards 4x96GB --working-room 3GiB",
    "a checkpoint": "inspect plain --bit-map map.json --ep 2 --cards 4x96GB --working-room 3GiB",
}


@pytest.mark.parametrize("what", INSPECTED)
def test_as_planned(what: str, folder: Path, command: Command) -> None:
    """The same numbers, and the same tables below what ``inspect`` shows anyway."""
    plan, view = of(command, PLANNED), of(command, INSPECTED[what])
    assert view.pop("fit") == {key: plan[key] for key in FIT}
    alone = INSPECTED[what].partition(" --ep")[0].partition(" --cards")[0]
    assert of(command, alone) == view
    text, shown = command(*INSPECTED[what].split()).out, command(*alone.split()).out
    assert text.startswith(shown.rstrip("\n") + "\n\ntp 2, ep 2; base tensors: ")
    tables = text.removeprefix(shown.rstrip("\n")).strip()
    assert tables.count("\n\n") == 1
    assert f"\n\n{tables}\n\n" in command(*PLANNED.split()).out


def test_room_and_what_does_not_fit(folder: Path, command: Command) -> None:
    (card,) = of(command, "inspect pack --cards 4x96GB --working-room 3GiB")["fit"]["cards"]
    (default,) = of(command, "inspect pack --cards 4x96GB")["fit"]["cards"]
    assert default["needed"] - card["needed"] == 1 << 30
    text = command("inspect", "pack", "--cards", "4x1GB").out
    assert re.search(r"^  4x1GB +999 MB +3\.\d+ GB short +- +- +no$", text, re.MULTILINE), text


def test_cards_give_tp(folder: Path, command: Command) -> None:
    fit = of(command, "inspect hybrid --cards 3x24GB")["fit"]
    assert fit["topology"] == {"tensor_parallel": 3, "expert_parallel": 1}
    fit = of(command, "inspect hybrid --cards 3x24GB --tp 3 --ep 1")["fit"]
    assert [rank["rank"] for rank in fit["ranks"]] == [0, 1, 2]


def test_padded(folder: Path, command: Command) -> None:
    view = of(command, "inspect hybrid --cards 2x24GB --pad")
    assert (view["intermediate"], view["intermediate_padded"], view["fit"]["intermediate_padded"]) == (192, 256, 256)
    text = command("inspect", "hybrid", "--cards", "2x24GB", "--pad").out
    assert "\ntp 2, ep 1; intermediate 192, padded to 256; base tensors: " in text
    assert "intermediate 192, padded to 256, 8 experts" in text


@dataclass(frozen=True)
class Case:
    arguments: str
    code: int
    message: str
    prepare: Callable[[Path], object] = lambda _: None


def without_base(folder: Path) -> None:
    """What ``pull --experts-only`` leaves."""
    for file in wanted_entries(read_manifest(folder / "pack"), range(1), experts_only=True):
        (folder / "part" / file.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "pack" / file.path, folder / "part" / file.path)
    shutil.copy(folder / "pack" / "hybrid_pack.json", folder / "part")


CARDS = "--cards 4x96GB"
CASES = {
    "room alone": Case("inspect pack --working-room 4GiB", 2, r"--working-room, --tp, --ep and --pad go with --cards"),
    "tp alone": Case("inspect hybrid --tp 1", 2, r"go with --cards"),
    "tp zero alone": Case("inspect hybrid --tp 0", 2, r"go with --cards"),
    "ep alone": Case("inspect hybrid --ep 1", 2, r"go with --cards"),
    "pad alone": Case("inspect hybrid --pad", 2, r"go with --cards"),
    "no cards": Case("inspect pack --cards 4", 2, r"--cards: not a number and a size of cards \(expected such as 4x96"),
    "no cards, before the Hub": Case("inspect org/name --cards 0x96GB", 2, r"--cards: not a number and a size of card"),
    "room": Case(f"inspect pack {CARDS} --working-room much", 2, r"'--working-room': 'much' is not a size"),
    "cards for a pack": Case(
        "inspect pack --cards 2x96GB", 2, r"--cards: one card holds one rank \(expected tp \* ep = 4 cards, found 2\)"
    ),
    "tp of a pack": Case(f"inspect pack {CARDS} --tp 2", 2, r"--tp: a pack has its own sizes \(found the pack pack\)"),
    "tp zero of a pack": Case(f"inspect pack {CARDS} --tp 0", 2, r"--tp: a pack has its own sizes"),
    "ep of a pack": Case(f"inspect pack {CARDS} --ep 2", 2, r"--ep: a pack has its own sizes"),
    "pad of a pack": Case(f"inspect pack {CARDS} --pad", 2, r"--pad: a pack has its own sizes"),
    "map of a pack": Case(f"inspect pack {CARDS} --bit-map map.json", 2, r"--bit-map: a pack has its own bit map"),
    "cards and tp": Case(
        f"inspect hybrid {CARDS} --tp 3", 2, r"--cards: one card holds one rank \(expected tp \* ep = 3 cards, found 4"
    ),
    "cards and ep": Case(f"inspect hybrid {CARDS} --ep 3", 2, r"--cards: .*expected a multiple of ep = 3, found 4"),
    "tp zero": Case(f"inspect hybrid {CARDS} --tp 0", 2, r"--tp: a parallel size must be at least 1"),
    "illegal tp": Case(f"inspect hybrid {CARDS}", 2, r"--tp: tensor-parallel size 4 is not possible.*or --pad, to 256"),
    "illegal ep": Case("inspect hybrid --cards 3x96GB --ep 3", 2, r"--ep: .*8 experts are not divisible by 3"),
    "no map": Case(
        "inspect plain --cards 2x96GB", 1,
        r"plain: there is no bit map, so no sizes to hold against cards; hybrid-pack plan chooses the tiers",
    ),
    "no base": Case(
        f"inspect part {CARDS}", 1, r"part/model-.*: a file of base tensors is not there.* without --experts-only$",
        without_base,
    ),
}  # fmt: skip


@pytest.mark.parametrize("json_too", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("case", CASES)
def test_line_and_exit_code(case: str, json_too: bool, folder: Path, command: Command) -> None:
    call = CASES[case]
    call.prepare(folder)
    result = command(*call.arguments.split(), *["--json"] * json_too)
    assert result.code == call.code, result
    assert re.search(call.message, result.line), result.line


def test_the_page_names_every_option(command: Command) -> None:
    options = set(re.findall(r"^  (--[a-z-]+)", command("inspect", "--help").out, re.MULTILINE))
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    assert {option for option in options - {"--debug"} if option not in page} == set()
