"""Bases stored in ways that a source's config says wrongly or not at all, loaded by vLLM's own code on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_pack.convert import convert
from tests.convert.support import plan_of
from tests.integrations import checkpoint
from tests.integrations.real import Failed
from tests.integrations.test_vllm_real import TORCH, Serve

Tensors = dict[str, torch.Tensor]
PARTS = ("q_proj", "k_proj", "v_proj")
LAYERS = [f"model.layers.{layer}.self_attn" for layer in range(checkpoint.LAYERS)]


def made(
    folder: Path,
    dialect: str = "bf16",
    edit: Callable[[Tensors, dict[str, torch.Tensor]], None] | None = None,
    source: dict[str, Any] | None = None,
    mx_bias: int = 127,
    **experts: Any,
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A pack and what its linear layers mean.

    Args:
        folder: Where.
        dialect: Of the base, before it is edited.
        edit: Changes tensors and meanings.
        source: The source's quantisation config, as the pack remembers it.
        mx_bias: What the conversion is told.
        experts: Of ``Spec``.
    """
    meanings = checkpoint.write(folder / "source", dialect, **experts)
    file = folder / "source" / "model.safetensors"
    if edit is not None:
        tensors = load_file(file)
        edit(tensors, meanings)
        save_file(tensors, file)
    convert(plan_of(folder / "source", mx_bias=mx_bias), folder / "pack", workers=2)
    if source is not None:
        config = json.loads((folder / "pack" / "config.json").read_text())
        config["quantization_config"]["source_quantization_config"] = source
        (folder / "pack" / "config.json").write_text(json.dumps(config))
    return folder / "pack", meanings


def matrices(tensors: Tensors) -> Iterator[tuple[str, int, int]]:
    """Name, rows and columns of each linear layer, whose weight is taken out."""
    for at in LAYERS:
        for name in (*PARTS, "o_proj"):
            rows, columns = tensors.pop(f"{at}.{name}.weight").shape
            yield f"{at}.{name}", rows, columns


