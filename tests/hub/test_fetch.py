"""A checkpoint from a Hub on loopback, whole or its headers, with faults on the way."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.cli.main import run
from tests.hub.conftest import REPO, Client, tree
from tests.hub.server import Hub

FAULTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "none": ("GET", "never", {}),
    "commit 503": ("GET", f"/api/models/{REPO}", {"status": 503, "times": 3}),
    "listing 429": ("GET", "/tree/", {"status": 429}),
    "small file 500": ("GET", "resolve/.*/tokenizer.json", {"status": 500, "times": 2}),
    "header cut": ("GET", "cdn/.*model-00002", {"cut": 100, "times": 2}),
    "header 503": ("GET", "cdn/.*model-00003", {"status": 503, "times": 2}),
    "shard cut": ("GET", "cdn/.*model-00002", {"cut": 1000, "whole": True, "times": 2}),
    "shard 503": ("GET", "cdn/.*model-00004", {"status": 503, "whole": True, "times": 2}),
}


@pytest.fixture
def checkpoint_there(hub: Hub, small_checkpoint: Path) -> Hub:
    hub.add(REPO, tree(small_checkpoint))
    return hub


@pytest.mark.parametrize("kind", FAULTS)
def test_a_whole_checkpoint(
    kind: str, checkpoint_there: Hub, small_checkpoint: Path, tmp_path: Path, client: Client
) -> None:
    """Kept in the cache, and not asked for a second time."""
    method, path, what = FAULTS[kind]
    fault = checkpoint_there.fault(method, path, **what)
    times = fault.times if kind != "none" else 0
    assert run(["convert", REPO, "--out", str(tmp_path / "out"), "--tp", "2"]) == 0
    assert fault.met == times
    assert run(["verify", str(tmp_path / "out"), "--source", str(small_checkpoint)]) == 0
    checkpoint_there.sent.clear()
    assert run(["convert", REPO, "--out", str(tmp_path / "other")]) == 0
    assert not any(path.endswith(".safetensors") for path in checkpoint_there.sent)


@pytest.mark.parametrize("kind", [kind for kind in FAULTS if not kind.startswith("shard")])
def test_headers(
    kind: str, checkpoint_there: Hub, small_checkpoint: Path, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    method, path, what = FAULTS[kind]
    fault = checkpoint_there.fault(method, path, **what)
    times = fault.times if kind != "none" else 0
    assert run(["inspect", REPO, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert fault.met == times
    assert run(["inspect", str(small_checkpoint), "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert (found.pop("name"), expected.pop("name")) == (REPO, small_checkpoint.name)
    del found["folder"], expected["folder"]
    assert found == expected


def test_what_fits_a_pack_on_the_hub(
    remote: Hub, good_pack: Path, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    """Manifest, config and base headers are enough; no shard of experts is fetched."""
    call = ["--cards", "4x96GB", "--json"]
    assert run(["inspect", REPO, *call]) == 0
    found = json.loads(capsys.readouterr().out)["fit"]
    assert run(["inspect", str(good_pack), *call]) == 0
    assert found == json.loads(capsys.readouterr().out)["fit"]
    shards = {hashlib.sha256(path.read_bytes()).hexdigest() for path in good_pack.glob("experts/**/*.safetensors")}
    assert shards and not any(digest in path for path in remote.sent for digest in shards)


def test_a_pack_on_the_hub_without_its_base(
    hub: Hub, good_pack: Path, client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(REPO, {name: data for name, data in tree(good_pack).items() if not name.startswith("model-")})
    assert run(["inspect", REPO, "--cards", "4x96GB"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "model-00001-of-00001.safetensors: a file of base tensors is not there" in captured.err
