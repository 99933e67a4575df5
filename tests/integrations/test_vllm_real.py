"""The plugin in vLLM's own code: engine config, discovery, models, weight loading and the experts' call, on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hybrid_pack
from hybrid_pack.errors import DataError
from tests.convert.support import pack as convert
from tests.gpu.vllm_models import SHAPES, write_source
from tests.integrations import checkpoint
from tests.integrations.real import TORCH, Failed, Made, Serve
from tests.integrations.vllm_cpu import inputs

if importlib.util.find_spec("vllm") is None:
    if os.environ.get("HYBRID_PACK_REQUIRE_VLLM") == "1":
        pytest.fail("vLLM is not installed", pytrace=False)
    pytest.skip("vLLM is not installed; tests/integrations/vllm_site.sh says how", allow_module_level=True)


def options(**given: str) -> dict[str, Any]:
    return {"additional_config": {"hybrid_pack": given}}


def right(model: Path, layer: int, rank: int = 0) -> torch.Tensor:
    """What the experts of a rank give, by the runtime alone."""
    weights = hybrid_pack.open_pack(model).load_layer(layer, rank)
    geometry = weights.geometry
    x, w, ids = inputs(geometry.num_experts, geometry.top_k, geometry.hidden_size)
    y: torch.Tensor = hybrid_pack.runtime.HybridMoE(weights, geometry.top_k, 8, "torch")(x, w, ids)
    return y


def test_config_json_alone_brings_experts_from_the_pack(made: Callable[..., Made], serve: Serve) -> None:
    model, _ = made()
    (found,) = serve(model, additional_config={**TORCH, "hybridpack": {}})
    assert "--additional-config 'hybridpack' is not read; did you mean 'hybrid_pack'?" in found["text"]
    assert found["quantization"] == "hybrid_pack"
    experts = [name for name, method in found["methods"].items() if method == "HybridMoEMethod"]
    assert len(experts) == checkpoint.LAYERS
    assert all(parameters == [] for parameters in found["parameters"].values())
    for layer in range(checkpoint.LAYERS):
        assert torch.equal(found["experts"][layer], right(model, layer))
        assert found["reports"][layer] == (0, 1), "both layers came in one load"
    line = [text for text in found["text"].splitlines() if "2 layers of rank 0 on cpu" in text]
    assert len(line) == 1, "one line a rank says what was loaded"
    assert "backend torch (as asked for), up to 256 tokens a call" in found["text"]


LINEAR = {
    "mxfp8": ("ModelOptMxFp8LinearMethod", "DequantisedLinearMethod"),
    "nvfp4": ("ModelOptNvFp4LinearMethod", "DequantisedLinearMethod"),
    "fp8_row": ("DequantisedLinearMethod",),
    "fp8_tensor": ("DequantisedLinearMethod",),
    "fp8_block": ("DequantisedLinearMethod",),  # the CPU has no kernel, which vLLM's method finds in create_weights
    "nvfp4_no_input": ("DequantisedLinearMethod",),
}


@pytest.mark.parametrize("dialect", ["bf16", *LINEAR])
def test_linear_layers_mean_what_is_stored(dialect: str, made: Callable[..., Made], serve: Serve) -> None:
    tp = 2
    model, meanings = made(dialect, tp)
    ranks = serve(model, tp, additional_config=TORCH)
    for layer in range(checkpoint.LAYERS):
        at = f"model.layers.{layer}.self_attn"
        assert {rank["methods"][f"{at}.qkv_proj"] for rank in ranks} <= {
            *LINEAR.get(dialect, ["UnquantizedLinearMethod"])
        }
        widths = [h * checkpoint.HEAD_DIM // tp for h in (checkpoint.HEADS, checkpoint.KV_HEADS, checkpoint.KV_HEADS)]
        parts = [rank["linear"][f"{at}.qkv_proj"].split(widths) for rank in ranks]
        for place, name in enumerate(("q_proj", "k_proj", "v_proj")):
            whole = torch.cat([part[place] for part in parts])
            assert torch.equal(whole, meanings[f"{at}.{name}"].to(torch.bfloat16)), name
        whole = torch.cat([rank["linear"][f"{at}.o_proj"] for rank in ranks], dim=1)
        assert torch.equal(whole, meanings[f"{at}.o_proj"].to(torch.bfloat16))
        for number, rank in enumerate(ranks):
            assert torch.equal(rank["experts"][layer], right(model, layer, number))
    if dialect in ("fp8_block", "fp8_row", "fp8_tensor", "nvfp4_no_input"):
        said = [line for line in ranks[0]["text"].splitlines() if "dequantised to BF16" in line]
        assert len(said) == 1, "said once"
        assert ("since vLLM's Fp8LinearMethod failed: " in said[0]) is (dialect == "fp8_block")


@pytest.mark.parametrize(("part", "whole"), [(64, 256), (192, 384)])
def test_columns_that_cut_a_block_are_refused(part: int, whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from hybrid_pack.integrations.vllm import dequantised
    from hybrid_pack.integrations.vllm.base import BaseTensors, Stored

    engine = SimpleNamespace(load_config=SimpleNamespace(load_format="auto"))
    monkeypatch.setattr(dequantised, "get_current_vllm_config", lambda: engine)
    headers = {"o.weight": ("F8_E4M3", (200, whole)), "o.weight_scale_inv": ("F32", (2, -(-whole // 128)))}
    stored = BaseTensors(headers).stored("o", {})
    assert stored is not None
    scale = {"weight_scale_inv": headers["o.weight_scale_inv"]}
    fields = {**scale, "weight": headers["o.weight"]}
    method = dequantised.DequantisedLinearMethod(Stored(stored.names, stored.form, fields, stored.every), "o")
    with pytest.raises(DataError, match=rf"o: a rank's columns cut through a block .*found {part} of {whole} columns"):
        method.create_weights(torch.nn.Module(), part, [200], whole, 200, torch.bfloat16, weight_loader=print)


@pytest.mark.parametrize("dialect", ["mxfp8", "nvfp4_no_input", "fp8_block"])
def test_weights_that_are_loaded_again_mean_the_same(dialect: str, made: Callable[..., Made], serve: Serve) -> None:
    model, _ = made(dialect)
    (found,) = serve(model, more={"reload": str(model)}, additional_config=TORCH)
    assert found["linear"] and found["linear"].keys() == found["again"]["linear"].keys()
    for kind in ("linear", "experts"):
        for name, before in found[kind].items():
            assert torch.equal(found["again"][kind][name], before), name


@pytest.mark.parametrize("dialect", ["bf16", "fp8_block"])
def test_weights_of_another_model_are_refused(
    dialect: str, made: Callable[..., Made], serve: Serve, tmp_path: Path
) -> None:
    model, _ = made(dialect)
    shutil.copytree(model, tmp_path / "other")
    with pytest.raises(Failed, match="weights cannot be loaded from another model: experts stay those of the first"):
        serve(model, more={"reload": str(tmp_path / "other")}, additional_config=TORCH)


def test_compiled_code_is_not_shared_between_bases_stored_in_different_ways(
    made: Callable[..., Made], serve: Serve, tmp_path: Path
) -> None:
    keys = []
    for dialect, first in (("bf16", 0), ("fp8_row", 0), ("bf16", 1)):  # a key is the same under another seed of hashes
        shutil.rmtree(tmp_path / "pack", ignore_errors=True)
        shutil.copytree(made(dialect)[0], tmp_path / "pack")
        (found,) = serve(tmp_path / "pack", first=first, additional_config=TORCH)
        keys.append(found["key"])
    assert keys[0] == keys[2] != keys[1]


def compressed(model: Path, folder: Path) -> Path:
    """A pack as if its source were of compressed-tensors: FP8, one scale a matrix and one of its input."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": scheme, "output_activations": None}
    source = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group}, "kv_cache_scheme": scheme,
    }  # fmt: skip
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["source_quantization_config"] |= source
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_method_of_vllms_needs_all_it_registers(made: Callable[..., Made], serve: Serve, tmp_path: Path) -> None:
    model, meanings = made("fp8_tensor")
    (found,) = serve(compressed(model, tmp_path / "pack"), additional_config=TORCH)
    name = "model.layers.0.self_attn.o_proj"
    assert found["methods"][name] == "DequantisedLinearMethod"
    assert torch.equal(found["linear"][name], meanings[name].to(torch.bfloat16))
    why = "since vLLM's CompressedTensorsLinearMethod needs input_scale, which not all of its parts have"
    assert why in found["text"]
    assert "the source keeps its KV cache in FP8; --kv-cache-dtype fp8 does so here" in found["text"]


