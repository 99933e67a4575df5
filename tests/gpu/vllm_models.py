"""Small checkpoints in the shapes of real families, whose greedy tokens are decided, for engines to be compared on.

    python -m tests.gpu.vllm_models FOLDER [NAME ...]

For each: ``NAME/source`` (hybrid: kept experts NVFP4 or MXFP4, the others NF3), ``NAME/pack`` (and ``NAME/pack-tp2``,
``NAME/pack-ep2``), as ``hybrid-pack convert`` makes them, and ``NAME/bf16``: experts, and what of the base is
quantised, in BF16, all else the same.

How tokens are decided: the first ``CLASSES`` coordinates of the residual stream are a one-hot code of the token's
class, which nothing in the model writes to. The router reads that block alone and ranks experts by wide margins, so
that rounding moves no token to another expert, while what experts and attention compute is as context-dependent as in
any model. ``lm_head`` reads the other coordinates; its rows differ in size, which makes near ties rare, and where one
remains the comparison knows it from the margin.

glm4_moe stands for glm_moe_dsa: vLLM 0.22.1 runs that one on Hopper with FlashMLA's sparse kernels only, which the
bundle for the test machine leaves out (``platforms/cuda.py``; ``DeepseekV2Attention`` refuses an indexer). Its MLP
part (sigmoid routing with a correction bias, shared expert, routed scaling) is glm4_moe's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import hybrid_pack
from hybrid_pack.io.safetensors import nbytes_of
from hybrid_pack.synthetic import Spec, bit_map
from hybrid_pack.synthetic.experts import experts as expert_items
from hybrid_pack.synthetic.pools import Item, Pools
from hybrid_pack.synthetic.writer import _write_file

CLASSES = 64
"""Classes of tokens, and the coordinates of their one-hot code."""

CODE = 8.0
"""Size of the code in the residual stream."""

NORM = 4.0
"""Weight of the norm before the experts: theirs are of sigma 0.02, and would otherwise hardly move the stream."""

STEP = 0.03
"""Between two ranks of the router; its logits are one or two units apart, since the code reaches it as 25 to 70."""


@dataclass(frozen=True)
class Shape:
    """A model.

    Attributes:
        family: ``model_type``.
        kept_format: Of its kept experts.
        dense: First layers without experts.
        groups: Groups of experts the router chooses from, two of them for a token; 1 is no grouping.
        shared: Whether each layer has a shared expert.
        mtp: Whether there is a multi-token-prediction layer, outside the map and all NVFP4.
        two_ranks: Whether packs for two ranks are made too, tensor-parallel and expert-parallel.
        steep: Class code, zeroed writes to it and a router that reads it; else a plain random router.
        fp8_base: Whether qwen3_moe's attention is stored quantised: q, k and v as MXFP8, o as FP8 with a scale a row.
    """

    family: Literal["qwen3_moe", "deepseek_v3", "glm4_moe"]
    kept_format: Literal["nvfp4", "mxfp4"] = "nvfp4"
    dense: int = 0
    groups: int = 1
    shared: bool = False
    mtp: bool = False
    two_ranks: bool = False
    hidden: int = 512
    intermediate: int = 256
    experts: int = 32
    kept: int = 8
    top_k: int = 4
    moe_layers: int = 3
    vocab: int = 1024
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    steep: bool = True
    fp8_base: bool = False
    seed: int = 1

    @property
    def spec(self) -> Spec:
        """Its experts, for the writer of synthetic ones."""
        layers = tuple(range(self.dense, self.layers))
        return Spec(
            seed=self.seed, hidden=self.hidden, intermediate=self.intermediate, num_experts=self.experts,
            top_k=self.top_k, kept=self.kept, moe_layers=layers, dense_layers=tuple(range(self.dense)),
            mtp_layer=self.mtp, kept_format=self.kept_format, vocab=self.vocab,
        )  # fmt: skip

    @property
    def layers(self) -> int:
        """Decoder layers, the multi-token-prediction layer not among them."""
        return self.dense + self.moe_layers


SHAPES: dict[str, Shape] = {
    "qwen3_moe": Shape("qwen3_moe", two_ranks=True),
    "deepseek_v3": Shape("deepseek_v3", kept_format="mxfp4", dense=1, groups=4, shared=True, mtp=True),
    "glm4_moe": Shape("glm4_moe", dense=1, shared=True, seed=2),
}

EVERY: dict[str, Shape] = {**SHAPES, "fp8_base": Shape("qwen3_moe", fp8_base=True, seed=3)}
"""With one for the base's own formats."""

