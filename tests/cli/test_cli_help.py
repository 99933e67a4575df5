"""Help, version and what they import; output into a closed pipe."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_pack import __version__
from hybrid_pack.cli.main import COMMANDS
from tests.cli.conftest import Command

HEAVY = ("torch", "numpy", "numba", "pydantic", "huggingface_hub", "tqdm", "rich", "triton", "b12x", "safetensors")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

CHILD = """
import json, os, sys
from hybrid_pack.cli.main import run
stdout, sys.stdout = sys.stdout, open(os.devnull, "w")
code = run(sys.argv[1:])
json.dump({"code": code, "modules": sorted({name.partition(".")[0] for name in sys.modules})}, stdout)
"""


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help(name: str, option: str, command: Command) -> None:
    result = command(*filter(None, [name]), option)
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"Usage: hybrid-pack {name}".rstrip())


def test_help_lists_commands_and_exit_codes(command: Command) -> None:
    text = command("--help").out
    for name, what in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(what)}$", text, re.MULTILINE)
    assert "Exit codes: 0 done, 1 the data is wrong, 2 usage, 3 the environment failed" in text


def test_every_option_has_a_help(command: Command) -> None:
    for name in COMMANDS:
        lines = command(name, "--help").out.partition("Options:\n")[2].splitlines()
        for line, after in zip(lines, [*lines[1:], ""], strict=True):
            if line.startswith("  --"):
                assert re.search(r"^  --\S+( [A-Z\[]\S*)?  +\S", line) or after.startswith("     "), line


def test_version(command: Command) -> None:
    assert command("--version").out.strip().endswith(__version__)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], [], ["convert", "--help"], ["nothing"]], ids=str)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments], env=ENVIRONMENT, capture_output=True, text=True, check=True
    )
    found = json.loads(child.stdout)
    assert "click" in found["modules"]
    assert not set(HEAVY) & set(found["modules"])


def test_as_a_module() -> None:
    command = [sys.executable, "-m", "hybrid_pack.cli", "nothing"]
    child = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert (child.returncode, child.stdout) == (2, "")
    assert re.fullmatch(r"hybrid-pack: .*No such command 'nothing'.*\n", child.stderr)


def test_a_closed_pipe(source: Path) -> None:
    """``hybrid-pack inspect SRC | head -0`` ends without a word."""
    child = subprocess.Popen(
        [sys.executable, "-m", "hybrid_pack.cli", "inspect", str(source), "--json"],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout
    assert child.stderr
    child.stdout.close()
    assert child.stderr.read() == ""
    assert child.wait() == 3
    child.stderr.close()