DRAFTED = "model.layers.0.transformer_layer.block_sparse_moe.experts"


def test_a_draft_is_not_given_layers_of_the_decoder(made: Callable[..., Made], serve: Serve) -> None:
    with pytest.raises(Failed) as error:
        serve(made()[0], more={"draft": DRAFTED}, additional_config=TORCH)
    text = str(error.value)
    assert f"{DRAFTED}: a draft" in text, text[-3000:]
    assert "a draft model asks for experts by the number of a decoder layer (expected layer 2 or one after it" in text


K_SCALE = "model.layers.1.self_attn.k_proj.weight_scale"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (f"{K_SCALE}_fp8", r"only part q, v of 3"),
        ("model.layers.0.self_attn.o_proj.weight_scale_fp8", "nothing"),
        ("model.layers.0.self_attn.o_proj.weight", "nothing"),
    ],
)
def test_a_tensor_that_vllm_did_not_load_is_refused(
    name: str, found: str, made: Callable[..., Made], serve: Serve
) -> None:
    with pytest.raises(Failed) as error:
        serve(made("fp8_row")[0], more={"renamed": {name: None}}, additional_config=TORCH)
    text = str(error.value)
    assert "vLLM has not loaded a tensor of the base" in text and f"found {found}" in text, text[-3000:]
    assert name in text


