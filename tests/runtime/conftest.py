"""Small packs of every dialect, each converted once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.runtime.dialects import Packs


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices here are so small that waiting for a second thread takes longer than the work (20 times, measured)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Packs:
    return Packs(tmp_path_factory.mktemp("packs"))


@pytest.fixture
def copy(packs: Packs, tmp_path: Path) -> Callable[..., Path]:
    """A pack to damage."""

    def make(name: str, tp: int = 1, ep: int = 1) -> Path:
        original, out = packs.pack(name, tp, ep), tmp_path / "pack"
        for path in original.rglob("*"):
            if path.is_file():
                target = out / path.relative_to(original)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
        return out

    return make
