"""Round trips over shapes, tiles, row ranges and column ranges drawn at random: our inverse and the slow decoders."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from hybrid_pack.layouts.nf3_2p1 import Nf32p1
from hybrid_pack.layouts.packed_fp4 import PackedFp4
from hybrid_pack.layouts.rows import Rows
from hybrid_pack.layouts.scales import BlockScales
from tests.layouts.ours import U8, pack_codes, pack_scales, random_bytes, same
from tests.reference import packed, source

quick = settings(deadline=None, max_examples=60)


@dataclass(frozen=True)
class Case:
    """A matrix [N, K] cut into row ranges, each in a larger buffer of its own, as slices of other matrices are.

    Attributes:
        blocks: 64-row blocks of each row range.
        k: Columns in units of the layout's smallest K.
        tile_n: N tile.
        lead: Units of columns before the slice in each buffer row.
        trail: Units of columns after it.
        skip: Rows before the slice.
        seed: Of the bytes.
    """

    blocks: tuple[int, ...]
    k: int
    tile_n: int
    lead: int
    trail: int
    skip: int
    seed: int

    @property
    def n(self) -> int:
        return 64 * sum(self.blocks)

    def parts(self, unit_bytes: int) -> tuple[U8, list[Rows]]:
        """(the whole matrix u8 [N, k * unit_bytes], its row ranges inside larger buffers)."""
        rng = np.random.default_rng(self.seed)
        stride, start, width = ((units * unit_bytes) for units in (self.lead + self.k + self.trail, self.lead, self.k))
        pieces, rows = [], []
        for blocks in self.blocks:
            buffer = random_bytes(rng, self.skip + 64 * blocks, stride)
            pieces.append(buffer[self.skip :, start : start + width])
            rows.append(Rows(buffer.reshape(-1), self.skip * stride + start, stride, 64 * blocks, width))
        return np.concatenate(pieces), rows


@st.composite
def draw_case(draw: st.DrawFn, max_k: int) -> Case:
    tile_n = draw(st.sampled_from([64, 128, 256]))
    total = draw(st.integers(1, 512 // tile_n)) * tile_n // 64
    cuts = sorted(draw(st.sets(st.integers(1, total - 1), max_size=2))) if total > 1 else []
    blocks = tuple(right - left for left, right in pairwise([0, *cuts, total]))
    lead, trail, skip = (draw(st.integers(0, 3)) for _ in range(3))
    return Case(blocks, draw(st.integers(1, max_k)), tile_n, lead, trail, skip, draw(st.integers(0, 2**32)))


@quick
@given(draw_case(max_k=6))
@example(Case((1, 2, 1), 33, 128, 1, 2, 3, 0))  # K = 1056: three of our kernel's K blocks, the last of one pair
def test_nf3(case: Case) -> None:
    stored, rows = case.parts(12)
    layout, k = Nf32p1(case.tile_n), 32 * case.k
    words = pack_codes(layout, rows, k)
    assert words.shape == layout.shape(case.n, k)
    assert same(layout.unpack(words, case.n, k), stored)
    assert same(packed.nf3_codes(words, case.n, k, case.tile_n), source.nf3_codes(stored))


@quick
@given(draw_case(max_k=9))
@example(Case((2, 1), 65, 64, 3, 0, 1, 0))  # K = 1040
def test_fp4(case: Case) -> None:
    stored, rows = case.parts(8)
    layout, k = PackedFp4(), 16 * case.k
    words = pack_codes(layout, rows, k)
    assert words.size == int(np.prod(layout.shape(case.n, k)))
    assert same(layout.unpack(words, case.n, k), stored)
    assert same(packed.fp4_codes(words, case.n, k), source.fp4_codes(stored))


@quick
@given(draw_case(max_k=40), st.sampled_from([16, 32]))
@example(Case((1, 1), 33, 64, 1, 1, 1, 0), 16)
def test_scales(case: Case, group: int) -> None:
    stored, rows = case.parts(1)
    layout, k = BlockScales(group), group * case.k
    assume(case.k > 1)  # one group has another permutation and is refused
    table = np.random.default_rng(case.seed).permutation(256).astype(np.uint8)
    out = pack_scales(layout, rows, k, table)
    assert out.shape == layout.shape(case.n, k)
    assert same(layout.unpack(out, case.n, k), table[stored])
    assert same(packed.scale_bytes(out, case.n, case.k), table[stored])


@quick
@given(st.data())
def test_packing_a_part_leaves_the_rest_alone(data: st.DataObject) -> None:
    """Blocks may be written in any order, or by several threads."""
    tile_n, k, total = data.draw(st.sampled_from([64, 128, 256])), 64, 8
    order = data.draw(st.permutations(range(total)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    threes, fours, scales = (random_bytes(rng, 64 * total, width) for width in (24, 32, 4))
    identity = np.arange(256, dtype=np.uint8)
    nf3, fp4, block = Nf32p1(tile_n), PackedFp4(), BlockScales(16)
    n = 64 * total
    out3, out4 = np.zeros(n * k // 32 * 3, np.uint32), np.zeros(n * k // 8, np.uint32)
    out_scales = np.zeros(n * 4, np.uint8)
    for block_index in order:
        rows = slice(64 * block_index, 64 * block_index + 64)
        nf3.pack_rows(Rows.of(threes[rows]), n, k, 64 * block_index, out3)
        fp4.pack_rows(Rows.of(fours[rows]), n, k, 64 * block_index, out4)
        block.pack_rows(Rows.of(scales[rows]), n, k, 64 * block_index, identity, out_scales)
    assert same(out3, pack_codes(nf3, threes, k))
    assert same(out4, pack_codes(fp4, fours, k))
    assert same(out_scales.reshape(4, n), pack_scales(block, scales, k))
