"""Packs, and what the GPU tests need besides a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from hybrid_pack.runtime import b12x_probe
from tests.runtime.dialects import Packs


@pytest.fixture(scope="session")
def packs(tmp_path_factory: pytest.TempPathFactory) -> Packs:
    return Packs(tmp_path_factory.mktemp("packs"))


@pytest.fixture
def b12x() -> Iterator[None]:
    """Skips without a b12x that works, or fails where HYBRID_PACK_REQUIRE_GPU=1."""
    problems = b12x_probe.package_problems() or [b12x_probe.import_problem()]
    if problems != [None]:
        (pytest.fail if os.environ.get("HYBRID_PACK_REQUIRE_GPU") == "1" else pytest.skip)(
            "; ".join(map(str, problems))
        )
    yield
    torch.cuda.synchronize()  # an error of a kernel belongs to the test that launched it
