"""Seeded hybrid checkpoints with the real names, dtypes and config keys, from a megabyte to full size.

Codes are uniform, block scales log-normal around the value that gives weights a sigma of 0.02, a few of them zero. All
bytes are slices of a few pools at offsets no two tensors share, so a layer of 4 GB is written as fast as the disk can.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.errors import UsageError
from hybrid_pack.formats import e4m3
from hybrid_pack.io.bitmap import KEPT_BITS, KEY, TAIL_BITS
from hybrid_pack.io.config import CONFIG, HF_QUANT_CONFIG
from hybrid_pack.io.names import FAMILIES
from hybrid_pack.io.safetensors import build_header, nbytes_of
from hybrid_pack.io.shards import INDEX, SINGLE, read_shards

SIGMA = 0.02
"""Standard deviation of the weights."""

_SPREAD = 0.35
_FP4_RMS = 2.93
_NF3_RMS = 0.614
_AMAX = 0.1
_SPARE_BYTES = 1 << 22
_POOL_BYTES = 3 << 22
_SMALL_ELEMS = 1 << 16
_STRIDE = 0x9E3779B1  # odd, so that offsets modulo a power of two repeat only after all of them

_EXPERTS, _INNER, _TOP_K = "num_experts", "moe_intermediate_size", "num_experts_per_tok"


@dataclass(frozen=True)
class _Model:
    """Config keys and names in which families differ; ``nested`` is the model_type inside ``text_config``, if any."""

    model_type: str
    nested: str = ""
    experts: tuple[str, ...] = (_EXPERTS,)
    inner: str = _INNER
    top_k: str = _TOP_K
    latent: str = ""
    activation: tuple[str, str] = ("hidden_act", "silu")


_MODELS = (  # for each line of names.FAMILIES
    _Model("glm_moe_dsa", experts=("n_routed_experts", _EXPERTS)),
    _Model("deepseek_v4", experts=("n_routed_experts",)),
    _Model("qwen3_5_moe", "qwen3_5_moe_text"),
    _Model("minimax_m2", experts=("num_local_experts",), inner="intermediate_size"),
    _Model("minimax_m3_vl", "minimax_m3", experts=("num_local_experts",), inner="intermediate_size"),
    _Model("kimi_k3", "kimi_linear", top_k="num_experts_per_token", latent="routed_expert_hidden_size"),
    _Model("kimi_k25", "kimi_k2", experts=("n_routed_experts",)),
    _Model("gemma4", "gemma4_text", top_k="top_k_experts", activation=("hidden_activation", "gelu_pytorch_tanh")),
)


@dataclass(frozen=True)
class Spec:
    """What to write; the defaults make GLM-5.2 in small.

    Attributes:
        seed: Same seed, same bytes.
        hidden: Width the experts read and write, a multiple of 32.
        intermediate: Their intermediate size, a multiple of 32.
        num_experts: Routed experts in a layer.
        top_k: Experts a token visits.
        kept: Kept experts in each mapped layer; the rest are NF3.
        moe_layers: Layers with experts, all named by the map.
        dense_layers: Layers without.
        mtp_layer: Add one layer past the last, all NVFP4, not in the map.
        kept_format: Kept format of the mapped layers.
        nf3_scales: ``e4m3``, or ``e4m3_x16`` for kquant's U8 holding the E4M3 bits of 16 times the scale.
        base_dialect: How the linear layers outside the experts are stored.
        family: Index into ``names.FAMILIES``.
        map_in: ``config``: in config.json. ``quantization``: under that key of hf_quant_config.json.
            ``hf_quant``: at the top of that file. ``none``: nowhere.
        map_keys: Keys "3" or "03".
        scalar_shape: Shape of scalar scales, () or (1,).
        input_scale: Whether NVFP4 experts have the (unused) activation scale.
        second_scale: How up's second-level scale relates to gate's.
        single_file: One file and no index.
        shard_bytes: Largest shard otherwise.
        vocab: Rows of the embedding.
    """

    seed: int = 0
    hidden: int = 256
    intermediate: int = 256
    num_experts: int = 8
    top_k: int = 2
    kept: int = 2
    moe_layers: tuple[int, ...] = (3, 4)
    dense_layers: tuple[int, ...] = (0, 1, 2)
    mtp_layer: bool = True
    kept_format: Literal["nvfp4", "mxfp4"] = "nvfp4"
    nf3_scales: Literal["e4m3", "e4m3_x16"] = "e4m3"
    base_dialect: Literal["bf16", "mxfp8", "fp8_row"] = "bf16"
    family: int = 0
    map_in: Literal["config", "quantization", "hf_quant", "none"] = "config"
    map_keys: Literal["plain", "zero_padded"] = "plain"
    scalar_shape: tuple[int, ...] = ()
    input_scale: bool = True
    second_scale: Literal["equal", "power_of_two", "unequal"] = "equal"
    single_file: bool = False
    shard_bytes: int = 1 << 30
    vocab: int = 64

    def __post_init__(self) -> None:
        if self.hidden % 32 or self.intermediate % 32 or min(self.hidden, self.intermediate) < 32:
            raise UsageError("sizes must be multiples of 32", found=f"{self.hidden} and {self.intermediate}")
        if not 0 <= self.kept <= self.num_experts or not self.moe_layers:
            raise UsageError("kept must be 0 to num_experts, and one layer needs experts", found=self.kept)

    @property
    def layers(self) -> int:
        """Decoder layers; the MTP layer, if any, has this index."""
        return max((*self.moe_layers, *self.dense_layers)) + 1

    @property
    def width(self) -> int:
        """Hidden size of the model: twice the experts' where the family gives those a narrower one."""
        return self.hidden * (2 if _MODELS[self.family].latent else 1)


