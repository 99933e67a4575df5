"""Codes against b12x running now, whole and in the parts tensor parallelism reads."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_pack.formats import nf3
from hybrid_pack.layouts.nf3_2p1 import Nf32p1
from hybrid_pack.layouts.packed_fp4 import PackedFp4
from tests.golden import oracle
from tests.layouts.ours import column_range, pack_codes, random_bytes, row_range, same
from tests.reference import source


@pytest.fixture(autouse=True)
def b12x() -> None:
    oracle.require()


NF3_SHAPES = [
    (64, 32, 64),
    (192, 96, 64),
    (128, 64, 128),
    (384, 512, 128),
    (640, 544, 128),
    (256, 32, 256),
    (512, 768, 256),
    (768, 256, 256),
    (1536, 64, 256),
    (128, 1056, 128),
]
"""(N, K, tile_n); 512x768 and 768x256 are an eighth of GLM-5.2 undivided. K past 512 and 1024 crosses our blocks."""
FP4_SHAPES = [(64, 16), (64, 32), (128, 48), (192, 160), (512, 768), (768, 256), (128, 1040)]
"""(N, K)."""


def nf3_words(stored: np.ndarray, tile_n: int) -> np.ndarray:
    return oracle.nf3_codes(source.nf3_codes(np.ascontiguousarray(stored)), tile_n)


def fp4_words(stored: np.ndarray) -> np.ndarray:
    return oracle.fp4_codes(np.ascontiguousarray(stored)).reshape(-1)


def test_code_book_is_b12x_s() -> None:
    assert oracle.module()._NF3_CODEBOOK == nf3.DEFAULT_LEVELS == source.NF3_LEVELS


@pytest.mark.parametrize(("n", "k", "tile_n"), NF3_SHAPES)
def test_nf3(n: int, k: int, tile_n: int) -> None:
    stored = random_bytes(np.random.default_rng((n, k, tile_n)), n, k // 8 * 3)
    words = pack_codes(Nf32p1(tile_n), stored, k)
    assert words.shape == Nf32p1(tile_n).shape(n, k)
    assert same(words, nf3_words(stored, tile_n))


@pytest.mark.parametrize(("n", "k"), FP4_SHAPES)
def test_fp4(n: int, k: int) -> None:
    stored = random_bytes(np.random.default_rng((n, k)), n, k // 2)
    assert same(pack_codes(PackedFp4(), stored, k), fp4_words(stored))


@pytest.mark.parametrize(
    ("hidden", "intermediate", "tp", "tile_n"), [(96, 512, 2, 256), (64, 512, 4, 128), (96, 192, 3, 64)]
)
def test_nf3_gate_and_up_as_two_row_ranges(hidden: int, intermediate: int, tp: int, tile_n: int) -> None:
    rng = np.random.default_rng((hidden, intermediate))
    gate, up = (random_bytes(rng, intermediate, hidden // 8 * 3) for _ in range(2))
    share = intermediate // tp
    for rank in range(tp):
        words = pack_codes(Nf32p1(tile_n), [row_range(m, rank * share, share) for m in (gate, up)], hidden)
        rows = slice(rank * share, (rank + 1) * share)
        assert same(words, nf3_words(np.concatenate([gate[rows], up[rows]]), tile_n))


@pytest.mark.parametrize(("hidden", "intermediate", "tp"), [(48, 512, 4), (96, 192, 3)])
def test_fp4_gate_and_up_as_two_row_ranges(hidden: int, intermediate: int, tp: int) -> None:
    rng = np.random.default_rng((hidden, intermediate))
    gate, up = (random_bytes(rng, intermediate, hidden // 2) for _ in range(2))
    share = intermediate // tp
    for rank in range(tp):
        words = pack_codes(PackedFp4(), [row_range(m, rank * share, share) for m in (gate, up)], hidden)
        rows = slice(rank * share, (rank + 1) * share)
        assert same(words, fp4_words(np.concatenate([gate[rows], up[rows]])))


@pytest.mark.parametrize(
    ("hidden", "intermediate", "tp", "tile_n"), [(256, 256, 4, 256), (384, 192, 3, 128), (128, 2304, 2, 128)]
)
def test_down_as_a_column_range(hidden: int, intermediate: int, tp: int, tile_n: int) -> None:
    rng = np.random.default_rng((hidden, intermediate, 1))
    threes, fours = random_bytes(rng, hidden, intermediate // 8 * 3), random_bytes(rng, hidden, intermediate // 2)
    share = intermediate // tp
    for rank in range(tp):
        width = share // 8 * 3
        words = pack_codes(Nf32p1(tile_n), [column_range(threes, rank * width, width)], share)
        assert same(words, nf3_words(threes[:, rank * width : (rank + 1) * width], tile_n))
        width = share // 2
        words = pack_codes(PackedFp4(), [column_range(fours, rank * width, width)], share)
        assert same(words, fp4_words(fours[:, rank * width : (rank + 1) * width]))
