"""Every byte of whole shards against b12x 1.1.0's own packers, called for each expert and rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.convert.conftest import Sources
from tests.convert.stored import Matrix, manifest, read_file, shard_path, source_experts
from tests.convert.support import pack, small
from tests.golden import oracle
from tests.reference.floats import E4M3
from tests.reference.source import nf3_codes

SPECS = {
    "nvfp4": small(seed=30, intermediate=256, mtp_layer=True),
    "mxfp4": small(seed=31, intermediate=256, kept_format="mxfp4"),
    "kquant": small(seed=32, intermediate=256, kept_format="mxfp4", nf3_scales="e4m3_x16", mtp_layer=False),
    "latent": small(seed=33, family=5, hidden=256, intermediate=256, kept=3),
}
TOPOLOGIES = [(1, 1), (2, 2), (4, 1)]


@pytest.fixture(autouse=True)
def b12x() -> None:
    oracle.require()


def device_matrix(parts: list[Matrix], rank: int, tp: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Stored codes and scale bytes of one rank's w13 (gate, up) or w2 (down), as b12x is given them."""
    codes_field = "weight_packed" if parts[0].name == "nf3" else "weight"
    stored = [(p.raw[codes_field].bytes, p.raw["weight_scale"].bytes) for p in parts]
    if len(parts) == 2:
        share = stored[0][0].shape[0] // tp
        rows = slice(rank * share, (rank + 1) * share)
        return np.concatenate([c[rows] for c, _ in stored]), np.concatenate([s[rows] for _, s in stored])
    cut = [slice(rank * a.shape[1] // tp, (rank + 1) * a.shape[1] // tp) for a in stored[0]]
    return np.ascontiguousarray(stored[0][0][:, cut[0]]), np.ascontiguousarray(stored[0][1][:, cut[1]])


def expected(parts: list[Matrix], rank: int, tp: int, tile_n: int) -> tuple[bytes, bytes, float]:
    """Codes, scales and global scale of one expert by b12x."""
    codes, scales = device_matrix(parts, rank, tp)
    name = parts[0].name
    if name == "nf3":
        k = codes.shape[1] // 3 * 8
        values = E4M3[scales] / (1 if parts[0].raw["weight_scale"].dtype == "F8_E4M3" else 16)
        words = oracle.nf3_codes(nf3_codes(codes), tile_n)
        return words.tobytes(), oracle.nf3_scales(values, k).tobytes(), float(oracle.module()._NF3_SCALE_GLOBAL)
    k, words = codes.shape[1] * 2, oracle.fp4_codes(codes)
    if name == "nvfp4":
        assert len({part.second for part in parts}) == 1, "b12x takes one second scale for gate and up"
        packed, global_scale = oracle.nvfp4_scales(scales, parts[0].second, k)
        return words.tobytes(), packed.tobytes(), global_scale
    shift = min(max(200 - int(scales.max()), 0), 126)
    return words.tobytes(), oracle.mxfp4_scales(scales + np.uint8(shift), k).tobytes(), 2.0**-shift


@pytest.mark.parametrize(("tp", "ep"), TOPOLOGIES)
@pytest.mark.parametrize("name", SPECS)
def test_whole_shards(name: str, tp: int, ep: int, sources: Sources, tmp_path: Path) -> None:
    root, out = sources(SPECS[name]), tmp_path / "out"
    pack(root, out, tp, ep)
    tiles = manifest(out)["layout"]["tiles"]
    compared = 0
    for layer, experts in source_experts(root).items():
        block = len(experts) // ep
        for rank in range(tp * ep):
            wanted: dict[str, bytes] = {}
            for expert in range(rank // tp * block, (rank // tp + 1) * block):
                roles = experts[expert]
                tier = "tail" if roles["gate"].name == "nf3" else "kept"
                for which, parts, tile_n in (
                    ("w13", [roles["gate"], roles["up"]], tiles[1]),
                    ("w2", [roles["down"]], tiles[3]),
                ):
                    codes, scales, global_scale = expected(parts, rank % tp, tp, tile_n)
                    data = (codes, scales, np.float32(global_scale).tobytes())
                    for end, part in zip(("", "_scale", "_global_scale"), data, strict=True):
                        key = f"{tier}.{which}{end}"
                        wanted[key] = wanted.get(key, b"") + part
                key = f"{tier}.expert_ids"
                wanted[key] = wanted.get(key, b"") + np.int32(expert).tobytes()
            found = {key: raw.data for key, raw in read_file(shard_path(out, tp, ep, rank, layer)).items()}
            assert set(found) == set(wanted)
            for key, data in wanted.items():
                assert found[key] == data, f"layer {layer} rank {rank} {key}"
                compared += len(data)
    assert compared == sum(len(raw.data) for p in out.glob("experts/*/*/*") for raw in read_file(p).values())
