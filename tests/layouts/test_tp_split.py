"""One expert split over 1, 2, 4 and 8 ranks: the ranks' packed weights, decoded slowly, are the source's weights."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hybrid_pack.layouts import scale_bytes
from hybrid_pack.layouts.rows import Rows
from hybrid_pack.layouts.scales import BlockScales
from hybrid_pack.layouts.shard import KeptScaleFormat, Matrix, RankGeometry, Tier
from hybrid_pack.sharding import tiles_for
from tests.layouts.ours import U8, column_range, pack_codes, pack_scales, random_bytes, row_range
from tests.reference import packed, source
from tests.reference.floats import E4M3

HIDDEN, INTERMEDIATE = 128, 512
F64 = NDArray[np.float64]
Stored = dict[str, tuple[U8, U8]]
"""(codes, scales) as stored, by projection."""

SCALES = {"nvfp4": (0x38, 0x7F), "mxfp4": (105, 124), "nf3": (0, 0x60), "nf3_times_16": (0, 0x7F)}
"""(lowest, one past the highest) scale byte; NVFP4 within what one normalisation keeps, zeros added below."""
SECOND = float(np.float32(3.7e-4))


@lru_cache(maxsize=8)
def expert(name: source.SourceName) -> Stored:
    rng = np.random.default_rng(list(name.encode()))
    made: Stored = {}
    for projection, (n, k) in (
        ("gate", (INTERMEDIATE, HIDDEN)), ("up", (INTERMEDIATE, HIDDEN)), ("down", (HIDDEN, INTERMEDIATE))
    ):  # fmt: skip
        codes = random_bytes(rng, n, k // 8 * 3 if name.startswith("nf3") else k // 2)
        low, high = SCALES[name]
        scales = random_bytes(rng, n, k // source.GROUP[name], low=low, high=high)
        if name != "mxfp4":
            scales[rng.random(scales.shape) < 0.1] = 0
        made[projection] = codes, scales
    return made


@lru_cache(maxsize=8)
def weights(name: source.SourceName) -> dict[str, F64]:
    second = SECOND if name == "nvfp4" else 1.0
    return {projection: source.dequantize(name, *stored, second) for projection, stored in expert(name).items()}


def scale_table(name: source.SourceName, scales: list[Rows]) -> tuple[U8, float]:
    """(table, global scale) of one matrix, normalised over its own row ranges."""
    largest = max(int(rows.matrix().max()) for rows in scales)
    if name == "nvfp4":
        factor = scale_bytes.nvfp4_factor(float(E4M3[largest]))
        return scale_bytes.nvfp4_table(E4M3, factor).device, scale_bytes.nvfp4_global_scale(SECOND, factor)
    if name == "mxfp4":
        shift = scale_bytes.mxfp4_shift(largest)
        return scale_bytes.mxfp4_table(shift).device, scale_bytes.mxfp4_global_scale(shift)
    divisor = 16 if name == "nf3_times_16" else 1
    return scale_bytes.nf3_table(E4M3 / divisor).device, scale_bytes.NF3_GLOBAL_SCALE


def shard(name: source.SourceName, tp: int, rank: int) -> tuple[dict[str, NDArray[Any]], RankGeometry]:
    """One rank's tensors of a shard with this expert alone."""
    share = INTERMEDIATE // tp
    tiles = tiles_for(HIDDEN, share)
    assert tiles is not None
    geometry = RankGeometry(HIDDEN, share, tiles)
    tier: Tier = "tail" if name.startswith("nf3") else "kept"
    scale_format: KeptScaleFormat = "e4m3_k16" if name == "nvfp4" else "e8m0_k32"
    stored = expert(name)
    tensors: dict[str, NDArray[Any]] = {}

    def add(matrix: Matrix, codes: list[Rows], scales: list[Rows]) -> None:
        layout: BlockScales = geometry.scales(tier, scale_format)
        _, k = geometry.size(matrix)
        table, global_scale = scale_table(name, scales)
        tensors[f"{tier}.{matrix}"] = pack_codes(geometry.codes(tier, matrix), codes, k).view(np.int32)[None]
        tensors[f"{tier}.{matrix}_scale"] = pack_scales(layout, scales, k, table)[None]
        tensors[f"{tier}.{matrix}_global_scale"] = np.array([global_scale], np.float32)

    gate_up = [stored["gate"], stored["up"]]
    add("w13", *([row_range(pair[part], rank * share, share) for pair in gate_up] for part in (0, 1)))
    down = [stored["down"][part].shape[1] // tp for part in (0, 1)]
    add("w2", *([column_range(stored["down"][part], rank * down[part], down[part])] for part in (0, 1)))
    return tensors, geometry


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", SCALES)
def test_the_ranks_together_are_the_source(name: source.SourceName, tp: int) -> None:
    gates, ups, downs = [], [], []
    for rank in range(tp):
        tensors, geometry = shard(name, tp, rank)
        packed_name: packed.PackedName = "nf3" if name == "nf3_times_16" else name
        gate_up, down = packed.expert(packed_name, tensors, 0, HIDDEN, geometry.intermediate, geometry.tiles)
        gate, up = np.split(gate_up, 2)
        gates.append(gate)
        ups.append(up)
        downs.append(down)
    for projection, union in (("gate", np.concatenate(gates)), ("up", np.concatenate(ups)), ("down", np.hstack(downs))):
        assert np.array_equal(union, weights(name)[projection]), projection


def test_the_source_has_distinct_ranks() -> None:
    """So that a rank that read another rank's slice would show."""
    for matrix in weights("nf3").values():
        cut = np.split(matrix, 8, axis=0 if matrix.shape[0] == INTERMEDIATE else 1)
        assert all(not np.array_equal(cut[0], other) for other in cut[1:])
