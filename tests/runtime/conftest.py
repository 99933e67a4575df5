"""Small packs of every dialect, each converted once a session."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.convert import convert
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.plan import make_plan
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec, write_checkpoint
from tests.runtime.dialects import DIALECTS


class Packs:
    """Makes a source when it is first asked for, and a pack of it likewise."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def source(self, name: str, spec: Spec | None = None, quantization: dict[str, Any] | None = None, **config: Any) -> Path:
        """A checkpoint of a dialect, or of a spec with keys of its config.json replaced."""
        root = self._root / name / "source"
        if not root.exists():
            write_checkpoint(root, spec or DIALECTS[name])
            document = json.loads((root / "config.json").read_text()) | config
            document["quantization_config"] = document.get("quantization_config", {}) | (quantization or {})
            (root / "config.json").write_text(json.dumps(document))
        return root

    def pack(self, name: str, tp: int = 1, ep: int = 1) -> Path:
        """A pack of a source made before, or of a dialect."""
        out = self._root / name / f"tp{tp}-ep{ep}"
        if not out.exists():
            convert(make_plan(open_checkpoint(self.source(name)), Topology(tp, ep)), out, workers=2)
        return out


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
