"""A layer of random bytes with sensible scales: for self-tests and timings, where no pack is wanted.

Every word is a legal code in both layouts, so codes are random words; only scale bytes and global scales are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hybrid_pack.errors import UsageError
from hybrid_pack.formats.nf3 import DEFAULT_LEVELS
from hybrid_pack.io.config import is_gated
from hybrid_pack.layouts.scale_bytes import DEVICE_VALUES, NF3_GLOBAL_SCALE, NVFP4_VALUE_EXPONENT
from hybrid_pack.layouts.shard import KeptScaleFormat, RankGeometry, Tier, shard_tensors
from hybrid_pack.runtime.layer import LayerGeometry, PackedMoELayer, TierWeights
from hybrid_pack.sharding import tiles_for

_FP4_RMS, _NF3_RMS = 2.93, 0.614  # of a uniformly random code's value
_NVFP4_BYTES = (216, 247)  # value(byte) from 2^12 to 2^16, where conversion puts an expert's blocks
_MXFP4_BYTES = (197, 200)
_DTYPES = {"I32": torch.int32, "U8": torch.uint8, "F32": torch.float32}


def random_layer(
    hidden: int,
    intermediate: int,
    num_experts: int,
    kept_ids: Sequence[int],
    tail_ids: Sequence[int],
    *,
    top_k: int = 8,
    kept_scale_format: KeptScaleFormat = "e4m3_k16",
    activation: str = "silu",
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> PackedMoELayer:
    """Random experts whose weights have a standard deviation of about 1/sqrt(fan in), so that outputs are of order 1.

    Args:
        hidden: H.
        intermediate: I of the rank.
        num_experts: E of the layer; ids in neither tier are other ranks'.
        kept_ids: Global ids of the FP4 experts, ascending.
        tail_ids: Global ids of the NF3 experts, ascending.
        top_k: Experts a token visits.
        kept_scale_format: ``e4m3_k16`` (NVFP4) or ``e8m0_k32`` (MXFP4).
        activation: As a manifest names it; it tells whether the experts have a gate.
        device: Where to make it.
        seed: Same seed and device, same bytes.

    Raises:
        UsageError: b12x has no tiles for these sizes.
    """
    gated = is_gated(activation)
    tiles = tiles_for(hidden, intermediate, gated)
    if tiles is None:
        raise UsageError("no kernel tiles fit", found=f"hidden size {hidden}, intermediate size {intermediate}")
    generator = torch.Generator(device).manual_seed(seed)
    geometry = RankGeometry(hidden, intermediate, tiles, gated)
    tensors: dict[str, torch.Tensor] = {}
    for spec in shard_tensors(geometry, len(kept_ids), len(tail_ids), kept_scale_format):
        tier, _, field = spec.name.partition(".")
        fan_in = hidden if field.startswith("w13") else intermediate
        low, high, scale = _scales(tier, kept_scale_format, fan_in**-0.5)
        if field == "expert_ids":
            ids = kept_ids if tier == "kept" else tail_ids
            tensors[spec.name] = torch.tensor(list(ids), dtype=torch.int32, device=device)
        elif field.endswith("_global_scale"):
            tensors[spec.name] = torch.full(spec.shape, scale, dtype=torch.float32, device=device)
        else:
            low, high = (low, high + 1) if field.endswith("_scale") else (-(2**31), 2**31)
            dtype = _DTYPES[spec.dtype]
            tensors[spec.name] = torch.randint(low, high, spec.shape, dtype=dtype, device=device, generator=generator)

    def weights(tier: Tier, ids: Sequence[int]) -> TierWeights | None:
        prefix = f"{tier}."
        fields = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        return TierWeights(**fields) if ids else None

    return PackedMoELayer(
        layer=0,
        rank=0,
        kept=weights("kept", kept_ids),
        tail=weights("tail", tail_ids),
        geometry=LayerGeometry(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_experts=num_experts,
            top_k=top_k,
            kept_scale_format=kept_scale_format if kept_ids else None,
            nf3_levels=DEFAULT_LEVELS,
            activation=activation,
            gated=gated,
        ),
        tiles=tiles,
    )


def _scales(tier: str, kept_scale_format: KeptScaleFormat, sigma: float) -> tuple[int, int, float]:
    """(smallest byte, largest byte, global scale) for weights of a standard deviation."""
    if tier == "tail":  # t_s from half to twice the right one; byte = upper bits of the float16 of t_s / 16
        right = math.frexp(sigma / _NF3_RMS / 16)[1] - 1 + 15
        return 8 * right - 8, 8 * right + 7, NF3_GLOBAL_SCALE
    if kept_scale_format == "e4m3_k16":
        low, high = _NVFP4_BYTES
        middle = float((DEVICE_VALUES[low : high + 1] ** 2).mean()) ** 0.5
        return low, high, sigma / _FP4_RMS / middle * 2.0**-NVFP4_VALUE_EXPONENT
    low, high = _MXFP4_BYTES
    wanted = round(math.log2(sigma / _FP4_RMS))
    return low, high, 2.0 ** (wanted - (high - 1 - 127))
