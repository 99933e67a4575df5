"""Configurations: real ones of every model in reach, and how activations are written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.io.config import CONFIG, HF_QUANT_CONFIG, is_gated, read_config
from hybrid_pack.io.excludes import matches
from hybrid_pack.io.names import FAMILIES
from hybrid_pack.runtime.activation import GatedSilu, parse_activation

SHARED = Path(os.environ.get("HYBRID_PACK_SHARED", Path(__file__).parents[3] / "shared"))
CONFIGS = SHARED / "data" / "configs"
NAMES = sorted(p.name.removesuffix("_config.json") for p in CONFIGS.glob("*_config.json") if "_hf_quant" not in p.name)

real = pytest.mark.skipif(not NAMES, reason=f"no real configs in {CONFIGS}; set HYBRID_PACK_SHARED")

GEOMETRY = {
    "zai-org--GLM-5.2": (6144, 2048, 256, 8, 78),
    "nvidia--GLM-5-NVFP4": (6144, 2048, 256, 8, 78),
    "nvidia--GLM-5.2-NVFP4": (6144, 2048, 256, 8, 78),
    "deepseek-ai--DeepSeek-R1": (7168, 2048, 256, 8, 61),
    "deepseek-ai--DeepSeek-V3.2": (7168, 2048, 256, 8, 61),
    "deepseek-ai--DeepSeek-V4-Flash": (4096, 2048, 256, 6, 43),
    "deepseek-ai--DeepSeek-V4-Pro": (7168, 3072, 384, 6, 61),
    "Qwen--Qwen3-30B-A3B": (2048, 768, 128, 8, 48),
    "Qwen--Qwen3-235B-A22B": (4096, 1536, 128, 8, 94),
    "Qwen--Qwen3.5-397B-A17B": (4096, 1024, 512, 10, 60),
    "nvidia--Qwen3.6-35B-A3B-NVFP4": (2048, 512, 256, 8, 40),
    "MiniMaxAI--MiniMax-M2.7": (3072, 1536, 256, 8, 62),
    "MiniMaxAI--MiniMax-M3": (6144, 3072, 128, 4, 60),
    "nvidia--MiniMax-M3-NVFP4": (6144, 3072, 128, 4, 60),
    "moonshotai--Kimi-K2.5": (7168, 2048, 384, 8, 61),
    "moonshotai--Kimi-K3": (3584, 3072, 896, 16, 93),
    "mistralai--Mixtral-8x7B-v0.1": (4096, 14336, 8, 2, 32),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": (2688, 1856, 128, 6, 52),
    "google--gemma-4-26B-A4B": (2816, 704, 128, 8, 30),
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": (5120, 8192, 16, 1, 48),
    "openai--gpt-oss-120b": (2880, 2880, 128, 4, 36),
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8": (1024, 2688, 512, 22, 88),
    "nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": (2048, 5120, 512, 22, 0),
    "nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4": (2688, 1856, 128, 6, 52),
    "stepfun-ai--Step-3.7-Flash-FP8": (4096, 1280, 288, 8, 45),
}
"""Experts' hidden and intermediate size, experts, top-k, decoder layers: what the models' cards say."""


def put(root: Path, name: str) -> Path:
    shutil.copy(CONFIGS / f"{name}_config.json", root / CONFIG)
    other = CONFIGS / f"{name}_hf_quant_config.json"
    if other.exists():
        shutil.copy(other, root / HF_QUANT_CONFIG)
    return root


@real
@pytest.mark.parametrize("name", GEOMETRY)
def test_geometry_of_real_models(tmp_path: Path, name: str) -> None:
    config = read_config(put(tmp_path, name))
    found = (config.hidden, config.intermediate, config.num_experts, config.top_k, config.num_layers)
    assert found == GEOMETRY[name]
    assert config.bit_map is None and config.kept_format is None


@real
def test_every_real_config_is_read(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).mkdir()
        config = read_config(put(tmp_path / name, name))
        assert config.top_k <= config.num_experts and config.hidden % 32 == 0, name


@real
def test_quantization_only_in_hf_quant_config(tmp_path: Path) -> None:
    config = read_config(put(tmp_path, "nvidia--GLM-5-NVFP4"))
    assert "quantization_config" not in config.raw
    assert config.quantization["quant_algo"] == "NVFP4"


@real
def test_real_exclude_lists_spare_the_experts(tmp_path: Path) -> None:
    """ModelOpt's lists have ``model.layers.1.*`` and ``model.layers.78*``; layers 10 to 19 are quantised."""
    config = read_config(put(tmp_path, "nvidia--GLM-5.2-NVFP4"))
    listed = config.quantization["ignore"]
    assert len(listed) > 100

    def excluded(module: str) -> list[int]:
        return [layer for layer in range(79) if any(matches(p, module.format(L=layer, E=0)) for p in listed)]

    assert excluded(f"{FAMILIES[0].prefix}.gate_proj") == [0, 1, 2, 78]
    assert set(range(10, 78)) <= set(excluded("model.layers.{L}.self_attn.o_proj"))


def minimal(root: Path, **values: Any) -> Path:
    base = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    (root / CONFIG).write_text(json.dumps(base | values))
    return root


