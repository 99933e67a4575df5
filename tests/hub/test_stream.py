"""``convert org/name --no-keep``: shards come when they are needed and go after use; the pack is the same."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from hybrid_pack.cli.main import run
from hybrid_pack.errors import DataError, UsageError
from hybrid_pack.hub import stream
from hybrid_pack.hub.stream import HubSupply, stream_checkpoint
from hybrid_pack.io.safetensors import read_header
from hybrid_pack.io.shards import Located
from hybrid_pack.synthetic import write_checkpoint
from tests.checkpoints import SMALL
from tests.hub.conftest import REPO, Client, child, many_layers, tree
from tests.hub.server import Hub

SHARD = r"model-0000\d-of"


@pytest.fixture
def checkpoint_there(hub: Hub, small_checkpoint: Path) -> Hub:
    hub.add(REPO, tree(small_checkpoint))
    return hub


def by_folder(source: Path, work: Path) -> dict[str, bytes]:
    """The pack of a checkpoint in a folder that has the Hub's name."""
    root = work / "models--org--name" / "snapshots" / ("0" * 40)
    root.parent.mkdir(parents=True)
    root.symlink_to(source)
    assert run(["convert", str(root), "--out", str(work / "out"), "--tp", "2"]) == 0
    return tree(work / "out")


