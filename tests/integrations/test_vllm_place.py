"""Another pack in the place of the one that is served."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import hybrid_pack
from hybrid_pack.errors import HybridPackError
from hybrid_pack.integrations.vllm import place
from hybrid_pack.integrations.vllm.folder import Folder
from hybrid_pack.integrations.vllm.place import Place
from hybrid_pack.io.manifest import MANIFEST, encode_manifest
from tests.hub.conftest import REPO
from tests.hub.server import Hub


def placed(root: Path) -> Place:
    return Place(Folder(root), hybrid_pack.open_pack(root).manifest.self_digest)


def other_manifest(root: Path) -> bytes:
    """As of another conversion of the same model."""
    document = hybrid_pack.open_pack(root).manifest.model_dump(mode="json", by_alias=True, exclude={"self_digest"})
    document["created_by"] = {**document["created_by"], "version": "0.0.1"}
    return encode_manifest(document)


def test_the_same_pack_is_the_same_wherever_its_files_lie(good_pack: Path, tmp_path: Path) -> None:
    root = tmp_path / "pack"
    shutil.copytree(good_pack, root)
    at = placed(root)
    assert at.other() is None
    shutil.rmtree(root)
    shutil.copytree(good_pack, root)
    assert at.other() is None


def test_the_manifest_is_read_once_while_its_file_stays(good_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at, reads = placed(good_pack), []
    read = place.read_manifest
    monkeypatch.setattr(place, "read_manifest", lambda root: reads.append(root) or read(root))
    for _ in range(3):
        assert at.other() is None
    assert len(reads) == 1


@pytest.mark.parametrize("looked_before", [False, True])
def test_another_pack_at_the_same_path_is_told(looked_before: bool, good_pack: Path, tmp_path: Path) -> None:
    root = tmp_path / "pack"
    shutil.copytree(good_pack, root)
    at = placed(root)
    if looked_before:
        assert at.other() is None
    time = (root / MANIFEST).stat().st_mtime_ns
    (root / MANIFEST).write_bytes(other_manifest(root))
    os.utime(root / MANIFEST, ns=(time, time))
    now = hybrid_pack.open_pack(root).manifest.self_digest
    assert at.other() == (at.digest, now) and now != at.digest
    assert at.other() is not None, "and not only once"


def test_a_place_without_a_pack_is_told(good_pack: Path, tmp_path: Path) -> None:
    root = tmp_path / "pack"
    shutil.copytree(good_pack, root)
    at = placed(root)
    assert at.other() is None
    shutil.rmtree(root)
    with pytest.raises(HybridPackError):
        at.other()


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_commit_that_vllm_fetched_since_is_told(revision: str | None, remote: Hub) -> None:
    folder = Folder.find(REPO, revision, None)
    assert folder.repo is not None
    at = Place(folder, hybrid_pack.open_pack(folder.root).manifest.self_digest)
    assert at.other() is None
    ref = folder.root.parents[1] / "refs" / "main"
    assert ref.read_text() == folder.repo[1], "huggingface_hub's cache is as it was"
    ref.write_text("0" * 40)
    assert at.other() == (f"commit {folder.repo[1]}", "commit " + "0" * 40)


def test_a_commit_that_was_asked_for_by_name_stays(remote: Hub) -> None:
    commit = Folder.find(REPO, None, None).repo
    assert commit is not None
    folder = Folder.find(REPO, commit[1], None)
    (folder.root.parents[1] / "refs" / "main").write_text("0" * 40)
    assert Place(folder, hybrid_pack.open_pack(folder.root).manifest.self_digest).other() is None
