"""Bases stored in ways that a source's config says wrongly or not at all, loaded by vLLM's own code on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hybrid_pack.convert import convert
from tests.convert.support import plan_of
from tests.integrations import checkpoint
from tests.integrations.test_vllm_real import TORCH, Serve, plugins, serve

__all__ = ["plugins", "serve"]

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
