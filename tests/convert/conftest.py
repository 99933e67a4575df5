"""Small sources and packs, each made once a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hybrid_pack.synthetic import Spec, write_checkpoint
from tests.convert.support import pack, small, tree

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
