"""Block scales against b12x running now: bytes, permutation, normalisation and global scale."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_pack.layouts import scale_bytes
from hybrid_pack.layouts.scales import BlockScales
from tests.golden import oracle
from tests.layouts.ours import U8, column_range, pack_scales, random_bytes, row_range, same
from tests.reference.floats import E4M3

FINITE = 0x7F
"""One past the largest finite positive E4M3 byte."""
NF3_LIMIT = 0x60
"""One past the largest E4M3 byte below 32."""
SHAPES = [(64, 64), (128, 96), (192, 160), (512, 768), (64, 1056)]
"""(N, K). b12x permutes a matrix with a single group of columns differently; no legal geometry has one."""


@pytest.fixture(autouse=True)
def b12x() -> None:
    oracle.require()


def test_b12x_has_the_same_constants() -> None:
    assert oracle.module()._NF3_SCALE_GLOBAL == scale_bytes.NF3_GLOBAL_SCALE
    assert oracle.module()._E8M0_K32_BF16_MAX_SCALE_BYTE == scale_bytes.MXFP4_MAX_BYTE


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_nf3(n: int, k: int) -> None:
    stored = random_bytes(np.random.default_rng((n, k)), n, k // 32, high=NF3_LIMIT)
    packed = pack_scales(BlockScales(32), stored, k, scale_bytes.nf3_table(E4M3).device)
    assert same(packed, oracle.nf3_scales(E4M3[stored], k))


def test_nf3_times_16_where_b12x_does_not_raise_the_scale() -> None:
    exact_in_both = np.array([byte for byte in range(FINITE) if byte == 0 or E4M3[byte] / 16 >= 2.0**-10], np.uint8)
    stored = np.resize(exact_in_both, (64, 8))
    packed = pack_scales(BlockScales(32), stored, 256, scale_bytes.nf3_table(E4M3 / 16).device)
    assert same(packed, oracle.nf3_scales(E4M3[stored] / 16, 256))


def nvfp4(stored: U8, second: float) -> tuple[U8, float]:
    factor = scale_bytes.nvfp4_factor(float(E4M3[stored].max()))
    table = scale_bytes.nvfp4_table(E4M3, factor)
    packed = pack_scales(BlockScales(16), stored, stored.shape[1] * 16, table.device)
    return packed, scale_bytes.nvfp4_global_scale(second, factor)


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize(("low", "high"), [(0, FINITE), (0x08, 0x30), (0, 9), (0x70, FINITE)])
def test_nvfp4(n: int, k: int, low: int, high: int) -> None:
    rng = np.random.default_rng((n, k, low))
    stored = random_bytes(rng, n, k // 16, low=low, high=high)
    second = float(np.float32(rng.uniform(1e-7, 1e-2)))
    packed, global_scale = nvfp4(stored, second)
    expected, expected_global = oracle.nvfp4_scales(stored, second, k)
    assert same(packed, expected)
    assert global_scale == expected_global


def test_nvfp4_factor_of_every_largest_scale() -> None:
    stored = np.zeros((64, 2), np.uint8)
    for largest in range(FINITE):
        stored[5, 1] = largest
        assert scale_bytes.nvfp4_factor(float(E4M3[largest])) == oracle.nvfp4_factor(stored), largest


def test_nvfp4_every_byte_beside_every_largest() -> None:
    for largest in range(1, FINITE):
        stored = np.resize(np.arange(largest + 1, dtype=np.uint8), (64, 2))
        stored[0, 0] = largest
        packed, global_scale = nvfp4(stored, 1.0)
        expected, expected_global = oracle.nvfp4_scales(stored, 1.0, 32)
        assert same(packed, expected), largest
        assert global_scale == expected_global, largest


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("shift", [0, 13, 73, 126])
def test_mxfp4(n: int, k: int, shift: int) -> None:
    stored = random_bytes(np.random.default_rng((n, k, shift)), n, k // 32, high=min(255, 256 - shift))
    packed = pack_scales(BlockScales(32), stored, k, scale_bytes.mxfp4_table(shift).device)
    assert same(packed, oracle.mxfp4_scales(stored + np.uint8(shift), k))


@pytest.mark.parametrize("group", [16, 32])
def test_parts_of_a_matrix(group: int) -> None:
    """Gate and up as two row ranges, down as a column range, as tensor parallelism reads them."""
    hidden, intermediate, tp = 160, 384, 3
    share = intermediate // tp
    rng = np.random.default_rng(group)
    gate, up = (random_bytes(rng, intermediate, hidden // group, high=NF3_LIMIT) for _ in range(2))
    down = random_bytes(rng, 128, intermediate // group, high=NF3_LIMIT)
    for rank in range(tp):
        rows, width = slice(rank * share, (rank + 1) * share), share // group
        w13 = np.concatenate([gate[rows], up[rows]])
        w2 = np.ascontiguousarray(down[:, rank * width : (rank + 1) * width])
        w13_parts = [row_range(gate, rank * share, share), row_range(up, rank * share, share)]
        w2_parts = [column_range(down, rank * width, width)]
        for whole, parts, k in ((w13, w13_parts, hidden), (w2, w2_parts, share)):
            if group == 32:
                table, expected = scale_bytes.nf3_table(E4M3), oracle.nf3_scales(E4M3[whole], k)
            else:
                table = scale_bytes.nvfp4_table(E4M3, scale_bytes.nvfp4_factor(float(E4M3[whole].max())))
                expected, _ = oracle.nvfp4_scales(whole, 1.0, k)
            assert same(pack_scales(BlockScales(group), parts, k, table.device), expected)
