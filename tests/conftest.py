"""Fixtures every folder uses."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.synthetic import write_checkpoint
from tests.checkpoints import SMALL


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good small checkpoint, for reading only."""
    root = tmp_path_factory.mktemp("source") / "small"
    write_checkpoint(root, SMALL)
    return root


@pytest.fixture
def checkpoint(small_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the small checkpoint to break."""
    root = tmp_path / "small"
    shutil.copytree(small_checkpoint, root)
    return root


@pytest.fixture(scope="session", autouse=True)
def no_network() -> Iterator[None]:
    """No test reaches another host, by whatever library."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            assert address[0].startswith("127.") or address[0] in ("::1", "localhost"), f"another host: {address}"
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Without a CUDA device, tests marked ``gpu`` are skipped, or fail where HYBRID_PACK_REQUIRE_GPU=1."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        if os.environ.get("HYBRID_PACK_REQUIRE_GPU") == "1":
            pytest.fail("HYBRID_PACK_REQUIRE_GPU=1, but there is no CUDA device", pytrace=False)
        pytest.skip("no CUDA device")
