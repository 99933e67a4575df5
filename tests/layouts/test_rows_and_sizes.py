"""Views of rows, size arithmetic, what packers refuse, counts, and the file order of a shard."""

from __future__ import annotations

import re
from typing import Any

import numba
import numpy as np
import pytest

from hybrid_pack import jit
from hybrid_pack.layouts.nf3_2p1 import Nf32p1
from hybrid_pack.layouts.packed_fp4 import PackedFp4
from hybrid_pack.layouts.rows import Rows
from hybrid_pack.layouts.scales import BlockScales, count_scale_bytes, row_order
from hybrid_pack.layouts.shard import KeptScaleFormat, RankGeometry, shard_path, shard_tensors
from tests.layouts.ours import IDENTITY, column_range, random_bytes, row_range
from tests.reference import packed

BUFFER = np.arange(240, dtype=np.uint8)


def test_rows_of_a_matrix_are_a_view_of_all_of_it() -> None:
    matrix = BUFFER.reshape(12, 20)
    rows = Rows.of(matrix)
    assert (rows.start, rows.stride, rows.count, rows.width) == (0, 20, 12, 20)
    assert np.shares_memory(rows.buffer, matrix)
    assert np.array_equal(rows.matrix(), matrix)


def test_rows_of_a_strided_matrix_are_a_copy() -> None:
    matrix = BUFFER.reshape(12, 20)[::2, 3:9]
    assert np.array_equal(Rows.of(matrix).matrix(), matrix)


def test_ranges_are_the_slices() -> None:
    matrix = BUFFER.reshape(12, 20)
    assert np.array_equal(row_range(matrix, 3, 4).matrix(), matrix[3:7])
    assert np.array_equal(column_range(matrix, 5, 6).matrix(), matrix[:, 5:11])
    assert not row_range(matrix, 3, 4).matrix().flags.writeable


@pytest.mark.parametrize(
    ("start", "stride", "count", "width"),
    [(0, 20, 13, 20), (1, 20, 12, 20), (-4, 20, 2, 20), (0, 10, 2, 20), (0, 20, 0, 20), (236, 4, 1, 5)],
)
def test_rows_that_leave_their_buffer_are_refused(start: int, stride: int, count: int, width: int) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{count} rows of {width} bytes at {start} do not fit 240 bytes")):
        Rows(BUFFER, start, stride, count, width)


def test_the_last_row_may_end_with_the_buffer() -> None:
    assert Rows(BUFFER, 10, 20, 12, 10).matrix()[-1, -1] == 239


@pytest.mark.parametrize(("start", "stride", "offset"), [(2, 20, 0), (0, 18, 0), (0, 20, 1)])
def test_rows_off_a_word_boundary_are_refused(start: int, stride: int, offset: int) -> None:
    memory = np.zeros(65, np.uint32).view(np.uint8)
    with pytest.raises(ValueError, match="not aligned to 4-byte words"):
        _ = Rows(memory[offset : offset + 240], start, stride, 4, 12).words


def test_words_of_rows() -> None:
    words, start, stride = Rows(np.arange(22, dtype=np.uint8), 4, 8, 2, 4).words
    assert words.tolist() == [0x03020100, 0x07060504, 0x0B0A0908, 0x0F0E0D0C, 0x13121110]
    assert (start, stride) == (1, 2)


@pytest.mark.parametrize(
    ("layout", "n", "k", "shape"),
    [
        (Nf32p1(256), 1024, 6144, (384 * 512 * 3,)),
        (Nf32p1(128), 6144, 512, (32 * 3072 * 3,)),
        (PackedFp4(), 1024, 6144, (384, 2048)),
        (PackedFp4(), 6144, 512, (32, 12288)),
        (BlockScales(16), 1024, 6144, (384, 1024)),
        (BlockScales(32), 6144, 512, (16, 6144)),
    ],
)
def test_shapes_of_glm(layout: Any, n: int, k: int, shape: tuple[int, ...]) -> None:
    assert layout.shape(n, k) == shape


