"""The experts of a source checkpoint, read and dequantised without any code of the package."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from tests.reference import source
from tests.reference.floats import F64

EXPERT = re.compile(r".*layers\.(\d+)\.(?:.*\.)?experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.(\w+)")
ROLE = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


@dataclass(frozen=True)
class Weights:
    """One expert in f64: gate and up [I, H], down [H, I]."""

    gate: F64
    up: F64
    down: F64

    def share(self, tp: int, tp_rank: int) -> tuple[F64, F64]:
        """A tensor-parallel rank's part: f64 [2 I/tp, H] and [H, I/tp]."""
        size = self.gate.shape[0] // tp
        part = slice(tp_rank * size, (tp_rank + 1) * size)
        return np.concatenate([self.gate[part], self.up[part]]), self.down[:, part]


Fields = dict[str, tuple[str, list[int], bytes]]


def fields_of(root: Path) -> dict[int, dict[int, dict[str, Fields]]]:
    """(dtype, shape, bytes) by layer, expert, role and field."""
    found: dict[int, dict[int, dict[str, Fields]]] = {}
    for path in sorted(root.glob("*.safetensors")):
        data = path.read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:begin]).items():
            match = EXPERT.fullmatch(name)
            if match:
                layer, expert, projection, field = match.groups()
                roles = found.setdefault(int(layer), {}).setdefault(int(expert), {})
                first, last = (begin + offset for offset in entry["data_offsets"])
                roles.setdefault(ROLE[projection], {})[field] = (entry["dtype"], entry["shape"], data[first:last])
    return found


def weights_of(fields: Fields, levels: tuple[float, ...]) -> F64:
    """f64 [N, K] of one stored matrix."""

    def matrix(field: str) -> source.U8:
        _, shape, data = fields[field]
        return np.frombuffer(data, np.uint8).reshape(shape)

    if "weight_packed" in fields:
        name: source.SourceName = "nf3" if fields["weight_scale"][0] == "F8_E4M3" else "nf3_times_16"
        return source.dequantize(name, matrix("weight_packed"), matrix("weight_scale"), levels=levels)
    if "weight_scale_2" in fields:
        second = float(np.frombuffer(fields["weight_scale_2"][2], "<f4")[0])
        return source.dequantize("nvfp4", matrix("weight"), matrix("weight_scale"), second)
    return source.dequantize("mxfp4", matrix("weight"), matrix("scale" if "scale" in fields else "weight_scale"))


@cache
def experts_of(root: Path, levels: tuple[float, ...] = source.NF3_LEVELS) -> Mapping[int, Mapping[int, Weights]]:
    """Every expert by layer and global id."""
    return {
        layer: {
            expert: Weights(**{role: weights_of(fields, levels) for role, fields in roles.items()})
            for expert, roles in sorted(experts.items())
        }
        for layer, experts in fields_of(root).items()
    }
