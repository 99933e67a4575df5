"""A reader of packs written from FORMAT.md alone: numpy, json and BLAKE3, no code of the package.

Tables and formulas are taken from the page, prose rules are written out. It is slow, and reads whole files. This part
opens a pack (sections 3 to 8); ``weights`` decodes it and ``verifier`` checks it.
"""

from __future__ import annotations

import json
import math
import re
import struct
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from tests.format_page import page

TAIL_BYTES = 94
GROUP = {row["scale format"].split("`")[1]: int(row["group"]) for row in page.WEIGHTS}
ITEM = {"I32": ("<i4", 4), "U8": ("u1", 1), "F32": ("<f4", 4)}
_MAPS = {"layers": "<layer>", "tensors": "<name>"}
_JSON_TYPES: dict[str, Any] = {"string": str, "integer": int, "object": dict, "array": list, "null": type(None)}


class Wrong(Exception):
    """A check of section 15 found something."""

    def __init__(self, check: int, what: str) -> None:
        super().__init__(f"check {check}: {what}")
        self.check = check


def need(check: int, condition: object, what: str) -> None:
    if not condition:
        raise Wrong(check, what)


def tiles_of(h: int, s: int, f: int = 2) -> tuple[int, ...] | None:
    for row in page.TILES:
        if page.evaluate(page.only(row["condition"]), H=h, S=s, F=f):
            return tuple(int(row[column]) for column in ("fc1_k", "fc1_n", "fc2_k", "fc2_n"))
    return None


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM[self.dtype][1]


