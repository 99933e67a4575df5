"""Weights that were dequantised from NVFP4 go back to NVFP4 as they were, and verify knows the grid they are on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_pack.errors import DataError
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


def of_size(source: Path, roles: tuple[str, ...], largest: float, block_scale: int) -> None:
    """Give experts' matrices of these roles weights of one grid, with this largest magnitude."""
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            named = ".experts." in name and name.endswith(tuple(f".{role}_proj.weight" for role in roles))
            if named and tensor.dtype == torch.float32:
                plain = gaussian(*tensor.shape)
                found = quantize("nvfp4", plain, "absmax", second=float(np.abs(plain).max()) / (6 * block_scale))
                weights = found.weights()
                tensors[name] = torch.from_numpy((weights / np.abs(weights).max() * largest).astype(np.float32))
        save_file(tensors, path, {"format": "pt"})


def test_a_grid_that_the_kernel_does_not_hold_is_not_taken(tmp_path: Path) -> None:
    """750,000 / (6 * 240) is above 512, where the device's global scale would be infinite; the usual scale is not."""
    source, out = tmp_path / "source", tmp_path / "out"
    write_checkpoint(source, replace(BASE, stored=("f32",)))
    of_size(source, ("gate", "up", "down"), 750_000.0, 240)
    pack(source, out)
    assert verify_pack(out, source=source).ok


def test_a_scale_beside_a_native_one_that_is_too_large_is_refused(tmp_path: Path) -> None:
    """400 is no power of two from 300, and the next that is, 600, is too large."""
    source = tmp_path / "source"
    write_checkpoint(source, replace(BASE, stored=("nvfp4", "f32"), mix_matrices=True))
    seconds = 0
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        for name in [name for name in tensors if ".experts." in name and name.endswith("weight_scale_2")]:
            tensors[name] = torch.full_like(tensors[name], 300.0)
            seconds += 1
        save_file(tensors, path, {"format": "pt"})
    of_size(source, ("gate", "up"), 400 * 1536.0, 448)
    assert seconds
    with pytest.raises(DataError, match=r"weights too large for the kernel.s NVFP4 .*below 512, found 600"):
        pack(source, tmp_path / "out")
