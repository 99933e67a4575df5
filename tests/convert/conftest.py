"""Small sources and packs, each made once a session."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.synthetic import Spec, write_checkpoint
from tests.convert.interrupted import Stop, stop_after
from tests.convert.support import pack, small, tree, weights

Sources = Callable[[Spec], Path]


@pytest.fixture(scope="session", autouse=True)
def quick_fsync() -> Iterator[None]:
    """fsync cannot be seen from the outside, and some disks take longer for it than for a whole small conversion."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda fd: None)
        yield


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """A checkpoint of a spec, for reading only."""
    made: dict[Spec, Path] = {}

    def make(spec: Spec) -> Path:
        if spec not in made:
            made[spec] = tmp_path_factory.mktemp("sources") / "source"
            write_checkpoint(made[spec], spec)
        return made[spec]

    return make


@pytest.fixture(scope="session")
def source(sources: Sources) -> Path:
    """The small checkpoint, for reading only."""
    return sources(small())


@pytest.fixture(scope="session")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of its pack for tp 2, made without any trouble."""
    out = tmp_path_factory.mktemp("whole") / "pack"
    pack(source, out, 2)
    return tree(out)


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    """A source of one's own."""
    return Path(shutil.copytree(source, tmp_path / "source"))


@pytest.fixture
def finished(source: Path, tmp_path: Path) -> Path:
    """A pack for tp 2."""
    pack(source, tmp_path / "out", 2)
    return tmp_path / "out"


@pytest.fixture
def unfinish(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Leaves a conversion with two finished files."""

    def make(source: Path, out: Path, tp: int = 2, ep: int = 1, **options: Any) -> Path:
        with monkeypatch.context() as patch:
            stop_after(patch, 2)
            with pytest.raises(Stop):
                pack(source, out, tp, ep, workers=1, **options)
        assert len(weights(out)) == 2
        return out

    return make
