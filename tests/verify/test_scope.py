"""What is asked for, what is left out and said, what fails for other reasons than the pack."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.errors import EnvironmentFailure, UsageError
from hybrid_pack.io import reader
from hybrid_pack.io.progress import Silent
from hybrid_pack.layouts import pack_kernels, scale_bytes
from hybrid_pack.layouts.nf3_2p1 import Nf32p1
from hybrid_pack.layouts.packed_fp4 import PackedFp4
from hybrid_pack.layouts.scales import BlockScales
from hybrid_pack.verify import VerifyReport, verify_pack, warmup
from hybrid_pack.verify.reading import PackFile
from tests.checkpoints import TAIL_GATE, edit_tensors, shard_of
from tests.verify.packs import flip, read_document, text_of

SHARD = "experts/tp2-ep2/rank-1/layer-004.safetensors"


def left_out(report: Any) -> dict[str, str]:
    return {left.what: left.why for left in report.not_checked}


def test_a_plain_verification_says_that_no_source_was_given(good_pack: Path) -> None:
    assert left_out(verify_pack(good_pack)) == {"whether the experts are the source's": "no source was given"}


def test_with_a_source_nothing_is_left_out(good_pack: Path, small_checkpoint: Path) -> None:
    assert left_out(verify_pack(good_pack, source=small_checkpoint)) == {}


def test_quick_reads_no_payload_and_says_so(pack: Path) -> None:
    flip(pack / SHARD, 5000)
    report = verify_pack(pack, quick=True)
    assert report.ok
    assert "payload digests" in left_out(report)
    assert sum(check.nbytes for check in report.checks) < 200_000
    assert not verify_pack(pack).ok


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "hybrid_pack.json"])
def test_quick_still_reads_the_documents(pack: Path, name: str) -> None:
    flip(pack / name, 20)
    assert {finding.path for finding in verify_pack(pack, quick=True).findings} == {name}


def test_quick_with_a_source_compares_structure_and_identity_alone(
    pack: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(pack / SHARD, 5000)
    flip(pack / "tokenizer.json", 5)
    monkeypatch.setattr(reader.TensorReader, "read", lambda *_: pytest.fail("payload was read"))
    report = verify_pack(pack, quick=True, source=checkpoint)
    assert report.ok, text_of(report)
    assert set(left_out(report)) == {
        "payload digests",
        "scale bytes",
        "experts against the source",
        "bytes of base tensors against the source",
        "bytes of small files against the source",
    }
    assert [check.name for check in report.checks][-4:] == [
        "source identity",
        "source structure",
        "names of small files and config.json against the source",
        "base headers against the source",
    ]
    assert sum(check.nbytes for check in report.checks) < 200_000
    with edit_tensors(checkpoint) as tensors:
        stored = tensors["lm_head.weight"]
        stored.dtype = "F16"
    (checkpoint / "LICENSE").unlink()
    found = text_of(verify_pack(pack, quick=True, source=checkpoint))
    assert "lm_head.weight: not as in the source (expected F16" in found
    assert "LICENSE: not a file of the source" in found


def test_one_rank_needs_only_its_own_shards(pack: Path, small_checkpoint: Path) -> None:
    for shard in read_document(pack)["shards"]:
        if shard["rank"] != 2:
            (pack / shard["path"]).unlink()
    report = verify_pack(pack, rank=2, source=small_checkpoint)
    assert report.ok, text_of(report)
    assert "shards of ranks other than 2" in left_out(report)
    experts = next(check for check in report.checks if check.name == "experts against the source")
    assert experts.count == 2 * 3
    assert not verify_pack(pack).ok


def test_one_rank_still_reads_all_that_ranks_share(pack: Path) -> None:
    flip(pack / "tokenizer.json", 0)
    assert not verify_pack(pack, rank=0).ok


def test_some_layers(pack: Path, small_checkpoint: Path) -> None:
    flip(pack / SHARD, 5000)
    assert verify_pack(pack, layers=[3, 5], source=small_checkpoint).ok
    assert "shards of layers other than 3, 5" in left_out(verify_pack(pack, layers=[3, 5]))
    assert not verify_pack(pack, layers=[4]).ok
    assert verify_pack(pack, layers=[4], rank=0).ok
    assert not verify_pack(pack, layers=iter([4]), rank=1).ok


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 4}, r"--rank: .*expected 0\.\.3, found 4"),
        ({"rank": -1}, "--rank"),
        ({"layers": [6]}, "--layers: .*expected of 3, 4, 5, found 6"),
        ({"layers": []}, "--layers: .*found none"),
        ({"workers": 0}, "--workers"),
    ],
)
def test_calls_that_cannot_be(good_pack: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        verify_pack(good_pack, **options)


@pytest.mark.parametrize("name", ["nowhere", "hybrid_pack.json"])
def test_no_folder(good_pack: Path, name: str) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        verify_pack(good_pack / name)


def test_a_checkpoint_is_no_pack(small_checkpoint: Path) -> None:
    assert text_of(verify_pack(small_checkpoint)).startswith("hybrid_pack.json: this is a checkpoint, not a pack;")


def test_paths_may_be_text(good_pack: Path, small_checkpoint: Path) -> None:
    report = verify_pack(str(good_pack), source=str(small_checkpoint))
    assert report.ok and report.root == str(good_pack)
    assert next(check.count for check in report.checks if check.name == "experts against the source") == 12


class Lines(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.lines: list[str] = []

    def start(self, total_bytes: int, done_bytes: int) -> None:
        self.started.append(total_bytes)

    def note(self, text: str) -> None:
        self.lines.append(text)


def test_no_progress_where_nothing_is_read(good_pack: Path, small_checkpoint: Path) -> None:
    watch = Lines()
    verify_pack(good_pack, quick=True, source=small_checkpoint, progress=watch)
    assert watch.started == []
    verify_pack(good_pack, progress=watch)
    assert len(watch.started) == 1


def test_kernels_that_are_compiled_are_said_once(
    good_pack: Path, small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, compiled = Lines(), iter([0, 2, 2, 2])
    monkeypatch.setattr(warmup, "_compiled", lambda: next(compiled))
    for _ in range(2):
        verify_pack(good_pack, source=small_checkpoint, progress=watch)
    assert len(watch.lines) == 1
    assert re.fullmatch(r"compiled the unpack kernels in \d+\.\d s \(.*\)", watch.lines[0])


def test_an_empty_folder_is_no_pack(tmp_path: Path) -> None:
    report = verify_pack(tmp_path)
    assert text_of(report) == "hybrid_pack.json: not a pack: it has no manifest"
    assert left_out(report) == {"everything else": "there is no valid manifest"}


def test_progress_adds_up(good_pack: Path, small_checkpoint: Path) -> None:
    class Watch:
        total = done = 0
        lock = threading.Lock()

        def start(self, total_bytes: int, done_bytes: int) -> None:
            self.total, self.done = total_bytes, done_bytes

        def advance(self, nbytes: int) -> None:
            with self.lock:
                self.done += nbytes

        def note(self, text: str) -> None:
            assert text.startswith("compiled the unpack kernels in ")

    for options in ({}, {"rank": 1}, {"layers": [3]}):
        watch = Watch()
        verify_pack(good_pack, progress=watch, **options)
        assert watch.done == watch.total > 0
    watch = Watch()
    verify_pack(good_pack, progress=watch, source=small_checkpoint)
    assert abs(watch.done - watch.total) < watch.total / 10


# no packer


def test_nothing_that_packs_is_called(good_pack: Path, small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("verify called a pack function")

    for layout in (Nf32p1, PackedFp4, BlockScales):
        monkeypatch.setattr(layout, "pack_rows", fail)
    for name in dir(pack_kernels):
        if not name.startswith("__"):
            monkeypatch.setattr(pack_kernels, name, fail)
    makers = [n for n in dir(scale_bytes) if n.endswith(("_table", "_factor", "_shift", "_global_scale", "_encode"))]
    assert len(makers) >= 8
    for name in makers:
        monkeypatch.setattr(scale_bytes, name, fail)
    assert verify_pack(good_pack, source=small_checkpoint).ok


def test_the_packers_are_not_even_imported(good_pack: Path, small_checkpoint: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from hybrid_pack.verify import verify_pack\n"
        f"report = verify_pack(Path({str(good_pack)!r}), source=Path({str(small_checkpoint)!r}))\n"
        "import json; print(json.dumps([report.ok, sorted(m for m in sys.modules if m.startswith('hybrid_pack'))]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": "."}
    )
    good, modules = json.loads(run.stdout)
    assert good
    assert "hybrid_pack.layouts.unpack_kernels" in modules
    assert "hybrid_pack.layouts.pack_kernels" not in modules
    assert not [name for name in modules if name.startswith("hybrid_pack.convert")]


# the machine


def failing(place: str) -> Callable[..., int]:
    """An ``os.preadv`` that fails with EIO for files of that name."""
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if place in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    return preadv


def unread(report: VerifyReport) -> list[str]:
    return [str(entry) for entry in report.unread]


@pytest.mark.parametrize(
    ("place", "files"),
    [
        ("layer-004", [f"experts/tp2-ep2/rank-{rank}/layer-004.safetensors" for rank in range(4)]),
        ("tokenizer.json", ["tokenizer.json"]),
        ("model-00001-of-00001", ["model-00001-of-00001.safetensors"]),
    ],
)
@pytest.mark.parametrize("with_source", [False, True])
def test_a_disk_that_fails_is_no_finding_and_the_rest_is_checked(
    pack: Path, small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, place: str, files: list[str], with_source: bool
) -> None:
    monkeypatch.setattr(os, "preadv", failing(place))
    source = small_checkpoint if with_source else None
    report = verify_pack(pack, workers=2, source=source)
    assert unread(report) == [f"{name}: could not be read (found Input/output error)" for name in files]
    assert not report.findings and not report.ok and report.exit_code == 3
    flip(pack / "LICENSE", 3)
    report = verify_pack(pack, workers=2, source=source)
    assert len(report.unread) == len(files)
    assert {finding.path for finding in report.findings} == {"LICENSE"} and report.exit_code == 1


def test_a_disk_that_fails_under_the_source(
    good_pack: Path, small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = shard_of(small_checkpoint, f"{TAIL_GATE}.weight_packed")
    monkeypatch.setattr(os, "preadv", failing(f"source0/small/{file.name}"))
    report = verify_pack(good_pack, source=small_checkpoint)
    assert unread(report) == [f"{file}: could not be read (found Input/output error)"]
    assert not report.findings
    assert 0 < next(check.count for check in report.checks if check.name == "experts against the source") < 12


@pytest.mark.parametrize("name", ["tokenizer.json", "model-00001", "config.json"])
def test_a_source_that_may_not_be_read(
    good_pack: Path, small_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = {"read_bytes": Path.read_bytes, "open": Path.open}

    def denied(function: str) -> Callable[..., Any]:
        def call(path: Path, *args: Any, **options: Any) -> Any:
            if path.parent == small_checkpoint and path.name.startswith(name):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return real[function](path, *args, **options)

        return call

    for function in real:
        monkeypatch.setattr(Path, function, denied(function))
    report = verify_pack(good_pack, source=small_checkpoint)
    assert re.fullmatch(rf"{small_checkpoint}/{name}.*: could not be read .found Permission denied.", *unread(report))
    assert not report.findings and report.exit_code == 3
    assert ("everything against the source" in left_out(report)) == (name != "tokenizer.json")


@pytest.mark.parametrize("name", [SHARD, "model-00001-of-00001.safetensors", "tokenizer.json"])
def test_a_file_that_shrinks_meanwhile_is_a_finding(pack: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real = PackFile.read

    def read(self: PackFile, out: Any, offset: int) -> None:
        if self.name == name and out.nbytes > 200 and offset != 0:
            os.truncate(pack / name, offset + 100)
        elif self.name == name and name == "tokenizer.json":
            os.truncate(pack / name, 10)
        real(self, out, offset)

    monkeypatch.setattr(PackFile, "read", read)
    monkeypatch.setattr("hybrid_pack.verify.digests.BUFFER_BYTES", 4096)
    report = verify_pack(pack)
    assert f"{name}: " in text_of(report)
    assert "became shorter while the pack was verified" in text_of(report)


def test_a_file_that_vanishes_meanwhile_is_a_finding(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = PackFile.__init__

    def init(self: PackFile, root: Path, name: str) -> None:
        if name == SHARD:
            (root / name).unlink(missing_ok=True)
        real(self, root, name)

    monkeypatch.setattr(PackFile, "__init__", init)
    assert f"{SHARD}: removed while the pack was verified" in text_of(verify_pack(pack))


def test_a_source_that_shrinks_meanwhile_is_a_finding(
    good_pack: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = max(checkpoint.glob("*.safetensors"))
    real = reader.TensorReader.read

    def read(self: reader.TensorReader, tensor: Any, out: Any, begin: int = 0) -> None:
        if tensor.path == victim:
            os.truncate(victim, 5000)
        real(self, tensor, out, begin)

    monkeypatch.setattr(reader.TensorReader, "read", read)
    report = verify_pack(good_pack, source=checkpoint)
    assert "became shorter while it was read" in text_of(report)


@pytest.mark.parametrize("name", [SHARD, "tokenizer.json"])
def test_a_file_that_may_not_be_read(good_pack: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real = os.open

    def denied(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith(name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", denied)  # as root nothing is denied
    report = verify_pack(good_pack)
    assert unread(report) == [f"{name}: could not be read (found Permission denied)"]
    assert not report.findings and report.exit_code == 3


def test_a_folder_that_may_not_be_listed(good_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.scandir

    def denied(path: Any) -> Any:
        if str(path).endswith("rank-1"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path)

    monkeypatch.setattr(os, "scandir", denied)
    report = verify_pack(good_pack)
    assert unread(report) == ["experts/tp2-ep2/rank-1: could not be read (found Permission denied)"]
    assert not report.findings
    assert verify_pack(good_pack, rank=0).ok, "that rank is not asked for"


def test_a_pack_that_may_not_be_listed(good_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Any) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(EnvironmentFailure, match=r"cannot read .found Permission denied"):
        verify_pack(good_pack)


def test_files_are_closed(good_pack: Path, small_checkpoint: Path) -> None:
    verify_pack(good_pack, source=small_checkpoint)
    before = len(list(Path("/proc/self/fd").iterdir()))
    verify_pack(good_pack, source=small_checkpoint)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
