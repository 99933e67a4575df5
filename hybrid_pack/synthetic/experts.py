"""Expert tensors of every stored format: one for each matrix, or one for all experts of a layer."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from hybrid_pack.io.bitmap import KEPT_BITS
from hybrid_pack.synthetic.pools import AMAX, Item, Pools
from hybrid_pack.synthetic.spec import Spec

Field = tuple[str, str, tuple[int, ...], str]
"""(name, dtype, shape, kind of the pool)."""
_FLOATS = {"bf16": "BF16", "f16": "F16", "f32": "F32"}


def _fields(kind: str, n: int, k: int, scaled: bool, deepseek: bool) -> list[Field]:
    """Fields of one matrix, scalars aside; ``scaled``: NF3 of the kquant dialect."""
    groups = {"nvfp4": 16, "ct_nvfp4": 16}.get(kind, 32)
    match kind:
        case "nf3":
            dtype, pool = ("U8", "nf3_x16") if scaled else ("F8_E4M3", "nf3")
            return [
                ("weight_packed", "U8", (n, k // 8 * 3), "codes"),
                ("weight_scale", dtype, (n, k // 32), pool),
            ]
        case "mxfp4" if deepseek:
            return [("weight", "I8", (n, k // 2), "codes"), ("scale", "F8_E8M0", (n, k // 32), "mxfp4")]
        case "nvfp4" | "mxfp4" | "ct_nvfp4" | "ct_mxfp4":
            pool = kind.removeprefix("ct_")
            dtype = "F8_E4M3" if pool == "nvfp4" else "U8"
            codes = "weight_packed" if kind.startswith("ct_") else "weight"
            return [(codes, "U8", (n, k // 2), "codes"), ("weight_scale", dtype, (n, k // groups), pool)]
        case "bf16" | "f16" | "f32":
            return [("weight", _FLOATS[kind], (n, k), _FLOATS[kind])]
    field, dtype, shape, pool = {
        "mxfp8": ("weight_scale", "U8", (n, k // 32), "fp8_exponent"),
        "mxfp8_inv": ("weight_scale_inv", "U8", (n, k // 32), "fp8_exponent"),
        "fp8_block": ("weight_scale_inv", "F32", (-(-n // 128), -(-k // 128)), "fp8_scale"),
        "fp8_row": ("weight_scale", "F32", (n, 1), "fp8_scale"),
        "fp8_tensor": ("weight_scale", "F32", (1, 1), "fp8_scale"),
    }[kind]
    return [("weight", "F8_E4M3", (n, k), "fp8"), (field, dtype, shape, pool)]


def _scalars(spec: Spec, kind: str, second: float) -> list[tuple[str, float]]:
    """Scalar fields of one matrix; compressed-tensors stores one over the second-level scale."""
    if kind not in ("nvfp4", "ct_nvfp4"):
        return []
    compressed = kind == "ct_nvfp4"
    name, value = ("weight_global_scale", 1 / second) if compressed else ("weight_scale_2", second)
    unused = [("input_global_scale" if compressed else "input_scale", 0.01)] if spec.input_scale else []
    return [(name, value), *unused]


def _seconds(spec: Spec, layer: int, expert: int) -> dict[str, float]:
    """Second-level scale of each role."""
    gate = AMAX / 2688 * (0.8 + 0.4 * (expert * 37 + layer * 11) % 101 / 101)
    up = gate * {"equal": 1.0, "power_of_two": 2.0 ** (expert % 5 - 2), "unequal": 1.37}[spec.second_scale]
    return {"gate": gate, "gate_up": gate, "up": up, "down": gate * 1.1}


def _take(pools: Pools, name: str, field: Field) -> Item:
    _, dtype, shape, pool = field
    return Item(name, dtype, shape, pools.take(pool, math.prod(shape)))


def _single(spec: Spec, pools: Pools, layer: int, bits: list[int]) -> Iterator[Item]:
    family = spec.names
    kept_kind = spec.kept_format if layer in spec.moe_layers else "nvfp4"
    for expert, bit in enumerate(bits):
        prefix = family.prefix.format(L=layer, E=expert)
        seconds = _seconds(spec, layer, expert)
        for number, (role, projection) in enumerate(family.projections):
            if spec.published:
                turn = 0 if layer == spec.layers else expert + (number if spec.mix_matrices else 0)
                kind = spec.published[turn % len(spec.published)]
            else:
                kind = kept_kind if bit == KEPT_BITS else "nf3"
            n, k = (spec.hidden, spec.intermediate) if role == "down" else (spec.intermediate, spec.hidden)
            name = f"{prefix}.{projection}"
            deepseek = family.models == "DeepSeek-V4"
            for field in _fields(kind, n, k, spec.nf3_scales == "e4m3_x16", deepseek):
                yield _take(pools, f"{name}.{field[0]}", field)
            for scalar, value in _scalars(spec, kind, seconds[role]):
                yield Item(f"{name}.{scalar}", "F32", spec.scalar_shape, np.array([value], dtype=np.float32))


def _stack(spec: Spec, pools: Pools, layer: int) -> Iterator[Item]:
    """Tensors of all experts. gpt-oss's MXFP4 has the rows of gate and up alternate, in blocks of 16 bytes."""
    model, family = spec.model, spec.names
    (kind,) = spec.published
    blocks = model.model_type == "gpt_oss" and kind == "mxfp4"
    for role, projection in family.projections:
        prefix = f"{family.prefix.format(L=layer)}.{projection}"
        inner = spec.intermediate * (2 if role == "gate_up" else 1)
        n, k = (spec.hidden, spec.intermediate) if role == "down" else (inner, spec.hidden)

        def name(field: str, prefix: str = prefix) -> str:
            if model.dotted:
                return f"{prefix}.{field}"
            return prefix if field == "weight" else f"{prefix}_{field}"

        for field, dtype, shape, pool in _fields(kind, n, k, False, False):
            whole = (shape[1], shape[0]) if model.transposed else shape
            if blocks:
                field = "blocks" if field == "weight" else "scales"
                whole = (n, k // 32, 16) if field == "blocks" else shape
            yield _take(pools, name(field), (field, dtype, (spec.num_experts, *whole), pool))
        shape = (spec.num_experts,) if spec.scalar_shape else ()
        for scalar, value in _scalars(spec, kind, _seconds(spec, layer, 0)[role]):
            yield Item(name(scalar), "F32", shape, np.full(math.prod(shape), value, dtype=np.float32))
        if model.biased:
            yield _take(pools, name("bias"), ("bias", "BF16", (spec.num_experts, n), "BF16"))


def experts(spec: Spec, pools: Pools, layer: int, bits: list[int]) -> Iterator[Item]:
    """Expert tensors of a layer, in file order.

    Args:
        spec: What to write.
        pools: Their bytes.
        layer: Decoder layer.
        bits: Tier of each expert.
    """
    return _stack(spec, pools, layer) if spec.names.fused else _single(spec, pools, layer, bits)
