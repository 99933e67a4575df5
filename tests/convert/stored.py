"""Sources and packs as the independent decoders see them: codes and scale values, without any code of the package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.reference import packed, source
from tests.reference.floats import E4M3, E8M0, F64

U8 = NDArray[np.uint8]
EXPERT = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:\w+\.)?experts\.(\d+)\.(gate_proj|up_proj|down_proj|w[123])\.(\w+)")
ROLE = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
TYPES = {"I32": "<i4", "U8": "u1", "F32": "<f4"}


@dataclass(frozen=True)
class Raw:
    """A tensor of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    data: bytes

    @property
    def bytes(self) -> U8:
        """U8 of its shape, for a dtype of one byte."""
        return np.frombuffer(self.data, np.uint8).reshape(self.shape)

    @property
    def array(self) -> NDArray[Any]:
        return np.frombuffer(self.data, TYPES[self.dtype]).reshape(self.shape)


@dataclass(frozen=True)
class Matrix:
    """One stored expert matrix: codes u8 [N, K], real scales f64 [N, K/group], exact in float64."""

    name: packed.PackedName
    codes: U8
    scales: F64
    raw: Mapping[str, Raw]

    @property
    def second(self) -> float:
        return float(np.frombuffer(self.raw["weight_scale_2"].data, "<f4")[0])


Experts = dict[int, dict[int, dict[str, Matrix]]]


def read_file(path: Path) -> dict[str, Raw]:
    """Every tensor of a safetensors file, and every byte of it accounted for."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    at = start
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = (start + offset for offset in entry["data_offsets"])
        assert begin == at, f"{name} follows without a hole"
        tensors[name] = Raw(entry["dtype"], tuple(entry["shape"]), begin, data[begin:end])
        at = end
    assert at == len(data)
    return tensors


def source_tensors(root: Path) -> dict[str, Raw]:
    return {name: raw for path in sorted(root.glob("*.safetensors")) for name, raw in read_file(path).items()}


def _matrix(fields: Mapping[str, Raw]) -> Matrix:
    if "weight_packed" in fields:
        values = E4M3[fields["weight_scale"].bytes] / (1 if fields["weight_scale"].dtype == "F8_E4M3" else 16)
        return Matrix("nf3", source.nf3_codes(fields["weight_packed"].bytes), values, fields)
    codes = source.fp4_codes(fields["weight"].bytes)
    if "weight_scale_2" in fields:
        second = float(np.frombuffer(fields["weight_scale_2"].data, "<f4")[0])
        return Matrix("nvfp4", codes, E4M3[fields["weight_scale"].bytes] * second, fields)
    return Matrix("mxfp4", codes, E8M0[fields["scale" if "scale" in fields else "weight_scale"].bytes], fields)


def source_experts(root: Path) -> Experts:
    """By layer, expert and role."""
    fields: dict[int, dict[int, dict[str, dict[str, Raw]]]] = {}
    for name, raw in source_tensors(root).items():
        match = EXPERT.fullmatch(name)
        if match:
            layer, expert = int(match[1]), int(match[2])
            fields.setdefault(layer, {}).setdefault(expert, {}).setdefault(ROLE[match[3]], {})[match[4]] = raw
    return {
        layer: {e: {role: _matrix(f) for role, f in roles.items()} for e, roles in sorted(experts.items())}
        for layer, experts in sorted(fields.items())
    }


def manifest(out: Path) -> Any:
    return json.loads((out / "hybrid_pack.json").read_text())


def shard_path(out: Path, tp: int, ep: int, rank: int, layer: int) -> Path:
    return out / f"experts/tp{tp}-ep{ep}/rank-{rank}/layer-{layer:03d}.safetensors"


def rank_experts(
    out: Path, tp: int, ep: int, rank: int, layer: int
) -> Iterator[tuple[int, str, packed.PackedName, str, U8, F64]]:
    """Decode one shard: (expert, tier, format, w13 or w2, codes u8 [N, K], real scales f64 [N, K/group])."""
    document = manifest(out)
    hidden = document["geometry"]["hidden_size"]
    share = document["geometry"]["intermediate_size_padded"] // tp
    tiles = document["layout"]["tiles"]
    tensors = {name: raw.array for name, raw in read_file(shard_path(out, tp, ep, rank, layer)).items()}
    kept: packed.PackedName = "mxfp4" if document["layers"][str(layer)]["kept_scale_format"] == "e8m0_k32" else "nvfp4"
    tiers: tuple[tuple[str, packed.PackedName], ...] = (("kept", kept), ("tail", "nf3"))
    for tier, name in tiers:
        for row, expert in enumerate(tensors.get(f"{tier}.expert_ids", ())):
            for which, n, k, tile_n in (("w13", 2 * share, hidden, tiles[1]), ("w2", hidden, share, tiles[3])):
                words = tensors[f"{tier}.{which}"][row]
                codes = packed.nf3_codes(words, n, k, tile_n) if tier == "tail" else packed.fp4_codes(words, n, k)
                device = packed.scale_bytes(tensors[f"{tier}.{which}_scale"][row], n, k // packed.GROUP[name])
                values = packed.scale_values(name, device, float(tensors[f"{tier}.{which}_global_scale"][row]))
                yield int(expert), tier, name, which, codes, values


@dataclass
class Whole:
    """An expert matrix put together from ranks."""

    codes: NDArray[np.int16]
    scales: F64

    def put(self, at: tuple[slice, slice], scales_at: tuple[slice, slice], codes: U8, scales: F64) -> None:
        assert (self.codes[at] == -1).all(), "no rank holds what another holds"
        assert codes.shape == self.codes[at].shape
        assert scales.shape == self.scales[scales_at].shape
        self.codes[at], self.scales[scales_at] = codes, scales


def join(out: Path, tp: int, ep: int, like: Experts) -> dict[tuple[int, int, str], Whole]:
    """The matrices of all ranks of a pack put together, by layer, expert and role; holes are code -1 and scale NaN."""
    wholes: dict[tuple[int, int, str], Whole] = {}
    for layer, experts in like.items():
        block = len(experts) // ep
        for rank in range(tp * ep):
            at_tp, held = rank % tp, range(rank // tp * block, (rank // tp + 1) * block)
            seen: dict[str, list[int]] = {"kept": [], "tail": []}
            for expert, tier, name, which, codes, scales in rank_experts(out, tp, ep, rank, layer):
                assert expert in held
                if which == "w13":
                    seen[tier].append(expert)
                share = experts[expert]["gate"].codes.shape[0] // tp
                part = slice(at_tp * share, (at_tp + 1) * share)
                groups = slice(part.start // packed.GROUP[name], part.stop // packed.GROUP[name])
                everything = slice(None)
                for role in ("gate", "up") if which == "w13" else ("down",):
                    stored = experts[expert][role]
                    assert stored.name == name
                    whole = wholes.setdefault(
                        (layer, expert, role),
                        Whole(np.full(stored.codes.shape, -1, np.int16), np.full(stored.scales.shape, np.nan)),
                    )
                    if which == "w2":
                        whole.put((everything, part), (everything, groups), codes, scales)
                    else:
                        rows = slice(0, share) if role == "gate" else slice(share, 2 * share)
                        whole.put((part, everything), (part, everything), codes[rows], scales[rows])
            assert all(ids == sorted(ids) for ids in seen.values())
            assert sorted(seen["kept"] + seen["tail"]) == list(held)
    return wholes