LATENT, ROPE, NOPE, VALUE = 128, 64, 64, 64
"""deepseek_v3's attention. Heads of values are narrower than those of keys: vLLM pads them when MLA is off."""


def config(shape: Shape) -> dict[str, Any]:
    """config.json but for the quantisation."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    common = {
        "model_type": shape.family, "dtype": "bfloat16", "hidden_size": shape.hidden, "intermediate_size": 512,
        "moe_intermediate_size": shape.intermediate, "num_experts_per_tok": shape.top_k,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "norm_topk_prob": True, "attention_bias": False, "tie_word_embeddings": False, "rope_parameters": rope,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if shape.family == "qwen3_moe":
        return common | {
            "architectures": ["Qwen3MoeForCausalLM"], "num_experts": shape.experts, "head_dim": shape.head_dim,
            "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    common |= {
        "n_routed_experts": shape.experts, "n_shared_experts": int(shape.shared), "routed_scaling_factor": 2.5,
        "n_group": shape.groups, "topk_group": min(shape.groups, 2), "first_k_dense_replace": shape.dense,
        "num_nextn_predict_layers": int(shape.mtp),
    }  # fmt: skip
    if shape.family == "glm4_moe":
        rope["partial_rotary_factor"] = 0.5
        return common | {
            "architectures": ["Glm4MoeForCausalLM"], "head_dim": shape.head_dim, "use_qk_norm": True,
            "partial_rotary_factor": 0.5,
        }  # fmt: skip
    return common | {
        "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": shape.heads, "kv_lora_rank": LATENT,
        "q_lora_rank": 2 * LATENT, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1, "rope_interleave": True,
    }  # fmt: skip


def quantization(shape: Shape) -> dict[str, Any]:
    """The block of the hybrid checkpoint, as the published one has it."""
    block: dict[str, Any] = {
        "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
        "ignore": ["lm_head", "*.embed_tokens", "*.self_attn.*", "*.shared_experts.*", "*.mlp.gate",
                   *(f"model.layers.{layer}.mlp.*" for layer in range(shape.dense)), "*.eh_proj"],
        "hybrid_bit_map": bit_map(shape.spec),
    }  # fmt: skip
    if shape.kept_format == "mxfp4":
        block["kept_format"] = "mxfp4_e8m0k32"
    return block


class _Base:
    """Everything that is no routed expert, drawn from one generator in a fixed order.

    Args:
        shape: The model.
        dequantised: Whether what is stored quantised is BF16 here, of the values stored.
    """

    def __init__(self, shape: Shape, *, dequantised: bool = False) -> None:
        self.shape, self.rng = shape, np.random.default_rng([shape.seed, 7])
        self.dequantised = dequantised

    def plain(self, name: str, values: np.ndarray[Any, Any], dtype: str = "BF16") -> Item:
        """A tensor of given values."""
        if dtype == "F32":
            return Item(name, dtype, values.shape, np.ascontiguousarray(values, dtype=np.float32).reshape(-1))
        bits = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(torch.bfloat16).view(torch.int16)
        return Item(name, dtype, values.shape, bits.numpy().reshape(-1))

    def linear(self, name: str, n: int, k: int, scale: float = 1.0, *, writes: bool = False) -> Item:
        """A random matrix that keeps the size of what it is given, times scale; one that writes spares the code."""
        values = self.rng.standard_normal((n, k), dtype=np.float32) * np.float32(scale / k**0.5)
        if writes and self.shape.steep:
            values[:CLASSES] = 0
        return self.plain(f"{name}.weight", values)

    def stored(self, item: Item, form: Literal["mxfp8", "fp8_row"]) -> Iterator[Item]:
        """A matrix as the checkpoint stores it."""
        if not self.shape.fp8_base:
            yield item
            return
        weights = torch.from_numpy(item.data.copy()).view(torch.bfloat16).float().reshape(item.shape)
        groups = weights.reshape(len(weights), -1, 32 if form == "mxfp8" else item.shape[1])
        largest = groups.abs().amax(-1, keepdim=True)
        largest = torch.where(largest > 0, largest, 1.0)
        if form == "mxfp8":
            scales = torch.exp2(torch.floor(torch.log2(largest)) - 8)
        else:
            scales = (largest / 448).to(torch.bfloat16).float()
        codes = (groups / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
        if self.dequantised:
            yield self.plain(item.name, (codes.float() * scales).reshape(item.shape).numpy())
            return
        yield Item(item.name, "F8_E4M3", item.shape, codes.reshape(-1).view(torch.uint8).numpy())
        if form == "mxfp8":
            octaves = (torch.log2(scales[..., 0]) + 127).to(torch.uint8)
            yield Item(f"{item.name}_scale", "U8", tuple(octaves.shape), octaves.reshape(-1).numpy())
        else:
            yield self.plain(f"{item.name}_scale_fp8", scales.reshape(-1).numpy())

    def norm(self, name: str, size: int, value: float = 1.0) -> Item:
        return self.plain(f"{name}.weight", value * (1 + 0.1 * self.rng.standard_normal(size)))

    def embedding(self) -> Item:
        shape = self.shape
        values = 0.3 * self.rng.standard_normal((shape.vocab, shape.hidden))
        if shape.steep:
            values[:, :CLASSES] = 0
            values[np.arange(shape.vocab), self.classes()] = CODE
        return self.plain("model.embed_tokens.weight", values)

    def classes(self) -> np.ndarray[Any, Any]:
        """The class of each token."""
        return np.random.default_rng([self.shape.seed, 8]).permutation(self.shape.vocab) % CLASSES

    def head(self, name: str) -> Item:
        """Logits of unequal size: with equal ones the two best are often within rounding of each other."""
        shape = self.shape
        values = self.rng.standard_normal((shape.vocab, shape.hidden)) / shape.hidden**0.5
        values *= 6.0 / (1 + np.arange(shape.vocab)[self.rng.permutation(shape.vocab), None]) ** 0.8
        if shape.steep:
            values[:, :CLASSES] = 0
        return self.plain(f"{name}.weight", values)

    def gate(self, at: str) -> Iterator[Item]:
        shape = self.shape
        values = self.rng.standard_normal((shape.experts, shape.hidden)) / shape.hidden**0.5
        if shape.steep:
            values[:] = 0
            for code in range(CLASSES):
                for rank, expert in enumerate(self.chosen()):
                    values[expert, code] = STEP * (shape.top_k - rank)
        yield self.plain(f"{at}.weight", values)
        if shape.family != "qwen3_moe":
            bias = 0.02 * self.rng.uniform(-1, 1, shape.experts)
            yield self.plain(f"{at}.e_score_correction_bias", bias, "F32")

    def chosen(self) -> list[int]:
        """The experts of a class, best first; with groups, two groups and as many of each."""
        shape, rng = self.shape, self.rng
        if shape.groups == 1:
            return [int(e) for e in rng.permutation(shape.experts)[: shape.top_k]]
        width = shape.experts // shape.groups
        groups = rng.permutation(shape.groups)[:2]
        picked = [int(g * width + e) for g in groups for e in rng.permutation(width)[: shape.top_k // 2]]
        return [picked[i] for i in rng.permutation(shape.top_k)]

    def attention(self, at: str) -> Iterator[Item]:
        shape = self.shape
        if shape.family == "deepseek_v3":
            yield self.linear(f"{at}.q_a_proj", 2 * LATENT, shape.hidden)
            yield self.norm(f"{at}.q_a_layernorm", 2 * LATENT)
            yield self.linear(f"{at}.q_b_proj", shape.heads * (NOPE + ROPE), 2 * LATENT)
            yield self.linear(f"{at}.kv_a_proj_with_mqa", LATENT + ROPE, shape.hidden)
            yield self.norm(f"{at}.kv_a_layernorm", LATENT)
            yield self.linear(f"{at}.kv_b_proj", shape.heads * (NOPE + VALUE), LATENT)
            yield self.linear(f"{at}.o_proj", shape.hidden, shape.heads * VALUE, 0.5, writes=True)
            return
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        for name, rows in (("q", wide), ("k", narrow), ("v", narrow)):
            yield from self.stored(self.linear(f"{at}.{name}_proj", rows, shape.hidden), "mxfp8")
        yield from self.stored(self.linear(f"{at}.o_proj", shape.hidden, wide, 0.5, writes=True), "fp8_row")
        for name in ("q_norm", "k_norm"):
            yield self.norm(f"{at}.{name}", shape.head_dim)

    def mlp(self, at: str, inner: int) -> Iterator[Item]:
        yield self.linear(f"{at}.gate_proj", inner, self.shape.hidden, 1 / NORM)
        yield self.linear(f"{at}.up_proj", inner, self.shape.hidden, 1 / NORM)
        yield self.linear(f"{at}.down_proj", self.shape.hidden, inner, 0.5, writes=True)

    def layer(self, number: int) -> Iterator[Item]:
        """A decoder layer without its routed experts."""
        shape, at = self.shape, f"model.layers.{number}"
        yield self.norm(f"{at}.input_layernorm", shape.hidden)
        yield self.norm(f"{at}.post_attention_layernorm", shape.hidden, NORM)
        yield from self.attention(f"{at}.self_attn")
        if number < shape.dense:
            yield from self.mlp(f"{at}.mlp", 512)
            return
        yield from self.gate(f"{at}.mlp.gate")
        if shape.shared:
            yield from self.mlp(f"{at}.mlp.shared_experts", shape.intermediate)
        if number == shape.layers:  # DeepSeek-V3's names; embedding and head are the model's own, stored once more
            for name in ("enorm", "hnorm", "shared_head.norm"):
                yield self.norm(f"{at}.{name}", shape.hidden)
            yield self.linear(f"{at}.eh_proj", shape.hidden, 2 * shape.hidden)


def base_items(shape: Shape, *, dequantised: bool = False) -> Iterator[list[Item]]:
    """Tensors that are no routed experts: those outside the layers, then of each layer."""
    base = _Base(shape, dequantised=dequantised)
    embedding, head = base.embedding(), base.head("lm_head")
    yield [embedding, head, base.norm("model.norm", shape.hidden)]
    for number in range(shape.layers + shape.mtp):
        items = list(base.layer(number))
        if number == shape.layers:
            at = f"model.layers.{number}"
            items.append(Item(f"{at}.embed_tokens.weight", embedding.dtype, embedding.shape, embedding.data))
            items.append(Item(f"{at}.shared_head.head.weight", head.dtype, head.shape, head.data))
        yield items


def routed_items(shape: Shape, pools: Pools, number: int) -> Iterator[Item]:
    """Routed experts of a layer as the hybrid checkpoint stores them; down matrices spare the code."""
    spec = shape.spec
    bits = bit_map(spec).get(str(number), [4] * shape.experts)
    for item in expert_items(spec, pools, number, bits):
        field = item.name.rpartition(".")[2]
        if not shape.steep or ".down_proj." not in item.name or len(item.shape) != 2:
            yield item
            continue
        # Zero rows: a zero scale where that is zero (NF3 has no zero level), zero codes where it is 2^-127 (MXFP4).
        nf3 = bits[int(item.name.split(".experts.")[1].split(".")[0])] == 3
        if field == ("weight_scale" if nf3 else "weight"):
            data = item.data.copy().reshape(item.shape)
            data[:CLASSES] = 0
            yield Item(item.name, item.dtype, item.shape, data.reshape(-1))
        else:
            yield item


def write_shards(root: Path, shards: Iterable[list[Item]], document: dict[str, Any]) -> None:
    """A checkpoint of a shard for each list, as it comes, an index and config.json."""
    root.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total = 0
    for number, items in enumerate(shards):
        name = f"model-{number:05d}.safetensors"
        _write_file(root / name, items)
        weight_map |= {item.name: name for item in items}
        total += sum(nbytes_of(item.dtype, item.shape) for item in items)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (root / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (root / "config.json").write_text(json.dumps(document, indent=1))


def write_source(root: Path, shape: Shape) -> None:
    """The hybrid checkpoint."""
    pools = Pools(shape.seed)

    def shards() -> Iterator[list[Item]]:
        for number, items in enumerate(base_items(shape), start=-1):
            yield items
            if number >= shape.dense:
                yield list(routed_items(shape, pools, number))

    write_shards(root, shards(), config(shape) | {"quantization_config": quantization(shape)})


def write_bf16(root: Path, shape: Shape, packed: Path) -> None:
    """The same model in BF16: routed experts as the kernel sees those of the pack (NF3 levels rounded to BF16)."""
    pack = hybrid_pack.open_pack(packed)
    base = _Base(shape)

    def routed(number: int) -> list[Item]:
        layer, items = pack.load_layer(number), []
        for expert in range(shape.experts):
            at = f"model.layers.{number}.mlp.experts.{expert}"
            gate_up, down = layer.dequantize(expert, levels="bfloat16")
            gate, up = gate_up.chunk(2)
            for name, values in (("gate", gate), ("up", up), ("down", down)):
                items.append(base.plain(f"{at}.{name}_proj.weight", values.numpy()))
        return items

    def shards() -> Iterator[list[Item]]:
        for number, items in enumerate(base_items(shape, dequantised=True), start=-1):
            yield items + (routed(number) if number >= shape.dense else [])

    write_shards(root, shards(), config(shape))


def convert(source: Path, out: Path, *split: str) -> None:
    """``hybrid-pack convert``, as a user calls it; ``split`` such as ``--tp 2``."""
    subprocess.run(
        [sys.executable, "-m", "hybrid_pack.cli", "convert", str(source), "--out", str(out), *split], check=True
    )


def make(folder: Path, name: str) -> None:
    """All of a model's checkpoints; what is there already stays."""
    shape, root = EVERY[name], folder / name
    if not (root / "source" / "config.json").exists():
        write_source(root / "source", shape)
    packs: dict[str, tuple[str, ...]] = {"pack": ("--tp", "1")}
    if shape.two_ranks:
        packs |= {"pack-tp2": ("--tp", "2"), "pack-ep2": ("--tp", "1", "--ep", "2")}
    for out, split in packs.items():
        if not (root / out / "hybrid_pack.json").exists():
            convert(root / "source", root / out, *split)
    if not (root / "bf16" / "config.json").exists():
        write_bf16(root / "bf16", shape, root / "pack")


@lru_cache
def prompts(vocab: int, lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Random prompts of given lengths."""
    rng = np.random.default_rng([seed, 9])
    return [[int(token) for token in rng.integers(0, vocab, length)] for length in lengths]


def main(arguments: list[str]) -> None:
    """Make them all, or some."""
    for name in arguments[1:] or EVERY:
        began = time.perf_counter()
        make(Path(arguments[0]), name)
        print(f"{name}: made in {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
