"""``hybrid-pack pull`` where the Hub, the disk or the user ends it on the way, or the bytes are wrong."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from hybrid_pack import open_pack
from hybrid_pack.cli.main import run
from hybrid_pack.errors import DataError, EnvironmentFailure
from hybrid_pack.hub import pull
from hybrid_pack.hub.pull import STAGING
from hybrid_pack.io.manifest import MANIFEST
from hybrid_pack.verify import verify_pack
from tests.hub.conftest import REPO, Client, child, tree
from tests.hub.expected import RANK, a_shard, of_rank
from tests.hub.repository import Entry
from tests.hub.server import Hub


def flip(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 4]) + data[-4:]


FAULTS: dict[str, dict[str, Any]] = {
    "429": {"status": 429, "headers": {"Retry-After": "7"}},
    "500": {"status": 500},
    "503": {"status": 503, "times": 3},
    "504 often": {"status": 504, "times": 5},
    "cut at once": {"cut": 0},
    "cut in the middle": {"cut": 1000, "times": 3},
}
PLACES = {
    "commit": ("GET", f"/api/models/{REPO}"),
    "sizes": ("POST", "paths-info"),
    "manifest": ("GET", "resolve/.*/hybrid_pack.json"),
    "small file": ("GET", "resolve/.*/tokenizer.json"),
    "where a shard is": ("HEAD", "resolve/.*/rank-2/layer-004"),
    "shard": ("GET", "cdn/.*/rank-2/layer-004"),
    "base file": ("GET", "cdn/.*model-00001"),
}

LARGE = ("manifest", "shard", "base file")


@pytest.mark.parametrize(
    ("kind", "place"),
    [(kind, place) for kind in FAULTS for place in PLACES if kind != "cut in the middle" or place in LARGE],
)
def test_what_may_pass_is_tried_again(
    kind: str, place: str, remote: Hub, good_pack: Path, tmp_path: Path, client: Client
) -> None:
    method, path = PLACES[place]
    fault = remote.fault(method, path, **FAULTS[kind])
    times = fault.times
    pull(REPO, tmp_path / "out", ranks=[RANK])
    assert tree(tmp_path / "out") == of_rank(good_pack, RANK)
    assert fault.met == times
    assert client.waits or place == "where a shard is", "it waited before it asked again"
    if kind == "429" and client.waits:
        assert max(client.waits) >= 7, "as long as the Hub asked for"


def test_a_cut_download_goes_on_where_it_was(
    remote: Hub, good_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # what arrived of a chunk is lost
    size = len(tree(good_pack)["model-00001-of-00001.safetensors"])
    remote.fault("GET", "cdn/.*model-00001", cut=size // 2)
    pull(REPO, tmp_path / "out", ranks=[RANK])
    assert tree(tmp_path / "out") == of_rank(good_pack, RANK)
    assert size <= remote.sent["model-00001-of-00001.safetensors"] <= size + 10_000


WRONG: dict[str, Callable[[bytes], bytes]] = {
    "flipped bit": flip,
    "zeros": lambda data: bytes(len(data)),
    "of another file": lambda data: data[1:] + data[:1],
}


@pytest.mark.parametrize("path", ["cdn/.*/rank-2/layer-003", "cdn/.*model-00001", "resolve/.*/tokenizer.json"])
@pytest.mark.parametrize("kind", WRONG)
def test_wrong_bytes_once(
    kind: str, path: str, remote: Hub, good_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = remote.fault("GET", path, corrupt=WRONG[kind])
    assert run(["pull", REPO, "--rank", "2", "--out", str(tmp_path / "out")]) == 0
    assert fault.met == 1
    assert tree(tmp_path / "out") == of_rank(good_pack, RANK)
    assert "arrived wrong" in capsys.readouterr().err


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_bytes_twice(
    kind: str, remote: Hub, good_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, name = tmp_path / "out", a_shard(good_pack)
    fault = remote.fault("GET", f"cdn/.*{name}", corrupt=WRONG[kind], times=2)
    assert run(["pull", REPO, "--rank", "2", "--out", str(out)]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(rf"org/name: {name}: arrived wrong twice: ", line), line
    found = tree(out)
    assert name not in found and MANIFEST not in found
    expected = of_rank(good_pack, RANK)
    whole = {path.removeprefix(f"{STAGING}/"): data for path, data in found.items() if path.endswith(".safetensors")}
    assert name not in whole, "another one that had just arrived may wait there"
    assert all(expected[path] == data for path, data in whole.items())
    assert all(found[path] == expected[path] for path in found if not path.startswith(STAGING))
    assert fault.times == 0
    assert run(["pull", REPO, "--rank", "2", "--out", str(out)]) == 0
    assert tree(out) == expected


def test_a_damaged_pack_on_the_hub(hub: Hub, good_pack: Path, tmp_path: Path) -> None:
    name = a_shard(good_pack)
    files = tree(good_pack)
    hub.add(REPO, {**files, name: flip(files[name])})
    with pytest.raises(DataError, match=rf"{name}: arrived wrong twice: tail\.\w+ has digest .*Try later.*--against"):
        pull(REPO, tmp_path / "out", ranks=[RANK])
    assert not (tmp_path / "out" / MANIFEST).exists()
    pull(REPO, tmp_path / "other", ranks=[0])
    assert verify_pack(tmp_path / "other", rank=0).ok


@pytest.mark.parametrize(
    ("change", "found"),
    [(lambda data: data + b"x", r"\d+ bytes"), (lambda data: data[:-1], r"\d+ bytes"), (None, "no such file")],
)
def test_sizes_are_seen_before_anything_is_fetched(
    change: Callable[[bytes], bytes] | None, found: str, hub: Hub, good_pack: Path, tmp_path: Path
) -> None:
    name, files = a_shard(good_pack), tree(good_pack)
    data = files.pop(name)
    hub.add(REPO, files if change is None else {**files, name: change(data)})
    with pytest.raises(DataError, match=rf"{name}: the repository does not have a file as .*found {found}\)"):
        pull(REPO, tmp_path / "out", ranks=[RANK])
    assert set(hub.sent) == {MANIFEST}
    assert not (tmp_path / "out").exists()
    pull(REPO, tmp_path / "out", ranks=[0])


@pytest.mark.parametrize("extra", [1, 100_000])
def test_more_bytes_than_were_announced(extra: int, hub: Hub, good_pack: Path, tmp_path: Path) -> None:
    """A server that does not stop sending fills no disk."""
    name, files = a_shard(good_pack), tree(good_pack)
    long = Entry(files[name] + bytes(extra), True, listed_bytes=len(files[name]))
    hub.add(REPO, {**files, name: long})
    with pytest.raises(DataError, match=rf"{name}: arrived wrong twice: more than its \d+ bytes came"):
        pull(REPO, tmp_path / "out", ranks=[RANK])
    assert name not in tree(tmp_path / "out")


def test_fewer_bytes_than_were_announced(hub: Hub, good_pack: Path, tmp_path: Path) -> None:
    name, files = a_shard(good_pack), tree(good_pack)
    short = Entry(files[name][:-10], True, listed_bytes=len(files[name]))
    hub.add(REPO, {**files, name: short})
    with pytest.raises(EnvironmentFailure, match=rf"{name}: cannot fetch \(found Consistency check failed"):
        pull(REPO, tmp_path / "out", ranks=[RANK])
    assert name not in tree(tmp_path / "out")


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("status", [403, 503])
def test_finished_files_are_kept(
    status: int, workers: int, remote: Hub, good_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It fails for good, and goes on when the Hub is well again."""
    out, expected = tmp_path / "out", of_rank(good_pack, RANK)
    fault = remote.fault("GET", f"cdn.*{a_shard(good_pack)}", status=status, times=99)
    arguments = ["pull", REPO, "--rank", "2", "--out", str(out), "--workers", str(workers)]
    assert run(arguments) == 3
    assert "hybrid-pack: org/name@" in capsys.readouterr().err.splitlines()[-1]
    kept = {path: data for path, data in tree(out).items() if not path.startswith(STAGING)}
    assert kept and MANIFEST not in kept
    assert all(expected[path] == data for path, data in kept.items())
    with pytest.raises(DataError, match="not a pack"):
        open_pack(out)
    fault.times = 0
    remote.sent.clear()
    assert run(arguments) == 0
    assert tree(out) == expected
    assert not set(remote.sent) & set(kept), "nothing is fetched twice"


