"""From headers, map and topology to a frozen plan: every output file, its tensors, their sources. Reads no payload."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hybrid_pack.errors import DataError, UsageError
from hybrid_pack.io.bitmap import KEY, MAP_HOLDERS
from hybrid_pack.io.checkpoint import Checkpoint, Layer
from hybrid_pack.io.config import CONFIG, HF_QUANT_CONFIG
from hybrid_pack.io.digest import blake3_digest
from hybrid_pack.io.manifest import BASE_INDEX, MANIFEST, README, STATE, shard_header
from hybrid_pack.io.quantization import (
    Quantization,
    QuantizeOptions,
    expectations,
    made_experts,
    open_quantization,
    require_groups,
    statistics_notes,
)
from hybrid_pack.io.safetensors import TensorHeader, build_header
from hybrid_pack.io.shards import INDEX, Located
from hybrid_pack.layouts.shard import KeptScaleFormat, RankGeometry, ShardTensor, shard_path, shard_tensors
from hybrid_pack.report.png import TIER_MAP, tier_map_png
from hybrid_pack.schemas.manifest import FORMAT_VERSION, LAYOUT_ABI, is_pack_path, path_key
from hybrid_pack.sharding import Topology, padded_intermediate, require_legal, why_not_hidden

BASE_FILE_BYTES = 5_000_000_000
"""Base tensors are written in files of about this size, as Hugging Face does."""

SMALL_FILE_LIMIT = 64 << 20
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5", ".msgpack", ".onnx", ".partial")
NOT_COPIED = frozenset({CONFIG, HF_QUANT_CONFIG, INDEX, MANIFEST, README.casefold(), STATE.removesuffix(".partial")})
SMALL_FOLDERS = ("additional_chat_templates",)
SCALE_FORMATS: Mapping[str | None, KeptScaleFormat | None] = {"nvfp4": "e4m3_k16", "mxfp4": "e8m0_k32", None: None}


@dataclass(frozen=True)
class ShardPlan:
    """The file of one rank and layer.

    Attributes:
        path: Inside the pack.
        layer: Decoder layer.
        rank: ep_rank * tp + tp_rank.
        kept: Global ids of its kept experts, in row order.
        tail: Likewise.
        tensors: In file order.
    """

    path: str
    layer: int
    rank: int
    kept: tuple[int, ...]
    tail: tuple[int, ...]
    tensors: tuple[ShardTensor, ...]

    @cached_property
    def header(self) -> bytes:
        """Exact bytes before the data."""
        return shard_header(self.tensors)

    @cached_property
    def placed(self) -> Mapping[str, TensorHeader]:
        """Tensors by name with absolute offsets, in file order."""
        return {t.name: t for t in build_header((t.name, t.dtype, t.shape) for t in self.tensors)[1]}

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(t.nbytes for t in self.tensors)


@dataclass(frozen=True)
class BasePlan:
    """A file of base tensors, copied as they are.

    Attributes:
        path: Inside the pack.
        tensors: In file order: wide dtypes first, then by name, so that every tensor is aligned to its element.
    """

    path: str
    tensors: tuple[Located, ...]

    @cached_property
    def header(self) -> bytes:
        """Exact bytes before the data."""
        return build_header((t.header.name, t.header.dtype, t.header.shape) for t in self.tensors)[0]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(t.header.nbytes for t in self.tensors)


@dataclass(frozen=True)
class Plan:
    """Everything a conversion will write.

    Attributes:
        source: The checkpoint.
        topology: tp and ep.
        geometry: Sizes of one rank's share.
        quantization: What to do with experts that are not stored in their tier's format.
        layers: Layers to pack, ascending.
        omitted: Layers left out by ``--layers``.
        shards: By layer, then rank.
        base: Files of base tensors.
        copied: Small files copied as they are, by path in the pack.
        written: Small files made here, by path in the pack.
        notes: Oddities that are no errors.
        expectations: What will be quantised and what that should cost; said before, and measured afterwards.
    """

    source: Checkpoint
    topology: Topology
    geometry: RankGeometry
    quantization: Quantization
    layers: tuple[int, ...]
    omitted: tuple[int, ...]
    shards: tuple[ShardPlan, ...]
    base: tuple[BasePlan, ...]
    copied: Mapping[str, Path]
    written: Mapping[str, bytes]
    notes: tuple[str, ...]
    expectations: tuple[str, ...]

    @property
    def announcements(self) -> tuple[str, ...]:
        """Everything to be said before the work."""
        return (*self.notes, *self.expectations)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pack, its manifest aside."""
        small = sum(p.stat().st_size for p in self.copied.values()) + sum(map(len, self.written.values()))
        return sum(s.nbytes for s in self.shards) + sum(b.nbytes for b in self.base) + small

    @cached_property
    def source_bytes(self) -> int:
        """Bytes of the source tensors that will be read: the unit of progress."""
        experts = sum(expert.nbytes for index in self.layers for expert in self.source.layers[index].experts.values())
        return experts + sum(t.header.nbytes for b in self.base for t in b.tensors)

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of the largest stored expert: with as many packed bytes again, the memory of one worker."""
        return max(expert.nbytes for index in self.layers for expert in self.source.layers[index].experts.values())

    @property
    def intermediate(self) -> int:
        """I, padded where that was asked for."""
        return self.geometry.intermediate * self.topology.tensor_parallel

    @property
    def options(self) -> dict[str, Any]:
        """The options that decide the experts' bytes, as the manifest remembers them."""
        source, chosen = self.source.options, self.quantization
        return {
            "kept_format": source.kept_format,
            "requantize": source.requantize,
            "mx_bias": source.mx_bias,
            "search": chosen.search,
            "importance": chosen.importance_digest,
            "hessians": chosen.hessians_digest,
        }

    @cached_property
    def quantizes(self) -> bool:
        """Whether some expert is not stored in its tier's format."""
        return bool(made_experts(self.source, self.layers, ("kept", "tail")))

    def rank_bytes(self, rank: int) -> Mapping[str, int]:
        """Expert bytes a rank loads, by tier."""
        tiers = {"kept": 0, "tail": 0}
        for shard in self.shards:
            if shard.rank == rank:
                for tensor in shard.tensors:
                    tiers[tensor.tier] += tensor.nbytes
        return tiers

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal for finished files of another run to be of use: the source, the layout and the options."""
        files = [[self.source.file_name(f), f.nbytes, f.digest] for f in self.source.shards.files]
        tiers = {str(i): self.source.layers[i].kept for i in self.layers}
        return {
            "format_version": FORMAT_VERSION,
            "abi": LAYOUT_ABI,
            "tensor_parallel": self.topology.tensor_parallel,
            "expert_parallel": self.topology.expert_parallel,
            "layers": list(self.layers),
            "source_config": self.source.config_digest,
            "source_index": self.source.index_digest,
            "source_files": blake3_digest(json.dumps(files).encode()),
            "bit_map": blake3_digest(json.dumps(tiers).encode()),
            "kept_formats": {str(i): self.source.layers[i].kept_format for i in self.layers},
            "intermediate": self.intermediate,
            "options": self.options,
            "statistics": {str(layer): digest for layer, digest in self.quantization.statistics.items()},
            "device": self.quantization.device if self.quantization.hessians else "any",  # else the bytes are equal
        }


def _shards(layer: Layer, topology: Topology, geometry: RankGeometry, num_experts: int) -> list[ShardPlan]:
    shards = []
    for rank in range(topology.ranks):
        held = topology.experts(rank, num_experts)
        kept = tuple(e for e in layer.kept if e in held)
        tail = tuple(e for e in layer.tail if e in held)
        tensors = shard_tensors(geometry, len(kept), len(tail), SCALE_FORMATS[layer.kept_format])
        shards.append(ShardPlan(shard_path(topology.folder, rank, layer.index), layer.index, rank, kept, tail, tensors))
    return shards


def _base(tensors: Iterable[Located]) -> tuple[BasePlan, ...]:
    """Base tensors in source order, cut into files."""
    groups: list[list[Located]] = []
    size = 0
    for tensor in tensors:
        if not groups or (size and size + tensor.header.nbytes > BASE_FILE_BYTES):
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.header.nbytes
    # Widest element first, so that every tensor starts on a multiple of its element.
    return tuple(
        BasePlan(f"model-{i:05d}-of-{len(groups):05d}.safetensors", tuple(sorted(group, key=_alignment_key)))
        for i, group in enumerate(groups, 1)
    )


def _alignment_key(tensor: Located) -> tuple[int, str]:
    header = tensor.header
    elements = 1
    for size in header.shape:
        elements *= size
    return (-(header.nbytes // elements if elements else 0), header.name)


def _leads_out(path: Path, root: Path) -> bool:
    """Whether a file is a link to somewhere else than the source, or its blobs in the Hugging Face cache."""
    target = path.resolve()
    homes = [root.resolve()] + (
        [root.resolve().parent.parent / "blobs"] if root.resolve().parent.name == "snapshots" else []
    )
    return path.is_symlink() and not any(home in target.parents for home in homes)


def _stays_behind(path: Path) -> bool:
    """Whether something at the top of a source has no place in a pack: other weight formats, further folders."""
    if path.name.startswith(".") or path.suffix == ".safetensors":
        return False
    return path.name not in SMALL_FOLDERS if path.is_dir() else path.name.lower().endswith(WEIGHT_SUFFIXES)


def small_files(root: Path) -> tuple[dict[str, Path], list[str]]:
    """(tokenizer, licence, sidecars and the like: everything small that is no weight file; notes)."""
    found: dict[str, Path] = {}
    notes = []
    reserved = {*NOT_COPIED, "experts"}
    left = [p.name for p in sorted(root.iterdir()) if _stays_behind(p)]
    if left:
        notes.append(f"not copied: {', '.join(left[:5])}{', ...' if len(left) > 5 else ''}")
    for folder in (root, *(root / name for name in SMALL_FOLDERS)):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            name = path.relative_to(root).as_posix()
            key = path_key(name)
            if (
                name.casefold() in NOT_COPIED
                or path.name.startswith(".")
                or path.name.lower().endswith(WEIGHT_SUFFIXES)
            ):
                continue
            if name.casefold() == TIER_MAP:
                notes.append(f"{name} is not copied: a pack has its own")
            elif path.is_symlink() and not path.exists():
                notes.append(f"{name} is not copied: a link to a file that is not there")
            elif not path.is_file():
                if not path.is_dir():
                    notes.append(f"{name} is not copied: no regular file")
            elif path.stat().st_size > SMALL_FILE_LIMIT:
                notes.append(f"{name} is not copied: {path.stat().st_size} bytes is no small file")
            elif not is_pack_path(name) or key in reserved or key.startswith(".") or key.endswith(WEIGHT_SUFFIXES):
                notes.append(f"{name!r} is not copied: a pack cannot hold a file of that name")
            else:
                found[name] = path
                if _leads_out(path, root):
                    notes.append(f"{name} is a link out of the source: what it leads to is copied")
    return found, notes


def _json(document: Any) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _with_map(document: Mapping[str, Any], bit_map: Mapping[str, list[int]], depth: int = 2) -> dict[str, Any]:
    """A configuration whose every bit map is the one in use: a map given by ``--bit-map`` leaves no other beside it."""
    return {
        key: bit_map
        if key == KEY
        else _with_map(value, bit_map, depth - 1)
        if depth and key in MAP_HOLDERS and isinstance(value, dict)
        else value
        for key, value in document.items()
    }


def _config(source: Checkpoint) -> bytes:
    """config.json with its quantization_config replaced; the original is kept inside."""
    bit_map = {str(layer): list(bits) for layer, bits in (source.config.bit_map or {}).items()}
    config = _with_map({k: v for k, v in source.config.raw.items() if k != "quantization_config"}, bit_map)
    config["quantization_config"] = {
        "quant_method": "hybrid_pack",
        "manifest": MANIFEST,
        "hybrid_bit_map": bit_map,
        "source_quantization_config": source.config.quantization,
    }
    return _json(config)


def _index(base: tuple[BasePlan, ...]) -> bytes:
    names = {t.header.name: file.path for file in base for t in file.tensors}
    total = sum(t.header.nbytes for file in base for t in file.tensors)
    return _json({"metadata": {"total_size": total}, "weight_map": dict(sorted(names.items()))})


def _gated(source: Checkpoint, layers: Iterable[int]) -> bool:
    """Whether the experts have a gate: all of them or none.

    Raises:
        DataError: Some have, some have not.
    """
    found = {e.gate is not None: (i, n) for i in layers for n, e in source.layers[i].experts.items()}
    if len(found) > 1:
        where = " and ".join(f"layer {i} expert {n} {'with' if gate else 'without'}" for gate, (i, n) in found.items())
        raise DataError("experts with and without a gate in one model", where=source.root, found=where)
    return next(iter(found))


def _legal_size(source: Checkpoint, topology: Topology, gated: bool, pad: bool) -> int:
    """I, padded to the next size that can be split if that was asked for."""
    tp = topology.tensor_parallel
    if not pad:
        return source.intermediate
    return padded_intermediate(source.hidden, source.intermediate, tp, gated) or source.intermediate


def make_plan(
    source: Checkpoint,
    topology: Topology,
    layers: Iterable[int] | None = None,
    *,
    pad: bool = False,
    options: QuantizeOptions | None = None,
) -> Plan:
    """Plan a conversion.

    Args:
        source: An opened checkpoint.
        topology: tp and ep.
        layers: Only these layers; by default all.
        pad: Pad the intermediate size with zeros to the next one that can be split.
        options: What to do with experts that are not stored in their tier's format; by default least squares.

    Raises:
        UsageError: An illegal topology, or a layer that has no experts to pack.
        DataError: Experts with and without a gate, or of a size that cannot be quantised; importances or Hessians that
            do not fit.
    """
    wanted = tuple(sorted(source.layers)) if layers is None else tuple(sorted(set(layers)))
    unknown = [layer for layer in wanted if layer not in source.layers]
    if unknown or not wanted:
        have = f"{min(source.layers)}..{max(source.layers)}"
        raise UsageError(
            "no experts to pack in that layer",
            where="--layers",
            expected=f"layers of {have}",
            found=unknown[0] if unknown else "none",
        )
    gated = _gated(source, wanted)
    if why_not_hidden(source.hidden) is None:
        require_groups(source, wanted)
    intermediate = _legal_size(source, topology, gated, pad)
    tiles = require_legal(source.hidden, intermediate, source.config.num_experts, topology, gated)
    geometry = RankGeometry(source.hidden, intermediate // topology.tensor_parallel, tiles, gated)
    base = _base(source.base)
    copied, small_notes = small_files(source.root)
    written = {CONFIG: _config(source)}
    written[TIER_MAP] = tier_map_png(source.config.num_experts, {i: source.layers[i].kept for i in wanted})
    if base:
        written[BASE_INDEX] = _index(base)
    omitted = tuple(layer for layer in sorted(source.layers) if layer not in wanted)
    notes = [*source.notes, *small_notes]
    if omitted:
        notes.append(
            f"only layers {', '.join(map(str, wanted))} are packed; the experts of {len(omitted)} layers are left out"
        )
    if intermediate != source.intermediate:
        notes.append(f"intermediate size {source.intermediate} is padded with zeros to {intermediate}")
    quantization = open_quantization(source, wanted, options or QuantizeOptions())
    notes += statistics_notes(quantization)
    return Plan(
        source=source,
        topology=topology,
        geometry=geometry,
        quantization=quantization,
        layers=wanted,
        omitted=omitted,
        shards=tuple(
            s for i in wanted for s in _shards(source.layers[i], topology, geometry, source.config.num_experts)
        ),
        base=base,
        copied=copied,
        written=written,
        notes=tuple(notes),
        expectations=tuple(expectations(source, wanted, quantization)),
    )
