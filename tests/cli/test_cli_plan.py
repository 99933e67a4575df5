"""``hybrid-pack plan``: what it prints and writes, and a line for every way to fail."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.io.config import read_bit_map_file
from hybrid_pack.synthetic import Spec, write_checkpoint
from tests.checkpoints import edit_config
from tests.cli.conftest import Command

SPEC = Spec(hidden=128, intermediate=128, kept=8, map_in="none", vocab=8)
"""Layers 3 and 4 of eight NVFP4 experts, top-2, MTP layer 5."""

SALIENCY = {"3": [8, 1, 7, 2, 6, 3, 5, 4], "4": [1, 1, 1, 1, 1, 1, 1, 1]}
PLAN = "plan source --saliency s.json"
ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}


@pytest.fixture(scope="session")
def uniform(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plan") / "source"
    write_checkpoint(root, SPEC)
    with edit_config(root) as config:
        config.update(ATTENTION)
    return root


@pytest.fixture
def folder(uniform: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds ``source``, ``hybrid`` and ``s.json``."""
    (tmp_path / "source").symlink_to(uniform)
    (tmp_path / "hybrid").symlink_to(source)
    (tmp_path / "s.json").write_text(json.dumps({"metric": "reap", "saliency": SALIENCY}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(command: Command, arguments: str) -> Any:
    result = command(*f"{PLAN} {arguments} --json".split())
    assert (result.code, result.err) == (0, "")
    return json.loads(result.out)


def test_map_is_what_convert_takes(folder: Path, command: Command) -> None:
    result = command(*f"{PLAN} --keep 3 --out map.json".split())
    assert (result.code, result.err) == (0, "")
    expected = {"3": [4, 3, 4, 3, 4, 3, 3, 3], "4": [4, 4, 4, 3, 3, 3, 3, 3]}
    assert json.loads((folder / "map.json").read_text()) == expected
    assert read_bit_map_file(folder / "map.json") == {int(k): tuple(v) for k, v in expected.items()}
    assert "wrote map.json\nnext: hybrid-pack convert source --bit-map map.json --out OUT --tp 1\n" in result.out
    assert sorted(p.name for p in folder.iterdir()) == ["hybrid", "map.json", "s.json", "source"]


def test_text(folder: Path, command: Command) -> None:
    text = command(*f"{PLAN} --keep 3 --tp 2".split()).out
    for line in (
        r"^source +source$",
        r"^saliency +reap$",
        r"^rule +3 experts of each layer$",
        r"^layers +2 chosen in: 3-4$",
        r"^kept +6 of 16 experts \(37\.5%\) as NVFP4$",
        r"^kept per layer +least 3, median 3, most 3$",
        r"^retained +54\.5% of all saliency; of a layer's 47\.9% on average, least 37\.5% in layer 4$",
        r"^ties cut +5 tail experts as salient as a kept one of a lower layer or id$",
        r"^tp 2, ep 1; base tensors: .* whole on every rank, the rest split$",
        r"^  0-1 +\d.*B +\d.*B",
        r"^one card a rank, 4\.29 GB left for .*: 384 bytes a token and rank in BF16, 192 in FP8 \(GQA\)$",
        r"^  2x96GB +103 GB +98\.3 GB +25\d,\d{3},\d{3} +51\d,\d{3},\d{3} +yes$",
        r"^    3 █·█·█··· 3 NVFP4 \+ 5 NF3$",
        r"^note: MTP layer 5: experts not in the map: they are packed with everything kept",
        r"^nothing was written; give --out FILE for the map$",
    ):
        assert re.search(line, text, re.MULTILINE), (line, text)


def test_what_does_not_fit(folder: Path, command: Command) -> None:
    text = command(*f"{PLAN} --keep 1 --cards 1x1GB".split()).out
    assert re.search(r"^  1x1GB +999 MB +3\.\d+ GB short +- +- +no$", text, re.MULTILINE), text


def test_not_estimated(folder: Path, command: Command, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "other", SPEC)
    text = command(*["plan", "other", "--saliency", "s.json", "--keep", "1", "--cards", "1x24GB"]).out
    assert "KV cache: not estimated: the config does not give the sizes of its heads" in text
    assert re.search(r"^  1x24GB .* not estimated +not estimated +yes$", text, re.MULTILINE)


def test_converted_to_the_byte(folder: Path, command: Command) -> None:
    """Everything kept is a map that moves what is stored; the files then have the sizes that were planned."""
    plan = planned(command, "--keep 8 --tp 2 --out map.json")
    assert command(*["convert", "source", "--bit-map", "map.json", "--out", "pack", "--tp", "2"]).code == 0
    for rank in plan["ranks"]:
        files = (folder / f"pack/experts/tp2-ep1/rank-{rank['rank']}").iterdir()
        assert sum(file.stat().st_size for file in files) == rank["experts"]
        assert rank["total"] == rank["experts"] + plan["base"]["per_rank"]
    assert (plan["retained"]["overall"], plan["tied"]) == (1.0, [])


WIDE = replace(SPEC, hidden=256)
SIZED = {
    "as asked": replace(WIDE, stored=("nvfp4",)),
    "padded": replace(WIDE, intermediate=192, stored=("bf16",)),
    "mixed": replace(WIDE, stored=("mxfp4", "bf16")),
    "MTP of another format": replace(WIDE, kept_format="mxfp4"),
}
"""Sources whose planned sizes depend on more than map and topology."""

NEXT = {
    "as asked": ("--keep 3 --kept-format mxfp4 --tp 2", "--tp 2 --kept-format mxfp4"),
    "padded": ("--keep 3 --pad --tp 2 --ep 2", "--tp 2 --ep 2 --pad"),
    "mixed": ("--keep 4", "--tp 1 --kept-format nvfp4"),
    "MTP of another format": ("--keep 8", "--tp 1"),
}


@pytest.mark.parametrize("case", NEXT)
def test_the_next_command_makes_what_was_planned(case: str, folder: Path, command: Command) -> None:
    """Run as it is printed, it writes files of the planned sizes."""
    given, printed = NEXT[case]
    write_checkpoint(folder / "made", SIZED[case])
    call = ["plan", "made", "--saliency", "s.json", *given.split(), "--out", "map.json"]
    result = command(*call)
    assert (result.code, result.err) == (0, "")
    (line,) = re.findall(r"^next: hybrid-pack (.*)$", result.out, re.MULTILINE)
    assert line == f"convert made --bit-map map.json --out OUT {printed}"
    assert ("; intermediate 192, padded to 256; base" in result.out) == (case == "padded")
    plan = json.loads(command(*call, "--overwrite", "--json").out)
    assert plan["intermediate_padded"] == (256 if case == "padded" else plan["intermediate"])
    assert command(*line.replace("OUT", "pack").split()).code == 0
    for rank in plan["ranks"]:
        files = next((folder / "pack/experts").iterdir()).glob(f"rank-{rank['rank']}/*")
        assert sum(file.stat().st_size for file in files) == rank["experts"]


def test_json(folder: Path, command: Command) -> None:
    plan = planned(command, "--keep-fraction 1/4 --tp 2 --ep 2 --kept-format mxfp4 --cards 4x48GB --working-room 2GiB")
    assert plan["kept"] == {"3": [0, 2], "4": [0, 1]}
    assert plan["rule"] == {"keep_fraction": 0.25}
    assert plan["layers_all_kept"] == {"5": {"kept_format": "mxfp4", "in_map": False}}
    assert plan["topology"] == {"tensor_parallel": 2, "expert_parallel": 2}
    assert (plan["metric"], plan["kept_format"], plan["out"]) == ("reap", "mxfp4", None)
    assert [rank["rank"] for rank in plan["ranks"]] == [0, 1, 2, 3]
    assert plan["base"]["total"] == plan["base"]["split"] + plan["base"]["whole"]
    (card,) = plan["cards"]
    largest = max(rank["total"] for rank in plan["ranks"])
    assert (card["cards"], card["name_gb"], card["needed"]) == (4, 48, largest + (2 << 30))
    assert card["fits"] is True
    assert card["tokens_fp8"] == card["left"] // plan["kv_cache"]["fp8"]
    assert plan["tied"] == [[4, e] for e in range(2, 8)]


def test_budget(folder: Path, command: Command) -> None:
    """Filled, not exceeded, one byte less keeps one less."""
    base = planned(command, "--keep 2")
    exact = base["ranks"][0]["total"]
    again = planned(command, f"--budget {exact} --floor 0")
    assert sum(map(len, again["kept"].values())) == 4
    assert again["kept"] == {"3": [0, 2, 4, 6], "4": []}  # 8, 7, 6, 5 of 36 are more than 1 of 8
    assert again["ranks"][0]["total"] == exact
    less = planned(command, f"--budget {exact - 1} --floor 0")
    assert sum(map(len, less["kept"].values())) == 3
    floored = planned(command, f"--budget {exact}")
    assert floored["rule"] == {"budget_bytes": exact, "floor": 2, "rank_by": "share"}
    assert floored["kept"] == {"3": [0, 2], "4": [0, 1]}
    raw = planned(command, f"--budget {exact} --floor 0 --rank-by raw")
    assert raw["rule"]["rank_by"] == "raw"


def test_cards_give_tp(folder: Path, command: Command) -> None:
    assert planned(command, "--keep 2 --cards 2x24GB")["topology"]["tensor_parallel"] == 2


def test_same_call_same_bytes(folder: Path, command: Command) -> None:
    texts = []
    for name in ("a.json", "b.json"):
        command(*f"{PLAN} --keep 5 --out {name}".split())
        texts.append((folder / name).read_bytes())
    assert texts[0] == texts[1]


def test_mtp(folder: Path, command: Command) -> None:
    (folder / "s.json").write_text(json.dumps({**SALIENCY, "5": [1, 2, 3, 4, 5, 6, 7, 8]}))
    plan = planned(command, "--keep 1 --include-mtp --out map.json")
    assert plan["kept"]["5"] == [7]
    assert set(read_bit_map_file(folder / "map.json")) == {3, 4, 5}
    unused = planned(command, "--keep 1")
    assert any("saliency of layer 5 is not used" in note for note in unused["notes"])


def test_overwrite(folder: Path, command: Command) -> None:
    for keep in (2, 3):
        assert command(*f"{PLAN} --keep {keep} --out map.json --overwrite".split()).code == 0
    assert read_bit_map_file(folder / "map.json")[3].count(4) == 3


def test_nothing_is_left_of_a_failed_write(folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "map.json").write_text("old")
    monkeypatch.setattr("os.posix_fallocate", fails)
    result = command(*f"{PLAN} --keep 2 --out map.json --overwrite".split())
    assert (result.code, result.line) == (
        3,
        "hybrid-pack: map.json: the disk is full (found No space left on device); make room and run again",
    )
    assert (folder / "map.json").read_text() == "old"
    assert not list(folder.glob("*.partial"))


def fails(*_: object) -> None:
    raise OSError(28, "No space left on device")


@dataclass(frozen=True)
class Case:
    arguments: str
    code: int
    message: str
    prepare: Callable[[Path], object] = lambda _: None


def put(name: str, text: str = "mine") -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


CASES = {
    "no_source": Case("plan --keep 1", 2, r"^hybrid-pack: plan: Missing argument 'SRC'"),
    "no_saliency": Case("plan source --keep 1", 2, r"give one of --saliency and --from-weights"),
    "both_saliencies": Case(f"{PLAN} --from-weights --keep 1", 2, r"give one of --saliency and --from-weights"),
    "no_rule": Case(PLAN, 2, r"give one of --keep, --keep-fraction and --budget"),
    "two_rules": Case(f"{PLAN} --keep 1 --budget 1GB", 2, r"give one of --keep, --keep-fraction and --budget"),
    "zero_and_another": Case(f"{PLAN} --keep 0 --keep-fraction 0", 2, r"give one of --keep, --keep-fraction"),
    "floor_alone": Case(f"{PLAN} --keep 1 --floor 1", 2, r"--floor and --rank-by go with --budget"),
    "rank_by_alone": Case(f"{PLAN} --keep 1 --rank-by share", 2, r"--floor and --rank-by go with --budget"),
    "keep_many": Case(f"{PLAN} --keep 9", 2, r"--keep: not a number of experts \(expected 0 to 8, found 9\)"),
    "keep_negative": Case(f"{PLAN} --keep -1", 2, r"--keep: not a number of experts"),
    "keep_word": Case(f"{PLAN} --keep all", 2, r"'--keep': 'all' is not a valid integer"),
    "fraction_percent": Case(f"{PLAN} --keep-fraction 25%", 2, r"'25%' is not a fraction from 0 to 1, such as 0\.25"),
    "fraction_large": Case(f"{PLAN} --keep-fraction 1.01", 2, r"'1\.01' is not a fraction from 0 to 1"),
    "fraction_by_zero": Case(f"{PLAN} --keep-fraction 1/0", 2, r"'1/0' is not a fraction"),
    "fraction_negative": Case(f"{PLAN} --keep-fraction=-0.5", 2, r"'-0\.5' is not a fraction"),
    "fraction_nan": Case(f"{PLAN} --keep-fraction nan", 2, r"'nan' is not a fraction"),
    "budget_words": Case(f"{PLAN} --budget lots", 2, r"'--budget': 'lots' is not a size"),
    "budget_small": Case(
        f"{PLAN} --budget 100kB", 2,
        r"--budget: too small even with 2 kept experts a layer \(expected [\d,]+ bytes a rank .*, found 100,000",
    ),
    "tp_illegal": Case(f"{PLAN} --keep 1 --tp 4", 2, r"--tp: tensor-parallel size 4 is not .*legal sizes: 1, 2"),
    "ep_illegal": Case(f"{PLAN} --keep 1 --ep 3", 2, r"--ep: .*8 experts are not divisible by 3"),
    "cards_words": Case(f"{PLAN} --keep 1 --cards many", 2, r"--cards: not a number and a size of cards"),
    "cards_and_tp": Case(f"{PLAN} --keep 1 --tp 2 --cards 4x96GB", 2, r"--cards: one card holds one rank .*found 4"),
    "out_there": Case(f"{PLAN} --keep 1 --out map.json", 2, r"map\.json: already there; give another", put("map.json")),
    "out_in_source": Case(f"{PLAN} --keep 1 --out source/map.json", 2, r"the output would lie in the source"),
    "out_is_input": Case(f"{PLAN} --keep 1 --out s.json --overwrite", 2, r"s\.json: the output is also the input"),
    "out_folder": Case(f"{PLAN} --keep 1 --out hybrid --overwrite", 2, r"hybrid: in the way of the output"),
    "out_nowhere": Case(f"{PLAN} --keep 1 --out no/map.json", 2, r"no: the folder of the output is not there"),
    "out_dangling": Case(
        f"{PLAN} --keep 1 --out map.json --overwrite", 2, r"map\.json: in the way of the output",
        lambda f: (f / "map.json").symlink_to("nowhere"),
    ),
    "source_missing": Case("plan nowhere --saliency s.json --keep 1", 2, r"nowhere: not a checkpoint folder"),
    "saliency_missing": Case("plan source --saliency no.json --keep 1", 1, r"no\.json: no such file"),
    "saliency_layer": Case(
        f"{PLAN} --keep 1", 1, r"s\.json: the saliency has no layer 4", put("s.json", json.dumps({"3": SALIENCY["3"]}))
    ),
    "saliency_mtp": Case(
        f"{PLAN} --keep 1 --include-mtp", 1, r"s\.json: the saliency has no layer 5 \(expected layers 3-5, found 3-4\)"
    ),
    "saliency_large": Case(
        f"{PLAN} --keep 1", 1, r"expected a finite number, 0 or more, at most 1e\+300, found 1e\+308",
        put("s.json", json.dumps({"3": [1e308] * 8, "4": SALIENCY["4"]})),
    ),
    "already_hybrid": Case("plan hybrid --saliency s.json --keep 1", 1, r"layer 1 expert \d is NF3 already"),
    "empty_source": Case("plan empty --saliency s.json --keep 1", 1, r"no such file", lambda f: (f / "empty").mkdir()),
}  # fmt: skip


@pytest.mark.parametrize("json_too", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("case", CASES)
def test_line_and_exit_code(case: str, json_too: bool, folder: Path, command: Command) -> None:
    call = CASES[case]
    call.prepare(folder)
    before = sorted(folder.iterdir())
    result = command(*call.arguments.split(), *["--json"] * json_too)
    assert result.code == call.code, result
    assert re.search(call.message, result.line), result.line
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("rule", "words"),
    [("--keep 1", "1 expert of each layer"), ("--keep-fraction 1.0", "100 % of each layer"),
     ("--keep-fraction 1/3", "33.33 % of each layer"), ("--keep-fraction 0.25", "25 % of each layer")],
)  # fmt: skip
def test_a_share_reads_as_one(folder: Path, command: Command, rule: str, words: str) -> None:
    assert re.search(rf"^rule +{words}$", command(*PLAN.split(), *rule.split()).out, re.MULTILINE)


PAGE = Path(__file__).parents[2] / "docs" / "planning.md"


def test_the_page_turns_a_dump_of_reap_into_saliency(folder: Path, command: Command) -> None:
    """The snippet of docs/planning.md, run on a dump as the observer saves it."""
    torch = pytest.importorskip("torch")
    state = {
        int(layer): {
            "total_tokens": torch.tensor(12),
            "expert_frequency": torch.ones(8, dtype=torch.long),
            "reap": torch.tensor(values, dtype=torch.float32),
            "weighted_ean_sum": torch.zeros(8, dtype=torch.float64),
        }
        for layer, values in SALIENCY.items()
    }
    torch.save(state, folder / "observations.pt")
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(snippet, {})
    kept = planned(command, "--keep 3")["kept"]
    result = command(*["plan", "source", "--saliency", "reap.json", "--keep", "3", "--json"])
    assert json.loads(result.out)["kept"] == kept


def test_the_page_names_every_option(command: Command) -> None:
    options = set(re.findall(r"^  (--[a-z-]+)", command("plan", "--help").out, re.MULTILINE))
    page = PAGE.read_text()
    assert {option for option in options if option not in page} == set()
