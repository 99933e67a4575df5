"""Calls of HybridMoE with b12x: no allocation, no waiting, CUDA graphs, torch.compile, streams."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hybrid_pack import UsageError
from hybrid_pack.runtime import HybridMoE
from hybrid_pack.runtime.random_layer import random_layer
from hybrid_pack.runtime.timing import graph_of
from tests.gpu.support import LIMIT, Arguments, check, expected_of, given, note, relative

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("b12x")]

H, E, TOP_K, MOST = 256, 8, 3, 600
ATOMIC = 5e-3
"""Largest distance between two runs of the decode kernels, which add in BF16 in no fixed order."""
SPLIT_K = 2e-3
"""The same for more tokens: rows of an expert with more than a block of them fall into blocks in no fixed order, and
some blocks are summed over K in parts. Where no expert has more than a block of rows, results are the same."""

SPLITS = {"both": ((0, 3), (1, 2, 4, 5, 6, 7)), "kept": (tuple(range(E)), ()), "tail": ((), tuple(range(E)))}
SIZES = (1, 3, 8, 9, 64, 333, 600)


@pytest.fixture(scope="module")
def moes() -> dict[str, HybridMoE]:
    layers = {name: random_layer(H, 256, E, *split, device="cuda") for name, split in SPLITS.items()}
    return {name: HybridMoE(layer, TOP_K, MOST) for name, layer in layers.items()}


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def allocations() -> tuple[int, int]:
    stats = torch.cuda.memory_stats()
    return stats["allocation.all.allocated"], stats["segment.all.allocated"]


@pytest.mark.parametrize("split", SPLITS)
def test_a_call_allocates_nothing_and_waits_for_nothing(split: str, no_waiting: None) -> None:
    torch.cuda.set_sync_debug_mode("default")
    fresh = HybridMoE(random_layer(H, 256, E, *SPLITS[split], device="cuda"), TOP_K, MOST)
    arguments = {tokens: given(tokens, H, E, TOP_K) for tokens in SIZES}
    outs = {tokens: torch.empty_like(x) for tokens, (x, _, _) in arguments.items()}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    before = allocations()
    for tokens in (*SIZES, *SIZES):  # the first call of each size is no different
        fresh(*arguments[tokens], out=outs[tokens])
        fresh(*arguments[tokens])
    assert allocations() == before
    kept = [fresh(*arguments[9]) for _ in range(3)]
    assert allocations()[0] == before[0] + 1, "the third result held at the same time is a new one"
    torch.cuda.set_sync_debug_mode("default")
    for tokens, out in outs.items():
        assert relative(out, expected_of(fresh.layer, arguments[tokens])) <= LIMIT
    assert len({result.data_ptr() for result in kept}) == 3


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("tokens", SIZES)
def test_replay_equals_eager(moes: dict[str, HybridMoE], split: str, tokens: int) -> None:
    moe = moes[split]
    arguments, other = given(tokens, H, E, TOP_K), given(tokens, H, E, TOP_K, seed=5)
    out = torch.empty_like(arguments[0])
    graph = graph_of(lambda: moe(*arguments, out=out), moe.layer.device)
    for new in (arguments, other):
        for place, tensor in zip(arguments, [t.clone() for t in new], strict=True):
            place.copy_(tensor)
        eager = [moe(*arguments).clone() for _ in range(3)]
        replayed = []
        for _ in range(3):
            out.fill_(float("nan"))
            graph.replay()
            replayed.append(out.clone())
        same = all(torch.equal(one, eager[0]) for one in (*eager, *replayed))
        note("replay and eager", split=split, tokens=tokens, equal_bit_for_bit=same)
        assert relative(replayed[0], expected_of(moe.layer, arguments)) <= LIMIT
        for one in (*eager, *replayed):
            assert relative(one, eager[0].float()) <= (ATOMIC if tokens <= 8 else SPLIT_K)


def test_results_of_a_captured_call_belong_to_the_graph(moes: dict[str, HybridMoE]) -> None:
    moe, arguments = moes["both"], given(9, H, E, TOP_K)
    graph, total = torch.cuda.CUDAGraph(), torch.zeros(9, H, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        total += moe(*arguments)  # the result is dropped, but every replay writes it again
    held = [moe(*given(9, H, E, TOP_K, seed=seed)) for seed in range(4)]
    copies = [result.clone() for result in held]
    total.zero_()
    graph.replay()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))
    assert relative(total / 2, expected_of(moe.layer, arguments)) <= LIMIT


def test_a_graph_of_many_layers() -> None:
    layers = [random_layer(H, 256, E, *split, device="cuda", seed=i) for i, split in enumerate(SPLITS.values())] * 4
    moes = [HybridMoE(layer, TOP_K, 64) for layer in layers]
    for tokens in (1, 8, 64):
        x, weights, ids = given(tokens, H, E, TOP_K)

        def model(x: torch.Tensor = x, weights: torch.Tensor = weights, ids: torch.Tensor = ids) -> torch.Tensor:
            for moe in moes:
                x = (x + moe(x, weights, ids)) * 0.7
            return x

        eager, y = model(), torch.empty_like(x)
        graph = graph_of(lambda model=model, y=y: y.copy_(model()), layers[0].device)
        graph.replay()
        assert relative(y, eager.float()) <= 5 * (ATOMIC if tokens <= 8 else SPLIT_K)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(moes: dict[str, HybridMoE], mode: str) -> None:
    order = [moes["both"], moes["kept"], moes["tail"]]

    def model(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        for moe in order:
            x = (x + moe(x, weights, ids)) * 0.7
        return x

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, mode=mode)
    for tokens in (4, 9, 64, 8):
        for seed in range(3):
            arguments = given(tokens, H, E, TOP_K, seed)
            found = compiled(*arguments).clone()
            assert relative(found, model(*arguments).float()) <= 1e-2  # one rounding less between the layers


def test_compiled_with_out(moes: dict[str, HybridMoE]) -> None:
    moe = moes["both"]

    def model(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return moe(x, weights, ids, out=out) * 2

    torch._dynamo.reset()
    arguments = given(9, H, E, TOP_K)
    out = torch.empty_like(arguments[0])
    doubled = torch.compile(model, fullgraph=True)(*arguments, out)
    assert torch.equal(out, moe(*arguments)) and torch.equal(doubled, out * 2)


def test_streams_take_turns(moes: dict[str, HybridMoE]) -> None:
    moe, streams = moes["both"], [torch.cuda.Stream() for _ in range(3)]
    arguments = [given(tokens, H, E, TOP_K, seed=tokens) for tokens in (600, 8, 64, 300, 1, 9)]
    expected = [expected_of(moe.layer, given_) for given_ in arguments]
    torch.cuda.synchronize()
    for _ in range(10):
        results = []
        for i, given_ in enumerate(arguments):
            with torch.cuda.stream(streams[i % 3]):
                results.append(moe(*given_, out=torch.empty_like(given_[0])))
        torch.cuda.synchronize()
        assert all(relative(y, e) <= LIMIT for y, e in zip(results, expected, strict=True))


def test_slices_and_what_cannot_be_read(moes: dict[str, HybridMoE]) -> None:
    moe, (x, weights, ids) = moes["both"], given(40, H, E, TOP_K)
    for first, last in ((1, 3), (3, 12), (1, 40)):  # three ids are 12 bytes: not at a multiple of 16
        part: Arguments = (x[first:last], weights[first:last], ids[first:last])
        check(moe, part, "a slice")
    memory = torch.zeros(3 * H + 4, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(UsageError, match="not aligned"):
        moe(memory[4 : 4 + 2 * H].view(2, H), weights[:2], ids[:2])
    with pytest.raises(UsageError, match="out overlaps x"):
        moe(x, weights, ids, out=x)
    with pytest.raises(UsageError, match=r"wrong device \(expected cuda:0, found cpu\)"):
        moe(x, weights, ids.cpu())


def test_inference_mode(moes: dict[str, HybridMoE]) -> None:
    arguments = given(9, H, E, TOP_K)
    with torch.inference_mode():
        made_inside = HybridMoE(moes["both"].layer, TOP_K, 32)
        inside = made_inside(*arguments)
    assert torch.equal(made_inside(*arguments), inside) and torch.equal(inside, moes["both"](*arguments))
