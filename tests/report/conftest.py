"""Real packs of the three formats, for reading only, and their sources."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_pack.synthetic import Spec, write_checkpoint
from tests.convert.support import pack

SPEC = Spec(hidden=256, intermediate=256, num_experts=8, kept=3, vocab=16)


@pytest.fixture(scope="session", autouse=True)
def quick_fsync() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda fd: None)
        yield


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report") / "source"
    write_checkpoint(root, SPEC)
    return root


@pytest.fixture(scope="session")
def packed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For tp 2; layers 3 and 4, and the MTP layer 5."""
    out = tmp_path_factory.mktemp("report") / "pack"
    pack(source, out, 2)
    return out


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    """A pack to break."""
    return Path(shutil.copytree(packed, tmp_path / "pack"))
