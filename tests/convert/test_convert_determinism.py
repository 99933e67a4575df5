"""The same source and options give the same bytes, whatever the workers and however often it was resumed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.convert.journal import STATE, Journal
from hybrid_pack.convert.layer import ShardFile
from hybrid_pack.io.output import PARTIAL
from hybrid_pack.synthetic import write_checkpoint
from tests.convert.conftest import Sources
from tests.convert.support import names, pack, replace_in_os, small, stamps, tree, weights

MIXED = small(seed=40, kept_format="mxfp4", moe_layers=(1, 2), shard_bytes=200_000, second_scale="power_of_two")
UNEQUAL = small(seed=41, second_scale="unequal")


@pytest.fixture(autouse=True)
def small_base_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybrid_pack.plan.BASE_FILE_BYTES", 150_000)


@pytest.mark.parametrize("workers", [3, 8])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 2)])
def test_workers(workers: int, tp: int, ep: int, sources: Sources, tmp_path: Path) -> None:
    root = sources(MIXED)
    pack(root, tmp_path / "one", tp, ep, workers=1)
    pack(root, tmp_path / "many", tp, ep, workers=workers)
    assert tree(tmp_path / "one") == tree(tmp_path / "many")


def test_unequal_thread_speeds(sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts finish in any order."""
    root = sources(MIXED)
    pack(root, tmp_path / "one", 2, workers=1)
    real = ShardFile.put

    def put(self: ShardFile, expert: int, packed: Any, encoding: Any) -> None:
        time.sleep(0.003 * (expert % 3))
        real(self, expert, packed, encoding)

    monkeypatch.setattr(ShardFile, "put", put)
    pack(root, tmp_path / "many", 2, workers=8)
    assert tree(tmp_path / "one") == tree(tmp_path / "many")


def test_a_source_made_again_elsewhere(sources: Sources, tmp_path: Path) -> None:
    pack(sources(MIXED), tmp_path / "one", 2)
    write_checkpoint(tmp_path / "else" / "source", MIXED)
    pack(tmp_path / "else" / "source", tmp_path / "other" / "two", 2)
    assert tree(tmp_path / "one") == tree(tmp_path / "other" / "two")


class Stop(Exception):
    """The conversion ends here."""


