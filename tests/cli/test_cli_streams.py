"""Closed, broken and full standard streams, signals, and options in odd places."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybrid_pack.cli.main import run
from tests.cli.conftest import Command
from tests.convert.support import tree

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
CLI = [sys.executable, "-m", "hybrid_pack.cli"]


def shell(line: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A line of sh, in which $@ is the command line."""
    command = ["sh", "-c", line, "sh", *CLI, *map(str, arguments)]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)


@pytest.mark.parametrize("closed", ["2>&-", "<&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams(closed: str, source: Path, packed: Path, tmp_path: Path) -> None:
    """No output file gets the number of one, and exit codes stay right."""
    out = tmp_path / "out"
    assert shell(f'"$@" {closed}', "convert", source, "--out", out, "--tp", 2).returncode == 0
    assert tree(out) == tree(packed)
    assert shell(f'"$@" {closed}', "convert", source, "--out", out).returncode == 2
    assert shell(f'"$@" {closed}', "--debug", "convert", tmp_path / "none", "--out", out).returncode == 2


def test_no_stderr_in_this_process(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert run(["convert", str(source), "--out", str(tmp_path / "out")]) == 0
    monkeypatch.setattr("sys.stderr", None)
    assert run(["convert", str(source), "--out", str(tmp_path / "out")]) == 2


def test_a_full_stderr(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert shell('"$@" 2>/dev/full', "convert", source, "--out", out, "--layers", 2).returncode == 0
    assert shell('"$@" 2>/dev/full', "convert", source, "--out", out).returncode == 2


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_nobody_reads_the_summary(option: list[str], source: Path, tmp_path: Path) -> None:
    """The pack is finished all the same."""
    child = subprocess.Popen(
        [*CLI, "convert", str(source), "--out", str(tmp_path / "out"), *option],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout
    assert child.stderr
    child.stdout.close()
    err = child.stderr.read()
    assert child.wait() == 0, err
    assert re.fullmatch(r"(compiled .*\n)?convert: [\d.]+ kB\n", err)
    child.stderr.close()
    assert (tmp_path / "out" / "hybrid_pack.json").exists()


@pytest.mark.parametrize("arguments", ["convert SRC --out OUT", "inspect SRC", "inspect SRC --json", "--help"])
def test_a_full_stdout(arguments: str, source: Path, tmp_path: Path) -> None:
    paths = {"SRC": source, "OUT": tmp_path / "out"}
    done = shell('"$@" >/dev/full', *(paths.get(a, a) for a in arguments.split()))
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert last == "hybrid-pack: cannot write to stdout (found No space left on device)"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals(number: int, code: int, source: Path, tmp_path: Path) -> None:
    slow = (
        "import sys, time; from hybrid_pack.convert.layer import ShardFile; from hybrid_pack.cli.main import main\n"
        "real = ShardFile.put\n"
        "def put(*args):\n    print('at work', file=sys.stderr, flush=True); time.sleep(1); real(*args)\n"
        "ShardFile.put = put\n"
        "main()"
    )
    out = tmp_path / "out"
    child = subprocess.Popen(
        [sys.executable, "-c", slow, "convert", str(source), "--out", str(out), "--workers", "1"],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stderr
    while child.stderr.readline() != "at work\n":
        time.sleep(0.01)
    child.send_signal(number)
    _, err = child.communicate(timeout=60)
    assert child.returncode == code, err
    assert err.splitlines()[-1] == "hybrid-pack: interrupted; finished files are kept for --resume"
    assert "Traceback" not in err


def test_interrupted_elsewhere(source: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hybrid_pack.inspection.open_path", interrupt)
    result = command("inspect", source)
    assert (result.code, result.line) == (130, "hybrid-pack: interrupted")


def test_sigterm_is_as_before_afterwards(command: Command) -> None:
    before = signal.getsignal(signal.SIGTERM)
    command("--version")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("arguments", ["convert --debug nowhere --out OUT", "convert nowhere --out OUT --debug"])
def test_debug_after_the_command(arguments: str, tmp_path: Path, command: Command) -> None:
    result = command(*(tmp_path / "out" if a == "OUT" else a for a in arguments.split()))
    assert result.code == 2
    assert "Traceback (most recent call last)" in result.err
    assert result.err.splitlines()[-1].startswith("hybrid-pack: nowhere: not a checkpoint folder")


def test_resume_with_overwrite(tmp_path: Path, command: Command) -> None:
    """Said before anything is looked at, or fetched."""
    result = command("convert", "org/name", "--out", tmp_path / "out", "--resume", "--overwrite")
    assert result.code == 2
    assert re.fullmatch(r"hybrid-pack: convert: --resume .*, --overwrite .*: give one of them \(see .*\)", result.line)


def test_the_next_command_can_be_pasted(
    source: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quoted for the shell, with SRC as it was typed."""
    monkeypatch.chdir(tmp_path)
    Path("my source").symlink_to(source)
    line = command("convert", "my source", "--out", "a $pack").out.splitlines()[-1]
    assert line == "next: hybrid-pack verify 'a $pack' --source 'my source'"
    assert command(*shlex.split(line)[2:]).code == 0


def test_notes_with_json_go_to_stderr(source: Path, tmp_path: Path, command: Command) -> None:
    result = command("convert", source, "--out", tmp_path / "out", "--layers", 2, "--json")
    assert result.err.splitlines()[0].startswith("note: only layers 2 are packed")
    assert json.loads(result.out)["report"]["layers_omitted"] == [1]


def test_dry_run_names_layers_and_what_is_finished(
    source: Path, packed: Path, tmp_path: Path, command: Command
) -> None:
    text = command("convert", source, "--out", tmp_path / "out", "--layers", 2, "--dry-run").out
    assert re.search(r"layers +2; left out: 1\n", text)
    assert re.search(r"files +1 expert shard, 1 base file, \d small\n", text)
    text = command("convert", source, "--out", packed, "--tp", 2, "--resume", "--dry-run").out
    assert re.search(r"finished +everything: the pack there is complete\n", text)
    assert re.search(r"disk +0 B needed", text)
    result = command("convert", source, "--out", packed, "--resume", "--dry-run")
    assert result.code == 2
    assert "--tp was 2, now 1" in result.line


def test_help_tells_of_signals(command: Command) -> None:
    assert re.search(r"130\s+interrupted\s+by\s+Ctrl-C,\s+143\s+ended\s+by\s+SIGTERM", command("--help").out)


def test_inspect_shows_every_legal_ep(source: Path, command: Command) -> None:
    assert "ep 1, 2, 4\n" in command("inspect", source).out
