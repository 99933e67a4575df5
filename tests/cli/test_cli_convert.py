"""``hybrid-pack convert``, ``inspect`` and ``verify`` when all is well: what goes where."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import click
import pytest

from hybrid_pack.cli.options import BYTES, LAYERS
from hybrid_pack.cli.progress import ByteProgress, size
from hybrid_pack.cli.tables import spans, table
from hybrid_pack.synthetic import Spec, write_checkpoint
from tests.cli.conftest import Command
from tests.convert.support import small, stamps, tree


def test_convert_says_what_it_did(source: Path, tmp_path: Path, command: Command) -> None:
    """The summary on stdout, progress on stderr in plain lines."""
    out = tmp_path / "out"
    result = command("convert", source, "--out", out, "--tp", 2)
    assert result.code == 0
    assert result.out.startswith(f"packed source for tp 2, ep 1 into {out}\n")
    assert re.search(r"written +13 files\n", result.out)
    assert re.search(r"experts +6 kept, 2 tail\n", result.out)
    assert result.out.splitlines()[-1] == f"next: hybrid-pack verify {out} --source {source}"
    assert "\r" not in result.err
    assert "\x1b" not in result.err + result.out
    assert re.fullmatch(r"(compiled .*\n)?convert: [\d.]+ kB\n", result.err), result.err


def test_json_is_one_object(source: Path, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "out"
    result = command("convert", source, "--out", out, "--workers", 2, "--json")
    document = json.loads(result.out)
    assert result.code == 0
    assert re.fullmatch(r"(compiled .*\n)?convert: [\d.]+ kB\n", result.err), "progress, in plain lines"
    assert set(document) == {
        "out", "files_written", "files_kept", "source_bytes", "seconds", "workers", "self_digest", "report"
    }  # fmt: skip
    assert (document["out"], document["files_written"], document["workers"]) == (str(out), 11, 2)
    manifest = json.loads((out / "hybrid_pack.json").read_text())
    assert document["report"] == manifest["report"]
    assert document["self_digest"] == manifest["self_digest"]


GOOD = [
    "convert SRC --out OUT --dry-run", "inspect SRC", "inspect PACK",
    "verify PACK", "verify PACK --quick", "verify PACK --source SRC",
]  # fmt: skip


@pytest.mark.parametrize("arguments", GOOD)
def test_text_and_json_of_every_command(
    arguments: str, source: Path, packed: Path, tmp_path: Path, command: Command
) -> None:
    paths = {"SRC": source, "OUT": tmp_path / "out", "PACK": packed}
    given = [paths.get(a, a) for a in arguments.split()]
    before = stamps(source), stamps(packed)
    text = command(*given)
    assert text.code == 0
    assert len(text.out.splitlines()) > 2
    assert not text.err or re.fullmatch(r"(compiled .*\n)?verify: [\d.]+ [kM]?B\n", text.err), text.err
    document = command(*given, "--json")
    assert (document.code, document.err) == (0, "")
    assert isinstance(json.loads(document.out), dict)
    assert (stamps(source), stamps(packed)) == before
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_dry_run_tells_sizes(source: Path, tmp_path: Path, command: Command) -> None:
    """Those of the files that are then written."""
    out = tmp_path / "deep" / "out"
    arguments = ["convert", source, "--out", out, "--tp", 2, "--ep", 2]
    text = command(*arguments, "--dry-run").out
    assert "plan for tp 2, ep 2" in text
    assert text.endswith("dry run: nothing was written\n")
    plan = json.loads(command(*arguments, "--dry-run", "--json").out)
    assert not (tmp_path / "deep").exists()
    assert command(*arguments).code == 0
    found = {name: len(data) for name, data in tree(out).items()}
    assert {f["path"]: f["bytes"] for f in plan["files"]} == {n: b for n, b in found.items() if n.endswith("tensors")}
    assert plan["disk_bytes"] == sum(found.values()) - found["hybrid_pack.json"] - found["README.md"]
    assert [r["rank"] for r in plan["ranks"]] == [0, 1, 2, 3]


def test_dry_run_tells_the_notes_of_the_run(tmp_path: Path, command: Command) -> None:
    """What is quantised, what is padded: each once, and the same that the run says."""
    spec = small(hidden=256, intermediate=192, stored=("bf16",), mtp_layer=False)
    write_checkpoint(tmp_path / "wide", spec)
    arguments = ["convert", tmp_path / "wide", "--out", tmp_path / "out", "--tp", 2, "--pad"]
    text = command(*arguments, "--dry-run").out
    told = [line for line in text.splitlines() if line.startswith("note: ")]
    assert "note: intermediate size 192 is padded with zeros to 256" in told
    assert any(re.search(r"become NF3 from BF16 \(search mse\): about 15\.8 dB", line) for line in told), told
    assert re.search(r"^geometry +hidden 256, intermediate 192, padded to 256, ", text, re.MULTILINE)
    plan = json.loads(command(*arguments, "--dry-run", "--json").out)
    assert told == [f"note: {note}" for note in plan["notes"]]
    assert (plan["source"]["intermediate"], plan["source"]["intermediate_padded"]) == (192, 256)
    run = command(*arguments)
    assert [line for line in run.err.splitlines() if line.startswith("note: ")] == told


def test_dry_run_says_where_the_disk_is_too_small(
    source: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    result = command("convert", source, "--out", tmp_path / "out", "--dry-run")
    assert result.code == 3
    assert re.search(r"needed, 1 kB free at .*: NOT ENOUGH", result.out)
    assert re.search(r"out: not enough disk space \(expected [\d,]+ bytes, found 1,000 free\)", result.err)
    assert not (tmp_path / "out").exists()


def test_dry_run_refuses_what_cannot_be_planned(source: Path, tmp_path: Path, command: Command) -> None:
    assert command("convert", source, "--out", tmp_path / "out", "--dry-run", "--tp", 8).code == 2


def test_layers(source: Path, tmp_path: Path, command: Command) -> None:
    """A part of the layers, with a note of it."""
    out = tmp_path / "out"
    result = command("convert", source, "--out", out, "--layers", "2")
    assert result.code == 0
    assert result.err.splitlines()[0] == "note: only layers 2 are packed; the experts of 1 layers are left out"
    manifest = json.loads((out / "hybrid_pack.json").read_text())
    assert (list(manifest["layers"]), manifest["report"]["layers_omitted"]) == (["2"], [1])
    assert not list(out.glob("experts/*/*/layer-001*"))


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("3-5,78", (3, 4, 5, 78)), ("7", (7,)), (" 1 - 2 , 0 ", (0, 1, 2)), ("5,5-5,4", (4, 5)), ("0-0", (0,))],
)
def test_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert LAYERS.convert(text, None, None) == numbers


@pytest.mark.parametrize(
    "text", ["", " ", "-", "1-", "-1", "1--2", "2-1", "1;2", "a", "1.5", "1,", ",1", "1234567", "１"]
)
def test_no_numbers(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a list such as 3-5,78"):
        LAYERS.convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0), ("123", 123), ("123B", 123), ("1k", 1000), ("1KB", 1000), ("500MB", 500_000_000), ("2 g", 2 * 10**9),
        ("1tb", 10**12), ("1KiB", 1024), ("1.5GiB", 3 << 29), ("0.5 mib", 1 << 19), ("3Ti", 3 << 40), ("7 Gi ", 7 << 30)
    ],
)  # fmt: skip
def test_sizes(text: str, nbytes: int) -> None:
    assert BYTES.convert(text, None, None) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "1PB", "1iB", "1 G B", "1,5GB", ".5GB", "5.GB", "1e3", "nan", "9" * 400]
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size such as 1GiB or 500MB"):
        BYTES.convert(text, None, None)


def test_max_ram_lowers_the_workers(source: Path, tmp_path: Path, command: Command) -> None:
    """To what fits, and the estimate stays below the limit."""
    arguments = ["convert", source, "--out", tmp_path / "out", "--workers", 50, "--dry-run", "--json"]
    free, limited = (json.loads(command(*arguments, *more).out) for more in ([], ["--max-ram", "340MiB"]))
    assert free["workers"] == 50
    assert 1 <= limited["workers"] < 50
    assert limited["memory_bytes"] <= 340 << 20 < free["memory_bytes"]
    smallest = re.search(r"expected (\d+) MiB", command(*arguments, "--max-ram", "1MiB").line)
    assert smallest
    assert json.loads(command(*arguments, "--max-ram", f"{int(smallest[1])}MiB").out)["workers"] == 1


def test_resume_and_overwrite(source: Path, tmp_path: Path, command: Command) -> None:
    out = tmp_path / "out"
    arguments = ["convert", source, "--out", out]
    assert command(*arguments).code == 0
    before = stamps(out)
    result = command(*arguments, "--resume")
    assert (result.code, result.out) == (
        0, f"{out} is complete: its 11 files, of the same source and options, have their size; verify proves the rest\n"
    )  # fmt: skip
    assert stamps(out) == before
    assert command(*arguments, "--overwrite").code == 0
    assert stamps(out) != before


def test_requantize_is_told(tmp_path: Path, command: Command) -> None:
    write_checkpoint(tmp_path / "unequal", small(second_scale="unequal"))
    arguments = ["convert", tmp_path / "unequal", "--out", tmp_path / "out"]
    result = command(*arguments)
    assert result.code == 1
    assert "--on-scale-mismatch requantize" in result.line
    result = command(*arguments, "--on-scale-mismatch", "requantize", "--overwrite")
    assert result.code == 0
    assert re.search(
        r"6 experts requantised, worst relative scale error 0\.0\d+ in layer [12] expert [0-3]\n", result.out
    )


def test_progress_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal: a line now and then, of what is done and what is left."""
    monkeypatch.setattr("hybrid_pack.cli.progress.LINE_SECONDS", 0)
    with ByteProgress("convert") as progress:
        progress.start(4_000_000, 1_000_000)
        progress.advance(1_000_000)
        progress.note("a note")
        progress.advance(2_000_000)
    first, half, note, last = capsys.readouterr().err.splitlines()
    assert first == "convert: 4 MB, 1 MB of it done before"
    assert re.fullmatch(r"convert: 50 % of 4 MB, [\d.]+ GB/s, \d+ s left", half)
    assert note == "a note"
    assert re.fullmatch(r"convert: 100 % of 4 MB, [\d.]+ GB/s, 0 s left", last)


