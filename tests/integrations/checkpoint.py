"""A small hybrid Qwen3-MoE checkpoint whose layers outside the experts are stored in any way, and what they mean."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from hybrid_pack.synthetic import Spec, write_checkpoint

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 256, 4, 2, 64, 64, 2
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Fields = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Matrix:
    """One stored matrix.

    Attributes:
        fields: Its tensors by field.
        meaning: The weights they stand for, f64 [N, K].
    """

    fields: Fields
    meaning: torch.Tensor


def matrix(dialect: str, rows: int, columns: int, generator: torch.Generator) -> Matrix:
    """Random codes and scales of a dialect."""

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    if dialect == "bf16":
        weight = (torch.randn(rows, columns, generator=generator) * 0.05).to(torch.bfloat16)
        return Matrix({"weight": weight}, weight.double())
    if dialect == "ct_mxfp4_125":
        codes, exponent = integers(0, 256, rows, columns // 2), integers(115, 120, rows, columns // 32)
        nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
        values = torch.tensor(E2M1, dtype=torch.float64)[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0).double()
        factor = torch.exp2(exponent.double() - 125).repeat_interleave(32, dim=1)
        fields = {"weight_packed": codes.to(torch.uint8), "weight_scale": exponent.to(torch.uint8)}
        return Matrix(fields, values * factor)
    if dialect in ("nvfp4", "nvfp4_no_input"):
        codes = integers(0, 256, rows, columns // 2).to(torch.uint8)
        scale = (torch.rand(rows, columns // 16, generator=generator) * 8 + 1).to(torch.float8_e4m3fn)
        second = torch.tensor(2.0**-8)
        fields = {"weight": codes, "weight_scale": scale, "weight_scale_2": second}
        if dialect == "nvfp4":
            fields["input_scale"] = torch.tensor(1.0)
        nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)
        signs = torch.where(nibbles > 7, -1.0, 1.0).double()
        values = torch.tensor(E2M1, dtype=torch.float64)[(nibbles & 7).long()] * signs
        return Matrix(fields, values * scale.double().repeat_interleave(16, dim=1) * second.double())
    codes = (torch.randn(rows, columns, generator=generator) * 0.5).to(torch.float8_e4m3fn)
    if dialect == "mxfp8":
        exponent = integers(120, 125, rows, columns // 32)
        factor = torch.exp2(exponent.double() - 127).repeat_interleave(32, dim=1)
        return Matrix({"weight": codes, "weight_scale": exponent.to(torch.uint8)}, codes.double() * factor)
    if dialect == "fp8_row":
        scale = (torch.rand(rows, generator=generator) * 0.1 + 0.01).to(torch.bfloat16)
        return Matrix({"weight": codes, "weight_scale_fp8": scale}, codes.double() * scale.double()[:, None])
    if dialect == "fp8_channel":
        scale = torch.rand(rows, 1, generator=generator) * 0.1 + 0.01
        return Matrix({"weight": codes, "weight_scale": scale}, codes.double() * scale.double())
    if dialect == "fp8_tensor":
        one = torch.rand((), generator=generator) * 0.1 + 0.01
        return Matrix({"weight": codes, "weight_scale": one}, codes.double() * one.double())
    assert dialect == "fp8_block", dialect
    blocks = math.ceil(rows / 128), math.ceil(columns / 128)
    scale = (torch.rand(blocks, generator=generator) * 0.1 + 0.01).to(torch.bfloat16).float()  # exact products
    factor = scale.double().repeat_interleave(128, dim=0)[:rows].repeat_interleave(128, dim=1)[:, :columns]
    return Matrix({"weight": codes, "weight_scale_inv": scale}, codes.double() * factor)


def write(root: Path, dialect: str, seed: int = 0, **experts_of: Any) -> dict[str, torch.Tensor]:
    """Write the checkpoint; returns what its linear layers mean, f64 [N, K] by name."""
    layers = tuple(range(LAYERS))
    spec = Spec(moe_layers=layers, dense_layers=(), mtp_layer=False, seed=seed, vocab=VOCAB, **experts_of)
    write_checkpoint(root, spec)
    experts = {
        name: tensor
        for path in root.glob("*.safetensors")
        for name, tensor in load_file(path).items()
        if ".experts." in name
    }
    for path in root.glob("model*"):
        path.unlink()
    generator = torch.Generator().manual_seed(seed)
    tensors: Fields = dict(experts)
    meanings = {}
    shapes = {
        "q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "o_proj": (HIDDEN, HEADS * HEAD_DIM),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, (rows, columns) in shapes.items():
            made = matrix(dialect, rows, columns, generator)
            meanings[f"{at}.self_attn.{name}"] = made.meaning
            tensors |= {f"{at}.self_attn.{name}.{field}": tensor for field, tensor in made.fields.items()}
        for norm, width in (
            ("input_layernorm", HIDDEN),
            ("post_attention_layernorm", HIDDEN),
            ("self_attn.q_norm", HEAD_DIM),
            ("self_attn.k_norm", HEAD_DIM),
        ):
            tensors[f"{at}.{norm}.weight"] = torch.ones(width, dtype=torch.bfloat16)
        tensors[f"{at}.mlp.gate.weight"] = torch.randn(spec.num_experts, HIDDEN, generator=generator).bfloat16()
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    for name in ("model.embed_tokens", "lm_head"):
        tensors[f"{name}.weight"] = torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16()
    save_file(tensors, root / "model.safetensors")
    made_config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(_config(spec, made_config["quantization_config"]), indent=1))
    return meanings


def _config(spec: Spec, quantization: dict[str, object]) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "head_dim": HEAD_DIM,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": LAYERS,
        "intermediate_size": 512,
        "moe_intermediate_size": spec.intermediate,
        "num_experts": spec.num_experts,
        "num_experts_per_tok": spec.top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
        "quantization_config": {**quantization, "ignore": ["lm_head", "model.layers.*.self_attn*", "*.mlp.gate"]},
    }
