"""A repository that means harm: whatever its manifest or its listing says, nothing is written outside the folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_pack.errors import DataError, HybridPackError, UsageError
from hybrid_pack.hub import fetch_headers, list_files, open_remote, pull
from hybrid_pack.hub.listing import MAX_MANIFEST_BYTES
from hybrid_pack.hub.pull import STAGING
from hybrid_pack.io.digest import blake3_digest
from hybrid_pack.io.manifest import MANIFEST, encode_manifest
from tests.hub.conftest import REPO, tree
from tests.hub.repository import Entry
from tests.hub.server import Hub

PAYLOAD = b"owned"
Document = dict[str, Any]


def with_manifest(good_pack: Path, change: Callable[[Document], None]) -> dict[str, bytes]:
    """The pack's files, its manifest changed and sealed again as an attacker would."""
    files = tree(good_pack)
    document = json.loads(files[MANIFEST])
    del document["self_digest"]
    change(document)
    return {**files, MANIFEST: encode_manifest(document)}


def add_file(path: str) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        document["files"].append({"path": path, "bytes": len(PAYLOAD), "digest": blake3_digest(PAYLOAD)})

    return change


def everything(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*")}


HOSTILE_PATHS = [
    "../evil", "a/../../evil", "/tmp/evil", "./evil", "a//evil", "a/./evil", "evil/", "..", ".", "", "~/../evil\\..\\x",
    "C:evil", "C:\\evil", "a\\..\\evil", "a\nb", "a\0b", "x" * 2000, ".git/config", ".cache/huggingface/x",
    f"{STAGING}/x", "HYBRID_PACK.json", "Hybrid_Pack.JSON", "hybrid_pack.json", "readme.MD", "README.md", "CONFIG.JSON",
    "config.json", "\uff43onfig.json", "con\ufb01g.json", "cafe\u0301.txt", "experts/tp2-ep2/rank-9/x",
    "EXPERTS/x", "a.partial", "tokenizer.json/evil", "hybrid_pack.json/x", "README.md/x", "experts", "a" * 241,
    "TOKENIZER.json/x", "a.partial/x",
]  # fmt: skip


@pytest.mark.parametrize("path", HOSTILE_PATHS, ids=ascii)
@pytest.mark.parametrize("among", ["files", "base"])
def test_a_hostile_path_in_the_manifest(among: str, path: str, hub: Hub, good_pack: Path, tmp_path: Path) -> None:
    """It is refused when the manifest is read, before anything is written."""

    def change(document: Document) -> None:
        entry = {"path": path, "bytes": len(PAYLOAD), "digest": blake3_digest(PAYLOAD)}
        (document["files"] if among == "files" else document["base"]["files"]).append(entry)

    hub.add(REPO, {**with_manifest(good_pack, change), path: PAYLOAD})
    out = tmp_path / "there" / "out"
    out.parent.mkdir()
    with pytest.raises(DataError):
        pull(REPO, out, ranks=[2])
    assert everything(tmp_path) == {"there"}


@pytest.mark.parametrize("value", ["../../evil", "/etc/evil", "experts/tp2-ep2/rank-2/../../../../evil"])
def test_a_shard_has_the_one_path_it_may_have(value: str, hub: Hub, good_pack: Path, tmp_path: Path) -> None:
    def change(document: Document) -> None:
        document["shards"][2]["path"] = value

    hub.add(REPO, with_manifest(good_pack, change))
    with pytest.raises(DataError):
        pull(REPO, tmp_path / "out", ranks=[2])
    assert everything(tmp_path) == set()


NUMBERS: list[tuple[tuple[Any, ...], Any]] = [
    (("files", 0, "bytes"), 2**63),
    (("files", 0, "bytes"), -1),
    (("files", 0, "bytes"), 1e30),
    (("files", 0, "bytes"), 2**62),
    (("shards", 0, "bytes"), 2**62),
    (("geometry", "num_experts"), 2**31 - 1),
    (("geometry", "hidden_size"), 2**31 - 1),
    (("topology", "tensor_parallel"), 2**31 - 1),
    (("topology", "expert_parallel"), 2**30),
    (("shards", 0, "tensors", "kept.w13", "end"), 2**63 - 1),
    (("shards", 0, "tensors", "kept.w13", "shape"), [2**62, 2**62]),
    (("shards", 0, "rank"), 2**62),
]


@pytest.mark.parametrize(("where", "value"), NUMBERS, ids=str)
def test_huge_numbers(where: tuple[Any, ...], value: Any, hub: Hub, good_pack: Path, tmp_path: Path) -> None:
    """Refused quickly, and nothing is allocated, reserved or written for them."""

    def change(document: Document) -> None:
        at = document
        for key in where[:-1]:
            at = at[key]
        at[where[-1]] = value

    hub.add(REPO, with_manifest(good_pack, change))
    with pytest.raises(DataError):
        pull(REPO, tmp_path / "out", ranks=[2])
    assert everything(tmp_path) == set()


def test_a_manifest_that_is_too_large_is_not_fetched(hub: Hub, good_pack: Path, tmp_path: Path) -> None:
    large = Entry(b"{}", False, listed_bytes=MAX_MANIFEST_BYTES + 1)
    hub.add(REPO, {**tree(good_pack), MANIFEST: large})
    with pytest.raises(DataError, match=r"too large for a manifest \(found 67108865 bytes\)"):
        pull(REPO, tmp_path / "out")
    assert not hub.sent


def test_a_manifest_that_is_larger_than_listed(hub: Hub, good_pack: Path, tmp_path: Path) -> None:
    files = tree(good_pack)
    hub.add(REPO, {**files, MANIFEST: Entry(files[MANIFEST] + b" " * 5000, False, listed_bytes=len(files[MANIFEST]))})
    with pytest.raises(DataError, match="more bytes come than the file has"):
        pull(REPO, tmp_path / "out")
    assert everything(tmp_path) == set()


def answer(document: Any) -> Callable[[bytes], bytes]:
    return lambda _: json.dumps(document).encode()


def changed(change: Callable[[list[Document]], None]) -> Callable[[bytes], bytes]:
    def corrupt(body: bytes) -> bytes:
        document = json.loads(body)
        change(document)
        return json.dumps(document).encode()

    return corrupt


LISTINGS: dict[str, tuple[Callable[[list[Document]], None], str]] = {
    "negative size": (lambda d: d[0].update(size=-1), "the Hub lists a file that cannot be"),
    "size of text": (lambda d: d[0].update(size="9"), "the Hub lists a file that cannot be"),
    "size of a truth": (lambda d: d[0].update(size=True), "the Hub lists a file that cannot be"),
    "huge size": (lambda d: d[0].update(size=2**63), "the Hub lists a file that cannot be"),
    "no hash": (lambda d: d[0].update(oid="../../evil"), "the Hub lists a hash that is none"),
    "hash of a number": (lambda d: d[0].update(oid=5), "the Hub lists a hash that is none"),
    "twice": (lambda d: d.append(d[0]), "the Hub lists a file twice"),
}


@pytest.mark.parametrize("case", LISTINGS)
def test_a_hostile_answer_about_files(case: str, remote: Hub, tmp_path: Path) -> None:
    change, message = LISTINGS[case]
    remote.fault("POST", "paths-info", corrupt=changed(change), after=1)
    with pytest.raises(DataError, match=message):
        pull(REPO, tmp_path / "out", ranks=[2])
    assert everything(tmp_path) == set()


def test_answers_that_were_not_asked_for_are_left_out(remote: Hub, tmp_path: Path) -> None:
    evil = {"type": "file", "path": "../evil", "size": -5, "oid": "x"}
    remote.fault("POST", "paths-info", corrupt=changed(lambda d: d.append(evil)), times=9)
    pull(REPO, tmp_path / "out", ranks=[2])
    assert {path.split("/")[0] for path in everything(tmp_path)} == {"out"}


@pytest.mark.parametrize("sha", ["../../evil", "main", "0" * 39, 5, None])
def test_a_commit_that_is_none(sha: Any, remote: Hub, tmp_path: Path) -> None:
    remote.fault("GET", f"/api/models/{REPO}$", corrupt=answer({"id": REPO, "sha": sha}))
    with pytest.raises(DataError, match="the Hub names a commit that is none"):
        pull(REPO, tmp_path / "out")
    assert everything(tmp_path) == set()


def test_a_listing_is_bounded(remote: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from hybrid_pack.hub import listing

    monkeypatch.setattr(listing, "MAX_FILES", 10)
    with pytest.raises(DataError, match="the repository has too many files"):
        list_files(open_remote(REPO))


LINKS: dict[str, Callable[[Path, Path], None]] = {
    "the folder of the experts": lambda out, outside: (out / "experts").symlink_to(outside),
    "a small file": lambda out, outside: (out / "config.json").symlink_to(outside / "config.json"),
    "a small file that is there": lambda out, outside: (out / "tokenizer.json").symlink_to(outside / "file"),
    "a shard": lambda out, outside: deep(out).symlink_to(outside / "shard"),
    "the staging folder": lambda out, outside: (out / STAGING).symlink_to(outside),
    "the manifest": lambda out, outside: (out / MANIFEST).symlink_to(outside / "manifest"),
}


def deep(out: Path) -> Path:
    path = out / "experts" / "tp2-ep2" / "rank-2" / "layer-004.safetensors"
    path.parent.mkdir(parents=True)
    return path


@pytest.mark.parametrize("case", LINKS)
def test_links_that_lead_out(case: str, remote: Hub, good_pack: Path, tmp_path: Path) -> None:
    """Of an earlier pull that somebody has tampered with."""
    out, outside = tmp_path / "out", tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("mine")
    out.mkdir()
    if case not in ("the manifest", "the staging folder"):
        (out / STAGING).mkdir()
        (out / STAGING / MANIFEST).write_bytes((good_pack / MANIFEST).read_bytes())
    LINKS[case](out, outside)
    with pytest.raises(UsageError, match="in the way"):
        pull(REPO, out, ranks=[2])
    assert tree(outside) == {"file": b"mine"}


def test_a_link_inside_the_staging_folder_is_not_followed(remote: Hub, good_pack: Path, tmp_path: Path) -> None:
    out, outside = tmp_path / "out", tmp_path / "outside"
    outside.mkdir()
    (out / STAGING).mkdir(parents=True)
    (out / STAGING / MANIFEST).write_bytes((good_pack / MANIFEST).read_bytes())
    (out / STAGING / "experts").symlink_to(outside)
    (out / STAGING / ".cache").symlink_to(outside)
    pull(REPO, out, ranks=[2])
    assert everything(outside) == set()


@pytest.mark.parametrize("path", ["../evil.json", "/tmp/hybrid-pack-evil.json", "a/../../evil.json", "..\\evil.json"])
def test_a_hostile_listing_of_a_checkpoint(path: str, hub: Hub, small_checkpoint: Path, tmp_path: Path) -> None:
    """What ``inspect`` and ``convert`` fetch by the repository's own list."""
    hub.add(REPO, {**tree(small_checkpoint), path: PAYLOAD})
    folder = tmp_path / "there" / "folder"
    folder.mkdir(parents=True)
    try:
        fetch_headers(REPO, None, folder)
    except HybridPackError as error:
        assert error.exit_code in (1, 2, 3)
    written = [p for p in tmp_path.rglob("*") if p.is_file() and p.read_bytes() == PAYLOAD]
    assert [p for p in written if folder not in p.parents] == []
    assert not Path("/tmp/hybrid-pack-evil.json").exists()


NAME = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"]) | st.sampled_from("./\\:~ %#?&[]*"), min_size=1, max_size=30
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(NAME | st.sampled_from(["..", ".", "", "config.json", "experts"]), min_size=1, max_size=3))
def test_any_path(parts: list[str], hub: Hub, good_pack: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """It is written at exactly its place below the folder, or nothing is."""
    path = "/".join(parts)
    hub.add(REPO, {**with_manifest(good_pack, add_file(path)), path: PAYLOAD})
    root = tmp_path_factory.mktemp("any")
    out = root / "there" / "out"
    out.parent.mkdir()
    try:
        pull(REPO, out, ranks=[2], experts_only=True)
    except HybridPackError:
        assert not (out / MANIFEST).exists()
    else:
        assert (out / path).read_bytes() == PAYLOAD
        assert tree(out)[path] == PAYLOAD
    assert {re.sub(r"(there/out)/.*", r"\1", p, flags=re.S) for p in everything(root)} <= {"there", "there/out"}
