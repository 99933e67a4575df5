"""``convert --device cuda``: the files of ``--device cpu``, for every search and target, and GPTQ as good."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_pack.synthetic import write_checkpoint
from hybrid_pack.verify import verify_pack
from tests.convert.support import tree
from tests.convert.test_convert_options import SPEC, hessians, importance, pack

pytestmark = pytest.mark.gpu

MANIFEST = "hybrid_pack.json"
SUMS = {"seconds", "sqnr_db", "error", "signal"}
"""Of the report: sums of floats, in an order that differs between the devices."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """BF16 experts; some groups so much smaller than the rest that the kernel would flush their NVFP4 scales."""
    root = tmp_path / "source"
    write_checkpoint(root, SPEC)
    generator, shrunk = torch.Generator().manual_seed(3), 0
    for file in root.glob("*.safetensors"):
        tensors = load_file(file)
        for name, weights in tensors.items():
            if ".experts." in name and weights.dim() == 2:
                groups = weights.view(weights.shape[0], -1, 16)
                small = torch.rand(groups.shape[:2], generator=generator) < 0.05
                powers = torch.randint(-18, -7, (int(small.sum()), 1), generator=generator)
                groups[small] *= torch.exp2(powers.float()).to(groups.dtype)
                shrunk += int(small.sum())
        save_file(tensors, file, metadata={"format": "pt"})
    assert shrunk > 50
    return root


def without_sums(value: Any) -> Any:
    """A manifest but for what summing in another order changes."""
    if isinstance(value, dict):
        dropped = {key for key in value if key == "self_digest" or key == "device" or any(s in key for s in SUMS)}
        return {key: without_sums(entry) for key, entry in value.items() if key not in dropped}
    if isinstance(value, list):
        return [without_sums(entry) for entry in value]
    return value


@pytest.mark.parametrize("search", ["absmax", "mse", "weighted"])
@pytest.mark.parametrize("kept_format", ["nvfp4", "mxfp4"])
def test_a_pack_made_on_the_gpu_is_that_of_the_cpu(source: Path, tmp_path: Path, kept_format: str, search: str) -> None:
    options: dict[str, Any] = {"search": search}
    if search == "weighted":
        importance(tmp_path)
        options["importance"] = tmp_path / "importance.safetensors"
    found = {}
    for device in ("cpu", "cuda"):
        out = tmp_path / device
        pack(source, out, {"kept_format": kept_format}, tp=1, device=device, **options)
        assert verify_pack(out, source=source).ok
        found[device] = tree(out)
    manifests = {device: without_sums(json.loads(files.pop(MANIFEST))) for device, files in found.items()}
    for files in found.values():
        files.pop("README.md", None)  # quotes the sums
    assert found["cuda"] == found["cpu"]
    assert manifests["cuda"] == manifests["cpu"]
    assert any(name.startswith("experts/") for name in found["cuda"])


def test_gptq_on_the_gpu_is_as_good_and_repeats(source: Path, tmp_path: Path) -> None:
    hessians(tmp_path)
    ratios = {}
    for name, device in (("cpu", "cpu"), ("cuda", "cuda"), ("again", "cuda")):
        done = pack(source, tmp_path / name, device=device, hessians=tmp_path / "hessians")
        assert verify_pack(tmp_path / name, source=source).ok
        ratios[name] = {entry.tier: entry.gptq_to_rtn for entry in done.manifest.report.experts_quantized}["tail"]
    assert tree(tmp_path / "cuda") == tree(tmp_path / "again")
    assert ratios["cuda"] is not None and ratios["cuda"] <= 1
    assert ratios["cuda"] == pytest.approx(ratios["cpu"], rel=0.02)
