"""Which of vLLM's linear methods may run a layer, with vLLM's classes; needs no engine."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

from hybrid_pack.formats.source import Header, detect
from hybrid_pack.integrations.vllm.base import Stored

if importlib.util.find_spec("vllm") is None:
    if os.environ.get("HYBRID_PACK_REQUIRE_VLLM") == "1":
        pytest.fail("vLLM is not installed", pytrace=False)
    pytest.skip("vLLM is not installed; tests/integrations/vllm_site.sh says how", allow_module_level=True)

from hybrid_pack.integrations.vllm import linear

MXFP8: dict[str, Header] = {"weight": ("F8_E4M3", (256, 256)), "weight_scale": ("U8", (256, 8))}
TENSOR: dict[str, Header] = {"weight": ("F8_E4M3", (256, 256)), "weight_scale": ("F32", ())}
INPUT: dict[str, Header] = {"input_scale": ("F32", ())}


def stored(fields: dict[str, Header], some: dict[str, Header] | None = None) -> Stored:
    """Matrices of which all have some fields, and not all have others."""
    form = detect(fields)
    assert isinstance(form, tuple)
    return Stored(("a", "b"), form[0], {**fields, **(some or {})}, frozenset(fields))


class Method:
    """As one of vLLM's, with the parameters it registers."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def create_weights(self, layer: torch.nn.Module, columns: int, rows: list[int], **extra: Any) -> None:
        for name in self.names:
            layer.register_parameter(name, torch.nn.Parameter(torch.zeros(sum(rows), columns)))


class MxFp8Method(Method):
    """As one whose kernels have a least size."""


class Ours:
    """In the place of ``DequantisedLinearMethod``, which needs vLLM's groups of ranks."""

    def __init__(self, stored: Stored, prefix: str) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **extra: Any) -> None:
        assert dict(layer.named_parameters()) == {}, "nothing of vLLM's method is left"
        self.calls.append((*sizes, extra))


@pytest.mark.parametrize(
    ("method", "found", "rows", "ours"),
    [
        (Method("weight", "weight_scale"), stored(TENSOR), [128, 128], False),
        (Method("weight", "weight_scale"), stored(TENSOR), [32, 32], False),
        (Method("weight", "weight_scale", "input_scale"), stored(TENSOR | INPUT), [128, 128], False),
        (Method("weight", "weight_scale", "input_scale"), stored(TENSOR), [128, 128], True),
        (Method("weight", "weight_scale", "input_scale"), stored(TENSOR, INPUT), [128, 128], True),
        (Method("weight", "weight_scale"), stored(TENSOR, INPUT), [128, 128], True),
        (Method("weight", "weight_scale"), stored(TENSOR, {"bias": ("BF16", (256,))}), [128, 128], False),
        (MxFp8Method("weight", "weight_scale"), stored(MXFP8), [64, 64], False),
        (MxFp8Method("weight", "weight_scale"), stored(MXFP8), [64, 32], True),
    ],
)
def test_what_a_method_registers_is_what_is_stored(
    method: Method, found: Stored, rows: list[int], ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "DequantisedLinearMethod", Ours)
    layer = torch.nn.Module()
    layer.quant_method = linear._guarded(method, found, "x.proj")
    layer.quant_method.create_weights(layer, 256, rows, weight_loader=print)
    assert isinstance(layer.quant_method, Ours) is ours
    if ours:
        assert layer.quant_method.calls == [(256, rows, {"weight_loader": print})]
    else:
        assert set(dict(layer.named_parameters())) == set(method.names)


def test_columns_may_be_too_few_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "DequantisedLinearMethod", Ours)
    layer = torch.nn.Module()
    linear._guarded(MxFp8Method("weight"), stored(MXFP8), "x.proj").create_weights(
        layer=layer, input_size_per_partition=64, output_partition_sizes=[256]
    )
    assert isinstance(layer.quant_method, Ours)


def test_what_attention_reads_is_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "DequantisedLinearMethod", Ours)
    config: Any = None  # it is not asked
    assert isinstance(linear.linear_method(config, None, "model.layers.0.self_attn.kv_b_proj", stored(MXFP8)), Ours)


@pytest.mark.parametrize(("bias", "names"), [(127, {"CompressedTensorsLinearMethod"}), (125, set())])
def test_vllms_methods_take_a_bias_for_granted(bias: int, names: set[str]) -> None:
    fields: dict[str, Header] = {"weight_packed": ("U8", (256, 128)), "weight_scale": ("U8", (256, 8))}
    form = detect(fields, bias)
    assert isinstance(form, tuple)
    assert linear._candidates(Stored(("a",), form[0], fields, frozenset(fields))) == (names, None)
