"""Every scale byte there is: MXFP4's and NVFP4's and NF3's whole ranges, and what the kernel makes of the smallest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import hybrid_pack
from hybrid_pack.layouts.scale_bytes import DEVICE_VALUES, MXFP4_TARGET_BYTE, mxfp4_shift
from hybrid_pack.runtime import HybridMoE, PackedMoELayer
from hybrid_pack.runtime.random_layer import random_layer
from hybrid_pack.runtime.torch_backend import TorchBackend
from tests.gpu.support import LIMIT, Arguments, check, given, note, relative
from tests.runtime.dialects import MAPPED, Packs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("b12x")]

H, INNER, E, TOP_K = 256, 256, 8, 3
KEPT, TAIL = (0, 3), (1, 2, 4, 5, 6, 7)
TOKENS = (4, 64)
SAFE_NF3_BYTE = 32
"""From here on every NF3 level times its scale is normal in BF16: 0.1275 * 2^-7 * 2^-116 is above 2^-126."""


def only(layer: PackedMoELayer, tier: str, tokens: int, seed: int = 0) -> Arguments:
    """Arguments that visit one tier's experts."""
    x, weights, ids = given(tokens, H, E, TOP_K, seed, lowest=0)
    held = getattr(layer, tier).expert_ids
    return x, weights, held[ids.long() % len(held)]


def with_scales(layer: PackedMoELayer, tier: str, low: int, high: int, matrices: str, scale: float) -> PackedMoELayer:
    """The layer with random scale bytes from low to high in one tier, and one global scale for all."""
    weights, fields = getattr(layer, tier), {}
    generator = torch.Generator("cuda").manual_seed(low)
    for matrix in matrices.split():
        shape = getattr(weights, f"{matrix}_scale").shape
        fields[f"{matrix}_scale"] = torch.randint(
            low, high + 1, shape, generator=generator, device="cuda", dtype=torch.uint8
        )
        fields[f"{matrix}_global_scale"] = torch.full_like(getattr(weights, f"{matrix}_global_scale"), scale)
    return replace(layer, **{tier: replace(weights, **fields)})


def distances(layer: PackedMoELayer, tier: str) -> dict[int, float]:
    moe = HybridMoE(layer, TOP_K, max(TOKENS), backend="b12x")
    found = {}
    for tokens in TOKENS:
        arguments = only(layer, tier, tokens)
        found[tokens] = relative(moe(*arguments), TorchBackend(layer).accumulate(*arguments))
    return found


def base(kept_scale_format: Any = "e4m3_k16") -> PackedMoELayer:
    return random_layer(H, INNER, E, KEPT, TAIL, kept_scale_format=kept_scale_format, device="cuda")


def test_mxfp4_from_100_to_130() -> None:
    layer, table = base("e8m0_k32"), {}
    ranges = [(low, low) for low in range(100, 131)] + [(100, 130), (112, 117), (115, 120), (118, 121), (124, 129)]
    for low, high in ranges:
        shift = mxfp4_shift(high)  # as conversion chooses it
        assert high + shift == MXFP4_TARGET_BYTE
        changed = with_scales(layer, "kept", low + shift, high + shift, "w13 w2", 2.0**-shift)
        table[f"{low}-{high}"] = distances(changed, "kept")
    note("MXFP4 relative L2 by source bytes", table=table)
    assert max(max(found.values()) for found in table.values()) <= LIMIT


def test_nvfp4_from_2_to_65504() -> None:
    layer, table = base(), {}
    for low in range(0x80, 0xF8, 8):  # an octave of value(byte) each; the last byte is 0xF7
        middle = float(DEVICE_VALUES[low]) * 1.5
        scale = H**-0.5 / 2.93 / middle * 2.0**126
        changed = with_scales(layer, "kept", low, low + 7, "w13 w2", scale)
        table[f"{low:#x}"] = distances(changed, "kept")
    changed = with_scales(layer, "kept", 0x80, 0xF7, "w13 w2", H**-0.5 / 2.93 / 20000 * 2.0**126)
    table["all"] = distances(changed, "kept")
    note("NVFP4 relative L2 by the first of 8 device bytes", table=table)
    assert max(max(found.values()) for found in table.values()) <= LIMIT


def test_nf3_from_the_smallest_byte_to_the_largest() -> None:
    layer, table = base(), {}
    for low in range(0, 128, 8):
        changed = with_scales(layer, "tail", max(low, 1), low + 7, "w13 w2", 2.0**116)
        table[str(max(low, 1))] = distances(changed, "tail")
    changed = with_scales(layer, "tail", SAFE_NF3_BYTE, 127, "w13 w2", 2.0**116)
    table["all from the safe one"] = distances(changed, "tail")
    note("NF3 relative L2 by the first of 8 device bytes (byte = upper bits of float16(t_s / 16))", table=table)
    for first, found in table.items():
        if not first.isdigit() or int(first) >= SAFE_NF3_BYTE:
            assert max(found.values()) <= LIMIT, (first, found)


class Flushing(PackedMoELayer):
    """A layer whose down weights lose what is subnormal in BF16 before the global scale: |w| / 2^116 below 2^-126."""

    def dequantize(self, expert_id: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        gate_up, down = super().dequantize(expert_id, levels="bfloat16")
        return gate_up, torch.where(down.abs() < 2.0**-10, 0.0, down)


@pytest.mark.parametrize("low", [1, 8, 16, 24, 32])
def test_what_becomes_of_the_smallest_nf3_scales(low: int) -> None:
    """Only ``w2`` has small scales, so that the output is linear in what is asked about."""
    changed = with_scales(base(), "tail", low, low | 7, "w2", 2.0**116)
    flushing = Flushing(**{name: getattr(changed, name) for name in PackedMoELayer.__dataclass_fields__})
    moe = HybridMoE(changed, TOP_K, max(TOKENS), backend="b12x")
    for tokens in TOKENS:
        arguments = only(changed, "tail", tokens)
        y = moe(*arguments)
        exact = relative(y, TorchBackend(changed).accumulate(*arguments))
        flushed = relative(y, TorchBackend(flushing).accumulate(*arguments))
        verdict = "exact" if exact <= LIMIT else "flushed" if flushed <= LIMIT else "neither"
        note(
            "NF3 w2 device bytes", first=low, last=low | 7, tokens=tokens, exact=exact, flushed=flushed, verdict=verdict
        )


@pytest.mark.parametrize("dialect", ["kquant", "nvfp4", "mxfp4"])
def test_packs_as_they_come(packs: Packs, dialect: str) -> None:
    """Smallest device bytes of a pack's tail, and how near its layer comes."""
    layer = hybrid_pack.open_pack(packs.pack(dialect)).load_layer(MAPPED, device="cuda")
    assert layer.tail is not None
    counts = torch.bincount(layer.tail.w13_scale.flatten().int(), minlength=256)
    distance = check(HybridMoE(layer, TOP_K, 64), given(64, H, E, TOP_K), dialect)
    smallest = int(counts[1:].nonzero()[0]) + 1
    note("NF3 bytes of a synthetic pack", pack=dialect, zero=int(counts[0]), smallest=smallest, distance=distance)
