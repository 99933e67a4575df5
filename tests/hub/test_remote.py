"""``hybrid-pack verify --remote``: names, sizes and the Hub's own hashes; no payload is fetched."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.cli.main import run
from hybrid_pack.errors import EnvironmentFailure
from hybrid_pack.hub import list_files, open_remote, pull, push
from hybrid_pack.io.manifest import MANIFEST
from hybrid_pack.io.remote import RemoteFile
from tests.hub.conftest import REPO, tree
from tests.hub.repository import Entry
from tests.hub.server import LFS_SUFFIXES, Hub

SHARD = "experts/tp2-ep2/rank-1/layer-004.safetensors"
Files = dict[str, Any]


def flip(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 4]) + data[-4:]


def test_names_and_sizes(remote: Hub, good_pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--remote", REPO]) == 0
    out = capsys.readouterr().out
    count = len(set(tree(good_pack)) - {MANIFEST, "README.md"})
    assert re.search(rf"checked +file set and sizes: {count} files", out)
    assert re.search(r"not checked +bytes of the files: names and sizes were compared; --against OUT compares", out)
    assert out.splitlines()[-1].startswith(f"{REPO}: nothing wrong found")
    assert set(remote.sent) == {MANIFEST}, "nothing but the manifest is fetched"


def test_every_hash_against_a_local_pack(remote: Hub, good_pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--remote", f"{REPO}@main", "--against", str(good_pack), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    check = document["checks"][-1]
    covered = {path: data for path, data in tree(good_pack).items() if path != "README.md"}
    assert (check["name"], check["count"]) == ("hashes against the local pack", len(covered))
    assert check["nbytes"] == sum(map(len, covered.values()))
    assert set(remote.sent) == {MANIFEST}


def test_against_one_rank(remote: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pull(REPO, tmp_path / "out", ranks=[1])
    capsys.readouterr()
    assert run(["verify", "--remote", REPO, "--against", str(tmp_path / "out")]) == 0
    assert re.search(r"not checked +bytes of 9 files: \S+ does not have them", capsys.readouterr().out)


DAMAGE: dict[str, tuple[Callable[[Files], None], str, str]] = {
    "missing": (lambda f: f.pop(SHARD), "", rf"{SHARD}: missing; push it again"),
    "shorter": (lambda f: f.update({SHARD: f[SHARD][:-1]}), "", rf"{SHARD}: of another size; .*expected \d+ bytes"),
    "small file missing": (lambda f: f.pop("config.json"), "", r"config\.json: missing"),
    "extra": (lambda f: f.update({"more.safetensors": b"x"}), "", r"more\.safetensors: not in the manifest; remove it"),
    "a path that leads out": (lambda f: f.update({"../EVIL": b"x"}), "", r"\.\./EVIL: not in the manifest; remove it"),
    "extra in a folder": (lambda f: f.update({"experts/.x": b"x"}), "", r"experts/\.x: not in the manifest"),
    "control characters": (
        lambda f: f.update({"a\x1b[31m\nb.bin": b"x"}), "", r"'a\\x1b\[31m\\nb\.bin': not in the manifest"
    ),
    "flipped bit": (
        lambda f: f.update({SHARD: flip(f[SHARD])}), "against",
        rf"{SHARD}: the Hub has other bytes than the local .*expected sha256 [0-9a-f]{{64}}, found [0-9a-f]{{64}}",
    ),
    "small file changed": (
        lambda f: f.update({"config.json": flip(f["config.json"])}), "against",
        r"config\.json: the Hub has other bytes .*expected git-sha1 [0-9a-f]{40}, found [0-9a-f]{40}",
    ),
    "no manifest": (lambda f: f.pop(MANIFEST), "", r"hybrid_pack\.json: the repository is not a pack: it has no manif"),
    "broken manifest": (lambda f: f.update({MANIFEST: b"{}"}), "", r"hybrid_pack\.json: not a hybrid-pack manifest"),
    "edited manifest": (
        lambda f: f.update({MANIFEST: f[MANIFEST].replace(b'"small"', b'"large"')}), "",
        r"hybrid_pack\.json: the manifest's self_digest does not match",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_wrong(case: str, hub: Hub, good_pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, against, message = DAMAGE[case]
    files: Files = tree(good_pack)
    change(files)
    hub.add(REPO, files)
    more = ["--against", str(good_pack)] if against else []
    assert run(["verify", "--remote", REPO, *more]) == 1
    captured = capsys.readouterr()
    assert re.search(rf"WRONG +{message}", captured.out), captured.out
    line = captured.err.splitlines()[-1]
    assert line.startswith(f"hybrid-pack: {REPO}: 1 finding; first: "), line
    assert "\x1b" not in captured.out + captured.err


@pytest.mark.parametrize("case", ["flipped bit", "small file changed"])
def test_bytes_are_not_compared_without_a_local_pack(
    case: str, hub: Hub, good_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the report says so."""
    files: Files = tree(good_pack)
    DAMAGE[case][0](files)
    hub.add(REPO, files)
    assert run(["verify", "--remote", REPO]) == 0
    assert "not checked  bytes of the files" in capsys.readouterr().out


