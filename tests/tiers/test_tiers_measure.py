"""The data-free score on weights of a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.weights import read_matrix
from hybrid_pack.synthetic import Spec, write_checkpoint
from hybrid_pack.tiers import read_model
from hybrid_pack.tiers.measure import BLOCK_ROWS, ROWS, measure_of, sampled_rows
from hybrid_pack.tiers.source import weights_saliency
from tests.checkpoints import edit_tensors
from tests.reference.quantize import least_error

SPEC = Spec(
    hidden=128, intermediate=64, num_experts=4, kept=4, vocab=8, moe_layers=(1,), dense_layers=(0,), mtp_layer=False,
    stored=("bf16",), map_in="none",
)  # fmt: skip


@pytest.mark.parametrize("rows", [1, ROWS, ROWS + 1, 1000, 6144])
def test_rows_are_spread_over_the_matrix(rows: int) -> None:
    blocks = list(sampled_rows(rows))
    taken = [row for first, count in blocks for row in range(first, first + count)]
    assert taken == sorted(taken) and taken[0] == 0 and taken[-1] == rows - 1
    assert len(taken) == min(rows, ROWS) and (rows == len(taken) or {count for _, count in blocks} == {BLOCK_ROWS})


def test_errors_are_those_of_brute_force(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SPEC)
    source = open_checkpoint(tmp_path, require_map=False)
    with TensorReader() as reader:
        found = measure_of(source, "nvfp4", reader)(1, 2)
        matrices = source.layers[1].experts[2].matrices
        for matrix, error in zip(matrices, found, strict=True):
            weights = read_matrix(reader, matrix, "").astype(np.float64)
            assert error.signal == pytest.approx((weights**2).sum())
            best = least_error("nf3", weights).sum()
            assert error.tail == pytest.approx(best, rel=1e-4)
            assert 0 < error.kept < error.tail


def test_a_louder_expert_is_more_salient(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, replace(SPEC, stored=("f32",)))
    with edit_tensors(tmp_path) as tensors:
        for name in tensors.matching("model.layers.1.mlp.experts.3."):
            stored = tensors[name]
            tensors[name] = replace(stored, data=(np.frombuffer(stored.data, "<f4") * 2).tobytes())
    source = open_checkpoint(tmp_path, require_map=False)
    found = weights_saliency(source, read_model(source))
    values = found.layers[1]
    assert max(range(4), key=values.__getitem__) == 3
    assert values[3] == pytest.approx(8 * np.mean(values[:3]), rel=0.1)
