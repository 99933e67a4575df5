"""A full GLM-5.2 layer (256 experts, 6144/2048, 64 kept, TP4): every byte of every shard equals b12x's own packers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hybrid_pack.convert import convert
from hybrid_pack.io.checkpoint import Expert, Matrix, open_checkpoint
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.plan import make_plan
from hybrid_pack.runtime.pack import open_pack
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec, write_checkpoint

pytestmark = pytest.mark.gpu

TP = 4
GLM_LAYER = Spec(
    hidden=6144, intermediate=2048, num_experts=256, kept=64, top_k=8, moe_layers=(3,), dense_layers=(), mtp_layer=False
)  # fmt: skip


def stored(matrix: Matrix, reader: TensorReader) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(codes u8 [N, bytes], scales u8 [N, K/group], second-level scale) on the GPU."""
    out = []
    for at in (matrix.codes, matrix.scales):
        data = np.empty(at.header.nbytes, np.uint8)
        reader.read(at, data)
        out.append(torch.from_numpy(data).cuda().view(matrix.rows, -1))
    second = np.ones(1, "<f4")
    if matrix.second is not None:
        reader.read(matrix.second, second.view(np.uint8))
    return out[0], out[1], float(second[0])


def nf3_codes(packed: torch.Tensor) -> torch.Tensor:
    """Stored rows u8 [N, K/8*3] to codes i64 [N, K]."""
    triples = packed.view(packed.shape[0], -1, 3).long()
    words = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
    return ((words[..., None] >> (3 * torch.arange(8, device="cuda"))) & 7).view(packed.shape[0], -1)


def oracle(parts: list[tuple[torch.Tensor, torch.Tensor, float]], tail: bool, tile_n: int) -> list[torch.Tensor]:
    """b12x's (codes, scales, global scale) of one rank's matrix of one expert."""
    from b12x.moe._shared.kernels.w4a16 import prepare

    codes, scales = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    n = codes.shape[0]
    if tail:
        k = codes.shape[1] // 3 * 8
        values = scales.view(torch.float8_e4m3fn).float()
        return [
            prepare._nf3_pack_codes(nf3_codes(codes), size_k=k, size_n=n, tile_n=tile_n),
            prepare._nf3_pack_scales(values, size_k=k, size_n=n),
            torch.tensor(2.0**116),
        ]
    k = codes.shape[1] * 2
    second = torch.tensor([parts[0][2]], device="cuda")
    packed, glob = prepare._permute_nvfp4_scales(
        scales.view(torch.float8_e4m3fn)[None], second, size_k=k, size_n=n, a_dtype=torch.bfloat16
    )
    return [
        prepare._repack_weight(codes[None].contiguous(), size_k=k, size_n=n)[0],
        packed[0].view(torch.uint8),
        glob[0],
    ]


def rank_parts(
    expert: Expert, reader: TensorReader, rank: int
) -> tuple[list[tuple[torch.Tensor, torch.Tensor, float]], list[tuple[torch.Tensor, torch.Tensor, float]]]:
    """A rank's stored parts of w13 (rows of gate and up) and w2 (columns of down)."""
    gate_up = []
    for matrix in (expert.gate, expert.up):
        codes, scales, second = stored(matrix, reader)
        share = matrix.rows // TP
        rows = slice(rank * share, (rank + 1) * share)
        gate_up.append((codes[rows], scales[rows], second))
    codes, scales, second = stored(expert.down, reader)
    wide, narrow = codes.shape[1] // TP, scales.shape[1] // TP
    down = (
        codes[:, rank * wide : (rank + 1) * wide].contiguous(),
        scales[:, rank * narrow : (rank + 1) * narrow].contiguous(),
        second,
    )
    return gate_up, [down]


def test_every_byte_of_a_full_layer_is_b12x_s(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", GLM_LAYER)
    checkpoint = open_checkpoint(tmp_path / "source")
    convert(make_plan(checkpoint, Topology(TP)), tmp_path / "pack")
    pack = open_pack(tmp_path / "pack")
    experts = checkpoint.layers[3].experts
    compared = 0
    with TensorReader() as reader:
        for rank in range(TP):
            layer = pack.load_layer(3, rank=rank)
            for tier in (layer.kept, layer.tail):
                assert tier is not None
                for row, expert in enumerate(tier.expert_ids.tolist()):
                    w13, w2 = rank_parts(experts[expert], reader, rank)
                    for name, parts, tile_n in (("w13", w13, layer.tiles[1]), ("w2", w2, layer.tiles[3])):
                        codes, scales, glob = oracle(parts, tier is layer.tail, tile_n)
                        where = f"rank {rank} expert {expert} {name}"
                        assert torch.equal(getattr(tier, name)[row].cuda().view(-1), codes.view(-1)), where
                        assert torch.equal(getattr(tier, f"{name}_scale")[row].cuda().view(-1), scales.view(-1)), where
                        assert float(getattr(tier, f"{name}_global_scale")[row]) == float(glob), where
                        compared += 1
    assert compared == TP * GLM_LAYER.num_experts * 2