def test_what_is_there_is_not_taken_on_trust(remote: Hub, good_pack: Path, tmp_path: Path) -> None:
    """A file with the right name and size and wrong bytes is replaced."""
    out, name = tmp_path / "out", a_shard(good_pack)
    pull(REPO, out, ranks=[RANK])
    (out / name).write_bytes(flip((out / name).read_bytes()))
    done = pull(REPO, out, ranks=[RANK])
    assert done.replaced == (name,)
    assert tree(out) == of_rank(good_pack, RANK)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_killed_and_taken_up_again(number: int, remote: Hub, good_pack: Path, tmp_path: Path) -> None:
    """SIGKILL when the n-th large file is half way."""
    out, expected = tmp_path / "out", of_rank(good_pack, RANK)
    seen, half_way, killed = [0], threading.Event(), threading.Event()
    fault = remote.fault("GET", "cdn/", cut=10_000, after=number - 1)

    def hold(method: str, path: str) -> None:
        if method == "GET" and path.startswith("/cdn/"):
            seen[0] += 1
            if seen[0] == number + 1:  # the cut one is asked for again: part of it has been written
                half_way.set()
                killed.wait(60)

    remote.hook = hold
    process = child(remote, tmp_path / "home", "pull", REPO, "--rank", RANK, "--out", out, "--workers", 1)
    assert half_way.wait(60), process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    killed.set()
    assert fault.met == 1
    left = {path: data for path, data in tree(out).items() if not path.startswith(STAGING)}
    assert all(expected[path] == data for path, data in left.items()) and MANIFEST not in left
    assert any(path.name.endswith(".incomplete") for path in (out / STAGING).rglob("*"))
    remote.hook = lambda method, path: None
    remote.sent.clear()
    pull(REPO, out, ranks=[RANK])
    assert tree(out) == expected
    assert not set(remote.sent) & set(left)
    assert not (out / STAGING).exists()


