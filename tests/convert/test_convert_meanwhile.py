"""What happens while a conversion runs: another one, and a source that changes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.convert import convert, finish
from hybrid_pack.convert.journal import STATE
from hybrid_pack.errors import DataError, UsageError
from tests.checkpoints import edit_header
from tests.convert.interrupted import Stop
from tests.convert.support import names, pack, partials, plan_of, tree

MANIFEST = "hybrid_pack.json"


LOCK = (
    "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
)


@pytest.fixture
def hold() -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Another process that has the lock of an output folder."""
    holders: list[subprocess.Popen[str]] = []

    def make(out: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LOCK, str(out / STATE)]
        holders.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert holders[-1].stdout
        assert holders[-1].stdout.readline() == "held\n"
        return holders[-1]

    yield make
    for holder in holders:
        holder.kill()
        holder.communicate()


def test_a_second_conversion_is_refused(
    source: Path, tmp_path: Path, whole: dict[str, bytes], hold: Callable[[Path], Any], unfinish: Callable[..., Path]
) -> None:
    out = unfinish(source, tmp_path / "out")
    holder = hold(out)
    before = tree(out)
    for options in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(UsageError, match="another conversion is writing here; wait for it, or choose another"):
            pack(source, out, 2, **options)
    with pytest.raises(UsageError, match="another conversion is writing here"):
        pack(source, out, 2)
    assert tree(out) == before
    holder.kill()
    holder.wait()
    pack(source, out, 2, resume=True)
    assert tree(out) == whole


def test_two_at_once(source: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    """One is refused, the other undisturbed."""
    refused: list[BaseException] = []

    class Second:
        def start(self, total_bytes: int, done_bytes: int) -> None:
            for options in ({}, {"resume": True}, {"overwrite": True}):
                try:
                    pack(source, tmp_path / "out", 1, **options)
                except UsageError as error:
                    refused.append(error)

        def advance(self, nbytes: int) -> None:
            pass

        def note(self, text: str) -> None:
            pass

    pack(source, tmp_path / "out", 2, progress=Second())
    assert len(refused) == 3
    assert tree(tmp_path / "out") == whole


def test_another_that_finished_between_look_and_lock(
    source: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybrid_pack.convert import survey

    out = tmp_path / "out"

    def look(*args: Any, **options: Any) -> Any:
        found = survey(*args, **options)
        monkeypatch.setattr("hybrid_pack.convert.survey", survey)
        pack(source, out, 2)
        return found

    monkeypatch.setattr("hybrid_pack.convert.survey", look)
    with pytest.raises(UsageError, match="a finished pack is already there"):
        pack(source, out, 1)
    assert tree(out) == whole


class Meddler:
    """Does something to the source once so many bytes were read."""

    def __init__(self, meddle: Callable[[], object]) -> None:
        self._meddle = meddle
        self._lock = threading.Lock()
        self._done = False

    def start(self, total_bytes: int, done_bytes: int) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        with self._lock:
            if not self._done:
                self._done = True
                self._meddle()

    def note(self, text: str) -> None:
        pass


def test_a_source_that_changes_meanwhile(copy: Path, tmp_path: Path) -> None:
    """Nothing of it is kept, for no file tells whether it is of the old or the new; the next run starts over."""
    out = tmp_path / "out"
    path = next(iter(copy.glob("*.safetensors")))

    def meddle() -> None:
        with path.open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(b"\1" * 100)
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))

    with pytest.raises(DataError, match="the source changed while it was read: what was written is removed"):
        pack(copy, out, 2, progress=Meddler(meddle))
    assert not out.exists()
    pack(copy, out, 2, resume=True)
    pack(copy, tmp_path / "fresh", 2)
    assert tree(out) == tree(tmp_path / "fresh")


def test_a_source_that_changes_meanwhile_beside_a_foreign_file(copy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def meddle() -> None:
        (out / "notes.txt").write_text("mine")
        os.utime(next(iter(copy.glob("*.safetensors"))))

    with pytest.raises(DataError, match="the source changed while it was read"):
        pack(copy, out, 2, progress=Meddler(meddle))
    assert names(out) == ["notes.txt"]


def test_a_source_that_becomes_shorter(copy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    path = max(copy.glob("*.safetensors"))
    with pytest.raises(DataError, match="the file became shorter while it was read"):
        pack(copy, out, 2, workers=1, progress=Meddler(lambda: os.truncate(path, path.stat().st_size // 2)))
    assert not partials(out)
    assert MANIFEST not in names(out)


def test_a_source_that_changed_since_it_was_opened(copy: Path, tmp_path: Path) -> None:
    plan = plan_of(copy, 2)
    edit_header(next(iter(copy.glob("*.safetensors"))), lambda header: header.update(__metadata__={"format": "np"}))
    with pytest.raises(DataError, match=r"\.safetensors: the source changed since it was opened; run again"):
        convert(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_small_file_the_source_lost_before_the_end(
    copy: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "chat_template.jinja").write_text("{{ x }}")
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        written = finish._small_files

        def stop(*arguments: Any) -> None:
            written(*arguments)
            raise Stop

        patch.setattr(finish, "_small_files", stop)
        with pytest.raises(Stop):
            pack(copy, out, 2)
    assert "chat_template.jinja" in names(out)
    (copy / "chat_template.jinja").unlink()
    pack(copy, out, 2, resume=True)
    assert tree(out) == whole