@pytest.mark.parametrize("options", [{}, {"on_scale_mismatch": "requantize"}], ids=["exact", "requantized"])
@pytest.mark.parametrize("workers", [1, 3])
def test_resumed(
    workers: int, options: dict[str, Any], sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any number of finished files; what the report says of files done before comes from the journal."""
    root = sources(UNEQUAL if options else MIXED)
    pack(root, tmp_path / "whole", 2, **options)
    whole = tree(tmp_path / "whole")
    files = len(weights(tmp_path / "whole"))
    real: Callable[..., None] = Journal.add
    for allowed in range(files):
        left = [allowed]

        def add(self: Journal, record: dict[str, Any], left: list[int] = left) -> None:
            if not left[0]:
                raise Stop
            left[0] -= 1
            real(self, record)

        out = tmp_path / str(allowed)
        with monkeypatch.context() as patch:
            patch.setattr(Journal, "add", add)
            with pytest.raises(Stop):
                pack(root, out, 2, workers=workers, **options)
        kept = weights(out)
        assert len(kept) == allowed
        before = stamps(out, kept)
        done = pack(root, out, 2, workers=workers, resume=True, **options)
        assert (done.files_kept, done.files_written) == (allowed, len(whole) - allowed - 1)  # README.md apart
        assert tree(out) == whole
        assert stamps(out, kept) == before


def test_resuming_a_finished_pack_touches_nothing(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(source, out, 2)
    before = stamps(out)
    (out / "README.md").write_text("A card people edit.\n")
    done = pack(source, out, 2, resume=True)
    assert (done.files_written, done.files_kept, done.source_bytes) == (0, len(before) - 1, 0)
    assert {**before, "README.md": stamps(out, ["README.md"])["README.md"]} == stamps(out)


def test_only_the_manifest_was_missing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("hybrid_pack.convert.write_manifest", lambda *_: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            pack(source, out, 2)
    before = stamps(out, weights(out))
    done = pack(source, out, 2, resume=True)
    assert (done.files_kept, done.files_written) == (len(before), len(names(out)) - len(before) - 1)
    assert stamps(out, weights(out)) == before
    assert STATE not in names(out)


def test_a_recorded_file_that_is_lost_is_written_anew(source: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """And is not taken for finished when that, too, is interrupted: the new temporary file has its size at once."""
    out = tmp_path / "out"
    pack(source, tmp_path / "whole", 2)
    with monkeypatch.context() as patch:
        patch.setattr("hybrid_pack.convert.write_manifest", lambda *_: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            pack(source, out, 2)
    lost = next(name for name in weights(out) if "rank-1" in name)
    size = (out / lost).stat().st_size
    (out / lost).unlink()
    with monkeypatch.context() as patch:
        patch.setattr("hybrid_pack.io.output.OutputFile.discard", lambda self: self.close())  # as if killed
        patch.setattr(ShardFile, "put", lambda *_: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            pack(source, out, 2, resume=True)
    assert (out / f"{lost}{PARTIAL}").stat().st_size == size
    pack(source, out, 2, resume=True)
    assert tree(out) == tree(tmp_path / "whole")


def test_a_file_of_another_size_is_written_anew(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    pack(source, tmp_path / "whole", 2)
    with monkeypatch.context() as patch:
        patch.setattr("hybrid_pack.convert.write_manifest", lambda *_: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            pack(source, out, 2)
    for name in weights(out)[:2]:
        os.truncate(out / name, 100)
    done = pack(source, out, 2, resume=True)
    assert done.files_kept == len(weights(out)) - 2
    assert tree(out) == tree(tmp_path / "whole")


@pytest.mark.parametrize("text", [b"", b"{", b"garbage\n", b"[]\n", b"{}\n", b'{"x": 1}\n', b"\0" * 64, b"\xff\n"])
def test_a_journal_of_no_use_is_as_none(text: bytes, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(source, tmp_path / "whole", 2)
    out.mkdir()
    (out / STATE).write_bytes(text)
    pack(source, out, 2, resume=True)
    assert tree(out) == tree(tmp_path / "whole")


def test_lines_after_a_torn_one_do_not_count(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.begin({"a": 1})
    journal.add({"path": "x", "bytes": 1})
    journal.close()
    with (tmp_path / STATE).open("ab") as file:
        file.write(b'{"path": "y", "by\n{"path": "z", "bytes": 1}\n')
    journal = Journal(tmp_path)
    assert (journal.fingerprint, set(journal.records)) == ({"a": 1}, {"x"})
    journal.add({"path": "v", "bytes": 2})
    journal.forget("x")
    journal.close()
    journal = Journal(tmp_path)
    assert set(journal.records) == {"v"}
    journal.clear(["v", "w"])
    assert (journal.fingerprint, journal.records, journal.clearing) == (None, {}, {"v", "w"})
    journal.close()
    journal = Journal(tmp_path)
    assert (journal.fingerprint, journal.records, journal.clearing) == (None, {}, {"v", "w"})
    journal.begin({"b": 2})
    assert (journal.fingerprint, journal.clearing) == ({"b": 2}, None)
    journal.close()


def test_durable_before_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every shard and base file: synced, then its record, synced, then its name, then the folder synced."""
    events: list[tuple[str, str]] = []
    fds: dict[int, str] = {}

    def watch(name: str, path_of: Callable[..., Any]) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            if name == "open":
                fds[result] = os.fspath(args[0])
            else:
                events.append((name, path_of(*args)))
            return result

        replace_in_os(monkeypatch.setattr, name, call)

    watch("open", lambda *_: "")
    watch("fsync", lambda fd: fds[fd])
    watch("pwrite", lambda fd, *_: fds[fd])
    watch("write", lambda fd, *_: fds[fd])
    watch("replace", lambda old, new, **_: os.fspath(new))
    out = tmp_path / "out"
    pack(source, out, 2, workers=1)
    state = str(out / STATE)
    for name in [*weights(out), "config.json", "LICENSE", "hybrid_pack.json"]:
        path = str(out / name)
        named = events.index(("replace", path))
        synced = events.index(("fsync", f"{path}{PARTIAL}"))
        written = max(i for i, event in enumerate(events) if event == ("pwrite", f"{path}{PARTIAL}"))
        assert written < synced < named
        assert events[named + 1] == ("fsync", str(Path(path).parent))
        if name.endswith(".safetensors"):
            assert events[synced + 1 : named] == [("write", state), ("fsync", state)]
    assert [path for name, path in events if name == "replace"][-1] == str(out / "hybrid_pack.json")
