"""Which tensors an expert shard holds, in which order, with which shapes: shape arithmetic only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hybrid_pack.layouts.nf3_2p1 import Nf32p1
from hybrid_pack.layouts.packed_fp4 import PackedFp4
from hybrid_pack.layouts.scales import BlockScales

Tier = Literal["kept", "tail"]
Matrix = Literal["w13", "w2"]
KeptScaleFormat = Literal["e4m3_k16", "e8m0_k32"]

MATRICES: tuple[Matrix, Matrix] = ("w13", "w2")
ITEM_BYTES = {"I32": 4, "U8": 1, "F32": 4}


@dataclass(frozen=True)
class RankGeometry:
    """Sizes of one rank's share of a layer.

    Attributes:
        hidden: H, columns of w13 and rows of w2.
        intermediate: I of this rank, columns of w2; w13 has 2 I rows, gate then up.
        tiles: (fc1_tile_k, fc1_tile_n, fc2_tile_k, fc2_tile_n).
        gated: Whether w13 holds gate and up, or up alone and has I rows.
    """

    hidden: int
    intermediate: int
    tiles: tuple[int, int, int, int]
    gated: bool = True

    def size(self, matrix: Matrix) -> tuple[int, int]:
        """(N, K) of a matrix."""
        if matrix == "w13":
            return (2 if self.gated else 1) * self.intermediate, self.hidden
        return self.hidden, self.intermediate

    def codes(self, tier: Tier, matrix: Matrix) -> PackedFp4 | Nf32p1:
        """Layout of a tier's codes."""
        return PackedFp4() if tier == "kept" else Nf32p1(self.tiles[1] if matrix == "w13" else self.tiles[3])

    @staticmethod
    def scales(tier: Tier, kept_scale_format: KeptScaleFormat | None) -> BlockScales:
        """Layout of a tier's scales."""
        return BlockScales(16 if tier == "kept" and kept_scale_format == "e4m3_k16" else 32)


@dataclass(frozen=True)
class ShardTensor:
    """One tensor of a shard.

    Attributes:
        name: Such as ``tail.w13_scale``.
        tier: ``kept`` or ``tail``.
        dtype: safetensors dtype, I32, U8 or F32.
        shape: First dimension is the expert.
        row_bytes: Bytes of one expert.
    """

    name: str
    tier: Tier
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one expert."""
        return self.nbytes // self.shape[0]


def shard_tensors(
    geometry: RankGeometry, kept: int, tail: int, kept_scale_format: KeptScaleFormat | None
) -> tuple[ShardTensor, ...]:
    """Tensors of a shard in file order: largest first, then by name, so that big ones start on 4096-byte boundaries.

    Args:
        geometry: The rank's sizes.
        kept: Experts in the kept tier; 0 gives no tensors.
        tail: Experts in the tail tier; 0 gives no tensors.
        kept_scale_format: Scale format of the kept tier; None only where kept is 0.
    """
    tensors: list[ShardTensor] = []
    counts: tuple[tuple[Tier, int], ...] = (("kept", kept), ("tail", tail))
    for tier, experts in counts:
        if not experts:
            continue
        for matrix in MATRICES:
            n, k = geometry.size(matrix)
            codes = geometry.codes(tier, matrix).shape(n, k)
            scales = geometry.scales(tier, kept_scale_format).shape(n, k)
            tensors += [
                ShardTensor(f"{tier}.{matrix}", tier, "I32", (experts, *codes)),
                ShardTensor(f"{tier}.{matrix}_scale", tier, "U8", (experts, *scales)),
                ShardTensor(f"{tier}.{matrix}_global_scale", tier, "F32", (experts,)),
            ]
        tensors.append(ShardTensor(f"{tier}.expert_ids", tier, "I32", (experts,)))
    return tuple(sorted(tensors, key=lambda tensor: (tensor.row_bytes <= 4, -tensor.nbytes, tensor.name)))


def shard_path(folder: str, rank: int, layer: int) -> str:
    """Path of a shard inside a pack; ``folder`` is ``tp<T>-ep<P>``."""
    return f"experts/{folder}/rank-{rank}/layer-{layer:03d}.safetensors"