@pytest.mark.parametrize(
    ("values", "activation"),
    [
        ({}, "silu"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_activation": "gelu_pytorch_tanh"}, "gelu_pytorch_tanh"),
        ({"mlp_hidden_act": "relu2"}, "relu2"),
        ({"hidden_act": "silu", "swiglu_limit": 10}, "silu(limit=10.0)"),
        ({"hidden_act": "silu", "swiglu_limit": None}, "silu"),
        ({"hidden_act": "silu", "swiglu_limit": 0}, "silu"),
        ({"hidden_act": None, "hidden_activation": "", "mlp_hidden_act": None}, "silu"),
        ({"hidden_act": "swigluoai", "swiglu_limit": 7.0, "swiglu_alpha": 1.702}, "swigluoai(alpha=1.702, limit=7.0)"),
        ({"hidden_act": "silu", "model_type": "gpt_oss", "swiglu_limit": 7.0}, "swigluoai(alpha=1.702, limit=7.0)"),
        ({"hidden_act": "silu", "model_type": "gpt_oss"}, "swigluoai(alpha=1.702, limit=7.0)"),
        ({"hidden_act": "silu", "model_type": "minimax_m3", "swiglu_limit": 6.0, "swiglu_alpha": 1.5},
         "swigluoai(alpha=1.5, limit=6.0)"),
        ({"hidden_act": "silu", "model_type": "deepseek_v4", "swiglu_limit": 10.0}, "silu(limit=10.0)"),
        ({"hidden_act": "silu", "model_type": "llama4_text"}, "silu(router_weight=input)"),
        ({"swiglu_limits": [None, 0, 0.0]}, "silu"),
        ({"swiglu_limits": [0, 7, None, 7.5]}, "swiglustep(1=7.0, 3=7.5)"),
        ({"hidden_act": "situ", "activation_situ_beta": 4, "activation_situ_linear_beta": 25},
         "situ(beta=4.0, linear_beta=25.0)"),
    ],
)  # fmt: skip
def test_activation(tmp_path: Path, values: dict[str, Any], activation: str) -> None:
    assert read_config(minimal(tmp_path, **values)).activation == activation


@pytest.mark.parametrize(
    ("activation", "gated"),
    [("relu2", False), ("silu", True), ("silu(limit=10.0)", True), ("swigluoai(alpha=1.702, limit=7.0)", True)],
)
def test_activations_with_a_gate(activation: str, gated: bool) -> None:
    assert is_gated(activation) == gated


@pytest.mark.parametrize(
    "activation",
    ["silu(router_weight=input)", "swiglustep(1=7.0)", "swigluoai(alpha=1.702, limit=7.0)", 
     "relu2", "situ(beta=4.0, linear_beta=25.0)", "gelu_pytorch_tanh"],
)  # fmt: skip
def test_what_is_no_plain_silu_is_never_taken_for_one(activation: str) -> None:
    found = parse_activation(activation)
    assert found is None or type(found) is not GatedSilu


def test_the_key_of_the_mlps_comes_before_that_of_the_model(tmp_path: Path) -> None:
    """Nemotron-3's published configs have ``mlp_hidden_act`` (and ``mamba_hidden_act``) alone."""
    values = {"hidden_act": "silu", "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"}
    assert read_config(minimal(tmp_path, **values)).activation == "relu2"


def test_keys_of_step(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(
        json.dumps({"hidden_size": 64, "moe_intermediate_size": 32, "moe_num_experts": 288, "moe_top_k": 8})
    )
    config = read_config(tmp_path)
    assert (config.num_experts, config.top_k) == (288, 8)


ACTIVATIONS = {
    "openai--gpt-oss-120b": "swigluoai(alpha=1.702, limit=7.0)",
    "MiniMaxAI--MiniMax-M3": "swigluoai(alpha=1.702, limit=7.0)",
    "deepseek-ai--DeepSeek-V4-Flash": "silu(limit=10.0)",
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": "silu(router_weight=input)",
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4": "relu2",
    "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8": "relu2",
    "moonshotai--Kimi-K3": "situ(beta=4.0, linear_beta=25.0)",
    "google--gemma-4-26B-A4B": "gelu_pytorch_tanh",
    "zai-org--GLM-5.2": "silu",
}


@real
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_real_models(tmp_path: Path, name: str) -> None:
    assert read_config(put(tmp_path, name)).activation == ACTIVATIONS[name]


def test_defaults_of_a_minimal_config(tmp_path: Path) -> None:
    config = read_config(minimal(tmp_path))
    assert config.model_type == "unknown" and config.num_layers == 0
    assert config.quantization == {} and config.bit_map is None
    assert config.nf3_levels == (-1.0, -0.6047, -0.3563, -0.1275, 0.1275, 0.3563, 0.6047, 1.0)


def test_null_is_as_good_as_nothing(tmp_path: Path) -> None:
    keys = ("model_type", "text_config", "quantization_config", "swiglu_limits", "swiglu_alpha")
    assert read_config(minimal(tmp_path, **dict.fromkeys(keys))).model_type == "unknown"


def test_text_config_wins_over_the_top(tmp_path: Path) -> None:
    config = read_config(minimal(tmp_path, text_config={"hidden_size": 96, "model_type": "inner"}, model_type="outer"))
    assert (config.hidden, config.model_type) == (96, "inner")


def test_infinity_as_python_writes_it_is_read(tmp_path: Path) -> None:
    """Mamba hybrids have ``time_step_limit: [0.0, Infinity]``."""
    assert read_config(minimal(tmp_path, time_step_limit=[0.0, float("inf")])).hidden == 64
