"""A Hub on loopback, huggingface_hub pointed at it, and no way to any other host."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http

from hybrid_pack.hub import errors
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec
from tests.checkpoints import SMALL
from tests.hub.server import Hub, serving
from tests.verify.conftest import make_pack

SECRET = "hf_secret0123456789ABCDEFGHIJ"
REPO = "org/name"


@dataclass
class Client:
    """What the client did besides its requests.

    Attributes:
        waits: Seconds it would have waited.
        hosts: Hosts it connected to.
    """

    waits: list[float] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)


@pytest.fixture(scope="session", autouse=True)
def quick_fsync() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda fd: None)
        yield


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits five minutes for what never comes."""

    def wait(seconds: float, stop: threading.Event | None = None) -> None:
        if stop is not None and stop.is_set():
            raise errors.Stopped

    monkeypatch.setattr(errors, "sleep", wait)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Client:
    """Nothing leaves loopback, nothing waits, nothing is taken from the user's cache."""
    made = Client()
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        made.hosts.add(address[0])
        assert address[0] in ("127.0.0.1", "::1"), f"another host is contacted: {address}"
        connect(self, address)

    def wait(seconds: float, stop: threading.Event | None = None) -> None:
        made.waits.append(seconds)
        if stop is not None and stop.is_set():
            raise errors.Stopped

    home = tmp_path_factory.mktemp("hf")
    monkeypatch.setattr(socket.socket, "connect", guarded)
    monkeypatch.setattr(errors, "sleep", wait)
    for module in (_http, file_download):
        real = module.time
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=wait, time=real.time, monotonic=real.monotonic))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("TMPDIR", str(home))
    monkeypatch.setattr("tempfile.tempdir", None)
    return made


@pytest.fixture
def hub(client: Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """An empty one, and the client pointed at it."""
    with serving(Hub()) as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", made.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        huggingface_hub.HfFileSystem.clear_instance_cache()  # it remembers an endpoint
        yield made
        huggingface_hub.close_session()


@pytest.fixture(scope="session")
def good_pack(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks (tp 2, ep 2), layers 3, 4 and 5; for reading only."""
    root = make_pack(small_checkpoint, tmp_path_factory.mktemp("pack") / "good", Topology(2, 2))
    (root / "README.md").write_text("---\nlibrary_name: hybrid-pack\n---\n")
    return root


@pytest.fixture(scope="session")
def other_pack(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of the same checkpoint, for one rank; for reading only."""
    return make_pack(small_checkpoint, tmp_path_factory.mktemp("other") / "pack", Topology(1, 1), layers=(3,))


@pytest.fixture
def pack(good_pack: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    root = tmp_path / "pack"
    shutil.copytree(good_pack, root)
    return root


def tree(root: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


@pytest.fixture
def remote(hub: Hub, good_pack: Path) -> Hub:
    """A Hub that has the good pack."""
    hub.add(REPO, {".gitattributes": b"*", **tree(good_pack)})
    return hub


def many_layers() -> Spec:
    """A checkpoint of nine packed layers in small shards."""
    return replace(SMALL, moe_layers=tuple(range(1, 9)), dense_layers=(0,), shard_bytes=60_000)


CHILD = """
import sys
from hybrid_pack.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


def child(hub: Hub, home: Path, *arguments: object, **more: str) -> subprocess.Popen[str]:
    """The command line in a process of its own."""
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": SECRET,
        "HF_HUB_OFFLINE": "0", **more,
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *map(str, arguments)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
