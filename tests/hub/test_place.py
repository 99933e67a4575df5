"""A pull's folder that somebody has tampered with, before it or during it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hybrid_pack.cli.main import run
from hybrid_pack.errors import EnvironmentFailure, HybridPackError, UsageError
from hybrid_pack.hub import pull
from hybrid_pack.hub.pull import STAGING
from hybrid_pack.hub.staging import open_staging
from hybrid_pack.io.manifest import MANIFEST
from tests.hub.conftest import REPO, tree
from tests.hub.expected import RANK, of_rank
from tests.hub.server import Hub
from tests.hub.test_hostile import with_manifest

SWAPPED = ["out/experts", "out/experts/tp2-ep2/rank-2", f"out/{STAGING}", f"out/{STAGING}/experts", "out"]


@pytest.mark.parametrize("swapped", SWAPPED)
def test_a_folder_that_becomes_a_link_during_the_pull(swapped: str, remote: Hub, tmp_path: Path) -> None:
    """Nothing gets a name outside, and no manifest says that all is well."""
    out, outside, done = tmp_path / "out", tmp_path / "outside", []
    outside.mkdir()
    (outside / "mine").write_text("mine")

    def swap(method: str, path: str) -> None:
        if method == "GET" and path.startswith("/cdn/") and not done and (tmp_path / swapped).is_dir():
            done.append(path)
            (tmp_path / swapped).rename(tmp_path / "old")
            (tmp_path / swapped).symlink_to(outside)

    remote.hook = swap
    with pytest.raises(HybridPackError):
        pull(REPO, out, ranks=[RANK], workers=1)
    assert done
    assert tree(outside) == {"mine": b"mine"}
    assert list(tmp_path.rglob(MANIFEST)) == [p for p in tmp_path.rglob(MANIFEST) if p.parent.name in (STAGING, "old")]
    assert swapped == f"out/{STAGING}" or not (tmp_path / "old" / MANIFEST).exists()


def overwrite(path: Path) -> None:
    path.write_bytes(b"{}")


def same_size_and_time(path: Path) -> None:
    status, data = path.stat(), path.read_bytes()
    path.unlink()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [overwrite, same_size_and_time, Path.unlink])
def test_a_file_changed_before_the_manifest(
    change: Callable[[Path], None], remote: Hub, good_pack: Path, tmp_path: Path
) -> None:
    out, done = tmp_path / "out", []

    def hook(method: str, path: str) -> None:
        if (out / "config.json").exists() and not done:
            (tmp_path / "keep").hardlink_to(out / "config.json") if change is same_size_and_time else None
            done.append(path)
            change(out / "config.json")

    remote.hook = hook
    with pytest.raises(EnvironmentFailure, match=r"config\.json: was changed by somebody else"):
        pull(REPO, out, ranks=[RANK], workers=1)
    assert done
    assert not (out / MANIFEST).exists()
    pull(REPO, out, ranks=[RANK])
    assert tree(out) == of_rank(good_pack, RANK)


@pytest.mark.parametrize("where", [MANIFEST, f"{STAGING}/{MANIFEST}"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "link"])
def test_a_manifest_that_is_no_file(where: str, kind: str, remote: Hub, tmp_path: Path) -> None:
    """It is not opened, for that might never end."""
    path = tmp_path / "out" / where
    path.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, 0o140600)
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(UsageError, match="in the way"):
        pull(REPO, tmp_path / "out", ranks=[RANK])


def test_a_manifest_that_is_no_file_of_a_pack(pack: Path) -> None:
    (pack / MANIFEST).unlink()
    os.mkfifo(pack / MANIFEST)
    assert run(["verify", str(pack)]) == 1


LEFT: dict[str, Callable[[Path], object]] = {
    "a folder that says incomplete": lambda staging: (staging / "x.incomplete").mkdir(),
    "a file for notes": lambda staging: (staging / ".cache").write_text("x"),
    "a folder for a file": lambda staging: (staging / "config.json" / "below").mkdir(parents=True),
    "a file for a folder": lambda staging: (staging / "experts").write_text("x"),
    "a folder for a lock": lambda s: (s / ".cache/huggingface/download/config.json.lock").mkdir(parents=True),
    "a pipe": lambda staging: os.mkfifo(staging / "config.json"),
    "a pipe for notes": lambda s: (
        (s / ".cache/huggingface/download").mkdir(parents=True),
        os.mkfifo(s / ".cache/huggingface/download/config.json.metadata"),
    ),
    "a folder for the commit": lambda staging: (staging / ".commit").mkdir(),
    "a pipe for the commit": lambda staging: os.mkfifo(staging / ".commit"),
    "a commit that is none": lambda staging: (staging / ".commit").write_text("[" * 4000),
    "a file for all": lambda staging: (shutil.rmtree(staging), staging.write_text("x")),
}


@pytest.mark.parametrize("case", LEFT)
def test_leftovers_of_another_kind(case: str, remote: Hub, good_pack: Path, tmp_path: Path) -> None:
    staging = tmp_path / "out" / STAGING
    staging.mkdir(parents=True)
    if case != "a file for all":
        (staging / MANIFEST).write_bytes((good_pack / MANIFEST).read_bytes())
    LEFT[case](staging)
    pull(REPO, tmp_path / "out", ranks=[RANK])
    assert tree(tmp_path / "out") == of_rank(good_pack, RANK)
    assert not staging.exists()


def interrupted(hub: Hub, out: Path) -> None:
    fault = hub.fault("GET", "layer-00", status=403, times=99)
    with pytest.raises(EnvironmentFailure):
        pull(REPO, out, ranks=[RANK])
    fault.times = 0


def newer(good_pack: Path) -> dict[str, bytes]:
    return with_manifest(good_pack, lambda document: document["report"].update(notes=["new"]))


def test_a_branch_that_moved_since_the_interruption(
    remote: Hub, good_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, old = tmp_path / "out", remote.add(REPO, {**tree(good_pack), "other.md": b"1"})
    interrupted(remote, out)
    new = remote.add(REPO, newer(good_pack))
    assert run(["pull", REPO, "--rank", str(RANK), "--out", str(out)]) == 0
    said = capsys.readouterr().err
    assert old[:12] in said and new[:12] in said and "goes on" in said
    assert tree(out) == of_rank(good_pack, RANK)


def test_another_revision_is_not_gone_on_with(remote: Hub, good_pack: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    interrupted(remote, out)
    new = remote.add(REPO, newer(good_pack))
    with pytest.raises(UsageError, match="another revision of it, is there"):
        pull(REPO, out, ranks=[RANK], revision=new)


def test_a_folder_of_the_pack_that_says_incomplete(tmp_path: Path) -> None:
    (tmp_path / "x.incomplete").mkdir()
    (tmp_path / "x.incomplete" / "y").write_text("y")
    (tmp_path / "z.incomplete").write_text("z")
    open_staging(tmp_path, ["x.incomplete/y"])
    assert tree(tmp_path) == {"x.incomplete/y": b"y"}
