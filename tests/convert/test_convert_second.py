"""Weights that were dequantised from NVFP4 go back to NVFP4 as they were, and verify knows the grid they are on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.synthetic import write_checkpoint
from hybrid_pack.verify import verify_pack
from tests.convert.test_convert_sources import BASE, differences, pack
from tests.quantize.ours import gaussian, quantize


def decoded(rows: int, columns: int, block_scale: int, seed: int) -> torch.Tensor:
    """What an NVFP4 checkpoint says, in BF16; the block of the largest weight has this block scale."""
    plain = gaussian(rows, columns) * np.float32(1 + seed / 8)
    found = quantize("nvfp4", plain, "absmax", second=float(np.abs(plain).max()) / (6 * block_scale))
    return torch.from_numpy(found.weights().astype(np.float32)).bfloat16()


@pytest.mark.parametrize("block_scale", [240, 256, 352, 448])
def test_nvfp4_that_was_dequantised_comes_back(block_scale: int, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    spec = replace(BASE, stored=("bf16",))
    write_checkpoint(source, spec)
    changed = 0
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        for expert in range(spec.num_experts):
            names = {
                role: [n for n in tensors if f".experts.{expert}.{role}_proj." in n] for role in ("gate", "up", "down")
            }
            for gate, up, down in zip(*names.values(), strict=True):
                both = decoded(2 * spec.intermediate, spec.hidden, block_scale, expert)
                tensors[gate], tensors[up] = (half.contiguous() for half in both.chunk(2))
                tensors[down] = decoded(spec.hidden, spec.intermediate, block_scale, expert + 1)
                changed += 1
        save_file(tensors, path, {"format": "pt"})
    assert changed == spec.num_experts
    manifest = pack(source, out).manifest
    kept = [
        10 * np.log10((weights**2).sum() / (error**2).sum())
        for _, _, name, weights, error in differences(out, open_checkpoint(source), manifest)
        if name == "nvfp4"
    ]
    assert len(kept) == spec.kept and min(kept) > 45  # what BF16 has left of them
    assert verify_pack(out, source=source).ok