def test_offline_is_said_at_once(remote: Hub, tmp_path: Path) -> None:
    """No try is made, and none again."""
    process = child(remote, tmp_path / "home", "pull", REPO, "--out", tmp_path / "out", HF_HUB_OFFLINE="1")
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 3 and stdout == ""
    assert "not reachable on the Hub" in stderr and "HF_HUB_OFFLINE" in stderr and "trying again" not in stderr
    assert len(stderr.splitlines()) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted(number: signal.Signals, code: int, remote: Hub, good_pack: Path, tmp_path: Path) -> None:
    out, held, go = tmp_path / "out", threading.Event(), threading.Event()

    def hold(method: str, path: str) -> None:
        if method == "GET" and path.startswith("/cdn/"):
            held.set()
            go.wait(60)

    remote.hook = hold
    process = child(remote, tmp_path / "home", "pull", REPO, "--rank", RANK, "--out", out)
    assert held.wait(60), process.communicate()
    process.send_signal(number)
    go.set()
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (code, "")
    assert stderr.splitlines()[-1] == "hybrid-pack: interrupted; finished files are kept: run it again"
    pull(REPO, out, ranks=[RANK])
    assert tree(out) == of_rank(good_pack, RANK)


def test_too_little_room_is_seen_before(
    remote: Hub, good_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 123_456

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage())
    needed = sum(len(data) for path, data in of_rank(good_pack, RANK).items() if path != MANIFEST)
    with pytest.raises(EnvironmentFailure, match=rf"not enough disk space \(expected {needed:,} bytes, found 123,456"):
        pull(REPO, tmp_path / "out", ranks=[RANK])
    assert set(remote.sent) == {MANIFEST}


def test_a_disk_that_is_full(
    remote: Hub, good_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import file_download

    out, real, calls = tmp_path / "out", file_download.http_get, [0]

    def full(url: str, file: Any, **options: Any) -> None:
        calls[0] += 1
        if calls[0] > 5:  # the manifest, and some files
            file.write(b"half of it")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(url, file, **options)

    with monkeypatch.context() as patch:
        patch.setattr(file_download, "http_get", full)
        assert run(["pull", REPO, "--rank", "2", "--out", str(out), "--workers", "1"]) == 3
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"the disk is full \(found No space left on device\); make room and run the same command", line)
    kept = {path for path in tree(out) if not path.startswith(STAGING)}
    assert len(kept) == 4
    remote.sent.clear()
    pull(REPO, out, ranks=[RANK])
    assert tree(out) == of_rank(good_pack, RANK)
    assert not set(remote.sent) & kept
