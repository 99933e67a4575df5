"""Packs of other families run on the CPU as their models do, or say by name why not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import hybrid_pack
from hybrid_pack.convert import convert
from hybrid_pack.errors import EnvironmentFailure
from hybrid_pack.io.checkpoint import Checkpoint, open_checkpoint
from hybrid_pack.io.names import FAMILIES
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.weights import read_matrix
from hybrid_pack.plan import make_plan
from hybrid_pack.runtime import HybridMoE
from hybrid_pack.runtime.backends import consider
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec, write_checkpoint
from tests.reference.floats import F64
from tests.reference.moe import silu, swigluoai

SPEC = Spec(
    hidden=128, intermediate=128, num_experts=4, top_k=2, kept=4, vocab=8, moe_layers=(1,), dense_layers=(0,),
    mtp_layer=False,
)  # fmt: skip
BF16_LIMIT = 4e-3


def family(models: str) -> int:
    return next(i for i, f in enumerate(FAMILIES) if f.models.startswith(models))


def packed(folder: Path, spec: Spec, tp: int) -> tuple[hybrid_pack.runtime.Pack, Checkpoint]:
    write_checkpoint(folder / "source", spec)
    source = open_checkpoint(folder / "source")
    convert(make_plan(source, Topology(tp), pad=True), folder / "out")
    return hybrid_pack.open_pack(folder / "out"), source


def weights_of(source: Checkpoint, expert: int) -> list[F64]:
    with TensorReader() as reader:
        matrices = source.layers[1].experts[expert].matrices
        return [read_matrix(reader, m, "").astype(np.float64) for m in matrices]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("models", ["Nemotron-3", "MiniMax-M3", "DeepSeek-V4"])
def test_runs_as_the_model_does(models: str, tp: int, tmp_path: Path) -> None:
    """Experts are all kept, so that the packed weights are the source's."""
    pack, source = packed(tmp_path, replace(SPEC, family=family(models)), tp)
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.standard_normal((6, SPEC.hidden)) * 20).to(torch.bfloat16)
    ids = torch.tensor([[0, 1], [2, 3], [3, 0], [1, -1], [2, 2], [0, 3]], dtype=torch.int32)
    given = torch.from_numpy(rng.random((6, 2)).astype(np.float32))
    y = torch.zeros(6, SPEC.hidden, dtype=torch.float64)
    for rank in range(tp):
        y += HybridMoE(pack.load_layer(1, rank), top_k=2)(x, given, ids).double()
    wanted = np.zeros((6, SPEC.hidden))
    activation = source.config.activation
    for token, slot in np.ndindex(6, 2):
        if (expert := int(ids[token, slot])) < 0:
            continue
        *rows, down = weights_of(source, expert)
        inner = [w @ x[token].double().numpy() for w in rows]
        if activation == "relu2":
            hidden = np.maximum(inner[0], 0) ** 2
        elif activation.startswith("swigluoai"):
            hidden = swigluoai(*inner, 1.702, 7.0)
        else:
            assert activation == "silu"
            hidden = silu(inner[0]) * inner[1]
        wanted[token] += float(given[token, slot]) * (down @ hidden)
    assert np.linalg.norm(y.numpy() - wanted) / np.linalg.norm(wanted) < BF16_LIMIT


def test_biases_are_refused_by_name(tmp_path: Path) -> None:
    pack, _ = packed(tmp_path, replace(SPEC, family=family("gpt-oss")), 1)
    assert pack.manifest.layout.expert_biases
    layer = pack.load_layer(1)
    with pytest.raises(EnvironmentFailure, match=r"torch: its experts have biases \(base tensors\)"):
        HybridMoE(layer, top_k=2)
    assert not any(choice.__class__.__name__ == "Accepted" for choice in consider(layer))


def test_what_no_kernel_has_is_named(tmp_path: Path) -> None:
    pack, _ = packed(tmp_path, replace(SPEC, family=family("Llama-4")), 1)
    with pytest.raises(EnvironmentFailure, match=r"activation 'silu\(router_weight=input\)' is not supported"):
        HybridMoE(pack.load_layer(1), top_k=2)


def test_experts_without_a_gate_have_one_matrix_in_w13(tmp_path: Path) -> None:
    pack, source = packed(tmp_path, replace(SPEC, family=family("Nemotron-3")), 1)
    up, down = pack.load_layer(1).dequantize(2)
    for found, wanted in zip((up, down), weights_of(source, 2), strict=True):
        assert np.array_equal(found.numpy(), wanted.astype(np.float32))
