"""Packs to break: change bytes or manifest, and make the digests right again where the test wants that."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from hybrid_pack.io.manifest import MANIFEST, encode_manifest
from hybrid_pack.verify import VerifyReport

Change = Callable[["PackEditor"], object]


def read_document(root: Path) -> dict[str, Any]:
    """The manifest without its own digest."""
    document: dict[str, Any] = json.loads((root / MANIFEST).read_text())
    document.pop("self_digest")
    return document


def tensor_digest(data: bytes, rows: int, by_rows: bool) -> str:
    """The digest FORMAT.md defines, written down a second time."""
    if not by_rows:
        return f"blake3:{blake3(data).hexdigest()}"
    size = len(data) // rows
    joined = b"".join(blake3(data[i * size : (i + 1) * size]).digest() for i in range(rows))
    return f"blake3-rows:{blake3(joined).hexdigest()}"


@dataclass
class PackEditor:
    """An open pack. ``consistent`` makes sizes and digests right when it is closed."""

    root: Path
    document: dict[str, Any]
    consistent: bool

    def shard(self, layer: int, rank: int) -> dict[str, Any]:
        return next(s for s in self.document["shards"] if (s["layer"], s["rank"]) == (layer, rank))

    def file(self, path: str) -> dict[str, Any]:
        everything = [*self.document["base"]["files"], *self.document["files"]]
        return next(f for f in everything if f["path"] == path)

    def array(self, layer: int, rank: int, name: str) -> NDArray[Any]:
        """A tensor as an array that can be changed and given back to ``put``."""
        shard = self.shard(layer, rank)
        entry = shard["tensors"][name]
        data = (self.root / shard["path"]).read_bytes()[entry["begin"] : entry["end"]]
        dtype = {"I32": "<i4", "U8": "u1", "F32": "<f4"}[entry["dtype"]]
        return np.frombuffer(data, dtype).reshape(entry["shape"]).copy()

    def put(self, layer: int, rank: int, name: str, values: NDArray[Any]) -> None:
        shard = self.shard(layer, rank)
        entry = shard["tensors"][name]
        assert values.nbytes == entry["end"] - entry["begin"]
        with (self.root / shard["path"]).open("r+b") as file:
            file.seek(entry["begin"])
            file.write(values.tobytes())

    def edit_json(self, name: str, change: Callable[[Any], object]) -> None:
        path = self.root / name
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    def edit_config(self, change: Callable[[Any], object]) -> None:
        self.edit_json("config.json", change)

    def save(self) -> None:
        if self.consistent:
            for shard in self.document["shards"]:
                self._refresh_shard(shard)
            for file in (*self.document["base"]["files"], *self.document["files"]):
                data = (self.root / file["path"]).read_bytes()
                file.update(bytes=len(data), digest=f"blake3:{blake3(data).hexdigest()}")
        (self.root / MANIFEST).write_bytes(encode_manifest(self.document))

    def _refresh_shard(self, shard: dict[str, Any]) -> None:
        data = (self.root / shard["path"]).read_bytes()
        entries = sorted(shard["tensors"].values(), key=lambda t: t["begin"])
        whole = blake3(data[: entries[0]["begin"]])
        for entry in entries:
            part = data[entry["begin"] : entry["end"]]
            entry["digest"] = tensor_digest(part, entry["shape"][0], entry["digest"].startswith("blake3-rows"))
            whole.update(bytes.fromhex(entry["digest"].split(":")[1]))
        shard["digest"] = f"blake3-shard:{whole.hexdigest()}"


@contextmanager
def editing(root: Path, *, consistent: bool = False) -> Iterator[PackEditor]:
    editor = PackEditor(root, read_document(root), consistent)
    yield editor
    editor.save()


def flip(path: Path, offset: int, bit: int = 0) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << bit)]))


def text_of(report: VerifyReport) -> str:
    """All findings, one a line."""
    return "\n".join(map(str, report.findings))