def test_scales_that_a_model_renames_are_found(made: Callable[..., Made], serve: Serve) -> None:
    """As vLLM's MiniMax-M3 does."""
    model, meanings = made("fp8_block")
    at = "model.layers.1.self_attn"
    renamed = {f"{at}.{name}.weight_scale_inv": f"{at}.{name}.weight_scale" for name in ("q_proj", "k_proj", "v_proj")}
    (found,) = serve(model, more={"renamed": renamed}, additional_config=TORCH)
    parts = [meanings[f"{at}.{name}"] for name in ("q_proj", "k_proj", "v_proj")]
    assert torch.equal(found["linear"][f"{at}.qkv_proj"], torch.cat(parts).to(torch.bfloat16))


def test_expert_parallel_ranks_hold_their_block(made: Callable[..., Made], serve: Serve) -> None:
    model, _ = made("bf16", 1, 2)
    ranks = serve(model, 2, enable_expert_parallel=True, additional_config=TORCH)
    whole, _ = made("bf16", 1, 1)
    for layer in range(checkpoint.LAYERS):
        parts = [rank["experts"][layer] for rank in ranks]
        for number, part in enumerate(parts):
            assert torch.equal(part, right(model, layer, number))
        total = sum(part.double() for part in parts)
        torch.testing.assert_close(total, right(whole, layer).double(), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("made_for", "tp", "engine", "words"),
    [
        ((2, 1), 1, {}, ["made for other ranks", "--tensor-parallel-size 2", "--tp 1 --ep 1"]),
        ((1, 1), 2, {}, ["made for other ranks", "hybrid-pack convert", "--tp 2 --ep 1"]),
        ((2, 1), 2, {"enable_expert_parallel": True}, ["made for other ranks", "--tp 1 --ep 2"]),
        ((1, 2), 2, {}, ["--tensor-parallel-size 2 --enable-expert-parallel", "--tp 2 --ep 1"]),
        ((1, 1), 1, options(bakend="torch"), ["no such option", "backend or check"]),
        ((1, 1), 1, options(backend="cutlass"), ["no such choice", "b12x or torch"]),
        ((1, 1), 1, options(backend="b12x"), ["'b12x' cannot run this layer"]),
        ((1, 1), 1, {"hf_overrides": {"num_experts_per_tok": 3}}, ["experts a token visits", "expected 2, found 3"]),
        ((1, 1), 1, {"hf_overrides": {"num_experts": 6}}, ["number of experts", "expected 8, found 6"]),
        ((1, 1), 1, {"hf_overrides": {"moe_intermediate_size": 128}}, ["intermediate size", "expected 256, found 128"]),
        (
            (1, 1), 1, {"ubatch_size": 2, "all2all_backend": "deepep_low_latency"},
            ["cannot be served with micro-batches (--enable-dbo, or --ubatch-size above 1)"],
        ),
        ((1, 1), 1, {"quantization": "fp8"}, ["(hybrid_pack) does not match the quantization method"]),
        ((1, 1), 1, {"dtype": "float16"}, ["float16 is not supported for quantization method hybrid_pack"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    made_for: tuple[int, int],
    tp: int,
    engine: dict[str, Any],
    words: list[str],
    made: Callable[..., Made],
    serve: Serve,
) -> None:
    model, _ = made("bf16", *made_for)
    with pytest.raises(Failed) as error:
        serve(model, tp, **{"additional_config": TORCH, **engine})
    text = str(error.value)
    for word in words:
        assert word in text, text[-3000:]
    assert "hybrid_pack: loading" not in text and "oading safetensors" not in text


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("vllm.model_executor.layers.fused_moe", "RoutedExperts"),
        ("vllm.config", "get_current_vllm_config"),
    ],
)
def test_a_name_that_vllm_moved_is_told_as_such_by_the_first_process(
    module: str, name: str, made: Callable[..., Made], serve: Serve
) -> None:
    with pytest.raises(Failed) as error:
        serve(made()[0], missing=[(module, name)], additional_config=TORCH)
    text = str(error.value)
    assert "is not as hybrid-pack knows it (cannot import name" in text, text[-3000:]
    assert name in text and "create_engine_config" in text, "no worker was started"


def test_a_model_that_is_no_pack_is_told_as_such(made: Callable[..., Made], serve: Serve, tmp_path: Path) -> None:
    model = tmp_path / "plain"
    shutil.copytree(made()[0], model, ignore=shutil.ignore_patterns("experts"))
    config = json.loads((model / "config.json").read_text())
    del config["quantization_config"]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(Failed, match=r"this is not a pack: config.json has no quantization_config; convert it first"):
        serve(model, quantization="hybrid_pack", additional_config=TORCH)


def test_a_router_that_vllm_never_quantises_is_told_before_weights_are_loaded(serve: Serve, tmp_path: Path) -> None:
    """Of the last layer alone, so that nothing after it but the head tells that the layer is complete."""
    source, shape = tmp_path / "source", SHAPES["glm4_moe"]
    write_source(source, shape)
    name = f"model.layers.{shape.layers - 1}.mlp.gate"
    index = json.loads((source / "model.safetensors.index.json").read_text())
    file = source / index["weight_map"][f"{name}.weight"]
    scale = torch.full((shape.experts,), 0.5, dtype=torch.bfloat16)
    tensors = load_file(file) | {f"{name}.weight_scale_fp8": scale}
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, file)
    index["weight_map"][f"{name}.weight_scale_fp8"] = file.name
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(source, tmp_path / "pack")
    with pytest.raises(Failed) as error:
        serve(tmp_path / "pack", additional_config=TORCH)
    text = str(error.value)
    assert f"{name}: this vLLM can load it only unquantised (expected BF16, found fp8_row)" in text, text[-3000:]
    assert "initialize_model" in text and "load_weights" not in text