def check(found: dict[str, Any], meanings: dict[str, torch.Tensor]) -> None:
    """Every layer means what is stored."""
    for at in LAYERS:
        whole = torch.cat([meanings[f"{at}.{name}"] for name in PARTS])
        assert torch.equal(found["linear"][f"{at}.qkv_proj"], whole.to(torch.bfloat16))
        assert torch.equal(found["linear"][f"{at}.o_proj"], meanings[f"{at}.o_proj"].to(torch.bfloat16))


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    """A config of compressed-tensors for all linear layers."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False, **weights}
    inputs = {"num_bits": 8, "type": scheme["type"], "strategy": "token", "symmetric": True, "dynamic": True}
    group = {
        "targets": ["Linear"], "weights": scheme, "output_activations": None,
        "input_activations": None if kind == "pack-quantized" else inputs,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group},
    }  # fmt: skip


def test_the_bias_of_mxfp4_scales_is_the_one_given_to_convert(serve: Serve, tmp_path: Path) -> None:
    model, meanings = made(tmp_path, "ct_mxfp4_125", mx_bias=125, stored=("ct_mxfp4",), map_in="config")
    (found,) = serve(model, additional_config=TORCH)
    check(found, meanings)
    assert "vLLM has no method for mxfp4 with bias 125 stored as weight_packed, weight_scale" in found["text"]


def rows(tensors: Tensors, meanings: dict[str, torch.Tensor]) -> None:
    """FP8 with one scale a row, as compressed-tensors stores it."""
    generator = torch.Generator().manual_seed(3)
    for name, *size in list(matrices(tensors)):
        matrix = checkpoint.matrix("fp8_row", *size, generator)
        meanings[name] = matrix.meaning
        tensors[f"{name}.weight"] = matrix.fields["weight"]
        tensors[f"{name}.weight_scale"] = matrix.fields["weight_scale_fp8"][:, None].contiguous()


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({"type": "int"}, "reads weight as I8, and it is F8_E4M3"),
        ({"strategy": "tensor"}, "reads weight_scale as [3], and it is [256, 1]"),
    ],
)
def test_headers_decide_where_the_config_names_other_codes_or_scales(
    weights: dict[str, Any], reason: str, serve: Serve, tmp_path: Path
) -> None:
    kind = "int-quantized" if weights.get("type") == "int" else "float-quantized"
    model, meanings = made(tmp_path, edit=rows, source=compressed(kind, **weights))
    (found,) = serve(model, additional_config=TORCH)
    assert f"dequantised to BF16 while loading, since vLLM's CompressedTensorsLinearMethod {reason}" in found["text"]
    check(found, meanings)


def scalars(tensors: Tensors, meanings: dict[str, torch.Tensor]) -> None:
    """One scale a matrix, as [1, 1]."""
    generator = torch.Generator().manual_seed(3)
    for name, *size in list(matrices(tensors)):
        matrix = checkpoint.matrix("fp8_tensor", *size, generator)
        meanings[name] = matrix.meaning
        tensors[f"{name}.weight"] = matrix.fields["weight"]
        tensors[f"{name}.weight_scale"] = matrix.fields["weight_scale"].reshape(1, 1)


def test_a_scale_of_a_matrix_may_have_two_dimensions(serve: Serve, tmp_path: Path) -> None:
    model, meanings = made(tmp_path, edit=scalars)
    (found,) = serve(model, additional_config=TORCH)
    check(found, meanings)


def int8(tensors: Tensors, meanings: dict[str, torch.Tensor]) -> None:
    """As compressed-tensors stores W8A8."""
    generator = torch.Generator().manual_seed(3)
    for name, n, k in list(matrices(tensors)):
        tensors[f"{name}.weight"] = torch.randint(-127, 128, (n, k), dtype=torch.int8, generator=generator)
        tensors[f"{name}.weight_scale"] = torch.rand(n, 1, generator=generator)


def int4(tensors: Tensors, meanings: dict[str, torch.Tensor]) -> None:
    """As compressed-tensors packs W4A16 in groups of 128."""
    generator = torch.Generator().manual_seed(3)
    for name, n, k in list(matrices(tensors)):
        words = torch.randint(0, 2**31 - 1, (n, k // 8), dtype=torch.int32, generator=generator)
        tensors[f"{name}.weight_packed"] = words
        tensors[f"{name}.weight_scale"] = torch.rand(n, k // 128, generator=generator).bfloat16()
        tensors[f"{name}.weight_shape"] = torch.tensor([n, k])


INT8 = compressed("int-quantized", type="int")
INT4 = compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=128)


@pytest.mark.parametrize(("edit", "source"), [(int8, INT8), (int4, INT4)])
def test_integers_are_given_to_vllms_method_as_they_are_stored(
    edit: Callable[[Tensors, dict[str, torch.Tensor]], None], source: dict[str, Any], serve: Serve, tmp_path: Path
) -> None:
    model, _ = made(tmp_path, edit=edit, source=source)
    (found,) = serve(model, more={"raw": True}, additional_config=TORCH)
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    for at in LAYERS:
        assert found["methods"][f"{at}.o_proj"] == "CompressedTensorsLinearMethod"
        for field, tensor in found["linear"][f"{at}.o_proj"].items():
            assert torch.equal(tensor, tensors[f"{at}.o_proj.{field}"]), field
        for field, tensor in found["linear"][f"{at}.qkv_proj"].items():
            if field != "weight_shape":
                assert torch.equal(tensor, torch.cat([tensors[f"{at}.{name}.{field}"] for name in PARTS])), field


@pytest.mark.parametrize(
    ("edit", "source", "what", "why"),
    [
        (int8, {}, "8-bit integers", "the source's config names no quantisation"),
        (int8, compressed("float-quantized"), "8-bit integers", "reads weight as F8_E4M3, and it is I8"),
        (
            int4, compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=64),
            "integers packed in words", "reads weight_scale as [512, 4], and it is [256, 2]",
        ),
    ],
)  # fmt: skip
def test_integers_that_no_method_reads_are_refused_for_what_they_are(
    edit: Callable[[Tensors, dict[str, torch.Tensor]], None],
    source: dict[str, Any],
    what: str,
    why: str,
    serve: Serve,
    tmp_path: Path,
) -> None:
    model, _ = made(tmp_path, edit=edit, source=source)
    with pytest.raises(Failed) as error:
        serve(model, additional_config=TORCH)
    text = str(error.value)
    assert f"a layer of {what}, which is read by a method of vLLM's alone" in text, text[-2000:]
    assert why in text, text[-2000:]


@pytest.mark.parametrize(
    ("fields", "source"),
    [
        (("k_proj.output_scale", "v_proj.output_scale"), {"quant_method": "fp8", "activation_scheme": "dynamic"}),
        (("k_proj.k_scale", "v_proj.v_scale"), {}),
    ],
)
def test_kv_cache_scales_have_the_names_of_the_sources_method(
    fields: tuple[str, str], source: dict[str, Any], serve: Serve, tmp_path: Path
) -> None:
    def scales(tensors: Tensors, meanings: dict[str, torch.Tensor]) -> None:
        for at in LAYERS:
            for field, value in zip(fields, (0.25, 0.5), strict=True):
                tensors[f"{at}.{field}"] = torch.tensor(value)

    model, _ = made(tmp_path, edit=scales, source=source)
    (found,) = serve(model, additional_config=TORCH, kv_cache_dtype="fp8")
    expected = (0.25, 0.5) if source else (1.0, 1.0)  # no method of the source's is there to take them
    assert set(found["cache"].values()) == {expected}
