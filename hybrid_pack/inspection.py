"""What a checkpoint or a pack holds, from its headers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybrid_pack.errors import UsageError
from hybrid_pack.io.checkpoint import Checkpoint, Layer, open_checkpoint
from hybrid_pack.io.config import read_document
from hybrid_pack.io.manifest import MANIFEST, expected_tensors, read_manifest, topology_of
from hybrid_pack.io.shards import Located
from hybrid_pack.plan import SCALE_FORMATS, make_plan
from hybrid_pack.schemas.manifest import Manifest
from hybrid_pack.sharding import Topology, legal_ep, legal_tp, tiles_for, why_not_tp

TP_SHOWN = (1, 2, 3, 4, 6, 8, 16)
KEPT_NAMES = {"e4m3_k16": "NVFP4", "e8m0_k32": "MXFP4", None: "-"}


@dataclass(frozen=True)
class LayerView:
    """Tiers of one layer.

    Attributes:
        layer: Decoder layer.
        kept: Kept expert ids.
        tail: Tail expert ids.
        kept_format: ``NVFP4``, ``MXFP4`` or ``-``.
        mapped: Whether the bit map names it; None where that is not known.
    """

    layer: int
    kept: tuple[int, ...]
    tail: tuple[int, ...]
    kept_format: str
    mapped: bool | None


@dataclass(frozen=True)
class TopologyView:
    """What a tensor-parallel size would mean.

    Attributes:
        tp: The size.
        why_not: Why it is illegal; None if it is legal.
        tiles: Kernel tiles; None if it is illegal.
        kept_bytes: Expert bytes of a rank in the kept tier.
        tail_bytes: Likewise in the tail.
    """

    tp: int
    why_not: str | None
    tiles: tuple[int, int, int, int] | None
    kept_bytes: int | None
    tail_bytes: int | None


@dataclass(frozen=True)
class Inspection:
    """Everything ``hybrid-pack inspect`` shows.

    Attributes:
        kind: ``checkpoint`` or ``pack``.
        name: Of the source.
        model_type: As in config.json.
        hidden: H.
        intermediate: I.
        num_experts: E.
        top_k: Experts a token visits.
        activation: Gated activation.
        layers: Tiers by layer.
        expert_formats: Stored format to number of experts.
        base_dtypes: dtype to (tensors, bytes) of the tensors that are not packed.
        base_dialect: How large non-expert matrices are stored, in words.
        file_bytes: Bytes of all files listed.
        topologies: Legal and illegal sizes; for a pack its own only.
        legal_tp: Legal tensor-parallel sizes.
        legal_ep: Legal expert-parallel sizes.
        notes: Oddities.
    """

    kind: str
    name: str
    model_type: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    activation: str
    layers: tuple[LayerView, ...]
    expert_formats: Mapping[str, int]
    base_dtypes: Mapping[str, tuple[int, int]]
    base_dialect: str
    file_bytes: int
    topologies: tuple[TopologyView, ...]
    legal_tp: tuple[int, ...]
    legal_ep: tuple[int, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def _base_dialect(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """How the large non-expert matrices are stored: the companion of an FP8 weight tells."""
    found = Counter[str]()
    for name, (dtype, shape) in tensors.items():
        if not name.endswith(".weight") or len(shape) != 2:
            continue
        stem = name.removesuffix("weight")
        if f"{stem}weight_scale_fp8" in tensors:
            found["FP8 per row"] += 1
        elif dtype == "F8_E4M3" and tensors.get(f"{stem}weight_scale", ("",))[0] in ("U8", "F8_E8M0"):
            found["MXFP8"] += 1
        elif dtype == "F8_E4M3":
            found["FP8"] += 1
        else:
            found[dtype] += 1
    return ", ".join(f"{kind} ({count})" for kind, count in found.most_common()) or "none"


def _dtypes(tensors: Iterable[Located]) -> dict[str, tuple[int, int]]:
    totals: dict[str, tuple[int, int]] = {}
    for at in tensors:
        count, nbytes = totals.get(at.header.dtype, (0, 0))
        totals[at.header.dtype] = (count + 1, nbytes + at.header.nbytes)
    return dict(sorted(totals.items(), key=lambda item: -item[1][1]))


def _topology(source: Checkpoint, tp: int) -> TopologyView:
    why_not = why_not_tp(source.hidden, source.intermediate, tp)
    if why_not is not None or not source.layers:
        return TopologyView(tp, why_not or "no layer to pack", None, None, None)
    rank = make_plan(source, Topology(tp)).rank_bytes(0)
    return TopologyView(tp, None, tiles_for(source.hidden, source.intermediate // tp), rank["kept"], rank["tail"])


def _layer_view(layer: Layer) -> LayerView:
    return LayerView(layer.index, layer.kept, layer.tail, KEPT_NAMES[SCALE_FORMATS[layer.kept_format]], layer.mapped)


def inspect_checkpoint(source: Checkpoint) -> Inspection:
    """Describe an opened checkpoint."""
    formats = Counter(
        expert.gate.format.name.upper() + (" (scale * 16)" if expert.gate.format.scale_times_16 else "")
        for layer in source.layers.values()
        for expert in layer.experts.values()
    )
    config = source.config
    return Inspection(
        kind="checkpoint",
        name=source.name,
        model_type=config.model_type,
        hidden=source.hidden,
        intermediate=source.intermediate,
        num_experts=config.num_experts,
        top_k=config.top_k,
        activation=config.activation,
        layers=tuple(map(_layer_view, source.layers.values())),
        expert_formats=dict(formats.most_common()),
        base_dtypes=_dtypes(source.base),
        base_dialect=_base_dialect({t.header.name: (t.header.dtype, t.header.shape) for t in source.base}),
        file_bytes=sum(f.nbytes for f in source.shards.files),
        topologies=tuple(_topology(source, tp) for tp in TP_SHOWN),
        legal_tp=tuple(legal_tp(source.hidden, source.intermediate)),
        legal_ep=tuple(legal_ep(config.num_experts)),
        notes=source.notes,
    )


def _rank_bytes(manifest: Manifest, rank: int) -> dict[str, int]:
    totals = {"kept": 0, "tail": 0}
    for layer in manifest.layers:
        for tensor in expected_tensors(manifest, int(layer), rank):
            totals[tensor.tier] += tensor.nbytes
    return totals


def inspect_pack(root: Path) -> Inspection:
    """Describe a pack from its manifest and base headers.

    Raises:
        DataError: The manifest or a base file's header is not right.
    """
    from hybrid_pack.io.safetensors import read_header

    manifest = read_manifest(root)
    config, _ = read_document(root / "config.json")
    nested = config.get("text_config")
    decoder = {**config, **nested} if isinstance(nested, Mapping) else config
    geometry, layout, topology = manifest.geometry, manifest.layout, topology_of(manifest)
    base = {
        t.name: Located(root / f.path, t)
        for f in manifest.base.files
        for t in read_header(root / f.path).tensors.values()
    }
    rank = _rank_bytes(manifest, 0)
    formats = Counter[str]()
    for tiers in manifest.layers.values():
        formats[KEPT_NAMES[tiers.kept_scale_format]] += len(tiers.kept)
        formats["NF3"] += len(tiers.tail)
    return Inspection(
        kind="pack",
        name=manifest.source.name,
        model_type=str(decoder.get("model_type", "unknown")),
        hidden=geometry.hidden_size,
        intermediate=geometry.intermediate_size,
        num_experts=geometry.num_experts,
        top_k=geometry.top_k,
        activation=layout.activation,
        layers=tuple(
            LayerView(int(i), tiers.kept, tiers.tail, KEPT_NAMES[tiers.kept_scale_format], None)
            for i, tiers in manifest.layers.items()
        ),
        expert_formats={kind: count for kind, count in formats.most_common() if count},
        base_dtypes=_dtypes(base.values()),
        base_dialect=_base_dialect({n: (t.header.dtype, t.header.shape) for n, t in base.items()}),
        file_bytes=sum(s.bytes for s in manifest.shards)
        + sum(f.bytes for f in (*manifest.base.files, *manifest.files)),
        topologies=(TopologyView(topology.tensor_parallel, None, layout.tiles, rank["kept"], rank["tail"]),),
        legal_tp=(topology.tensor_parallel,),
        legal_ep=(topology.expert_parallel,),
        notes=manifest.report.notes,
    )


def inspect_path(path: Path, *, bit_map_file: Path | None = None, name: str | None = None) -> Inspection:
    """Describe a folder, whichever it is.

    Raises:
        UsageError: Not a folder.
        DataError: Neither a checkpoint nor a pack that is right.
    """
    if not path.is_dir():
        raise UsageError("not a folder", where=path, expected="a checkpoint or a pack")
    if (path / MANIFEST).exists():
        return inspect_pack(path)
    return inspect_checkpoint(open_checkpoint(path, bit_map_file=bit_map_file, name=name, require_map=False))
