"""The disk is full, or fails otherwise: one line, exit code 3, finished files kept, and --resume does the rest."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.cli.main import run
from hybrid_pack.convert.journal import STATE
from hybrid_pack.errors import EnvironmentFailure
from hybrid_pack.io.reader import TensorReader
from tests.convert.support import names, pack, partials, replace_in_os, stamps, tree, weights

FILES = 5
"""Shards of two layers at tp 2, and one base file."""


class Fault:
    """Makes the n-th call of an os function, and all that follow, fail: half done if it is a write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, number: int, code: int) -> None:
        self.calls, self.number, self._code = 0, number, code
        self._real: Callable[..., Any] = getattr(os, name)
        self._name = name
        replace_in_os(monkeypatch.setattr, name, self)

    @property
    def struck(self) -> bool:
        return self.calls >= self.number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if not self.struck:
            return self._real(*args, **kwargs)
        if self._name in ("write", "pwrite") and self.calls == self.number:
            half = memoryview(args[1]).cast("B")[: memoryview(args[1]).nbytes // 2]
            return self._real(args[0], half, *args[2:])
        raise OSError(self._code, os.strerror(self._code))


def recorded(out: Path) -> set[str]:
    """Files the journal says are whole."""
    if not (out / STATE).exists():
        return set()
    lines = map(json.loads, (out / STATE).read_text().splitlines())
    return {line["path"] for line in lines if "path" in line}


def check_failed(error: EnvironmentFailure, out: Path, code: int, whole: dict[str, bytes]) -> None:
    """The message counts what is there; beside it there are only the state file and whole files without their name."""
    text = str(error)
    full = code in (errno.ENOSPC, errno.EDQUOT)
    what, remedy = ("the disk is full", "make room") if full else ("the system failed", "put that right")
    done = len(weights(out))
    kept, resume = (f"{done} of {FILES} weight files finished and kept: ", " with --resume") if done else ("", "")
    assert re.fullmatch(
        rf"{re.escape(str(out))}\S*: {what} \(found {re.escape(os.strerror(code))}\); "
        rf"{kept}{remedy} and run again{resume}",
        text,
    ), text
    assert error.exit_code == 3
    if not done and not recorded(out):
        assert not any(out.iterdir()), "nothing is left behind"
    known = {"hybrid_pack.json", *recorded(out)} if STATE in names(out) else set()
    assert {name.removesuffix(".partial") for name in partials(out)} <= known
    if "hybrid_pack.json" in names(out):
        assert {name: data for name, data in tree(out).items() if name != STATE} == whole


FAULTS = [
    ("posix_fallocate", errno.ENOSPC, 1),
    ("pwrite", errno.ENOSPC, 7),
    ("pwrite", errno.EDQUOT, 23),
    ("pwrite", errno.EIO, 23),
    ("fsync", errno.ENOSPC, 2),
    ("fsync", errno.EIO, 3),
    ("write", errno.ENOSPC, 1),
    ("write", errno.EROFS, 3),
    ("replace", errno.EIO, 1),
    ("mkdir", errno.ENOSPC, 1),
]


@pytest.mark.parametrize(("name", "code", "step"), FAULTS)
def test_fault_at_every_call(
    name: str, code: int, step: int, source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: Any
) -> None:
    number = 1
    while True:
        out = tmp_path / str(number)
        out.mkdir()
        with monkeypatch.context() as patch:
            fault = Fault(patch, name, number, code)
            try:
                pack(source, out, 2, workers=2)
            except EnvironmentFailure as error:
                failure = error
            else:
                break
        assert fault.struck
        check_failed(failure, out, code, whole)
        kept = stamps(out, weights(out))
        pack(source, out, 2, resume=True)
        assert tree(out) == whole
        assert stamps(out, list(kept)) == kept
        number += step
    assert not fault.struck
    assert number > 3 * step, "the fault struck at several moments"


def test_the_journal_stays_usable_for_the_other_threads(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line of it fails halfway; a thread that is still at work adds its own after that."""
    real, calls = os.write, []

    def write(fd: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[: len(data) // 2] if len(calls) == 2 else data)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        patch.setattr("hybrid_pack.convert.work.Run.all", ignore_failures)
        with pytest.raises(KeyError):
            pack(source, out, 2, workers=1)
    assert len(calls) > 2
    pack(source, out, 2, resume=True)
    assert tree(out) == whole


def ignore_failures(self: Any, tasks: Iterator[Any]) -> int:
    """All tasks, one after another, whatever happens."""
    worker = self.worker()
    total = 0
    for task in tasks:
        try:
            total += task(worker)
        except OSError as error:
            assert error.errno == errno.ENOSPC
    return total


def test_command_line(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["convert", str(source), "--out", str(out), "--tp", "2"]
    with monkeypatch.context() as patch:
        Fault(patch, "pwrite", 40, errno.ENOSPC)
        assert run(arguments) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith(f"hybrid-pack: {out}: the disk is full (found No space left")
    assert "Traceback" not in captured.err
    assert run([*arguments, "--resume"]) == 0


def test_a_read_that_fails(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source disk with a bad sector: the tensor is named."""
    real, calls = os.preadv, []

    def preadv(*args: Any) -> int:
        calls.append(args)
        if len(calls) == 60:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        with pytest.raises(EnvironmentFailure, match=r"model-\S+: \S+experts\S+: cannot read \(found Input/output"):
            pack(source, out, 2)
    assert not partials(out)
    pack(source, out, 2, resume=True)
    assert tree(out) == whole


def test_short_reads(source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, [memoryview(views[0])[:777]], at))
    pack(source, tmp_path / "out", 2)
    assert tree(tmp_path / "out") == whole


def test_a_small_file_that_cannot_be_read(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, real = tmp_path / "out", Path.read_bytes

    def read_bytes(self: Path) -> bytes:
        if self.name == "tokenizer.json":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", read_bytes)
        with pytest.raises(EnvironmentFailure, match=r"tokenizer\.json: the system failed .*5 of 5 .*put that right"):
            pack(source, out, 2)
    pack(source, out, 2, resume=True)
    assert tree(out) == whole


def test_too_little_space_is_seen_before(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(123_456))
    monkeypatch.setattr(TensorReader, "prefetch", lambda *_: pytest.fail("nothing is read"))
    assert run(["convert", str(source), "--out", str(out)]) == 3
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(
        rf"hybrid-pack: {re.escape(str(out))}: not enough disk space \(expected [\d,]+ bytes, found 123,456 free\); "
        r"free some, or choose another --out",
        line,
    ), line
    assert not out.exists()


class Usage:
    def __init__(self, free: int) -> None:
        self.free = free


def test_finished_files_need_no_space_again(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does what a killed run left of the others, which is removed first: its space counts as free."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        Fault(patch, "pwrite", 60, errno.ENOSPC)
        with pytest.raises(EnvironmentFailure):
            pack(source, out, 2)
    left = [name for name in whole if name.endswith(".safetensors") and name not in weights(out)]
    assert 0 < len(left) < FILES
    for name in left:
        (out / f"{name}.partial").parent.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.partial").write_bytes(b"\1" * 1000)
    done = sum(len(whole[name]) for name in weights(out))
    needed = sum(map(len, whole.values())) - len(whole["hybrid_pack.json"]) - len(whole["README.md"]) - done
    reclaimed = sum((out / name).stat().st_blocks * 512 for name in partials(out))
    assert reclaimed >= 1000 * len(left)
    free = [needed - reclaimed - 1]
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(free[0]))
    before = tree(out)
    with pytest.raises(
        EnvironmentFailure, match=rf"expected {needed:,} bytes, found {free[0]:,} free and {reclaimed:,}"
    ):
        pack(source, out, 2, resume=True)
    assert tree(out) == before
    free[0] += 1
    pack(source, out, 2, resume=True)
    assert tree(out) == whole


@pytest.fixture
def tiny_disk(whole: dict[str, bytes], tmp_path: Path) -> Iterator[Path]:
    """A file system that takes the base file and one layer, and not the other."""
    root = tmp_path / "disk"
    root.mkdir()
    options = f"size={sum(map(len, whole.values())) - 100_000}"
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", root], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"cannot mount a small tmpfs: {made.stderr.strip()}")
    yield root
    subprocess.run(["umount", root], check=True)


def test_a_disk_that_is_really_full(
    tiny_disk: Path, source: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tiny_disk / "out"
    with pytest.raises(EnvironmentFailure, match="not enough disk space"):
        pack(source, out, 2)
    with monkeypatch.context() as patch:
        patch.setattr("hybrid_pack.convert.require_disk", lambda *_, **__: None)
        with pytest.raises(
            EnvironmentFailure, match=r"the disk is full .* of 5 weight files finished and kept"
        ) as caught:
            pack(source, out, 2, workers=1, resume=True)
    check_failed(caught.value, out, errno.ENOSPC, whole)
    assert not partials(out)
    kept = stamps(out, weights(out))
    assert kept
    subprocess.run(["mount", "-o", "remount,size=64m", tiny_disk], check=True)
    pack(source, out, 2, resume=True)
    assert tree(out) == whole
    assert stamps(out, list(kept)) == kept
