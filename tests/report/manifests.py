"""Manifests of any size without payload: everything but digests is what a conversion would write."""

from __future__ import annotations

import random
from typing import Any

from hybrid_pack.io.digest import shard_digest
from hybrid_pack.io.manifest import decode_manifest, encode_manifest, shard_header
from hybrid_pack.io.safetensors import build_header
from hybrid_pack.layouts.shard import KeptScaleFormat, RankGeometry, shard_path, shard_tensors
from hybrid_pack.schemas.manifest import FORMAT, FORMAT_VERSION, LAYOUT_ABI, Manifest
from hybrid_pack.sharding import Topology, tiles_for

NOTHING = "0" * 64
Document = dict[str, Any]
Tiers = dict[int, tuple[list[int], KeptScaleFormat | None]]
LEVELS = [-1.0, -0.6047, -0.3563, -0.1275, 0.1275, 0.3563, 0.6047, 1.0]


def random_tiers(layers: range, experts: int, kept: int, mtp: int | None = None, seed: int = 0) -> Tiers:
    """``kept`` experts of every layer, and an MTP layer that keeps all."""
    chance = random.Random(seed)
    tiers: Tiers = {layer: (sorted(chance.sample(range(experts), kept)), "e4m3_k16") for layer in layers}
    if mtp is not None:
        tiers[mtp] = (list(range(experts)), "e4m3_k16")
    return tiers


def document(
    tiers: Tiers,
    experts: int,
    *,
    topology: Topology | None = None,
    hidden: int = 6144,
    intermediate: int = 2048,
    quantized: list[Document] | None = None,
    requantized: list[Document] | None = None,
    name: str = "zai-org/GLM-5.2",
    notes: list[str] | None = None,
    activation: str = "silu",
    created_by: str = "hybrid-pack",
    omitted: list[int] | None = None,
) -> Document:
    """A manifest as plain JSON values, without its self digest."""
    topology = topology or Topology(4)
    share = intermediate // topology.tensor_parallel
    tiles = tiles_for(hidden, share)
    assert tiles is not None
    shards = []
    for layer, (kept, scale_format) in tiers.items():
        for rank in range(topology.ranks):
            held = topology.experts(rank, experts)
            mine = sum(e in held for e in kept)
            tensors = shard_tensors(RankGeometry(hidden, share, tiles), mine, len(held) - mine, scale_format)
            header, placed = build_header((t.name, t.dtype, t.shape) for t in tensors)
            entries = {
                t.name: {
                    "dtype": t.dtype, "shape": list(t.shape), "begin": t.begin, "end": t.end,
                    "digest": f"blake3{'-rows' if '.w' in t.name and 'global' not in t.name else ''}:{NOTHING}",
                }
                for t in placed
            }  # fmt: skip
            assert shard_header(tensors) == header
            shards.append(
                {
                    "path": shard_path(topology.folder, rank, layer), "layer": layer, "rank": rank,
                    "bytes": placed[-1].end,
                    "digest": shard_digest(header, (entry["digest"] for entry in entries.values())),
                    "tensors": entries,
                }
            )  # fmt: skip
    base = [
        {"path": f"model-{i:05d}-of-00008.safetensors", "bytes": 4_700_000_000, "digest": f"blake3:{NOTHING}"}
        for i in range(1, 9)
    ]
    index = "model.safetensors.index.json"
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "created_by": {"tool": created_by, "version": "0.1.0"},
        "layout": {
            "abi": LAYOUT_ABI, "tiles": list(tiles), "kept_weight_layout": "packed", "tail_weight_layout": "nf3_2p1",
            "tail_scale_format": "e4m3_k32", "w13_order": "gate_up", "expert_biases": False, "nf3_levels": LEVELS,
            "activation": activation,
        },
        "topology": {"tensor_parallel": topology.tensor_parallel, "expert_parallel": topology.expert_parallel},
        "geometry": {
            "hidden_size": hidden, "intermediate_size": intermediate, "intermediate_size_padded": intermediate,
            "num_experts": experts, "top_k": min(8, experts),
        },
        "layers": {
            str(layer): {
                "kept": kept, "tail": [e for e in range(experts) if e not in set(kept)],
                "kept_scale_format": scale_format,
            }
            for layer, (kept, scale_format) in tiers.items()
        },
        "shards": shards,
        "base": {"index": index, "files": base},
        "files": [{"path": p, "bytes": 2000, "digest": f"blake3:{NOTHING}"} for p in ("config.json", index)],
        "source": {
            "name": name, "config_digest": f"blake3:{NOTHING}", "index_digest": f"blake3:{NOTHING}",
            "files": [{"path": "model.safetensors", "bytes": 365_987_273_208, "digest": f"blake3:{NOTHING}"}],
        },
        "report": {
            "experts_kept": sum(len(kept) for kept, _ in tiers.values()),
            "experts_tail": sum(experts - len(kept) for kept, _ in tiers.values()),
            "groups_zero_scale": 8880, "blocks_flushed": 0, "scales_saturated": 0,
            "experts_requantized": requantized or [], "experts_cast": 0, "experts_quantized": quantized or [],
            "options": {
                "kept_format": None, "requantize": False, "mx_bias": 127, "search": "mse", "importance": None,
                "hessians": f"blake3:{NOTHING}" if any(e["method"] == "gptq" for e in quantized or ()) else None,
            },
            "layers_omitted": omitted or [], "notes": notes or [],
        },
    }  # fmt: skip


def manifest(*arguments: Any, **options: Any) -> Manifest:
    return decode_manifest(encode_manifest(document(*arguments, **options)), "made")


def errors(
    tiers: Tiers, experts: int, seed: int = 0, exact: float = 0.01, ratios: dict[int, float] | None = None
) -> list[Document]:
    """Both tiers quantised, with a drift over the layers, a spread and a few outliers; GPTQ's ratios of the tail."""
    chance = random.Random(seed)
    entries = []
    for i, (layer, (kept, _)) in enumerate(tiers.items()):
        for tier, ids, level in (
            ("kept", kept, 20.6),
            ("tail", [e for e in range(experts) if e not in set(kept)], 14.9),
        ):
            if not ids:
                continue
            drift = 0.4 * (i / max(1, len(tiers) - 1) - 0.5)
            db = [
                None
                if chance.random() < exact
                else round(level + drift + chance.gauss(0, 0.15) - (4 if chance.random() < 0.0005 else 0), 4)
                for _ in ids
            ]
            known = [value for value in db if value is not None]
            ratio = (ratios or {}).get(layer) if tier == "tail" else None
            entries.append(
                {
                    "layer": layer, "tier": tier, "method": "mse" if ratio is None else "gptq", "sources": ["bf16"],
                    "experts": ids, "sqnr_db": db,
                    "tier_sqnr_db": sum(known) / len(known) if known else None, "gptq_to_rtn": ratio,
                    "groups": 1_000_000 * len(ids),
                    "groups_zero_scale": 12, "scales_subnormal": 3, "scales_saturated": 0,
                }
            )  # fmt: skip
    return entries


GLM = random_tiers(range(3, 78), 256, 64, mtp=78)
"""GLM-5.2: 75 mapped layers and the MTP layer."""
