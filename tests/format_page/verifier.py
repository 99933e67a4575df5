"""Checks 1 to 8 of section 15 of FORMAT.md; 9, the source, is the caller's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tests.format_page import page
from tests.format_page.reader import (
    Pack,
    digest,
    digest_of_rows,
    has_rows,
    header_and_data,
    header_of,
    listed,
    need,
    open_pack,
    read,
)

SCALE_BYTES = {
    row["scale format"].split("`")[1]: {
        value
        for span in row["bytes in use"].split(", ")
        for value in range(int(span.split(" to ")[0]), int(span.split(" to ")[-1]) + 1)
    }
    for row in page.WEIGHTS
}


def verify(root: Path) -> Pack:
    """Checks 1 to 8, in order, up to the first that finds something."""
    pack = open_pack(root)
    _check_folder(pack)
    _check_config(pack)
    _check_base(pack)
    for shard in pack.manifest["shards"]:
        header = header_of(pack.tensors(shard["layer"], shard["rank"]))
        need(5, (root / shard["path"]).read_bytes()[: len(header)] == header, shard["path"])
    for shard in pack.manifest["shards"]:
        _check_small_tensors(pack, shard)
    for entry in listed(pack.manifest):
        data = (root / entry["path"]).read_bytes()
        if "tensors" not in entry:
            need(7, digest(data) == entry["digest"], entry["path"])
            continue
        for name, at in entry["tensors"].items():
            part = data[at["begin"] : at["end"]]
            found = digest_of_rows(part, at["shape"][0]) if has_rows(name) else digest(part)
            need(7, found == at["digest"], name)
    for shard in pack.manifest["shards"]:
        kept_format = pack.manifest["layers"][str(shard["layer"])]["kept_scale_format"]
        for name in shard["tensors"]:
            if name.endswith("_scale") and not name.endswith("_global_scale"):
                form = kept_format if name.startswith("kept.") else "e4m3_k32"
                need(8, set(read(pack, shard, name).reshape(-1).tolist()) <= SCALE_BYTES[form], name)
    return pack


def _check_folder(pack: Pack) -> None:
    sizes = {entry["path"]: entry["bytes"] for entry in listed(pack.manifest)}
    home = pack.root.resolve()
    present = set()
    for path in pack.root.rglob("*"):
        name = path.relative_to(pack.root).as_posix()
        if name.startswith(".") or (path.is_dir() and not path.is_symlink()):
            continue
        need(2, home in path.resolve().parents, f"{name} leads out")
        present.add(name)
    need(2, present - {"README.md", "hybrid_pack.json"} == set(sizes), f"{present ^ set(sizes)}")
    for name, size in sizes.items():
        need(2, (pack.root / name).stat().st_size == size, name)


def _check_config(pack: Pack) -> None:
    block = json.loads((pack.root / "config.json").read_bytes())["quantization_config"]
    need(3, set(block) == {page.only(row["key"]) for row in page.CONFIG_KEYS}, "quantization_config")
    for row in page.CONFIG_KEYS[:2]:
        need(3, block[page.only(row["key"])] == page.only(row["value"]), row["key"])
    for layer, tiers in pack.manifest["layers"].items():
        bits = [4 if e in tiers["kept"] else 3 for e in range(pack.manifest["geometry"]["num_experts"])]
        need(
            3,
            block["hybrid_bit_map"].get(layer, bits) == bits
            and (layer in block["hybrid_bit_map"] or not tiers["tail"]),
            layer,
        )


def _check_base(pack: Pack) -> None:
    found = {}
    for entry in pack.manifest["base"]["files"]:
        header, _ = header_and_data(pack.root / entry["path"])
        found |= {name: entry["path"] for name in json.loads(header[8:]) if name != "__metadata__"}
    if pack.manifest["base"]["index"]:
        index = json.loads((pack.root / pack.manifest["base"]["index"]).read_bytes())
        need(4, index["weight_map"] == found, "index")


def _check_small_tensors(pack: Pack, shard: dict[str, Any]) -> None:
    for tier, ids in pack.ids(shard["layer"], shard["rank"]).items():
        if not ids:
            continue
        need(6, read(pack, shard, f"{tier}.expert_ids").tolist() == ids, "expert_ids")
        for matrix in ("w13", "w2"):
            scales = read(pack, shard, f"{tier}.{matrix}_global_scale").astype(float)
            need(6, all(map(math.isfinite, scales)) and (scales > 0).all(), "global scale")
            need(6, tier == "kept" or (scales == 2.0**116).all(), "global scale of the tail")
