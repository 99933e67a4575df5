"""HybridMoE under torch.compile and torch.export, and where its results lie."""

from __future__ import annotations

import gc

import pytest
import torch

from hybrid_pack import UsageError
from hybrid_pack.runtime import HybridMoE, PackedMoELayer
from hybrid_pack.runtime.outputs import OutputPool
from hybrid_pack.runtime.random_layer import random_layer

H, TOP_K = 256, 2
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def layers() -> list[PackedMoELayer]:
    return [random_layer(H, 128, 4, (0,), (1, 2, 3), seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def moes(layers: list[PackedMoELayer]) -> list[HybridMoE]:
    return [HybridMoE(layer, TOP_K, 16) for layer in layers]


def given(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, H, generator=generator).to(torch.bfloat16)
    ids = torch.randint(-1, 4, (tokens, TOP_K), generator=generator, dtype=torch.int32)
    return x, torch.rand(tokens, TOP_K, generator=generator), ids


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_one_graph(moes: list[HybridMoE], backend: str) -> None:
    def model(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for moe in moes:
            x = x + moe(x, weights, ids)
        return x

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for tokens in (0, 1, 5, 16):
        arguments = given(tokens)
        assert torch.equal(compiled(*arguments), model(*arguments))
    with pytest.raises(UsageError, match="more tokens than max_tokens"):
        compiled(*given(17))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_with_out(moes: list[HybridMoE], backend: str) -> None:
    def model(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        out.fill_(3)
        return moes[0](x, weights, ids, out=out) * 2

    arguments, out = given(5), torch.zeros(5, H, dtype=torch.bfloat16)
    expected = moes[0](*arguments)
    result = torch.compile(model, backend=backend, fullgraph=True)(*arguments, out)
    assert torch.equal(out, expected) and torch.equal(result, expected * 2)


def test_the_operators_keep_torch_s_rules(moes: list[HybridMoE]) -> None:
    arguments, number = given(4), moes[0]._number
    torch.library.opcheck(torch.ops.hybrid_pack.moe.default, (*arguments, number))
    out = torch.empty(4, H, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.hybrid_pack.moe_out.default, (*arguments, out, number))


def test_an_operator_of_a_layer_that_is_gone(layers: list[PackedMoELayer]) -> None:
    moe = HybridMoE(layers[0], TOP_K, 16)
    number = moe._number
    torch.ops.hybrid_pack.moe(*given(2), number)
    del moe
    gc.collect()
    with pytest.raises(UsageError, match="this layer is gone"):
        torch.ops.hybrid_pack.moe(*given(2), number)


def test_out(moes: list[HybridMoE]) -> None:
    x, weights, ids = given(3)
    out = torch.empty(3, H, dtype=torch.bfloat16)
    assert moes[0](x, weights, ids, out=out) is out
    assert torch.equal(out, moes[0](x, weights, ids))
    empty = out[:0]
    assert moes[0](x[:0], weights[:0], ids[:0], out=empty) is empty
    for wrong, message in (
        (out[:2], "out: wrong shape"), (out.float(), "out: wrong dtype"), (out.t().contiguous().t(), "out: not contig"),
        (out.to("meta"), "out: wrong device"), ([0.0], "out: not a torch tensor"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            moes[0](x, weights, ids, out=wrong)  # type: ignore[arg-type]


def like(tokens: int) -> torch.Tensor:
    return torch.empty(tokens, H, dtype=torch.bfloat16)


def test_a_buffer_is_used_again_when_nothing_refers_to_it() -> None:
    pool = OutputPool(2, 8, H, CPU)
    first, second = pool.take(like(8)), pool.take(like(3))
    third = pool.take(like(3))
    places = [first.data_ptr(), second.data_ptr()]
    assert third.data_ptr() not in places and third.shape == (3, H)
    view = first[2:].view(-1)[5:]
    del first
    assert pool.take(like(1)).data_ptr() not in places
    del view
    assert pool.take(like(1)).data_ptr() == places[0]
    assert pool.take(like(1)).data_ptr() == places[0]
    numpy = second.view(torch.int16).numpy()
    del second
    kept = pool.take(like(1)), pool.take(like(1))
    assert [tensor.data_ptr() in places for tensor in kept] == [True, False]
    assert numpy.size == 3 * H


def test_a_pool_without_buffers() -> None:
    pool = OutputPool(0, 8, H, CPU)
    assert pool.take(like(2).requires_grad_()).requires_grad is False