@pytest.mark.parametrize(
    ("count", "width", "n", "k", "first_row", "out_size"),
    [
        (64, 24, 128, 32, 0, 384),  # rows of another width
        (32, 12, 128, 32, 0, 384),  # half a block
        (64, 12, 128, 32, 32, 384),  # between blocks
        (128, 12, 128, 32, 64, 384),  # past the end
        (64, 12, 128, 32, 0, 383),  # out too small
        (64, 12, 128, 32, 0, 768),  # out too large
        (64, 12, 192, 32, 0, 576),  # N is no multiple of the tile
        (64, 18, 128, 48, 0, 576),  # K is no multiple of 32
    ],
)
def test_nf3_refuses_sizes_that_do_not_fit(
    count: int, width: int, n: int, k: int, first_row: int, out_size: int
) -> None:
    rows = Rows.of(np.zeros((count, width), np.uint8))
    out = np.zeros(out_size, np.uint32)
    with pytest.raises(ValueError, match=r"do not fit|does not divide|expected 384 contiguous"):
        Nf32p1(128).pack_rows(rows, n, k, first_row, out)
    assert not out.any()


@pytest.mark.parametrize(
    ("count", "width", "first_row", "out_size"),
    [(64, 32, 0, 512), (32, 16, 0, 512), (64, 16, 32, 512), (128, 16, 64, 512), (64, 16, 0, 511), (64, 16, 0, 1024)],
)
def test_fp4_refuses_sizes_that_do_not_fit(count: int, width: int, first_row: int, out_size: int) -> None:
    rows = Rows.of(np.zeros((count, width), np.uint8))
    with pytest.raises(ValueError, match=r"do not fit 128 rows of 16 bytes|expected 512 contiguous"):
        PackedFp4().pack_rows(rows, 128, 32, first_row, np.zeros(out_size, np.uint32))


@pytest.mark.parametrize(
    ("count", "width", "first_row", "out_size"),
    [(64, 4, 0, 256), (32, 2, 0, 256), (64, 2, 32, 256), (128, 2, 64, 256), (64, 2, 0, 255), (64, 2, 0, 512)],
)
def test_scales_refuse_sizes_that_do_not_fit(count: int, width: int, first_row: int, out_size: int) -> None:
    rows, out = Rows.of(np.zeros((count, width), np.uint8)), np.zeros(out_size, np.uint8)
    with pytest.raises(ValueError, match=r"do not fit 128 rows of 2 bytes|expected 256 contiguous"):
        BlockScales(32).pack_rows(rows, 128, 64, first_row, IDENTITY, out)


def test_row_order_is_the_reference_s() -> None:
    order = row_order()
    assert sorted(order) == list(range(64))
    assert all(packed.scale_position(int(row)) == position for position, row in enumerate(order))
    assert order[:8].tolist() == [0, 16, 8, 24, 32, 48, 40, 56]
    with pytest.raises(ValueError, match="read-only"):
        order[0] = 1


def test_scale_bytes_are_counted_in_the_rows_alone() -> None:
    buffer = random_bytes(np.random.default_rng(0), 50, 37)
    buffer[:, :5] = 0
    for rows, part in (
        (Rows.of(buffer), buffer),
        (column_range(buffer, 3, 30), buffer[:, 3:33]),
        (row_range(buffer, 7, 1), buffer[7:8]),
    ):
        counts = count_scale_bytes(rows)
        assert counts.dtype == np.int64
        assert counts.tolist() == np.bincount(np.ascontiguousarray(part).reshape(-1), minlength=256).tolist()


GLM = RankGeometry(hidden=6144, intermediate=512, tiles=(64, 256, 64, 256))


