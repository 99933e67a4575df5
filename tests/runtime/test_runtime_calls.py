"""HybridMoE: choice of a backend, with reasons, and the checks of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import hybrid_pack
from hybrid_pack import EnvironmentFailure, UsageError
from hybrid_pack.runtime import Accepted, HybridMoE, PackedMoELayer, Rejected
from hybrid_pack.runtime.activation import GatedSilu, SwigluOai, parse_activation
from tests.runtime.dialects import MAPPED, Packs, spec

HIDDEN, TOP_K = 256, 2


@pytest.fixture(scope="module")
def layer(packs: Packs) -> PackedMoELayer:
    return hybrid_pack.open_pack(packs.pack("nvfp4")).load_layer(MAPPED)


@pytest.fixture(scope="module")
def moe(layer: PackedMoELayer) -> HybridMoE:
    return HybridMoE(layer, top_k=TOP_K, max_tokens=16)


def with_activation(layer: PackedMoELayer, name: str) -> PackedMoELayer:
    return replace(layer, geometry=replace(layer.geometry, activation=name))


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_choice(layer: PackedMoELayer, backend: str) -> None:
    moe = HybridMoE(layer, backend=backend)
    assert (moe.backend, moe.top_k, moe.max_tokens, moe.layer) == ("torch", 8, 8192, layer)
    assert [choice.backend for choice in moe.choices] == ["b12x", "cuda", "torch"]
    assert moe.choices[-1] == Accepted("torch")
    for choice in moe.choices[:-1]:
        assert isinstance(choice, Rejected) and choice.reason


@pytest.mark.parametrize(("backend", "reason"), [("b12x", "no CUDA device|load it with device"), ("cuda", "not impl")])
def test_rejected_backends_say_why(layer: PackedMoELayer, backend: str, reason: str) -> None:
    with pytest.raises(EnvironmentFailure, match=rf"layer 1 rank 0: the backend '{backend}' cannot .*({reason})"):
        HybridMoE(layer, backend=backend)


def test_unknown_backend(layer: PackedMoELayer) -> None:
    with pytest.raises(UsageError, match=r"no such backend \(expected auto or b12x or cuda or torch, found 'triton'\)"):
        HybridMoE(layer, backend="triton")


@pytest.mark.parametrize(
    "name",
    [
        "gelu_pytorch_tanh", "swigluoai(alpha=1.702)", "relu", "silu(beta=4.0)",
        "silu(beta=4.0, limit=1.0)", "silu(limit=0)", "silu(limit=-1.0)", "silu(limit=1e999)",
        "silu(limit=e)", "silu(limit=)", "SiLU", "silu ", "",
    ],
)  # fmt: skip
def test_unsupported_activations(layer: PackedMoELayer, name: str) -> None:
    with pytest.raises(EnvironmentFailure) as caught:
        HybridMoE(with_activation(layer, name))
    assert f"torch: the activation {name!r} is not supported, only silu, silu(limit=L), " in str(caught.value)
    assert "b12x: " in str(caught.value)
    with pytest.raises(EnvironmentFailure, match="'torch' cannot run this layer: torch: the activation"):
        HybridMoE(with_activation(layer, name), backend="torch")


def test_supported_activations() -> None:
    assert parse_activation("silu") == GatedSilu(None)
    assert parse_activation("silu(limit=10.0)") == GatedSilu(10.0)
    assert parse_activation("silu(limit=1e-3)") == GatedSilu(0.001)
    gate, up = torch.tensor([-9.0, 3.0, 0.5]), torch.tensor([-3.0, 3.0, 0.5])
    clamped = GatedSilu(1.0)(gate, up)
    torch.testing.assert_close(
        clamped, torch.nn.functional.silu(torch.tensor([-9.0, 1.0, 0.5])) * torch.tensor([-1.0, 1.0, 0.5])
    )


@pytest.mark.parametrize(
    "text", ["swigluoai(alpha=0, limit=7.0)", "swigluoai(alpha=1.7, limit=inf)", "swigluoai", "relu"]
)
def test_near_misses_of_names(text: str) -> None:
    assert parse_activation(text) is None


def test_swigluoai_is_that_of_gpt_oss() -> None:
    """Against transformers' own experts."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    found = parse_activation("swigluoai(alpha=1.702, limit=7.0)")
    assert isinstance(found, SwigluOai)
    rng = torch.Generator().manual_seed(1)
    gate, up = (torch.randn(5, 64, generator=rng) * 6 for _ in range(2))
    theirs = GptOssExperts._apply_gate(
        SimpleNamespace(alpha=1.702, limit=7.0), torch.stack([gate, up], dim=-1).flatten(1)
    )
    torch.testing.assert_close(found(gate, up), theirs)


