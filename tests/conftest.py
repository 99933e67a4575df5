"""Fixtures every folder uses."""

from __future__ import annotations

import shutil
from pathlib import Path

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