def tensors_of(h: int, s: int, kept: int, tail: int, kept_scale_format: str | None, f: int = 2) -> list[Tensor]:
    """Tensors of a shard in file order."""
    names = {"H": h, "S": s, "F": f, "Ek": kept, "Et": tail, "G": GROUP.get(kept_scale_format or "", 0)}
    found = []
    for row in page.TENSORS:
        name = page.only(row["name"])
        if kept if name.startswith("kept.") else tail:
            shape = page.evaluate(f"({page.only(row['shape'])},)", **names)
            found.append(Tensor(name, row["dtype"], shape))
    return sorted(found, key=lambda t: (t.nbytes // t.shape[0] <= 4, -t.nbytes, t.name.encode()))


def header_of(tensors: list[Tensor]) -> bytes:
    parts = ['"__metadata__":{"format":"pt"}']
    at = 0
    for tensor in tensors:
        end = at + tensor.nbytes
        shape = ",".join(map(str, tensor.shape))
        parts.append(f'"{tensor.name}":{{"dtype":"{tensor.dtype}","shape":[{shape}],"data_offsets":[{at},{end}]}}')
        at = end
    text = "{" + ",".join(parts) + "}"
    text += " " * (-(8 + len(text)) % 4096)
    return struct.pack("<Q", len(text)) + text.encode()


def digest(data: bytes) -> str:
    return f"blake3:{blake3(data).hexdigest()}"


def digest_of_rows(data: bytes, rows: int) -> str:
    size = len(data) // rows
    inner = b"".join(blake3(data[i * size : (i + 1) * size]).digest() for i in range(rows))
    return f"blake3-rows:{blake3(inner).hexdigest()}"


def digest_of_shard(header: bytes, digests: list[str]) -> str:
    inner = b"".join(bytes.fromhex(d.split(":")[1]) for d in digests)
    return f"blake3-shard:{blake3(header + inner).hexdigest()}"


def has_rows(name: str) -> bool:
    (row,) = (row for row in page.ALGORITHMS if page.only(row["algorithm"]) == "blake3-rows")
    return name.split(".")[1] in page.ticked(row["used for"])


def tail_of(body: bytes) -> bytes:
    """The last bytes of a manifest: section 4, self_digest."""
    return b',\n "self_digest": "' + digest(body).encode() + b'"\n}\n'


def is_path(path: str) -> bool:
    parts = path.split("/")
    plain = not re.search("[\\\\:\x00-\x1f\x7f\ud800-\udfff]", path) and not {"", ".", ".."} & set(parts)
    short = plain and 1 <= len(path) <= 1024 and all(len(part.encode()) <= 240 for part in parts)
    return short and unicodedata.normalize("NFC", path) == path


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    need(1, len(dict(pairs)) == len(pairs), "a key twice")
    return dict(pairs)


def _no_constant(text: str) -> Any:
    raise Wrong(1, text)


def walk(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """(key in the notation of section 4, value) of everything in a manifest."""
    if key and not key.endswith("[]"):
        yield key, value
    if isinstance(value, dict):
        for name, inner in value.items():
            part = _MAPS.get(key.rpartition(".")[2], name)
            yield from walk(inner, f"{key}.{part}" if key else part)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            yield from walk(inner, f"{key}[]")


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind.startswith("array of "):
        inner = kind.removeprefix("array of ").removesuffix("s")
        return isinstance(value, list) and all(_has_type(item, inner) for item in value)
    if kind == "number":
        return isinstance(value, int | float)
    if " or " in kind:
        return any(_has_type(value, name) for name in kind.split(" or "))
    return kind != "boolean" and isinstance(value, _JSON_TYPES[kind])


def _check_keys(document: dict[str, Any]) -> None:
    kinds = {page.only(row["key"]): row["type"] for row in page.KEYS}
    for key, value in walk(document):
        need(1, key in kinds, f"unknown key {key}")
        need(1, _has_type(value, kinds[key]), f"{key} is no {kinds[key]}")
    for row in page.KEYS:  # an object has every key of the page that is always there
        parent, _, name = page.only(row["key"]).rpartition(".")
        holders = [document] if not parent else [v for k, v in _objects(document) if k == parent]
        need(1, row["presence"] != "always" or all(name in holder for holder in holders), f"no {parent}.{name}")


def _objects(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in walk(document):
        if isinstance(value, dict):
            yield key, value
        elif isinstance(value, list):
            yield from ((f"{key}[]", item) for item in value if isinstance(item, dict))


@dataclass(frozen=True)
class Pack:
    """A pack whose manifest passed check 1."""

    root: Path
    manifest: dict[str, Any]

    @property
    def share(self) -> int:
        return int(
            self.manifest["geometry"]["intermediate_size_padded"] // self.manifest["topology"]["tensor_parallel"]
        )

    @property
    def halves(self) -> int:
        """F of section 1."""
        return 2 if self.manifest["layout"]["w13_order"] == "gate_up" else 1

    @property
    def hidden(self) -> int:
        return int(self.manifest["geometry"]["hidden_size"])

    def ids(self, layer: int, rank: int) -> dict[str, list[int]]:
        """Global ids a rank holds, by tier: section 3."""
        topology, experts = self.manifest["topology"], self.manifest["geometry"]["num_experts"]
        block = experts // topology["expert_parallel"]
        first = rank // topology["tensor_parallel"] * block
        tiers = self.manifest["layers"][str(layer)]
        return {tier: [e for e in tiers[tier] if first <= e < first + block] for tier in ("kept", "tail")}

    def tensors(self, layer: int, rank: int) -> list[Tensor]:
        ids = self.ids(layer, rank)
        kept_format = self.manifest["layers"][str(layer)]["kept_scale_format"]
        return tensors_of(self.hidden, self.share, len(ids["kept"]), len(ids["tail"]), kept_format, self.halves)


def open_pack(root: Path) -> Pack:
    """Check 1."""
    path = root / "hybrid_pack.json"
    need(1, path.is_file(), "no manifest")
    text = path.read_bytes()
    try:
        document = json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except ValueError as error:
        raise Wrong(1, str(error)) from None
    need(1, document.get("format") == "hybrid-pack" and document.get("format_version") == 1, "format or version")
    need(1, text[-TAIL_BYTES:] == tail_of(text[:-TAIL_BYTES]), "self_digest")
    _check_keys(document)
    layout, geometry = document["layout"], document["geometry"]
    for key in ("abi", "kept_weight_layout", "tail_weight_layout", "tail_scale_format"):
        need(1, layout[key] == page.ticked(page.rule(f"layout.{key}") or "")[0], f"layout.{key}")
    need(1, layout["w13_order"] in page.ticked(page.rule("layout.w13_order") or ""), "layout.w13_order")
    levels = layout["nf3_levels"]
    need(1, len(levels) == 8 and levels == sorted(set(levels)), "levels")
    pack = Pack(root, document)
    need(1, tuple(layout["tiles"]) == tiles_of(pack.hidden, pack.share, pack.halves), "tiles")
    for tiers in document["layers"].values():
        need(1, sorted(tiers["kept"] + tiers["tail"]) == list(range(geometry["num_experts"])), "not each expert once")
    _check_shard_entries(pack)
    _check_paths(document)
    return pack


def _check_shard_entries(pack: Pack) -> None:
    topology = pack.manifest["topology"]
    ranks = topology["tensor_parallel"] * topology["expert_parallel"]
    wanted = [(int(layer), rank) for layer in pack.manifest["layers"] for rank in range(ranks)]
    need(1, [(s["layer"], s["rank"]) for s in pack.manifest["shards"]] == wanted, "shards")
    for shard in pack.manifest["shards"]:
        folder = f"experts/tp{topology['tensor_parallel']}-ep{topology['expert_parallel']}"
        need(1, shard["path"] == f"{folder}/rank-{shard['rank']}/layer-{shard['layer']:03d}.safetensors", "shard path")
        tensors = pack.tensors(shard["layer"], shard["rank"])
        header = header_of(tensors)
        need(1, set(shard["tensors"]) == {t.name for t in tensors}, "tensors")
        at = len(header)
        for tensor in tensors:
            entry = shard["tensors"][tensor.name]
            place = (entry["dtype"], tuple(entry["shape"]), entry["begin"], entry["end"])
            need(1, place == (tensor.dtype, tensor.shape, at, at + tensor.nbytes), tensor.name)
            kind = "blake3-rows:" if has_rows(tensor.name) else "blake3:"
            need(1, entry["digest"].startswith(kind), f"digest of {tensor.name}")
            at += tensor.nbytes
        need(1, shard["bytes"] == at, "bytes")
        digests = [shard["tensors"][t.name]["digest"] for t in tensors]
        need(1, shard["digest"] == digest_of_shard(header, digests), "shard digest")


def listed(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [*document["shards"], *document["base"]["files"], *document["files"]]


def _check_paths(document: dict[str, Any]) -> None:
    paths = [entry["path"] for entry in listed(document)]
    need(1, all(map(is_path, paths)), "a path that leads outside")
    need(1, len({unicodedata.normalize("NFKC", p).casefold() for p in paths}) == len(paths), "twins")
    plain = [entry["path"] for entry in (*document["base"]["files"], *document["files"])]
    folded = [unicodedata.normalize("NFKC", path).casefold() for path in paths]
    folders = {"/".join(parts[:n]) for path in folded if (parts := path.split("/")) for n in range(1, len(parts))}
    need(1, not folders & set(folded), "a file where a folder is needed")
    split = [unicodedata.normalize("NFKC", path).casefold().split("/") for path in plain]
    first = {parts[0] for parts in split}
    need(1, not {"hybrid_pack.json", "readme.md", "experts"} & first, "a path that no list has")
    need(1, not any(path[0] == "." for path in first), "likewise")
    need(1, not any(part.endswith(".partial") for parts in split for part in parts), "likewise")
    need(1, {"config.json", document["base"]["index"]} - {None} <= set(plain), "config.json and index")


def header_and_data(path: Path) -> tuple[bytes, bytes]:
    data = path.read_bytes()
    begin = 8 + struct.unpack("<Q", data[:8])[0]
    return data[:begin], data[begin:]


def read(pack: Pack, shard: dict[str, Any], name: str) -> NDArray[Any]:
    """A tensor of a shard, by its header."""
    header, data = header_and_data(pack.root / shard["path"])
    entry = json.loads(header[8:])[name]
    begin, end = entry["data_offsets"]
    return np.frombuffer(data[begin:end], ITEM[entry["dtype"]][0]).reshape(entry["shape"])
