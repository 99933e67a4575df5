"""Small checkpoints to break: each helper changes one thing and keeps everything else consistent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid_pack.io.config import CONFIG
from hybrid_pack.io.safetensors import build_header, read_header
from hybrid_pack.io.shards import INDEX
from hybrid_pack.synthetic import Spec, bit_map

SMALL = Spec(hidden=128, intermediate=128, num_experts=4, kept=2, vocab=16, shard_bytes=300_000)
"""Four experts in layers 3, 4 and 5 (the MTP layer); several shards of 300 kB."""

BITS = bit_map(SMALL)["3"]
KEPT, TAIL = BITS.index(4), BITS.index(3)
"""Ids of a kept and of a tail expert of layer 3."""

LAYER = "model.layers.3.mlp.experts"
KEPT_GATE = f"{LAYER}.{KEPT}.gate_proj"
TAIL_GATE = f"{LAYER}.{TAIL}.gate_proj"
MTP_GATE = "model.layers.5.mlp.experts.0.gate_proj"


@dataclass
class Stored:
    """A tensor to write."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Tensors = dict[str, Stored]


def read_file(path: Path) -> Tensors:
    data = path.read_bytes()
    return {t.name: Stored(t.dtype, t.shape, data[t.begin : t.end]) for t in read_header(path).tensors.values()}


def write_file(path: Path, tensors: Tensors) -> None:
    header, _ = build_header((name, t.dtype, t.shape) for name, t in tensors.items())
    path.write_bytes(header + b"".join(t.data for t in tensors.values()))


@contextmanager
def edit_json(path: Path) -> Iterator[Any]:
    document = json.loads(path.read_text())
    yield document
    path.write_text(json.dumps(document))


def edit_config(root: Path) -> Any:
    return edit_json(root / CONFIG)


def edit_index(root: Path) -> Any:
    return edit_json(root / INDEX)


@dataclass
class Editor:
    """Tensors of a checkpoint by name; files are read when first needed, and those touched are written back."""

    root: Path
    weight_map: dict[str, str]
    files: dict[str, Tensors] = field(default_factory=dict)

    def _file(self, name: str) -> Tensors:
        if name not in self.files:
            self.files[name] = read_file(self.root / name)
        return self.files[name]

    def __getitem__(self, name: str) -> Stored:
        return self._file(self.weight_map[name])[name]

    def __setitem__(self, name: str, stored: Stored) -> None:
        """Replace a tensor, or add one to the first file."""
        file = self.weight_map.setdefault(name, min(self.weight_map.values()))
        self._file(file)[name] = stored

    def __delitem__(self, name: str) -> None:
        del self._file(self.weight_map.pop(name))[name]

    def rename(self, old: str, new: str) -> None:
        file = self.weight_map.pop(old)
        self.weight_map[new] = file
        tensors = self._file(file)
        tensors[new] = tensors.pop(old)

    def move_last(self, name: str) -> None:
        """Put a tensor behind all others of its file."""
        tensors = self._file(self.weight_map[name])
        tensors[name] = tensors.pop(name)

    def beside(self, name: str, new: str, stored: Stored) -> None:
        """Add a tensor to the file of another."""
        self.weight_map[new] = self.weight_map[name]
        self[new] = stored

    def matching(self, prefix: str) -> list[str]:
        return [name for name in self.weight_map if name.startswith(prefix)]


@contextmanager
def edit_tensors(root: Path) -> Iterator[Editor]:
    """Change tensors; shards and index, with its total size, stay consistent."""
    with edit_index(root) as index:
        editor = Editor(root, index["weight_map"])
        yield editor
        for name, tensors in editor.files.items():
            write_file(root / name, tensors)
        headers = [read_header(root / name) for name in set(editor.weight_map.values())]
        index["metadata"]["total_size"] = sum(header.nbytes - header.data_begin for header in headers)


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the JSON of a header, leaving the payload alone. A change that returns text replaces it."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    result = change(header)
    text = result if isinstance(result, str) else json.dumps(header)
    path.write_bytes(len(text.encode()).to_bytes(8, "little") + text.encode() + data[8 + length :])


def first_shard(root: Path) -> Path:
    return min(root.glob("*.safetensors"))


def shard_of(root: Path, tensor: str) -> Path:
    return root / json.loads((root / INDEX).read_text())["weight_map"][tensor]


def quantization(config: dict[str, Any]) -> dict[str, Any]:
    block: dict[str, Any] = config["quantization_config"]
    return block
