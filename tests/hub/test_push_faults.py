"""``hybrid-pack push`` where the Hub fails, forgets or changes on the way: tried again, or what arrived is kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.cli.main import run
from hybrid_pack.errors import DataError
from hybrid_pack.hub import push
from hybrid_pack.io.manifest import MANIFEST
from tests.hub.conftest import REPO, Client, tree
from tests.hub.expected import check_history, on_hub
from tests.hub.server import LFS_SUFFIXES, Hub

FAULTS: dict[str, dict[str, Any]] = {
    "429": {"status": 429, "headers": {"Retry-After": "11"}},
    "503 often": {"status": 503, "times": 4},
    "500": {"status": 500},
    "cut": {"cut": 20},
    "answer lost": {"lost": True},
}
PLACES = {
    "look": ("GET", f"/api/models/{REPO}"),
    "create": ("POST", "/api/repos/create"),
    "listing": ("GET", "/tree/"),
    "preupload": ("POST", "/preupload/"),
    "batch": ("POST", "/objects/batch"),
    "file": ("PUT", "/lfs/"),
    "part": ("PUT", r"/lfs/\w+/4"),
    "complete": ("POST", "/complete"),
    "verify": ("POST", "/verify"),
    "commit": ("POST", "/commit/"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", FAULTS)
def test_what_may_pass_is_tried_again(kind: str, place: str, hub: Hub, good_pack: Path, client: Client) -> None:
    method, path = PLACES[place]
    fault = hub.fault(method, path, **FAULTS[kind])
    times = fault.times
    push(good_pack, REPO)
    assert fault.met == times
    assert on_hub(hub) == tree(good_pack)
    check_history(hub)
    assert client.waits
    if kind == "429":
        assert max(client.waits) >= 11


@pytest.mark.parametrize("place", ["preupload", "batch", "part", "complete", "commit"])
def test_what_does_not_pass_ends_it_and_the_rest_is_sent_later(
    place: str, hub: Hub, good_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    method, path = PLACES[place]
    fault = hub.fault(method, path, status=503, times=999)
    assert run(["push", str(good_pack), REPO]) == 3
    assert re.search(rf"hybrid-pack: {REPO}: cannot send \((found|expected) ", capsys.readouterr().err.splitlines()[-1])
    assert MANIFEST not in hub.files(REPO)
    fault.times = 0
    before, sent = hub.received_bytes, {oid: len(data) for oid, data in hub.blobs.items()}
    assert run(["push", str(good_pack), REPO]) == 0
    assert on_hub(hub) == tree(good_pack)
    large = sum(len(data) for path, data in tree(good_pack).items() if path.endswith(LFS_SUFFIXES))
    assert hub.received_bytes - before == large - sum(sent.values()), "what the Hub had is not sent again"


def test_a_file_the_hub_leaves_out_is_noticed(hub: Hub, good_pack: Path) -> None:
    """A .gitignore of the repository makes huggingface_hub skip files without an error."""
    hub.ignored.add("tokenizer.json")
    with pytest.raises(DataError, match=r"tokenizer\.json: the Hub does not have a file that was sent .*\.gitignore"):
        push(good_pack, REPO)


def test_a_pack_that_changes_meanwhile_gets_no_manifest(hub: Hub, good_pack: Path) -> None:
    """Its bytes went after verify had read them; a manifest would describe others."""

    def hook(method: str, path: str) -> None:
        if method == "POST" and "/commit/" in path:
            (good_pack / "tokenizer.json").touch()

    hub.hook = hook
    with pytest.raises(DataError, match=r"tokenizer\.json: a file of the pack changed while it was sent"):
        push(good_pack, REPO)
    hub.hook = lambda method, path: None
    assert MANIFEST not in hub.files(REPO)
    push(good_pack, REPO)
    assert MANIFEST in hub.files(REPO)


def test_another_manifest_that_came_meanwhile_is_noticed(hub: Hub, good_pack: Path) -> None:
    commits: list[str] = []

    def hook(method: str, path: str) -> None:
        if method == "POST" and "/commit/" in path:
            commits.append(path)
        elif method == "GET" and len(commits) == 2:
            commits.append("other")
            hub.add(REPO, {MANIFEST: (good_pack / MANIFEST).read_bytes()[::-1]}, whole=False)

    hub.hook = hook
    with pytest.raises(DataError, match=r"hybrid_pack\.json: another manifest than was sent is on the Hub"):
        push(good_pack, REPO)


@pytest.mark.parametrize("status", [401, 403])
def test_no_permission(status: int, hub: Hub, good_pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.fault("POST", "/api/repos/create", status=status, times=9)
    assert run(["push", str(good_pack), REPO]) == 3
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"log in with `hf auth login`", line), line
