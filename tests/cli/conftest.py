"""A small source and a pack of it, and the command line in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hybrid_pack.cli.main import run
from hybrid_pack.synthetic import write_checkpoint
from tests.convert.support import small


@dataclass(frozen=True)
class Result:
    """What a run of the command line left."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line of an error: the last, and there is no other of its kind and no traceback."""
        lines = self.err.splitlines()
        assert lines[-1].startswith("hybrid-pack: "), self.err
        assert sum(line.startswith("hybrid-pack: ") for line in lines) == 1, self.err
        assert "Traceback" not in self.err
        assert self.out == ""
        return lines[-1]


Command = Callable[..., Result]


@pytest.fixture(scope="session", autouse=True)
def quick_fsync() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda fd: None)
        yield


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def call(*arguments: object) -> Result:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layer 1 with two tiers, MTP layer 2; for reading only."""
    root = tmp_path_factory.mktemp("cli") / "source"
    write_checkpoint(root, small())
    return root


@pytest.fixture(scope="session")
def packed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its pack for tp 2, for reading only."""
    out = tmp_path_factory.mktemp("cli") / "pack"
    assert run(["convert", str(source), "--out", str(out), "--tp", "2"]) == 0
    return out