def test_a_gate_must_fit_the_activation(layer: PackedMoELayer) -> None:
    with pytest.raises(EnvironmentFailure, match="torch: the activation 'relu2' is of experts without a gate"):
        HybridMoE(with_activation(layer, "relu2"))


def test_a_checkpoint_with_another_activation_is_packed_but_not_run(packs: Packs) -> None:
    packs.source("gelu", spec(family=7, mtp_layer=False))
    layer = hybrid_pack.open_pack(packs.pack("gelu")).load_layer(MAPPED)
    assert layer.dequantize(0)[0].shape == (1024, HIDDEN)
    with pytest.raises(EnvironmentFailure, match="gelu_pytorch_tanh"):
        HybridMoE(layer)


@pytest.mark.parametrize(
    "sizes", [{"top_k": 0}, {"top_k": 2.0}, {"top_k": True}, {"max_tokens": 0}, {"max_tokens": -5}]
)
def test_sizes(layer: PackedMoELayer, sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(sizes))} must be a whole number of at least 1"):
        HybridMoE(layer, **sizes)


def arguments(tokens: int = 4) -> dict[str, torch.Tensor]:
    return {
        "x": torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16),
        "topk_weights": torch.zeros(tokens, TOP_K),
        "topk_ids": torch.zeros(tokens, TOP_K, dtype=torch.int32),
    }


@pytest.mark.parametrize("tokens", [0, 1, 16])
def test_numbers_of_tokens(moe: HybridMoE, tokens: int) -> None:
    y = moe(**arguments(tokens))
    assert y.shape == (tokens, HIDDEN) and y.dtype == torch.bfloat16


def test_gradients_are_not_recorded(moe: HybridMoE) -> None:
    given = arguments()
    given["x"].requires_grad_()
    assert not moe(**given).requires_grad


Change = Callable[[torch.Tensor], object]
REFUSED: dict[str, tuple[str, Change, str]] = {
    "x float": ("x", lambda t: t.float(), r"x: wrong dtype \(expected torch\.bfloat16, found torch\.float32\)"),
    "weights double": ("topk_weights", lambda t: t.double(), r"topk_weights: wrong dtype"),
    "ids long": (
        "topk_ids",
        lambda t: t.long(),
        r"topk_ids: wrong dtype \(expected torch\.int32, found torch\.int64\)",
    ),
    "x one-dimensional": ("x", lambda t: t[0], r"x: wrong shape \(expected \[0, 256\], found \[256\]\)"),
    "x too narrow": (
        "x",
        lambda t: t[:, :-1].contiguous(),
        r"x: wrong shape \(expected \[4, 256\], found \[4, 255\]\)",
    ),
    "fewer weights": (
        "topk_weights",
        lambda t: t[:3],
        r"topk_weights: wrong shape \(expected \[4, 2\], found \[3, 2\]\)",
    ),
    "other k": ("topk_ids", lambda t: t.repeat(1, 2), r"topk_ids: wrong shape \(expected \[4, 2\], found \[4, 4\]\)"),
    "flat ids": ("topk_ids", lambda t: t.reshape(-1), r"topk_ids: wrong shape"),
    "too many tokens": (
        "x",
        lambda t: t.repeat(5, 1),
        r"x: more tokens than max_tokens \(expected at most 16, found 20\)",
    ),
    "x strided": ("x", lambda t: t.repeat(1, 2)[:, ::2], r"x: not contiguous \(expected strides \[256, 1\], found"),
    "ids transposed": ("topk_ids", lambda t: t.t().contiguous().t(), r"topk_ids: not contiguous"),
    "x elsewhere": ("x", lambda t: t.to("meta"), r"x: wrong device \(expected cpu, found meta\)"),
    "numpy": ("topk_weights", lambda t: t.numpy(), r"topk_weights: not a torch tensor \(found ndarray\)"),
    "x a list": ("x", lambda t: [[0.0] * HIDDEN], r"x: not a torch tensor \(found list\)"),
    "id 8": ("topk_ids", lambda t: t + 8, r"topk_ids: not an expert id \(expected 0\.\.7, or -1 for none, found 8\)"),
    "id -2": ("topk_ids", lambda t: t - 2, r"topk_ids: not an expert id \(.*found -2\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_arguments(moe: HybridMoE, name: str) -> None:
    key, change, message = REFUSED[name]
    given = arguments()
    given[key] = change(given[key])  # type: ignore[assignment]
    with pytest.raises(UsageError, match=message):
        moe(**given)


def test_arguments_are_not_changed(moe: HybridMoE) -> None:
    given = arguments()
    given["topk_ids"][:, 1] = 5
    given["x"].fill_(0.5)
    given["topk_weights"].fill_(0.5)
    copies = {key: tensor.clone() for key, tensor in given.items()}
    first, second = moe(**given), moe(**given)
    assert torch.equal(first, second) and bool(first.any())
    for key, tensor in copies.items():
        assert torch.equal(given[key], tensor)
