"""One rank's experts of one layer, as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

import torch

from hybrid_pack.errors import UsageError
from hybrid_pack.runtime.decode import FormatName, dequantize_matrix
from hybrid_pack.sharding import Tiles

Levels = Literal["manifest", "bfloat16"]
"""Which NF3 levels to use: those of the manifest, or the same rounded to BF16 as b12x's kernels have them."""

Check = Literal["structure", "digest"]
"""``structure``: size, header bytes and expert ids of a shard, against the manifest, whose own digest was checked when
the pack was opened. ``digest``: that, and the BLAKE3 digest of every tensor."""


@dataclass(frozen=True, eq=False)
class TierWeights:
    """The tensors of one tier, named as in a b12x weight bundle; row i of each belongs to ``expert_ids[i]``.

    Attributes:
        w13: i32, codes of gate and up. Kept [E, H/16, 2I/64*128] packed FP4, tail [E, (H/16)*I*3] nf3_2p1.
        w2: i32, codes of down. Kept [E, I/16, H/64*128], tail [E, (I/16)*(H/2)*3].
        w13_scale: u8 [E, H/16, 2I] (NVFP4) or [E, H/32, 2I] (MXFP4, NF3).
        w2_scale: u8 [E, I/16, H] or [E, I/32, H].
        w13_global_scale: f32 [E].
        w2_global_scale: f32 [E].
        expert_ids: i32 [E], ascending global ids.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor
    w2_scale: torch.Tensor
    w13_global_scale: torch.Tensor
    w2_global_scale: torch.Tensor
    expert_ids: torch.Tensor


@dataclass(frozen=True)
class LayerGeometry:
    """Sizes and constants a kernel needs.

    Attributes:
        hidden_size: H.
        intermediate_size: I of this rank.
        num_experts: E of the layer, over all ranks.
        top_k: Experts a token visits in this model.
        kept_scale_format: ``e4m3_k16`` (NVFP4), ``e8m0_k32`` (MXFP4), or None where the layer keeps no expert.
        nf3_levels: The tail's eight levels, ascending.
        activation: Such as ``silu`` or ``silu(limit=10.0)``.
        gated: Whether w13 holds gate and up, or up alone and has I rows.
        expert_biases: Whether experts have biases, which are base tensors and which nothing here adds.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    kept_scale_format: str | None
    nf3_levels: tuple[float, ...]
    activation: str
    gated: bool = True
    expert_biases: bool = False

    @property
    def w13_rows(self) -> int:
        """Rows of w13: 2 I, or I without a gate."""
        return (2 if self.gated else 1) * self.intermediate_size


@dataclass(frozen=True, eq=False)
class PackedMoELayer:
    """One rank's experts of one layer; ``Pack.load_layer`` makes them.

    Attributes:
        layer: Decoder layer.
        rank: ep_rank * tensor_parallel + tp_rank.
        kept: FP4 experts, or None where the rank holds none.
        tail: NF3 experts, or None where the rank holds none.
        geometry: Sizes and constants.
        tiles: (fc1_tile_k, fc1_tile_n, fc2_tile_k, fc2_tile_n) the tail's bytes are laid out for.
        checked: What was held against the manifest when it was loaded.
    """

    layer: int
    rank: int
    kept: TierWeights | None = field(repr=False)
    tail: TierWeights | None = field(repr=False)
    geometry: LayerGeometry
    tiles: Tiles
    checked: Check = "structure"

    @cached_property
    def _rows(self) -> Mapping[int, tuple[TierWeights, int]]:
        """(tier, row) of each expert, by ascending global id."""
        rows = {
            int(expert): (tier, row)
            for tier in (self.kept, self.tail)
            if tier is not None
            for row, expert in enumerate(tier.expert_ids.tolist())
        }
        return dict(sorted(rows.items()))

    @property
    def expert_ids(self) -> tuple[int, ...]:
        """Global ids of the experts this rank holds, both tiers, ascending."""
        return tuple(self._rows)

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        tier = self.kept or self.tail
        assert tier is not None, "a rank holds at least one expert"
        return tier.w13.device

    def dequantize(self, expert_id: int, *, levels: Levels = "manifest") -> tuple[torch.Tensor, torch.Tensor]:
        """The weights of one expert.

        Code value, block scale and global scale are multiplied in float64, which holds FP4's product exactly, and the
        product is rounded to float32. Nothing is rounded for MXFP4, for NF3 with levels of at most 20 significant bits
        (BF16 levels have 8) and for NVFP4 with a second-level scale of at most 18 (a power of two has 1).

        Args:
            expert_id: Global id, one of ``expert_ids``.
            levels: NF3 levels as the manifest gives them, or rounded to BF16 first, as b12x's kernels do.

        Returns:
            (gate and up f32 [2I, H], gate rows first, or up alone [I, H]; down f32 [H, I]), on this layer's device.

        Raises:
            UsageError: This rank does not hold the expert, or there are no such levels.
        """
        if levels not in get_args(Levels):
            raise UsageError("no such NF3 levels", expected=" or ".join(get_args(Levels)), found=repr(levels))
        if expert_id not in self._rows:
            held = self.expert_ids
            span = f"{held[0]}..{held[-1]}" if len(held) == held[-1] - held[0] + 1 else ", ".join(map(str, held))
            raise UsageError(
                f"expert {expert_id!r} of layer {self.layer} is not on rank {self.rank}", expected=f"one of {span}",
                hint=f"the layer has experts 0..{self.geometry.num_experts - 1}",
            )  # fmt: skip
        tier, row = self._rows[expert_id]
        name: FormatName = "nf3"
        if tier is self.kept:
            name = "nvfp4" if self.geometry.kept_scale_format == "e4m3_k16" else "mxfp4"
        book = torch.tensor(self.geometry.nf3_levels, dtype=torch.float64, device=self.device)
        if levels == "bfloat16":
            book = book.to(torch.bfloat16).to(torch.float64)
        size, hidden, rows = self.geometry.intermediate_size, self.geometry.hidden_size, self.geometry.w13_rows
        gate_up = dequantize_matrix(
            name, tier.w13[row], tier.w13_scale[row], tier.w13_global_scale[row], rows, hidden, self.tiles[1], book
        )
        down = dequantize_matrix(
            name, tier.w2[row], tier.w2_scale[row], tier.w2_global_scale[row], hidden, size, self.tiles[3], book
        )
        return gate_up, down