@pytest.fixture(scope="module")
def whole(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return by_folder(small_checkpoint, tmp_path_factory.mktemp("whole"))


def convert(out: Path, *more: str) -> int:
    return run(["convert", REPO, "--out", str(out), "--tp", "2", "--workers", "2", "--no-keep", *more])


class Watch:
    """Counts what of the source is on the disk at a time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.most = self.limit = 0
        self.brought: list[str] = []
        bring, schedule = HubSupply._bring, HubSupply.schedule

        def counted_bring(supply: HubSupply, name: str, stop: Any) -> None:
            bring(supply, name, stop)
            self.brought.append(name)
            there = sum(supply.files[n].nbytes for n in supply.files if supply.is_whole(n))
            self.most = max(self.most, there)

        def counted_schedule(supply: HubSupply, groups: Any, stopped: Any) -> Any:
            self.limit = supply.most_bytes(groups)
            return schedule(supply, groups, stopped)

        patch.setattr(HubSupply, "_bring", counted_bring)
        patch.setattr(HubSupply, "schedule", counted_schedule)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def shard_names(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("*.safetensors"))


def test_the_pack_is_the_same_and_no_shard_stays(
    checkpoint_there: Hub, small_checkpoint: Path, whole: dict[str, bytes], tmp_path: Path, watch: Watch, client: Client
) -> None:
    out = tmp_path / "out"
    assert convert(out) == 0
    made = tree(out)
    assert made.keys() == whole.keys()
    assert [name for name in made if made[name] != whole[name]] == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(watch.brought) == shard_names(small_checkpoint)
    assert 0 < watch.most <= watch.limit
    assert client.hosts <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize("stored", [("bf16",), ("nvfp4", "mxfp4"), ("ct_nvfp4",), ("fp8_block",)], ids=str)
def test_other_sources(stored: Any, hub: Hub, tmp_path: Path) -> None:
    """Formats that are quantised, or have second-level scales of other kinds."""
    source = tmp_path / "source"
    write_checkpoint(source, replace(SMALL, stored=stored))
    hub.add(REPO, tree(source))
    assert convert(tmp_path / "out") == 0
    assert tree(tmp_path / "out") == by_folder(source, tmp_path / "work")


def test_less_than_the_whole_source_is_there_at_a_time(
    hub: Hub, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many layers and base files, as a real checkpoint has."""
    from hybrid_pack import plan

    source = tmp_path / "source"
    write_checkpoint(source, many_layers())
    hub.add(REPO, tree(source))
    monkeypatch.setattr(plan, "BASE_FILE_BYTES", 120_000)
    out = tmp_path / "out"
    assert convert(out) == 0
    total = sum((source / name).stat().st_size for name in shard_names(source))
    assert watch.most <= watch.limit < 0.75 * total
    assert sorted(watch.brought) == shard_names(source)
    assert run(["verify", str(out), "--source", str(source)]) == 0


def test_a_run_that_failed_goes_on_without_fetching_twice(
    checkpoint_there: Hub, small_checkpoint: Path, whole: dict[str, bytes], tmp_path: Path, watch: Watch
) -> None:
    """The last shard cannot be had: layers that were finished stay finished, whole shards that are needed stay."""
    out, names = tmp_path / "out", shard_names(small_checkpoint)
    fault = checkpoint_there.fault("GET", f"cdn.*{names[-1]}", status=403, whole=True, times=99)
    assert convert(out) == 3
    assert fault.met
    assert (tmp_path / ".out.source").is_dir()
    first = set(watch.brought)
    assert 0 < len(first) < len(names)
    fault.times = 0
    assert convert(out, "--resume") == 0
    assert tree(out) == whole
    assert sorted(watch.brought) == names
    assert not (tmp_path / ".out.source").exists()


@pytest.mark.parametrize("number", [1, 4])
def test_killed_and_taken_up_again(
    number: int, checkpoint_there: Hub, whole: dict[str, bytes], small_checkpoint: Path, tmp_path: Path, watch: Watch
) -> None:
    """SIGKILL while the n-th shard is on its way."""
    out, seen, there, killed = tmp_path / "out", [0], threading.Event(), threading.Event()

    def hold(method: str, path: str) -> None:
        if method == "GET" and path.startswith("/cdn/"):
            seen[0] += 1
            if seen[0] == number:
                there.set()
                killed.wait(60)

    checkpoint_there.hook = hold
    arguments = ["convert", REPO, "--out", out, "--tp", 2, "--workers", 1, "--no-keep"]
    process = child(checkpoint_there, tmp_path / "home", *arguments)
    assert there.wait(60), process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    killed.set()
    checkpoint_there.hook = lambda method, path: None
    folder = tmp_path / ".out.source"
    kept = {path.name for path in (folder / stream.WHOLE).iterdir()}
    assert convert(out, "--resume") == 0
    assert tree(out) == whole
    assert not set(watch.brought) & kept
    assert not folder.exists()


def test_a_folder_of_somebody_else_is_not_used(
    checkpoint_there: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / ".out.source" / "mine"
    mine.parent.mkdir()
    mine.write_text("mine")
    assert convert(tmp_path / "out") == 2
    assert "in the way of the shards" in capsys.readouterr().err.splitlines()[-1]
    assert mine.read_text() == "mine"


def test_a_finished_pack_fetches_no_shard(checkpoint_there: Hub, tmp_path: Path, watch: Watch) -> None:
    out = tmp_path / "out"
    assert convert(out) == 0
    count = len(watch.brought)
    assert convert(out, "--resume") == 0
    assert len(watch.brought) == count
    assert not (tmp_path / ".out.source").exists()


def flip_last(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def test_wrong_bytes_are_fetched_once_more(
    checkpoint_there: Hub, small_checkpoint: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    name = shard_names(small_checkpoint)[1]
    fault = checkpoint_there.fault("GET", f"cdn.*{name}", corrupt=flip_last, whole=True)
    assert convert(tmp_path / "out") == 0
    assert fault.met == 1
    assert tree(tmp_path / "out") == whole


def test_wrong_bytes_twice_stop_it_naming_the_file(
    checkpoint_there: Hub, small_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = shard_names(small_checkpoint)[1]
    checkpoint_there.fault("GET", f"cdn.*{name}", corrupt=flip_last, whole=True, times=2)
    assert convert(tmp_path / "out") == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(rf"{name}: arrived wrong twice \(expected sha256 \w+, found \w+\)", line), line
    assert not (tmp_path / "out" / "hybrid_pack.json").exists()


def test_a_wrong_header_or_scale_is_seen_when_the_shard_arrives(
    checkpoint_there: Hub, small_checkpoint: Path, tmp_path: Path
) -> None:
    """What was read of a stand-in, by ranges without a hash, is held against the whole file."""
    folder = tmp_path / "folder"
    supply = stream_checkpoint(REPO, None, folder)
    name = shard_names(small_checkpoint)[0]
    header = read_header(folder / name)
    tensor = next(iter(header.tensors.values()))
    supply.fetch([Located(folder / name, tensor)])
    stored = (small_checkpoint / name).read_bytes()
    assert (folder / name).read_bytes()[tensor.begin : tensor.end] == stored[tensor.begin : tensor.end]
    with (folder / name).open("r+b") as file:
        file.seek(tensor.begin)
        file.write(bytes([stored[tensor.begin] ^ 1]))
    with pytest.raises(DataError, match=rf"{name}: what was read of it before was wrong"):
        supply._bring(name, threading.Event())
    assert not supply.is_whole(name)


def test_another_revision_is_another_source(
    checkpoint_there: Hub, small_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same headers with other payload are told apart before anything is mixed."""
    out, names = tmp_path / "out", shard_names(small_checkpoint)
    checkpoint_there.fault("GET", f"cdn.*{names[-1]}", status=403, whole=True)
    assert convert(out) == 3
    changed = flip_last((small_checkpoint / names[0]).read_bytes())
    checkpoint_there.add(REPO, {names[0]: changed}, whole=False)
    capsys.readouterr()
    assert convert(out, "--resume") == 2
    assert "source" in capsys.readouterr().err.splitlines()[-1]


def test_too_little_room_for_the_shards_in_use(
    checkpoint_there: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Usage:
        free = 10_000

    monkeypatch.setattr(stream.shutil, "disk_usage", lambda path: Usage() if ".source" in str(path) else Room())
    assert convert(tmp_path / "out") == 3
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"not enough disk space for the shards that are in use at one time .*found 10,000 free", line)


class Room:
    free = 10**12


def test_a_folder_is_never_streamed(small_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["convert", str(small_checkpoint), "--out", str(tmp_path / "out"), "--no-keep"]
    assert run(arguments) == 2
    assert "--no-keep is for a checkpoint on the Hub" in capsys.readouterr().err


def test_small_tensors_that_are_near_each_other_come_together() -> None:
    gap = stream.GAP_BYTES
    assert stream._merged([(9, 12), (0, 4), (4, 8), (12 + gap, 20 + gap), (21 + 2 * gap, 30 + 2 * gap)]) == [
        (0, 20 + gap), (21 + 2 * gap, 30 + 2 * gap)
    ]  # fmt: skip


class Disk:
    """So much free on every disk."""

    def __init__(self, free: int) -> None:
        self.free = free

    def __call__(self, path: Any) -> Disk:
        return self


def free_bytes(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr("shutil.disk_usage", Disk(free))


def planned(out: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = run(["convert", REPO, "--out", str(out), "--tp", "2", "--dry-run", "--json", *more])
    return code, json.loads(capsys.readouterr().out)


def test_the_window_is_known_from_the_plan(
    hub: Hub, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a dry run says the shards in use will take is what the conversion's schedule says."""
    from hybrid_pack import plan

    write_checkpoint(tmp_path / "source", many_layers())
    hub.add(REPO, tree(tmp_path / "source"))
    monkeypatch.setattr(plan, "BASE_FILE_BYTES", 120_000)
    code, document = planned(tmp_path / "out", capsys, "--no-keep")
    room = document["source_room"]
    assert (code, room["kept"], room["where"]) == (0, False, str(tmp_path / ".out.source"))
    assert convert(tmp_path / "out") == 0
    assert room["bytes"] == watch.limit >= watch.most > 0


@pytest.mark.parametrize("more", [[], ["--no-keep"]], ids=str)
def test_the_source_and_the_pack_share_a_disk(
    more: list[str],
    checkpoint_there: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Refused, in the dry run too, before a shard is fetched: what fits alone need not fit together."""
    out = tmp_path / "out"
    code, document = planned(out, capsys, *more)
    needed, copy = document["needed_bytes"], document["source_room"]["bytes"]
    assert code == 0 and document["source_room"]["same_file_system_as_pack"]
    free_bytes(monkeypatch, needed + copy - 1)
    for dry in ([], ["--dry-run"]):
        assert run(["convert", REPO, "--out", str(out), "--tp", "2", *more, *dry]) == 3
        captured = capsys.readouterr()
        assert "not enough disk space for " in captured.err.splitlines()[-1]
        assert f"{copy:,} bytes and {needed:,} for the pack" in captured.err.splitlines()[-1]
        assert ("NOT ENOUGH" in captured.out) == bool(dry)
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.safetensors"))
    assert not list(tmp_path.iterdir())
    free_bytes(monkeypatch, needed + copy)
    assert run(["convert", REPO, "--out", str(out), "--tp", "2", *more, "--dry-run"]) == 0


def test_the_copy_in_the_cache_is_counted(
    checkpoint_there: Hub, small_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is there is not counted again."""
    _, document = planned(tmp_path / "out", capsys)
    shards = [(small_checkpoint / name).stat().st_size for name in shard_names(small_checkpoint)]
    small = sum(path.stat().st_size for path in small_checkpoint.iterdir()) - sum(shards)
    assert sum(shards) <= document["source_room"]["bytes"] <= sum(shards) + small
    huggingface_hub.hf_hub_download(REPO, shard_names(small_checkpoint)[0])
    _, less = planned(tmp_path / "out", capsys)
    assert document["source_room"]["bytes"] - less["source_room"]["bytes"] >= shards[0]
    huggingface_hub.snapshot_download(REPO)
    _, none = planned(tmp_path / "out", capsys)
    assert "source_room" not in none


def test_a_finished_pack_fetches_no_copy(
    checkpoint_there: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To say that a pack is complete takes headers alone, with --no-keep and without."""
    out = tmp_path / "out"
    assert convert(out) == 0
    assert "--source org/name  # fetches the whole source" in capsys.readouterr().out.splitlines()[-1]
    for more in ([], ["--no-keep"]):
        assert run(["convert", REPO, "--out", str(out), "--tp", "2", "--resume", *more]) == 0
        assert "is complete" in capsys.readouterr().out
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.safetensors"))


@pytest.mark.parametrize("way", ["link", "real/.."])
def test_any_way_to_the_folder(way: str, checkpoint_there: Hub, whole: dict[str, bytes], tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    out = tmp_path / way / "out"
    assert convert(out) == 0
    assert tree(out) == whole


@pytest.mark.parametrize("moment", ["copy_small_files", "write_stub", "download"])
def test_a_second_conversion_is_refused(
    moment: str, checkpoint_there: Hub, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """It has touched nothing then, whatever the first is at."""
    out, folder, real, seen = tmp_path / "out", tmp_path / ".out.source", getattr(stream, moment), []

    def files() -> dict[Path, tuple[int, int]]:
        return {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in folder.iterdir()}

    def with_another(*arguments: Any, **more: Any) -> Any:
        if not seen:
            seen.append(None)
            monkeypatch.setattr(stream, moment, real)
            before = files()
            with pytest.raises(UsageError, match="another conversion is writing here"):
                stream_checkpoint(REPO, None, folder)
            seen.append({p: was for p, was in before.items() if p.suffix == ".json" and files()[p] != was})
        return real(*arguments, **more)

    monkeypatch.setattr(stream, moment, with_another)
    assert convert(out) == 0
    assert seen == [None, {}]
    assert tree(out) == whole


def test_two_processes(checkpoint_there: Hub, tmp_path: Path) -> None:
    supply = stream_checkpoint(REPO, None, tmp_path / ".out.source")
    before = tree(supply.folder)
    process = child(checkpoint_there, tmp_path / "home", "convert", REPO, "--no-keep", "--out", tmp_path / "out")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "another conversion is writing here" in said.splitlines()[-1]
    assert tree(supply.folder) == before
    assert not (tmp_path / "out").exists()


def test_a_whole_shard_that_was_damaged_is_fetched_again(
    checkpoint_there: Hub, small_checkpoint: Path, whole: dict[str, bytes], tmp_path: Path, watch: Watch
) -> None:
    """As by a loss of power: size, time and marker are right, the bytes are not."""
    out, names = tmp_path / "out", shard_names(small_checkpoint)
    folder = tmp_path / ".out.source"
    supply = stream_checkpoint(REPO, None, folder)
    for name in names[:-1]:
        supply._bring(name, threading.Event())
    supply.release()
    for name in names[:-1]:
        status = (folder / name).stat()
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-4000] + bytes(4000))
        os.utime(folder / name, ns=(status.st_atime_ns, status.st_mtime_ns))
    watch.brought.clear()
    assert convert(out) == 0
    assert sorted(watch.brought) == names
    assert tree(out) == whole


def test_the_marker_comes_after_the_bytes_are_durable(
    checkpoint_there: Hub, small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, folder, synced = shard_names(small_checkpoint)[0], tmp_path / "folder", []
    supply = stream_checkpoint(REPO, None, folder)
    marked = (folder / stream.WHOLE / name).exists
    monkeypatch.setattr("os.fsync", lambda fd: synced.append((os.fstat(fd).st_ino, marked())))
    supply._bring(name, threading.Event())
    assert marked()
    assert ((folder / name).stat().st_ino, False) in synced
    assert (folder.stat().st_ino, False) in synced[synced.index(((folder / name).stat().st_ino, False)) :]


@pytest.mark.parametrize(
    "planted", [".arriving", "config.json", "model-00001-of-00006.safetensors", ".whole/x", ".whole", "hard", "fifo"]
)
def test_what_leads_out_of_the_folder_is_refused(
    planted: str, checkpoint_there: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, outside = tmp_path / ".out.source", tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    if planted == ".whole":
        folder.mkdir()
        (folder / planted).symlink_to(outside)
    else:
        (folder / ".whole").mkdir(parents=True)
        if planted == "hard":
            (folder / "config.json").hardlink_to(outside / "file")
        elif planted == "fifo":
            os.mkfifo(folder / "config.json")
        else:
            (folder / planted).symlink_to(outside / "new" if "." in planted[1:] else outside)
    assert convert(tmp_path / "out") == 2
    assert "in the way" in capsys.readouterr().err.splitlines()[-1]
    assert tree(outside) == {"file": b"mine"}
    assert not (tmp_path / "out").exists()


def test_dot_files_of_a_repository_are_not_taken_for_notes(
    hub: Hub, small_checkpoint: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add(REPO, {**tree(small_checkpoint), ".whole/x.json": b"{}", ".arriving/y.json": b"{}"})
    folder = tmp_path / "folder"
    stream_checkpoint(REPO, None, folder).release()
    assert list((folder / ".whole").iterdir()) == list((folder / ".arriving").iterdir()) == []
