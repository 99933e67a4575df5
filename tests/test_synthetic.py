"""The checkpoints everything else is tried with: deterministic, plausible, and readable by the official library."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from numpy.typing import NDArray

from hybrid_pack.errors import UsageError
from hybrid_pack.io.checkpoint import Matrix, open_checkpoint
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.weights import read_matrix, stored_rows
from hybrid_pack.synthetic import SIGMA, Spec, bit_map, read_tensor, write_checkpoint
from tests.checkpoints import SMALL

KINDS: tuple[Any, ...] = (
    "nvfp4", "mxfp4", "ct_nvfp4", "ct_mxfp4", "mxfp8", "mxfp8_inv", "fp8_block", "fp8_row", "fp8_tensor", "bf16", "f16",
    "f32",
)  # fmt: skip


def contents(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.iterdir()}


def weights(matrix: Matrix) -> NDArray[np.float32]:
    with TensorReader() as reader:
        return read_matrix(reader, matrix, "here")


def test_same_seed_same_bytes(small_checkpoint: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "again", SMALL)
    assert contents(tmp_path / "again") == contents(small_checkpoint)
    write_checkpoint(tmp_path / "other", replace(SMALL, seed=1))
    other, first = contents(tmp_path / "other"), contents(small_checkpoint)
    assert all(other[name] != first[name] for name in first if name.endswith("0006.safetensors"))


def test_the_default_is_small(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    assert 1e6 < sum(map(len, contents(tmp_path).values())) < 1e7
    assert list(open_checkpoint(tmp_path).layers) == [3, 4, 5]


@pytest.mark.parametrize(
    "spec",
    [
        Spec(num_experts=4),
        Spec(num_experts=4, kept_format="mxfp4", nf3_scales="e4m3_x16"),
        Spec(num_experts=4, kept_format="mxfp4", family=1),
        *(Spec(num_experts=4, stored=(kind,)) for kind in KINDS),
        Spec(num_experts=4, family=8),
        Spec(num_experts=4, stored=("nvfp4", "bf16", "fp8_block"), mix_matrices=True, mtp_layer=False),
        *(Spec(num_experts=4, family=family) for family in range(11, 17)),
        Spec(num_experts=4, variant="qwen3_vl_moe"),
        Spec(num_experts=4, family=14, stored=("nvfp4",)),
    ],
    ids=lambda spec: f"{spec.model.model_type} {'+'.join(spec.published) or spec.kept_format} {spec.nf3_scales}",
)
def test_weights_are_plausible(tmp_path: Path, spec: Spec) -> None:
    write_checkpoint(tmp_path, spec)
    seen = set()
    zeros = 0
    source = open_checkpoint(tmp_path, require_map=False)
    for layer in source.layers.values():
        for expert in layer.experts.values():
            for matrix in expert.matrices:
                w = weights(matrix)
                assert w.shape == (matrix.rows, matrix.columns)
                assert np.isfinite(w).all()
                assert SIGMA / 3 < w.std() < SIGMA * 3 and abs(w.mean()) < SIGMA / 20
                if matrix.format.name in ("nvfp4", "nf3"):
                    with TensorReader() as reader:
                        scales = stored_rows(reader, matrix).scales
                    assert scales is not None
                    zeros += int((scales == 0).sum())
                seen.add(w.tobytes())
    assert zeros > 0 or set(spec.published) - {"nvfp4", "ct_nvfp4"}
    assert len(seen) == sum(len(e.matrices) for layer in source.layers.values() for e in layer.experts.values())


@pytest.mark.parametrize(
    ("relation", "ratios"), [("equal", {1.0}), ("power_of_two", {0.25, 0.5, 1.0, 2.0, 4.0}), ("unequal", {1.37})]
)
def test_second_scales_of_gate_and_up(tmp_path: Path, relation: str, ratios: set[float]) -> None:
    write_checkpoint(tmp_path, replace(SMALL, second_scale=relation, num_experts=6))
    found = set()
    for expert in open_checkpoint(tmp_path).layers[5].experts.values():
        gate, up = (
            np.frombuffer(read_tensor(tmp_path, m.second.header.name)[2], np.float32)[0]
            for m in (expert.gate, expert.up)
            if m.second
        )
        found.add(round(float(up / gate), 5))
    assert found == ratios


def test_files(tmp_path: Path) -> None:
    """The official library reads every shard, and none is larger than asked for."""
    spec = replace(SMALL, shard_bytes=100_000)
    write_checkpoint(tmp_path, spec)
    total = 0
    for path in sorted(tmp_path.glob("*.safetensors")):
        tensors = safetensors.deserialize(path.read_bytes())
        assert len(tensors) == 1 or sum(len(entry["data"]) for _, entry in tensors) <= spec.shard_bytes
        total += len(tensors)
    assert total == len(open_checkpoint(tmp_path).shards.tensors)


def test_large_tensors_repeat_the_pool(tmp_path: Path) -> None:
    """A base matrix larger than the pool of random bytes is filled all the same."""
    spec = Spec(hidden=128, intermediate=64, num_experts=1, kept=1, moe_layers=(0,), dense_layers=(), vocab=100_000)
    write_checkpoint(tmp_path, spec)
    _, shape, data = read_tensor(tmp_path, "lm_head.weight")
    assert len(data) == 2 * shape[0] * shape[1]
    assert np.frombuffer(data, np.uint16)[-1000:].any()


def test_map(tmp_path: Path) -> None:
    bits = bit_map(Spec(num_experts=8, kept=3, moe_layers=(3, 7), map_keys="zero_padded"))
    assert list(bits) == ["03", "07"]
    assert all(sorted(entries) == [3] * 5 + [4] * 3 for entries in bits.values())
    with pytest.raises(KeyError):
        write_checkpoint(tmp_path, SMALL)
        read_tensor(tmp_path, "no such tensor")


@pytest.mark.parametrize(
    "options",
    [
        {"hidden": 100},
        {"intermediate": 0},
        {"kept": 9},
        {"moe_layers": ()},
        {"family": 14, "stored": ("nf3",)},
        {"family": 12, "stored": ("bf16", "f16")},
    ],
    ids=str,
)
def test_impossible_specs(options: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        replace(Spec(), **options)