def test_quiet_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_pack.cli.progress.LINE_SECONDS", 0)
    with ByteProgress("convert", quiet=True) as progress:
        progress.start(0, 0)
        progress.advance(10)
        progress.note("a note")
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(source: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    result = command("convert", source, "--out", tmp_path / "out")
    assert result.code == 0
    assert result.out.startswith("packed source")
    assert "convert:" in terminal.getvalue()
    assert "\r" in terminal.getvalue()


def test_sizes_in_words() -> None:
    numbers = (0, 999, 1000, 12_345, 999_499_999, 5e9, 1.5e12, 1234e12)
    words = ["0 B", "999 B", "1 kB", "12.3 kB", "999 MB", "5 GB", "1.5 TB", "1234 TB"]
    assert [size(n) for n in numbers] == words


def test_spans_and_tables() -> None:
    assert spans([]) == ""
    assert spans([3, 4, 5, 78]) == "3-5, 78"
    assert table([("rank", "size"), (0, "1 MB"), (10, "200 MB")]) == "  rank    size\n  0       1 MB\n  10    200 MB"


def test_one_is_one(packed: Path, source: Path, command: Command) -> None:
    text = command("verify", packed, "--source", source).out + command("inspect", packed).out
    assert re.search(r"config\.json: 1 file, ", text)
    assert not re.search(r"\b1 (files|tensors|shards|layers|experts|ranks)\b", text), text


def test_the_summary_tells_the_error_of_every_layer(tmp_path: Path, command: Command) -> None:
    spec = Spec(
        hidden=128, intermediate=128, num_experts=4, kept=1, vocab=8, moe_layers=(1, 2), dense_layers=(0,),
        mtp_layer=False, stored=("bf16",),
    )  # fmt: skip
    write_checkpoint(tmp_path / "source", spec)
    result = command("convert", str(tmp_path / "source"), "--out", str(tmp_path / "out"))
    assert result.code == 0
    report = json.loads((tmp_path / "out" / "hybrid_pack.json").read_text())["report"]["experts_quantized"]
    assert len(report) == 4
    for entry in report:
        assert f"{entry['tier_sqnr_db']:.2f} dB (mse, {len(entry['experts'])})" in result.out
        worst = min(entry["sqnr_db"])
        if worst == min(min(e["sqnr_db"]) for e in report if e["tier"] == entry["tier"]):
            assert f"{worst:.2f} dB" in result.out
    shown = command("inspect", str(tmp_path / "out")).out
    for entry in report:
        assert f"{entry['tier']} {entry['tier_sqnr_db']:.2f} dB" in shown
    assert "worst experts" in result.out and "worst experts" in shown
