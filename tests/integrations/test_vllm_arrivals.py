"""What is noted of the weight loaders that vLLM calls; needs no vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybrid_pack.errors import DataError
from hybrid_pack.integrations.vllm.arrivals import begun, came_otherwise, forget, require_loaded, watch

DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int8, torch.int32]


def copy(parameter: torch.nn.Parameter, tensor: torch.Tensor, loaded_shard_id: Any = None) -> None:
    """A weight loader."""
    parameter.data.copy_(tensor)


def layer(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.nn.Parameter]:
    """A layer's parameters as a method makes them, in memory that may hold anything."""
    made = {
        "weight": torch.nn.Parameter(torch.ones(4, 8).to(dtype), requires_grad=False),
        "weight_scale": torch.nn.Parameter(torch.ones(4, 1), requires_grad=False),
    }
    for parameter in made.values():
        parameter.weight_loader = copy  # type: ignore[attr-defined]
    watch(made, "weight")
    return made


def load(parameter: torch.nn.Parameter, *part: Any) -> None:
    parameter.weight_loader(parameter, torch.zeros(parameter.shape), *part)  # type: ignore[operator]


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_a_model_copies_itself_are_told_from_none(dtype: torch.dtype) -> None:
    made = layer(dtype)
    assert not came_otherwise(made, "weight")
    with pytest.raises(DataError, match=r"at.weight: .* \(expected at.weight, found nothing\)"):
        require_loaded(made, 1, "at", ["at"])
    made["weight"].data.copy_(torch.zeros(4, 8))
    assert came_otherwise(made, "weight")


def test_weights_of_which_a_part_came_otherwise_are_not_whole() -> None:
    made = layer()
    load(made["weight_scale"])
    assert not came_otherwise(made, "weight"), "a loader was called for the scale, so the weights must have had theirs"


def test_weights_that_are_processed_twice_are_not_missed() -> None:
    made = layer()
    for parameter in made.values():
        load(parameter)
    require_loaded(made, 1, "at", ["at"])
    for parameter in made.values():
        forget(parameter)
        assert not begun(parameter)
    assert came_otherwise(made, "weight")


@pytest.mark.parametrize(
    ("parts", "whole"), [(["q", "k", "v"], True), (["q", "v"], False), ([(0, 1), 2], True), ([None], True)]
)
def test_all_parts_must_come(parts: list[Any], whole: bool) -> None:
    made = layer()
    for part in parts:
        load(made["weight"], part)
    weight = {"weight": made["weight"]}
    if whole:
        require_loaded(weight, 3, "at", ["a", "b", "c"])
    else:
        with pytest.raises(DataError, match="found only part q, v of 3"):
            require_loaded(weight, 3, "at", ["a", "b", "c"])


def test_memory_on_no_device_is_not_looked_at() -> None:
    weight = torch.nn.Parameter(torch.empty(4, 8, device="meta"), requires_grad=False)
    weight.weight_loader = copy  # type: ignore[attr-defined]
    watch({"weight": weight}, "weight")
    assert not came_otherwise({"weight": weight}, "weight")
