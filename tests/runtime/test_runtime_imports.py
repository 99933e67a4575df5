"""What importing the package costs: nothing but the standard library until something is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hybrid_pack
from hybrid_pack import runtime
from tests.runtime.dialects import Packs

HEAVY = ("torch", "numpy", "numba", "pydantic", "huggingface_hub", "blake3", "safetensors", "click", "tqdm")
ROOT = Path(__file__).parents[2]


def loaded_after(code: str) -> set[str]:
    """Which heavy packages a fresh process has after running some code."""
    report = f"\nimport sys\nprint(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code + report], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import hybrid_pack",
        "import hybrid_pack; hybrid_pack.__version__; dir(hybrid_pack); hybrid_pack.DataError('x')",
        "import hybrid_pack; dir(hybrid_pack.runtime)",
        "import hybrid_pack.errors, hybrid_pack.sharding, hybrid_pack.runtime",
    ],
)
def test_importing_loads_nothing_heavy(code: str) -> None:
    assert loaded_after(code) == set()


def test_opening_a_pack_needs_no_torch(packs: Packs) -> None:
    code = f"import hybrid_pack\npack = hybrid_pack.open_pack({str(packs.pack('nvfp4'))!r})\npack.layers, pack.topology"
    assert not loaded_after(code) & {"torch", "numba", "huggingface_hub", "click", "tqdm"}


def test_running_needs_no_numba(packs: Packs) -> None:
    code = (
        f"import hybrid_pack\nlayer = hybrid_pack.open_pack({str(packs.pack('nvfp4'))!r}).load_layer(1)\n"
        "hybrid_pack.runtime.HybridMoE(layer); layer.dequantize(0)"
    )
    loaded = loaded_after(code)
    assert "torch" in loaded and not loaded & {"numba", "huggingface_hub", "click"}


@pytest.mark.parametrize("module", [hybrid_pack, runtime])
def test_public_names(module: object) -> None:
    names = module.__all__  # type: ignore[attr-defined]
    assert list(names) == sorted(names) and set(names) <= set(dir(module))
    for name in names:
        assert getattr(module, name) is getattr(module, name)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        module.nonsense  # type: ignore[attr-defined]
