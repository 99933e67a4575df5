"""From the tensors of a shard to weights: sections 9 to 12 of FORMAT.md, with its own formulas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.format_page import page
from tests.format_page.reader import GROUP, Pack, read

WEIGHT = {row["scale format"].split("`")[1]: page.only(row["weight"]) for row in page.WEIGHTS}


def codes_of(tier: str, words: NDArray[Any], n: int, k: int, tile_n: int) -> NDArray[np.int64]:
    """[N, K] codes of one expert's matrix."""
    row, column = np.indices((n, k))
    flat = words.reshape(-1).astype(np.int64) & 0xFFFFFFFF
    if tier == "kept":
        at = page.formula("packed", n=row, k=column, N=n, K=k)
        return flat[at["word"]] >> at["bit"] & 15
    at = page.formula("nf3_2p1", n=row, k=column, N=n, K=k, W=tile_n)
    return (flat[at["low_word"]] >> at["low_bit"] & 3) + 4 * (flat[at["top_word"]] >> at["top_bit"] & 1)


def scale_bytes_of(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[N, K // group] scale bytes of one expert's matrix, in row order."""
    return packed[:, page.formula("scales", n=np.arange(packed.shape[1]))["position"]].T


def value_of(byte: int) -> float:
    return float(page.formula("value", byte=byte)["value"])


def weights_of(
    form: str, codes: NDArray[Any], scales: NDArray[Any], global_scale: float, levels: list[float]
) -> NDArray[Any]:
    """[N, K] weights: section 12."""
    byte = np.repeat(scales, GROUP[form], axis=1).astype(int)
    names: dict[str, Any] = {"byte": byte.astype(float), "global_scale": float(global_scale)}
    if form != "e8m0_k32":
        names["value"] = np.array([value_of(b) for b in range(248)])[byte]
    names["level" if form == "e4m3_k32" else "e2m1"] = np.array(levels if form == "e4m3_k32" else page.E2M1)[codes]
    return np.asarray(page.evaluate(WEIGHT[form], **names))


def experts_of(pack: Pack, layer: int, rank: int) -> Iterator[tuple[int, NDArray[Any], NDArray[Any]]]:
    """(global id, w13 [2 S, H], w2 [H, S]) of every expert a rank holds."""
    (shard,) = (s for s in pack.manifest["shards"] if (s["layer"], s["rank"]) == (layer, rank))
    layout, h, s = pack.manifest["layout"], pack.hidden, pack.share
    sizes = {"w13": (2 * s, h, layout["tiles"][1]), "w2": (h, s, layout["tiles"][3])}
    for tier, ids in pack.ids(layer, rank).items():
        form = "e4m3_k32" if tier == "tail" else pack.manifest["layers"][str(layer)]["kept_scale_format"]
        ends = ("", "_scale", "_global_scale")
        parts = {m: [read(pack, shard, f"{tier}.{m}{end}") for end in ends] for m in sizes if ids}
        for row, expert in enumerate(ids):
            found = []
            for matrix, size in sizes.items():
                words, scales, global_scale = (tensor[row] for tensor in parts[matrix])
                codes = codes_of(tier, words, *size)
                found.append(weights_of(form, codes, scale_bytes_of(scales), global_scale, layout["nf3_levels"]))
            yield expert, found[0], found[1]
