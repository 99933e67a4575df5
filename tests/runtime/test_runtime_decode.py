"""decode.py against the slow decoders and against the layouts' own inverse, over whole code and byte spaces."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybrid_pack.layouts.nf3_2p1 import Nf32p1
from hybrid_pack.layouts.packed_fp4 import PackedFp4
from hybrid_pack.layouts.scales import BlockScales
from hybrid_pack.runtime import decode
from tests.reference import floats, packed, source

NF3_SHAPES = [(64, 32, 64), (128, 32, 64), (256, 64, 128), (512, 32, 256), (384, 96, 128)]
FP4_SHAPES = [(64, 16), (64, 32), (192, 64), (128, 96)]


def random_words(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(0, 2**32, count, np.uint32).view(np.int32)


@pytest.mark.parametrize(("n", "k", "tile_n"), NF3_SHAPES)
def test_nf3_codes(n: int, k: int, tile_n: int) -> None:
    for seed in range(3):
        words = random_words(np.random.default_rng((n, k, seed)), k // 16 * (n // 2) * 3)
        codes = decode.nf3_codes(torch.from_numpy(words), n, k, tile_n)
        assert codes.dtype == torch.uint8 and codes.shape == (n, k)
        assert np.array_equal(codes.numpy(), packed.nf3_codes(words, n, k, tile_n))
        stored = Nf32p1(tile_n).unpack(words.view(np.uint32), n, k)
        assert np.array_equal(codes.numpy(), source.nf3_codes(stored))


@pytest.mark.parametrize(("n", "k"), FP4_SHAPES)
def test_fp4_codes(n: int, k: int) -> None:
    for seed in range(3):
        words = random_words(np.random.default_rng((n, k, seed)), k // 16 * (n // 64) * 128)
        codes = decode.fp4_codes(torch.from_numpy(words.reshape(k // 16, -1)), n, k)
        assert codes.dtype == torch.uint8 and codes.shape == (n, k)
        assert np.array_equal(codes.numpy(), packed.fp4_codes(words, n, k))
        assert np.array_equal(codes.numpy(), source.fp4_codes(PackedFp4().unpack(words.view(np.uint32), n, k)))


def test_every_bit_of_a_unit_belongs_to_one_code() -> None:
    n, k = 64, 16
    zeros = torch.zeros(k // 16 * (n // 2) * 3, dtype=torch.int32)
    seen = torch.zeros(n, k, dtype=torch.uint8)
    for word in range(zeros.numel()):
        for bit in range(32):
            words = zeros.clone()
            words[word] = (1 << bit) - (1 << 32 if bit == 31 else 0)
            codes = decode.nf3_codes(words, n, k, 64)
            assert int((codes != 0).sum()) == 1
            assert not (seen & codes).any()
            seen |= codes
    assert bool((seen == 7).all())


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize(("n", "groups"), [(64, 2), (64, 5), (192, 6), (512, 3)])
def test_scale_bytes(n: int, groups: int, group: int) -> None:
    stored = np.random.default_rng((n, groups)).integers(0, 256, (groups, n), np.uint8)
    found = decode.scale_bytes(torch.from_numpy(stored), n, groups).numpy()
    assert np.array_equal(found, packed.scale_bytes(stored, n, groups))
    assert np.array_equal(found, BlockScales(group).unpack(stored, n, groups * group))


@pytest.mark.parametrize("global_scale", [1.0, 2.0**-126, 2.0**116, 2.0**119 * 1.37e-5, 511.0 * 2.0**119])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "nf3"])
def test_scale_values_of_every_byte(name: decode.FormatName, global_scale: float) -> None:
    every = np.arange(248 if name != "mxfp4" else 256, dtype=np.uint8)
    single = float(np.float32(global_scale))
    found = decode.scale_values(name, torch.from_numpy(every), torch.tensor(single, dtype=torch.float32))
    assert found.dtype == torch.float64
    assert np.array_equal(found.numpy(), packed.scale_values(name, every, single))


def test_values_of_every_code() -> None:
    assert np.array_equal(np.signbit(decode.E2M1), np.signbit(floats.E2M1))
    assert np.array_equal(decode.E2M1, floats.E2M1)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "nf3"])
def test_dequantize_matrix(name: decode.FormatName) -> None:
    n, k, tile_n = 256, 64, 128
    rng = np.random.default_rng(8)
    words = random_words(rng, k // 16 * (n // 2) * 3 if name == "nf3" else k // 16 * (n // 64) * 128)
    scales = rng.integers(0, 248, (k // decode.GROUP[name], n), np.uint8)
    # The largest f32 results come from the largest bytes; MXFP4's 2^120 needs a small global scale to stay finite.
    global_scale = {"nvfp4": 2.0**110, "mxfp4": 2.0**-20, "nf3": 2.0**116}[name]
    found = decode.dequantize_matrix(
        name, torch.from_numpy(words), torch.from_numpy(scales), torch.tensor(global_scale), n, k, tile_n,
        torch.tensor(source.NF3_LEVELS, dtype=torch.float64),
    )  # fmt: skip
    expected = packed.dequantize(name, words, scales, global_scale, n, k, tile_n)
    assert np.isfinite(expected.astype(np.float32)).all()
    assert found.numpy().tobytes() == expected.astype(np.float32).tobytes()


def test_float32_subnormals_survive() -> None:
    words = torch.full((1, 128), 0x11111111, dtype=torch.int32)  # every code 1, that is 0.5
    scales = torch.zeros(2, 64, dtype=torch.uint8)  # 2^-127
    found = decode.dequantize_matrix(
        "mxfp4", words.repeat(4, 1), scales, torch.tensor(2.0**-20), 64, 64, 0, torch.zeros(8, dtype=torch.float64)
    )
    assert bool((found.double() == 2.0**-148).all())
