"""Every code at every position of a block, against the slow decoders."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hybrid_pack.layouts.nf3_2p1 import Nf32p1
from hybrid_pack.layouts.packed_fp4 import PackedFp4
from tests.layouts.ours import U8, pack_codes, same
from tests.reference import packed, source


def matrices(n: int, k: int, base: int) -> Iterator[U8]:
    """Matrices that put every code at every position, then the position's own number there, digit by digit."""
    noise = np.random.default_rng((n, k)).integers(0, base, (n, k))
    for shift in range(base):
        yield ((noise + shift) % base).astype(np.uint8)
    number = np.arange(n * k).reshape(n, k)
    while number.any():
        yield (number % base).astype(np.uint8)
        number = number // base


@pytest.mark.parametrize(
    ("n", "k", "tile_n"), [(64, 32, 64), (192, 64, 64), (256, 64, 128), (512, 32, 256), (128, 544, 128)]
)
def test_nf3(n: int, k: int, tile_n: int) -> None:
    layout = Nf32p1(tile_n)
    for codes in matrices(n, k, 8):
        stored = source.store_nf3(codes)
        words = pack_codes(layout, stored, k)
        assert same(packed.nf3_codes(words, n, k, tile_n), codes)
        assert same(layout.unpack(words, n, k), stored)


@pytest.mark.parametrize(("n", "k"), [(64, 16), (64, 32), (192, 48), (128, 528)])
def test_fp4(n: int, k: int) -> None:
    layout = PackedFp4()
    for codes in matrices(n, k, 16):
        stored = source.store_fp4(codes)
        words = pack_codes(layout, stored, k)
        assert same(packed.fp4_codes(words, n, k), codes)
        assert same(layout.unpack(words, n, k), stored)


def test_nf3_bytes_of_one_unit_by_hand() -> None:
    """Column 9 of row 8m + t is code slot 3 of byte m in the unit of t and c = 0."""
    codes = np.zeros((64, 32), np.uint8)
    codes[8 * 5 + 2, 9] = 0b110  # m = 5, t = 2, c = 0: unit 4 * 2 of the first K block
    words = pack_codes(Nf32p1(64), source.store_nf3(codes), 32).reshape(-1, 3)
    assert words[8].tolist() == [0, 0b10 << (8 * 1 + 2 * 3), 1 << (4 * 5 + 3)]
    words[8] = 0
    assert not words.any()


def test_fp4_bytes_of_one_word_by_hand() -> None:
    """Rows 16 warp + t and its eighth successor share word 16t + 4c + warp."""
    codes = np.zeros((64, 16), np.uint8)
    codes[16 * 3 + 2 + 8, 2 * 1 + 9] = 0xE  # warp 3, t = 2, second row, c = 1, column 2c + 9: the top nibble
    words = pack_codes(PackedFp4(), source.store_fp4(codes), 16)
    assert words[16 * 2 + 4 * 1 + 3] == 0xE0000000
    assert np.count_nonzero(words) == 1


def test_a_tile_of_another_size_is_another_byte_order() -> None:
    codes = np.random.default_rng(3).integers(0, 8, (256, 32), np.uint8)
    small, large = (pack_codes(Nf32p1(tile_n), source.store_nf3(codes), 32) for tile_n in (128, 256))
    assert not same(small, large)
    assert not same(packed.nf3_codes(small, 256, 32, 256), codes)
