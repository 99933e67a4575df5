"""What serving does today: read a layer's source tensors, bring them to the GPU, unpack, pack with b12x's packers.

Written to be fair: files stay open and in the page cache, no tensor is read twice, every tensor goes to the GPU as it
is stored, unpacking is a few whole-tensor operations on the GPU, and the packers are b12x 1.1.0's own.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from hybrid_pack.io.checkpoint import Layer, Matrix, open_checkpoint
from hybrid_pack.runtime import PackedMoELayer
from hybrid_pack.sharding import Tiles

Packed = dict[str, torch.Tensor]


class SourceReader:
    """Tensors of a checkpoint through the safetensors library, one by one, as a weight loader reads them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._files: dict[Path, Any] = {}
        self._stack = ExitStack()

    def read(self, path: Path, name: str) -> torch.Tensor:
        """A tensor, as it is stored, on the device."""
        from safetensors import safe_open

        if path not in self._files:
            self._files[path] = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        stored: torch.Tensor = self._files[path].get_tensor(name)
        return stored.to(self._device)

    def codes(self, matrix: Matrix) -> torch.Tensor:
        """Stored codes, u8 [N, bytes]."""
        return self.read(matrix.codes.path, matrix.codes.header.name).view(torch.uint8)

    def scales(self, matrix: Matrix) -> torch.Tensor:
        """Stored block scales."""
        assert matrix.scales is not None
        return self.read(matrix.scales.path, matrix.scales.header.name)

    def second(self, matrix: Matrix) -> torch.Tensor:
        """Stored second-level scale, f32 []."""
        assert matrix.second is not None
        return self.read(matrix.second.path, matrix.second.header.name).reshape(())

    def close(self) -> None:
        """Close all files."""
        self._stack.close()
        self._files.clear()


def unpack_nf3(stored: torch.Tensor) -> torch.Tensor:
    """u8 [..., K/8*3] to codes u8 [..., K]: three bytes are a little-endian 24-bit word, code i at bits 3i."""
    triples = stored.reshape(*stored.shape[:-1], -1, 3).to(torch.int32)
    words = triples[..., 0] | (triples[..., 1] << 8) | (triples[..., 2] << 16)
    shifts = torch.arange(0, 24, 3, dtype=torch.int32, device=stored.device)
    codes = (words[..., None] >> shifts) & 7
    return codes.to(torch.uint8).flatten(-2)


def repack_layer(root: Path, layer: Layer, tiles: Tiles, device: torch.device) -> Packed:
    """Kept NVFP4 and tail NF3 experts of a layer, whole (TP1), in the layout of a pack.

    Args:
        root: The checkpoint, for messages.
        layer: From ``open_checkpoint``.
        tiles: The kernel's.
        device: Where to unpack and pack.
    """
    from b12x.moe._shared.kernels.w4a16 import prepare

    assert layer.kept_format == "nvfp4", f"{root}: the baseline is written for NVFP4"
    reader = SourceReader(device)
    packed: Packed = {}
    try:
        kept = [layer.experts[e] for e in layer.kept]
        for name, matrices in (("w13", [e.matrices[:2] for e in kept]), ("w2", [e.matrices[2:] for e in kept])):
            codes = torch.stack([torch.cat([reader.codes(m) for m in of_expert]) for of_expert in matrices])
            scales = torch.stack([torch.cat([reader.scales(m) for m in of_expert]) for of_expert in matrices])
            second = torch.stack([reader.second(of_expert[0]) for of_expert in matrices])
            n, k = codes.shape[1], codes.shape[2] * 2
            packed[f"kept.{name}"] = prepare._repack_weight(codes, size_k=k, size_n=n)
            permuted = prepare._permute_nvfp4_scales(scales, second, size_k=k, size_n=n, a_dtype=torch.bfloat16)
            packed[f"kept.{name}_scale"], packed[f"kept.{name}_global_scale"] = permuted
        tail = [layer.experts[e] for e in layer.tail]
        for name, matrices, tile_n in (
            ("w13", [e.matrices[:2] for e in tail], tiles[1]),
            ("w2", [e.matrices[2:] for e in tail], tiles[3]),
        ):
            codes = torch.stack([unpack_nf3(torch.cat([reader.codes(m) for m in each])) for each in matrices])
            scales = torch.stack([torch.cat([reader.scales(m) for m in each]).float() for each in matrices])
            n, k = codes.shape[1], codes.shape[2]
            packed[f"tail.{name}"] = prepare._nf3_pack_code_experts(codes, size_k=k, size_n=n, tile_n=tile_n)
            packed[f"tail.{name}_scale"] = prepare._nf3_pack_scale_experts(scales, size_k=k, size_n=n)
            del codes, scales
    finally:
        reader.close()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return packed


def differences(packed: Packed, layer: PackedMoELayer) -> list[str]:
    """Tensors that are not those of the pack; NVFP4 scales may differ, since b12x normalises over all experts."""
    found = []
    for name, tensor in packed.items():
        tier, key = name.split(".")
        ours = getattr(getattr(layer, tier), key)
        if name.startswith("kept.") and "scale" in name:
            continue
        if not torch.equal(tensor.view(ours.dtype).reshape(ours.shape), ours):
            found.append(name)
    return found


def source_layer(root: Path, number: int) -> Layer:
    """A layer of a checkpoint, headers only."""
    return open_checkpoint(root).layers[number]