def test_readme_and_dot_files_are_nobodys(hub: Hub, good_pack: Path) -> None:
    hub.add(REPO, {**tree(good_pack), "README.md": b"other", ".gitattributes": b"x", ".github/x": b"x"})
    assert run(["verify", "--remote", REPO, "--against", str(good_pack)]) == 0


def test_what_push_leaves_alone_is_named_and_no_error(
    hub: Hub, good_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The documented proof of a push passes where the repository has pictures and notes of its own."""
    hub.add(REPO, {"figure.png": b"png", "notes/x.txt": b"mine"})
    done = push(good_pack, REPO)
    assert run(["verify", "--remote", REPO, "--against", str(good_pack)]) == 0
    assert f"not checked  {', '.join(done.foreign)}: not of the pack" in capsys.readouterr().out


def test_another_pack_here(hub: Hub, good_pack: Path, small_checkpoint: Path, tmp_path: Path) -> None:
    from hybrid_pack.sharding import Topology
    from tests.verify.conftest import make_pack

    hub.add(REPO, dict(tree(good_pack)))
    other = make_pack(small_checkpoint, tmp_path / "other", Topology(1, 1))
    assert run(["verify", "--remote", REPO, "--against", str(other)]) == 1


def test_a_local_file_of_another_size(remote: Hub, pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (pack / SHARD).write_bytes(b"short")
    assert run(["verify", "--remote", REPO, "--against", str(pack)]) == 1
    assert f"{SHARD}: the local file is of another size" in capsys.readouterr().out


def test_a_local_file_that_cannot_be_read(
    remote: Hub, good_pack: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = RemoteFile.digest_of

    def digest_of(file: RemoteFile, path: Path, *more: Any) -> tuple[str, str, str]:
        if path.as_posix().endswith(SHARD):
            raise EnvironmentFailure("cannot read", where=path, found="Input/output error")
        return real(file, path, *more)

    monkeypatch.setattr(RemoteFile, "digest_of", digest_of)
    assert run(["verify", "--remote", REPO, "--against", str(good_pack)]) == 3
    assert re.search(rf"UNREAD +\S*{SHARD}: could not be read \(found Input/output error\)", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give the folder of a pack, or --remote org/name"),
        (["PACK", "--remote", REPO], 2, "give the folder of a pack, or --remote org/name"),
        (["PACK", "--against", "PACK"], 2, "--against goes with --remote"),
        (["--remote", REPO, "--quick"], 2, "--remote takes --against, --workers and --json only"),
        (["--remote", REPO, "--rank", "0"], 2, "--remote takes --against, --workers and --json only"),
        (["--remote", "noid"], 2, "noid: not a Hub id"),
        (["--remote", "nobody/nothing"], 2, "nobody/nothing: no such repository on the Hub"),
        (["--remote", f"{REPO}@nothing"], 2, f"{REPO}@nothing: no such revision"),
        (["--remote", REPO, "--against", "/nowhere"], 2, "/nowhere: no such folder"),
    ],
)
def test_usage(
    arguments: list[str], code: int, message: str, remote: Hub, good_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", *(str(good_pack) if a == "PACK" else a for a in arguments)]) == code
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("kind", [{"status": 503, "times": 3}, {"cut": 100}, {"status": 429}])
def test_a_listing_is_asked_for_again(kind: dict[str, Any], remote: Hub) -> None:
    fault = remote.fault("GET", "/tree/", **kind)
    assert run(["verify", "--remote", REPO]) == 0
    assert fault.met


def test_the_listing_is_the_servers(remote: Hub, good_pack: Path) -> None:
    """Pages are put together, and hashes are those of an independent computation."""
    files = list_files(open_remote(REPO))
    there = {**tree(good_pack), ".gitattributes": b"*"}
    assert files.keys() == there.keys()
    for path, data in there.items():
        large = path.endswith(LFS_SUFFIXES)
        assert files[path].nbytes == len(data)
        assert files[path].sha256 == (hashlib.sha256(data).hexdigest() if large else None)
        assert (files[path].git_sha1 is None) == large


@pytest.mark.parametrize("large", [True, False])
def test_digest_of(large: bool, tmp_path: Path) -> None:
    data = bytes(range(256)) * 9000
    (tmp_path / "x").write_bytes(data)
    entry = Entry(data, large)
    listed = entry.listing("x")
    file = RemoteFile("x", len(data), listed["lfs"]["oid"] if large else None, None if large else listed["oid"])
    read: list[int] = []
    _, expected, found = file.digest_of(tmp_path / "x", read.append)
    assert expected == found
    assert sum(read) == len(data)
    (tmp_path / "x").write_bytes(flip(data))
    assert file.digest_of(tmp_path / "x")[2] != expected
    shutil.rmtree(tmp_path)
    with pytest.raises(EnvironmentFailure, match="cannot read"):
        file.digest_of(tmp_path / "x")
