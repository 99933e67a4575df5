"""The safetensors files of a checkpoint and their index, checked against each other before anything is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hybrid_pack.errors import DataError
from hybrid_pack.io.config import read_document
from hybrid_pack.io.safetensors import FileHeader, TensorHeader, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Located:
    """A tensor and the file it lies in."""

    path: Path
    header: TensorHeader

    def __str__(self) -> str:
        return f"{self.path}: {self.header.name}"


@dataclass(frozen=True)
class Shards:
    """All files of a checkpoint.

    Attributes:
        files: Headers, in the order of their names.
        tensors: Every tensor by name.
        index_text: Bytes of the index, or None for a single file.
        notes: Oddities that are no errors.
    """

    files: tuple[FileHeader, ...]
    tensors: Mapping[str, Located]
    index_text: bytes | None
    notes: tuple[str, ...]


def safe_relative(name: Any, where: object) -> str:
    """A path that stays inside its folder, or an error.

    Raises:
        DataError: Absolute, with ``..``, empty parts, a backslash or a control character.
    """
    text = name if isinstance(name, str) else ""
    parts = PurePosixPath(text).parts
    clean = bool(parts) and not text.startswith("/") and "/".join(parts) == text
    if not clean or ".." in parts or any(c in "\\:" or ord(c) < 32 for c in text):
        raise DataError("a file name that may lead outside the folder", where=where, found=repr(name))
    return text


def _read_headers(root: Path, names: list[str]) -> tuple[FileHeader, ...]:
    with ThreadPoolExecutor(8) as pool:
        return tuple(pool.map(lambda name: read_header(root / name), names))


def _without_index(root: Path) -> Shards:
    single = root / SINGLE
    names = [SINGLE] if single.is_symlink() or single.exists() else sorted(p.name for p in root.glob("*.safetensors"))
    if len(names) != 1:
        found = f"{len(names)} safetensors files" if names else "no safetensors file"
        raise DataError(
            f"no {INDEX}", where=root, expected="an index, or one file", found=found, hint="download the index too"
        )
    files = _read_headers(root, names)
    tensors = {n: Located(files[0].path, t) for n, t in files[0].tensors.items()}
    return Shards(files, tensors, None, tuple(_unlisted_note(root, names)))


def _unlisted_note(root: Path, names: Collection[str]) -> list[str]:
    others = sorted(p.name for p in root.glob("*.safetensors") if p.name not in names)
    if not others:
        return []
    return [f"{len(others)} safetensors file(s) that no index names, ignored: {', '.join(others[:3])}"]


def _total_size_note(total: Any, files: tuple[FileHeader, ...]) -> list[str]:
    """``metadata.total_size`` counts tensor bytes in most repositories and file bytes in some; both are right."""
    payload = sum(f.nbytes - f.data_begin for f in files)
    if total is None or total in (payload, sum(f.nbytes for f in files)):
        return []
    return [f"{INDEX}: metadata.total_size is {total}, the shards hold {payload} tensor bytes"]


def _some(names: list[str]) -> str:
    return f"tensor {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def read_shards(root: Path) -> Shards:
    """Read the headers of every shard and hold them against the index, both ways.

    Raises:
        DataError: An index entry no shard has, a shard that is missing or broken, no shards at all.
        EnvironmentFailure: A file cannot be read.
    """
    index_path = root / INDEX
    if not index_path.exists() and not index_path.is_symlink():
        return _without_index(root)
    document, text = read_document(index_path)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DataError("no weight_map", where=index_path, expected="an object of tensor names and files")
    names = sorted({safe_relative(name, index_path) for name in weight_map.values()})
    files = _read_headers(root, names)
    by_name = dict(zip(names, files, strict=True))
    tensors: dict[str, Located] = {}
    for tensor, name in weight_map.items():
        header = by_name[name].tensors.get(tensor)
        if header is None:
            other = next((n for n, f in by_name.items() if tensor in f.tensors), None)
            hint = f"{other} has it: the index is stale" if other else "download the checkpoint again"
            raise DataError(f"the index lists tensor {tensor}, the shard has it not", where=root / name, hint=hint)
        tensors[tensor] = Located(by_name[name].path, header)
    notes = []
    for name, file in by_name.items():
        twins = [t for t in file.tensors if weight_map.get(t, name) != name]
        if twins:
            notes.append(f"{name}: {_some(twins)} by the index in another file, this copy ignored")
        unlisted = [t for t in file.tensors if t not in tensors]
        if unlisted:  # loaders that go by file find them, so that leaving them out would change the model
            notes.append(f"{name}: {_some(unlisted)} not in the index, kept")
            tensors |= {t: Located(file.path, file.tensors[t]) for t in unlisted}
    notes += _unlisted_note(root, by_name)
    metadata = document.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Shards(files, tensors, text, tuple(notes + _total_size_note(total, files)))
