"""Which bytes travel together: every byte once, whole rows, never more than a buffer holds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_pack.errors import UsageError
from hybrid_pack.layouts.shard import RankGeometry, shard_tensors
from hybrid_pack.runtime.buffers import LEAST_CHUNK_BYTES, choose_sizes
from hybrid_pack.runtime.stream.plan import DEVICE_ALIGNMENT, Layout, Span, Task, page_floor, plan_bytes, plan_rows

SIZES = st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 12)), min_size=1, max_size=8)
PAGES = st.integers(1, 8)
quick = settings(deadline=None)


def contiguous(sizes: list[tuple[int, int]], begin: int = 4096) -> tuple[Span, ...]:
    spans = []
    for row_bytes, rows in sizes:
        spans.append(Span(begin, begin + row_bytes * rows, rows))
        begin += row_bytes * rows
    return tuple(spans)


def check(tasks: list[Task], begin: int, end: int, chunk_bytes: int) -> None:
    chunks = [chunk for task in tasks for chunk in task]
    assert [chunks[0][0], *(stop for _, stop in chunks)] == [*(first for first, _ in chunks), end]
    assert chunks[0][0] == begin
    for first, stop in chunks:
        assert first < stop <= page_floor(first) + chunk_bytes
    assert all(tasks)


@quick
@given(SIZES, PAGES)
def test_plans_by_rows(sizes: list[tuple[int, int]], pages: int) -> None:
    spans, chunk_bytes = contiguous(sizes), pages * 4096
    tasks = plan_rows(spans, chunk_bytes)
    check(tasks, spans[0].begin, spans[-1].end, chunk_bytes)
    edges = [s.begin + i * s.row_bytes for s in spans for i in range(s.rows)] + [spans[-1].end]
    row_at = dict(pairwise(edges))
    for task in tasks:
        assert task[0][0] in row_at and task[-1][1] in edges
        if len(task) > 1:
            assert row_at[task[0][0]] == task[-1][1], "only a single row is cut"
            assert row_at[task[0][0]] > page_floor(task[0][0]) + chunk_bytes, "and only one that does not fit"
    for this, after in pairwise(tasks):
        if len(this) == 1 and len(after) == 1:
            assert row_at[after[0][0]] > page_floor(this[0][0]) + chunk_bytes, "the next row would have fitted"


@quick
@given(st.integers(0, 20_000), st.integers(1, 100_000), PAGES)
def test_plans_by_bytes(begin: int, size: int, pages: int) -> None:
    tasks = plan_bytes(begin, begin + size, pages * 4096)
    check(tasks, begin, begin + size, pages * 4096)
    assert {len(task) for task in tasks} == {1}
    assert all(first % 4096 == 0 for ((first, _),) in tasks[1:]), "only the first can be cut within a page"


@quick
@given(SIZES, PAGES, st.integers(0, 3).map(lambda i: 4096 * i))
def test_moves_put_every_byte_in_its_tensor(sizes: list[tuple[int, int]], pages: int, begin: int) -> None:
    spans = contiguous(sizes, begin)
    layout = Layout.of(spans)
    end = spans[-1].end
    assert all(place % DEVICE_ALIGNMENT == 0 for place in layout.places)
    assert layout.nbytes < end - begin + DEVICE_ALIGNMENT * len(spans) + 1
    data = np.random.default_rng(end).integers(0, 256, end, np.uint8)
    for tasks in (plan_rows(spans, pages * 4096), plan_bytes(begin, end, pages * 4096)):
        memory, written = np.zeros(layout.nbytes, np.uint8), np.zeros(layout.nbytes, np.int8)
        for first, stop in (chunk for task in tasks for chunk in task):
            moves = layout.moves_of(first, stop)
            assert sum(move.end - move.begin for move in moves) == stop - first
            for move in moves:
                size = move.end - move.begin
                memory[move.to : move.to + size] = data[move.begin : move.end]
                written[move.to : move.to + size] += 1
        assert written.max() == 1
        for span, place in zip(spans, layout.places, strict=True):
            assert np.array_equal(memory[place : place + span.end - span.begin], data[span.begin : span.end])


def test_a_shard_of_glm_is_one_move() -> None:
    begin, spans = 8192, []
    for tensor in shard_tensors(RankGeometry(6144, 512, (64, 256, 64, 256)), 64, 192, "e4m3_k16"):
        spans.append(Span(begin, begin + tensor.nbytes, tensor.shape[0] if tensor.row_bytes > 4 else 1))
        begin += tensor.nbytes
    layout = Layout.of(spans)
    assert len(layout.moves) == 1 and layout.nbytes == begin - 8192
    tasks = plan_rows(spans, 8 << 20)
    assert {len(task) for task in tasks} == {1}
    sizes = [stop - first for ((first, stop),) in tasks]
    assert sum(sizes) / len(sizes) > 6.5e6, "large reads"
    assert all(first % 4096 == 0 for ((first, _),) in tasks), "direct reads read nothing twice"


def test_sizes() -> None:
    assert choose_sizes(256 << 20, 16).chunk_bytes == 8 << 20
    assert choose_sizes(1 << 30, 4).chunk_bytes == 8 << 20
    assert choose_sizes(1 << 30, 4, 32 << 20).chunk_bytes == 32 << 20
    for limit in (2 * LEAST_CHUNK_BYTES, 1_000_000, 3 << 20, 100 << 20):
        for readers in (1, 3, 16, 100):
            for chunk in (None, 4096, 5000, 1 << 30):
                sizes = choose_sizes(limit, readers, chunk)
                assert 1 <= sizes.readers <= readers and sizes.chunk_bytes % 4096 == 0
                assert sizes.chunk_bytes >= 4096 and 2 * sizes.readers * sizes.chunk_bytes == sizes.host_memory_bytes
                assert sizes.host_memory_bytes <= limit
    for wrong in (
        {"host_memory_bytes": 1000},
        {"readers": 0},
        {"chunk_bytes": 100},
        {"readers": 1.5},
        {"readers": True},
    ):
        name = next(iter(wrong))
        with pytest.raises(UsageError, match=f"{name} must be a whole number of at least"):
            choose_sizes(**wrong)  # type: ignore[arg-type]