@dataclass(frozen=True)
class _Item:
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[Any]


def bit_map(spec: Spec) -> dict[str, list[int]]:
    """The map in its JSON form: per mapped layer 4 (kept) or 3 (tail) for each expert."""
    rng = np.random.default_rng([spec.seed, 1])
    result = {}
    for layer in sorted(spec.moe_layers):
        kept = set(rng.permutation(spec.num_experts)[: spec.kept].tolist())
        key = f"{layer:02d}" if spec.map_keys == "zero_padded" else str(layer)
        result[key] = [KEPT_BITS if expert in kept else TAIL_BITS for expert in range(spec.num_experts)]
    return result


def _e4m3_table(typical: float) -> NDArray[np.uint8]:
    """u8 [256]: E4M3 bytes of log-normal scales with this root mean square; two in 256 are zero, no NaN."""
    center = typical * math.exp(-(_SPREAD**2))
    quantiles = [center * math.exp(_SPREAD * NormalDist().inv_cdf((i + 0.5) / 254)) for i in range(254)]
    positive = e4m3.VALUES[:0x7F]
    return np.array([0, 0, *(np.abs(positive - value).argmin() for value in quantiles)], dtype=np.uint8)


def _tables() -> dict[str, NDArray[Any]]:
    """For each kind of data, what a uniform random byte becomes."""
    normal = np.array([NormalDist().inv_cdf((i + 0.5) / 256) for i in range(256)])
    bf16 = ((normal * SIGMA).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    octave = round(math.log2(SIGMA / _FP4_RMS)) - 1 + 127
    return {
        "nvfp4": _e4m3_table(SIGMA / _FP4_RMS * 2688 / _AMAX),
        "nf3": _e4m3_table(SIGMA / _NF3_RMS),
        "nf3_x16": _e4m3_table(16 * SIGMA / _NF3_RMS),
        "mxfp4": np.clip(octave + np.rint(normal), octave - 4, octave + 2).astype(np.uint8),
        "BF16": bf16,
        "F32": (normal * SIGMA).astype(np.float32),
        "F8_E4M3": np.array([byte & 0xF7 if byte & 0x7F == 0x7F else byte for byte in range(256)], dtype=np.uint8),
        "mxfp8": np.clip(octave - 5 + np.rint(normal), 1, 254).astype(np.uint8),
    }  # fmt: skip


class _Pools:
    """Endless data of each kind: slices of a pool, at another offset each time."""

    def __init__(self, seed: int) -> None:
        self._noise = np.frombuffer(np.random.default_rng([seed, 0]).bytes(_POOL_BYTES), dtype=np.uint8)
        self._tables = _tables()
        self._pools: dict[str, NDArray[Any]] = {"codes": self._noise}
        self._taken = 0

    def take(self, kind: str, elements: int) -> NDArray[Any]:
        """Elements of one kind (bytes for packed codes), or as many as there are: the writer repeats them."""
        self._taken += 1
        offset = self._taken * _STRIDE % _SPARE_BYTES
        if elements <= _SMALL_ELEMS:
            noise = self._noise[offset : offset + elements]
            return noise if kind == "codes" else self._tables[kind][noise]
        if kind not in self._pools:
            self._pools[kind] = self._tables[kind][self._noise]
        return self._pools[kind][offset : offset + elements]


def _expert_matrix(spec: Spec, pools: _Pools, name: str, kind: str, n: int, k: int, second: float) -> Iterator[_Item]:
    def scalar(field: str, value: float) -> _Item:
        return _Item(f"{name}.{field}", "F32", spec.scalar_shape, np.array([value], dtype=np.float32))

    if kind == "nf3":
        yield _Item(f"{name}.weight_packed", "U8", (n, k // 8 * 3), pools.take("codes", n * k // 8 * 3))
        scaled = spec.nf3_scales == "e4m3_x16"
        data = pools.take("nf3_x16" if scaled else "nf3", n * k // 32)
        yield _Item(f"{name}.weight_scale", "U8" if scaled else "F8_E4M3", (n, k // 32), data)
        return
    group = 16 if kind == "nvfp4" else 32
    deepseek = kind == "mxfp4" and FAMILIES[spec.family].models == "DeepSeek-V4"
    dtype = "F8_E4M3" if kind == "nvfp4" else "F8_E8M0" if deepseek else "U8"
    yield _Item(f"{name}.weight", "I8" if deepseek else "U8", (n, k // 2), pools.take("codes", n * k // 2))
    scale_field = "scale" if deepseek else "weight_scale"
    yield _Item(f"{name}.{scale_field}", dtype, (n, k // group), pools.take(kind, n * k // group))
    if kind == "nvfp4":
        yield scalar("weight_scale_2", second)
        if spec.input_scale:
            yield scalar("input_scale", 0.01)


def _experts(spec: Spec, pools: _Pools, layer: int, bits: list[int]) -> Iterator[_Item]:
    family = FAMILIES[spec.family]
    kept_kind = spec.kept_format if layer in spec.moe_layers else "nvfp4"
    for expert, bit in enumerate(bits):
        prefix = family.prefix.format(L=layer, E=expert)
        gate = _AMAX / 2688 * (0.8 + 0.4 * (expert * 37 + layer * 11) % 101 / 101)
        up = gate * {"equal": 1.0, "power_of_two": 2.0 ** (expert % 5 - 2), "unequal": 1.37}[spec.second_scale]
        kind = kept_kind if bit == KEPT_BITS else "nf3"
        for (role, projection), second in zip(family.projections, (gate, up, gate * 1.1), strict=True):
            down = role == "down"
            n, k = (spec.hidden, spec.intermediate) if down else (spec.intermediate, spec.hidden)
            yield from _expert_matrix(spec, pools, f"{prefix}.{projection}", kind, n, k, second)


def _items(spec: Spec) -> Iterator[_Item]:
    """Every tensor, in file order."""
    width, inner = spec.width, spec.intermediate
    pools = _Pools(spec.seed)
    family = FAMILIES[spec.family]
    stem, _, block = family.prefix.partition("layers.{L}.")
    ffn = block.partition("experts.")[0] or "mlp."

    def plain(name: str, dtype: str, *shape: int) -> _Item:
        return _Item(name, dtype, shape, pools.take(dtype, math.prod(shape)))

    def linear(name: str, n: int, k: int) -> Iterator[_Item]:
        yield plain(f"{name}.weight", "BF16" if spec.base_dialect == "bf16" else "F8_E4M3", n, k)
        if spec.base_dialect == "mxfp8":
            yield _Item(f"{name}.weight_scale", "U8", (n, k // 32), pools.take("mxfp8", n * k // 32))
        elif spec.base_dialect == "fp8_row":
            yield plain(f"{name}.weight_scale_fp8", "BF16", n)

    def mlp(name: str) -> Iterator[_Item]:
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
        yield from _experts(spec, pools, layer, mapped[layer])
    yield plain(f"{stem}norm.weight", "BF16", width)
    yield plain("lm_head.weight", "BF16", spec.vocab, width)


def _config(spec: Spec, quantization: dict[str, Any] | None) -> dict[str, Any]:
    model = _MODELS[spec.family]
    decoder: dict[str, Any] = {
        "model_type": model.nested or model.model_type,
        "hidden_size": spec.width,
        model.inner: spec.intermediate,
        **dict.fromkeys(model.experts, spec.num_experts),
        model.top_k: spec.top_k,
        model.activation[0]: model.activation[1],
        "num_hidden_layers": spec.layers,
        "num_nextn_predict_layers": int(spec.mtp_layer),
        "first_k_dense_replace": min(spec.moe_layers),
        "vocab_size": spec.vocab,
        "rms_norm_eps": 1e-05,
    }
    if model.latent:
        decoder[model.latent] = spec.hidden
    document: dict[str, Any] = {"dtype": "bfloat16", "model_type": model.model_type}
    document |= {"text_config": decoder} if model.nested else decoder
    return document if quantization is None else {**document, "quantization_config": quantization}


def _documents(spec: Spec) -> dict[str, Any]:
    """The JSON files beside the shards."""
    quantization: dict[str, Any] = {"quant_algo": "NVFP4", "group_size": 16}
    if spec.kept_format == "mxfp4":
        quantization["kept_format"] = "mxfp4_e8m0k32"
    listed = ["lm_head", "*.embed_tokens", "*.self_attn.*", "*.shared_experts.*"]
    listed += [f"*.layers.{layer}*" for layer in spec.dense_layers]
    here: dict[str, Any] = {KEY: bit_map(spec)}
    producer = {"name": "modelopt", "version": "0.39.0.dev290+gf9d9a71de"}
    documents: dict[str, Any] = {}
    if spec.map_in in ("config", "none"):
        block = {"quant_method": "modelopt", **quantization, "ignore": listed, "producer": producer}
        documents[CONFIG] = _config(spec, block | (here if spec.map_in == "config" else {}))
    else:
        under = spec.map_in == "quantization"
        block = {**quantization, "exclude_modules": listed, **(here if under else {})}
        documents[CONFIG] = _config(spec, None)
        documents[HF_QUANT_CONFIG] = {"producer": producer, "quantization": block, **({} if under else here)}
    documents["generation_config.json"] = {"_from_model_config": True, "eos_token_id": 1}
    documents["tokenizer_config.json"] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096}
    words = {"type": "WordLevel", "vocab": {"<unk>": 0, "</s>": 1}, "unk_token": "<unk>"}
    documents["tokenizer.json"] = {"version": "1.0", "model": words}
    return documents


def _write_file(path: Path, items: list[_Item]) -> None:
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
    groups: list[list[_Item]] = [[]]
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
