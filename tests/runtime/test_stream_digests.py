"""Rows hashed on their way: the same digests whatever the pieces."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hybrid_pack
from hybrid_pack.errors import DataError
from hybrid_pack.io.digest import blake3_bytes
from hybrid_pack.runtime.stream.digests import Countdown, ShardDigests
from hybrid_pack.runtime.stream.plan import plan_rows, spans_of
from hybrid_pack.schemas.manifest import ShardEntry, TensorEntry
from tests.runtime.dialects import MAPPED, Packs
from tests.runtime.test_stream_plan import SIZES, contiguous, quick


@quick
@given(SIZES, st.integers(1, 8), st.lists(st.integers(1, 5000), min_size=1, max_size=5))
def test_rows_in_any_pieces(sizes: list[tuple[int, int]], pages: int, pieces: list[int]) -> None:
    spans = contiguous(sizes, 0)
    data = np.random.default_rng(pages).integers(0, 256, spans[-1].end, np.uint8)
    entry = ShardEntry.model_construct(tensors={})
    digests = ShardDigests(Path("x"), entry, spans)
    number = 0
    for task in plan_rows(spans, pages * 4096):
        walker = digests.walk(task[0][0])
        at, end = task[0][0], task[-1][1]
        while at < end:
            stop = min(end, at + pieces[number % len(pieces)])
            walker.feed(data[at:stop].data)
            at, number = stop, number + 1
    for span, rows in zip(spans, digests.rows, strict=True):
        size = span.row_bytes
        expected = [data[span.begin + i * size : span.begin + (i + 1) * size] for i in range(span.rows)]
        assert rows == [blake3_bytes(row) for row in expected]


def test_the_manifests_digests_come_out(packs: Packs) -> None:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4", 2, 2))
    entry = next(s for s in pack.manifest.shards if (s.layer, s.rank) == (MAPPED, 1))
    data = (pack.root / entry.path).read_bytes()
    spans = spans_of(entry)
    digests = ShardDigests(pack.root / entry.path, entry, spans)
    digests.walk(spans[0].begin).feed(memoryview(data)[spans[0].begin :])
    digests.check()
    name, tensor = next(iter(entry.tensors.items()))
    wrong = TensorEntry(**{**tensor.model_dump(), "digest": "blake3-rows:" + "0" * 64})
    other = entry.model_copy(update={"tensors": {**entry.tensors, name: wrong}})
    digests = ShardDigests(pack.root / entry.path, other, spans)
    digests.walk(spans[0].begin).feed(memoryview(data)[spans[0].begin :])
    with pytest.raises(
        DataError, match=rf"the bytes of {name} are not the ones that were written \(expected .*000, found"
    ):
        digests.check()


def test_countdown() -> None:
    countdown = Countdown(3)
    assert [countdown.is_last() for _ in range(3)] == [False, False, True]