def test_shard_of_glm_at_tp4() -> None:
    tensors = shard_tensors(GLM, kept=64, tail=192, kept_scale_format="e4m3_k16")
    assert [(t.name, t.dtype, t.shape) for t in tensors] == [
        ("tail.w13", "I32", (192, 384 * 512 * 3)),
        ("tail.w2", "I32", (192, 32 * 3072 * 3)),
        ("kept.w13", "I32", (64, 384, 2048)),
        ("kept.w2", "I32", (64, 32, 12288)),
        ("tail.w13_scale", "U8", (192, 192, 1024)),
        ("kept.w13_scale", "U8", (64, 384, 1024)),
        ("tail.w2_scale", "U8", (192, 16, 6144)),
        ("kept.w2_scale", "U8", (64, 32, 6144)),
        ("tail.expert_ids", "I32", (192,)),
        ("tail.w13_global_scale", "F32", (192,)),
        ("tail.w2_global_scale", "F32", (192,)),
        ("kept.expert_ids", "I32", (64,)),
        ("kept.w13_global_scale", "F32", (64,)),
        ("kept.w2_global_scale", "F32", (64,)),
    ]
    begin = 0
    for tensor in tensors[:8]:
        assert begin % 4096 == 0, tensor.name
        begin += tensor.nbytes
    weights = 3 * 6144 * 512
    assert begin == 64 * weights * 9 // 16 + 192 * weights * 13 // 32  # 4.5 and 3.25 bits a weight
    assert tensors[0].row_bytes == 384 * 512 * 3 * 4


@pytest.mark.parametrize("scale_format", ["e4m3_k16", "e8m0_k32"])
def test_scale_shape_of_the_kept_tier_follows_its_format(scale_format: KeptScaleFormat) -> None:
    group = {"e4m3_k16": 16, "e8m0_k32": 32}[scale_format]
    shapes = {t.name: t.shape for t in shard_tensors(GLM, 2, 3, scale_format)}
    assert shapes["kept.w13_scale"] == (2, 6144 // group, 1024)
    assert shapes["kept.w2_scale"] == (2, 512 // group, 6144)
    assert shapes["tail.w13_scale"] == (3, 192, 1024)


@pytest.mark.parametrize(("kept", "tail", "tiers"), [(2, 0, {"kept"}), (0, 2, {"tail"}), (0, 0, set())])
def test_an_empty_tier_has_no_tensors(kept: int, tail: int, tiers: set[str]) -> None:
    tensors = shard_tensors(GLM, kept, tail, "e4m3_k16" if kept else None)
    assert {t.tier for t in tensors} == {t.name.split(".")[0] for t in tensors} == tiers
    assert len(tensors) == 7 * len(tiers)


def test_small_tensors_come_last_even_after_smaller_weights() -> None:
    """A tier of one expert beside a tier of many: its scales still begin before any list of ids."""
    tensors = shard_tensors(RankGeometry(128, 64, (64, 128, 64, 128)), kept=1, tail=255, kept_scale_format="e8m0_k32")
    scales, ids = (
        next(i for i, t in enumerate(tensors) if t.name == name) for name in ("kept.w2_scale", "tail.expert_ids")
    )
    assert tensors[scales].nbytes < tensors[ids].nbytes
    assert scales < ids


def test_tiles_of_each_matrix_reach_its_layout() -> None:
    geometry = RankGeometry(3584, 192, (128, 64, 64, 128))
    assert geometry.codes("tail", "w13") == Nf32p1(64)
    assert geometry.codes("tail", "w2") == Nf32p1(128)
    assert geometry.codes("kept", "w13") == PackedFp4()
    assert geometry.size("w13") == (384, 3584) and geometry.size("w2") == (3584, 192)


def test_shard_path() -> None:
    assert shard_path("tp4-ep2", 7, 78) == "experts/tp4-ep2/rank-7/layer-078.safetensors"
    assert shard_path("tp1-ep1", 0, 1000) == "experts/tp1-ep1/rank-0/layer-1000.safetensors"


def test_kernels_compile_where_no_cache_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_cache(**options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        assert options == {"nogil": True}
        return lambda function: lambda value: ("compiled", function(value))

    monkeypatch.setattr(numba, "njit", refuse_cache)
    assert jit.kernel(len)("abc") == ("compiled", 3)
