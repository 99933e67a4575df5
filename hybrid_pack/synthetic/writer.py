"""Writing a synthetic checkpoint: tensors in file order, JSON documents, shards."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_pack.io.bitmap import KEPT_BITS, KEY
from hybrid_pack.io.config import CONFIG, HF_QUANT_CONFIG
from hybrid_pack.io.safetensors import build_header, nbytes_of
from hybrid_pack.io.shards import INDEX, SINGLE, read_shards
from hybrid_pack.synthetic.experts import experts
from hybrid_pack.synthetic.pools import Item, Pools
from hybrid_pack.synthetic.spec import Spec, bit_map

_FLOATS = ("bf16", "f16", "f32")


def _items(spec: Spec) -> Iterator[Item]:
    """Every tensor, in file order."""
    width, inner = spec.width, spec.intermediate
    pools = Pools(spec.seed)
    stem, _, block = spec.names.prefix.partition("layers.{L}.")
    ffn = block.partition("experts")[0].rstrip(".") + "." if block.partition("experts")[0] else "mlp."

    def plain(name: str, dtype: str, *shape: int) -> Item:
        return Item(name, dtype, shape, pools.take(dtype, math.prod(shape)))

    def linear(name: str, n: int, k: int) -> Iterator[Item]:
        yield plain(f"{name}.weight", "BF16" if spec.base_dialect == "bf16" else "F8_E4M3", n, k)
        if spec.base_dialect == "mxfp8":
            yield Item(f"{name}.weight_scale", "U8", (n, k // 32), pools.take("mxfp8", n * k // 32))
        elif spec.base_dialect == "fp8_row":
            yield plain(f"{name}.weight_scale_fp8", "BF16", n)

    def mlp(name: str) -> Iterator[Item]:
        yield from linear(f"{name}gate_proj", inner, width)
        yield from linear(f"{name}up_proj", inner, width)
        yield from linear(f"{name}down_proj", width, inner)

    yield plain(f"{stem}embed_tokens.weight", "BF16", spec.vocab, width)
    mapped = {int(layer): bits for layer, bits in bit_map(spec).items()}
    if spec.mtp_layer:
        mapped[spec.layers] = [KEPT_BITS] * spec.num_experts
    for layer in sorted({*spec.dense_layers, *mapped}):
        at = f"{stem}layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield plain(f"{at}{norm}.weight", "BF16", width)
        for projection in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
            yield from linear(f"{at}self_attn.{projection}", width, width)
        if layer == spec.layers:
            yield from linear(f"{at}eh_proj", width, 2 * width)
        if layer not in mapped:
            yield from mlp(f"{at}mlp.")
            continue
        yield plain(f"{at}{ffn}gate.weight", "BF16", spec.num_experts, width)
        yield plain(f"{at}{ffn}gate.e_score_correction_bias", "F32", spec.num_experts)
        yield from mlp(f"{at}{ffn}shared_experts.")
        yield from experts(spec, pools, layer, mapped[layer])
    yield plain(f"{stem}norm.weight", "BF16", width)
    yield plain("lm_head.weight", "BF16", spec.vocab, width)


def _config(spec: Spec, quantization: dict[str, Any] | None) -> dict[str, Any]:
    model = spec.model
    key, activation = model.activation
    decoder: dict[str, Any] = {
        "model_type": model.nested or model.model_type,
        "hidden_size": spec.width,
        model.inner: spec.intermediate,
        **dict.fromkeys(model.experts, spec.num_experts),
        model.top_k: spec.top_k,
        **({key: activation} if key else {}),
        "num_hidden_layers": spec.layers,
        "num_nextn_predict_layers": int(spec.mtp_layer),
        "first_k_dense_replace": min(spec.moe_layers),
        "vocab_size": spec.vocab,
        "rms_norm_eps": 1e-05,
        **dict(model.more),
    }
    if model.latent:
        decoder[model.latent] = spec.hidden
    document: dict[str, Any] = {"dtype": "bfloat16", "model_type": model.model_type}
    document |= {"text_config": decoder} if model.nested else decoder
    return document if quantization is None else {**document, "quantization_config": quantization}


def _quantization(spec: Spec) -> dict[str, Any]:
    """The quantization block of the format the experts are published in; empty where they are BF16, F16 or F32."""
    kinds = spec.published
    if not kinds or "nvfp4" in kinds:
        block: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
        if not kinds and spec.kept_format == "mxfp4":
            block["kept_format"] = "mxfp4_e8m0k32"
        return block
    first = next((kind for kind in kinds if kind not in _FLOATS), "")
    if first.startswith("ct_"):
        return {"quant_method": "compressed-tensors", "format": f"{first.removeprefix('ct_')}-pack-quantized"}
    blocks: dict[str, dict[str, Any]] = {
        "": {},
        "mxfp4": {"quant_method": "mxfp4"},
        "mxfp8": {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        "mxfp8_inv": {"quant_method": "mxfp8"},
        "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "fp8_row": {"quant_method": "compressed-tensors", "format": "float-quantized"},
        "fp8_tensor": {"quant_method": "modelopt", "quant_algo": "FP8"},
        "nf3": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    }
    return blocks[first]


def _documents(spec: Spec) -> dict[str, Any]:
    """The JSON files beside the shards."""
    quantization = _quantization(spec)
    listed = ["lm_head", "*.embed_tokens", "*.self_attn.*", "*.shared_experts.*"]
    listed += [f"*.layers.{layer}*" for layer in spec.dense_layers]
    here: dict[str, Any] = {KEY: bit_map(spec)}
    producer = {"name": "modelopt", "version": "0.39.0.dev290+gf9d9a71de"}
    documents: dict[str, Any] = {}
    if spec.map_in in ("config", "none"):
        held = here if spec.map_in == "config" else {}
        if quantization:
            documents[CONFIG] = _config(spec, {**quantization, "ignore": listed, "producer": producer, **held})
        else:
            documents[CONFIG] = _config(spec, None) | held
    else:
        under = spec.map_in == "quantization"
        quantization.pop("quant_method", None)
        block = {**quantization, "exclude_modules": listed, **(here if under else {})}
        documents[CONFIG] = _config(spec, None)
        documents[HF_QUANT_CONFIG] = {"producer": producer, "quantization": block, **({} if under else here)}
    documents["generation_config.json"] = {"_from_model_config": True, "eos_token_id": 1}
    documents["tokenizer_config.json"] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096}
    words = {"type": "WordLevel", "vocab": {"<unk>": 0, "</s>": 1}, "unk_token": "<unk>"}
    documents["tokenizer.json"] = {"version": "1.0", "model": words}
    return documents


def _write_file(path: Path, items: list[Item]) -> None:
    header, placed = build_header((item.name, item.dtype, item.shape) for item in items)
    with path.open("wb") as file:
        file.write(header)
        for item, tensor in zip(items, placed, strict=True):
            data = item.data.view(np.uint8).data
            for start in range(0, tensor.nbytes, len(data)):
                file.write(data[: tensor.nbytes - start])


def write_checkpoint(root: Path, spec: Spec | None = None) -> None:
    """Write a checkpoint; the folder is made if it is not there.

    Args:
        root: Where to.
        spec: What to write; by default GLM-5.2 in small, 2 MB.

    Raises:
        OSError: It cannot be written.
    """
    spec = spec or Spec()
    root.mkdir(parents=True, exist_ok=True)
    groups: list[list[Item]] = [[]]
    size = 0
    for item in _items(spec):
        nbytes = nbytes_of(item.dtype, item.shape)
        if size and size + nbytes > spec.shard_bytes and not spec.single_file:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += nbytes
    count = len(groups)
    names = [SINGLE] if spec.single_file else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    documents = _documents(spec)
    for name, items in zip(names, groups, strict=True):
        _write_file(root / name, items)
    if not spec.single_file:
        total = sum(nbytes_of(item.dtype, item.shape) for items in groups for item in items)
        weight_map = {item.name: name for name, items in zip(names, groups, strict=True) for item in items}
        documents[INDEX] = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    for name, document in documents.items():
        (root / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    (root / "LICENSE").write_text("Synthetic weights, public domain.\n", encoding="utf-8")


def read_tensor(root: Path, name: str) -> tuple[str, tuple[int, ...], bytes]:
    """(safetensors dtype, shape, raw bytes) of a stored tensor.

    Raises:
        KeyError: No such tensor.
    """
    located = read_shards(root).tensors[name]
    with located.path.open("rb") as file:
        file.seek(located.header.begin)
        return located.header.dtype, located.header.shape, file.read(located.header.nbytes)
