"""What a checkpoint or a pack holds, from its headers only."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybrid_pack.errors import DataError, UsageError
from hybrid_pack.io.bitmap import find_bit_map, parse_bit_map
from hybrid_pack.io.checkpoint import Checkpoint, Layer, open_checkpoint
from hybrid_pack.io.config import CONFIG, HF_QUANT_CONFIG, read_document
from hybrid_pack.io.declared import declared, worst_of_tiers
from hybrid_pack.io.manifest import MANIFEST, STATE, expected_tensors, read_manifest, topology_of
from hybrid_pack.io.pack_base import pack_base
from hybrid_pack.io.shards import INDEX, Located
from hybrid_pack.plan import SCALE_FORMATS, make_plan
from hybrid_pack.schemas.manifest import Manifest
from hybrid_pack.sharding import Topology, legal_ep, legal_tp, padding_advice, why_not_tp

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
        stored: Format to number of experts as they are stored, where there is no bit map; None elsewhere.
        kept_sqnr_db: Of its quantised kept experts together; None where there are none, or no error.
        tail_sqnr_db: Likewise in the tail.
    """

    layer: int
    kept: tuple[int, ...]
    tail: tuple[int, ...]
    kept_format: str
    mapped: bool | None
    stored: Mapping[str, int] | None = None
    kept_sqnr_db: float | None = None
    tail_sqnr_db: float | None = None


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
class RankView:
    """Expert bytes of a rank of a pack.

    Attributes:
        rank: The rank.
        kept_bytes: In the kept tier.
        tail_bytes: In the tail.
    """

    rank: int
    kept_bytes: int
    tail_bytes: int


@dataclass(frozen=True)
class PackView:
    """What only a pack has.

    Attributes:
        tensor_parallel: It was made for.
        expert_parallel: Likewise.
        ranks: Expert bytes of every rank.
        created_by: Tool and version.
        abi: Id of its byte rules.
        self_digest: Of its manifest.
        declared: In what it differs from its source by its own manifest's report.
        worst_experts: (SQNR in dB, layer, expert, tier) of the quantised experts that lost most.
    """

    tensor_parallel: int
    expert_parallel: int
    ranks: tuple[RankView, ...]
    created_by: str
    abi: str
    self_digest: str
    declared: tuple[str, ...]
    worst_experts: tuple[tuple[float, int, int, str], ...]


@dataclass(frozen=True)
class Inspection:
    """Everything ``hybrid-pack inspect`` shows.

    Attributes:
        kind: ``checkpoint`` or ``pack``.
        folder: Where it is: a folder, or a Hub id.
        name: Of the source.
        model_type: As in config.json.
        hidden: H.
        intermediate: I.
        intermediate_padded: I as it is packed; the same where nothing is padded.
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
        bit_map_from: The document the tiers are from; None where no bit map is known and the stored formats tell.
        pack: What only a pack has; None for a checkpoint.
    """

    kind: str
    folder: str
    name: str
    model_type: str
    hidden: int
    intermediate: int
    intermediate_padded: int
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
    bit_map_from: str | None
    pack: PackView | None

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
    gated = source.gated
    why_not = why_not_tp(source.hidden, source.intermediate, tp, gated)
    if why_not is not None:
        advice = padding_advice(source.hidden, source.intermediate, tp, gated)
        why_not += "" if advice is None else f"; {advice[0]}--pad makes it {advice[1]}"
    if why_not is not None or not source.layers:
        return TopologyView(tp, why_not or "no layer to pack", None, None, None)
    plan = make_plan(source, Topology(tp))
    rank = plan.rank_bytes(0)
    return TopologyView(tp, None, plan.geometry.tiles, rank["kept"], rank["tail"])


def _layer_view(layer: Layer, *, decided: bool) -> LayerView:
    """Tiers of a layer; without a bit map also what its experts are stored as."""
    counts = Counter(kind.upper() for kind in layer.stored.values()).most_common()
    stored = None if decided else dict(sorted(counts, key=lambda item: item[0] == "NF3"))  # as tiers are ordered
    kept_format = KEPT_NAMES[SCALE_FORMATS[layer.kept_format]]
    return LayerView(layer.index, layer.kept, layer.tail, kept_format, layer.mapped, stored)


def _no_map(source: Checkpoint) -> str:
    """What the lack of a bit map means."""
    if any(layer.tail for layer in source.layers.values()):
        return "there is no bit map: tiers are as the experts are stored; convert needs a --bit-map"
    kept = "+".join(sorted({str(layer.kept_format).upper() for layer in source.layers.values()})) or "4 bits"
    return (
        f"there is no bit map, so no tiers yet: sizes are with every expert kept as {kept}; "
        "hybrid-pack plan makes the --bit-map that convert needs"
    )


def _origin(source: Checkpoint, bit_map_file: Path | None) -> str | None:
    """Which document an opened checkpoint's bit map is from."""
    if source.config.bit_map is None:
        return None
    if bit_map_file is not None:
        return f"--bit-map {bit_map_file}"
    for name in (CONFIG, HF_QUANT_CONFIG):
        if not (source.root / name).is_file():
            continue
        document = source.config.raw if name == CONFIG else read_document(source.root / name)[0]
        raw = find_bit_map(document)
        if raw is not None and parse_bit_map(raw, name) == source.config.bit_map:
            block = document.get("quantization_config")
            return f"{name} quantization_config" if isinstance(block, Mapping) and raw in block.values() else name
    return "--bit-map"  # the caller had one


def inspect_checkpoint(
    source: Checkpoint, *, bit_map_file: Path | None = None, folder: str | None = None
) -> Inspection:
    """Describe an opened checkpoint.

    Args:
        source: The checkpoint.
        bit_map_file: The map it was opened with, if it was one of its own.
        folder: Where it is, to be shown; by default its folder.
    """
    formats = Counter(
        expert.stored.upper() + (" (scale * 16)" if expert.up.format.scale_times_16 else "")
        for layer in source.layers.values()
        for expert in layer.experts.values()
    )
    config, origin = source.config, _origin(source, bit_map_file)
    no_map = () if origin else (_no_map(source),)
    return Inspection(
        kind="checkpoint",
        folder=folder or str(source.root),
        name=source.name,
        model_type=config.model_type,
        hidden=source.hidden,
        intermediate=source.intermediate,
        intermediate_padded=source.intermediate,
        num_experts=config.num_experts,
        top_k=config.top_k,
        activation=config.activation,
        layers=tuple(_layer_view(layer, decided=origin is not None) for layer in source.layers.values()),
        expert_formats=dict(formats.most_common()),
        base_dtypes=_dtypes(source.base),
        base_dialect=_base_dialect({t.header.name: (t.header.dtype, t.header.shape) for t in source.base}),
        file_bytes=sum(f.nbytes for f in source.shards.files),
        topologies=tuple(_topology(source, tp) for tp in TP_SHOWN),
        legal_tp=tuple(legal_tp(source.hidden, source.intermediate, gated=source.gated)),
        legal_ep=tuple(legal_ep(config.num_experts)),
        notes=(*no_map, *source.notes),
        bit_map_from=origin,
        pack=None,
    )


def _rank_bytes(manifest: Manifest, rank: int) -> dict[str, int]:
    totals = {"kept": 0, "tail": 0}
    for layer in manifest.layers:
        for tensor in expected_tensors(manifest, int(layer), rank):
            totals[tensor.tier] += tensor.nbytes
    return totals


def inspect_pack(root: Path, manifest: Manifest, *, folder: str | None = None) -> Inspection:
    """Describe a pack from its manifest and base headers.

    Args:
        root: The pack.
        manifest: Its manifest, checked.
        folder: Where it is, to be shown; by default its folder.

    Raises:
        DataError: A base file is not there, or its header is not right.
    """
    config, _ = read_document(root / "config.json")
    nested = config.get("text_config")
    decoder = {**config, **nested} if isinstance(nested, Mapping) else config
    geometry, layout, topology = manifest.geometry, manifest.layout, topology_of(manifest)
    base = {t.header.name: t for t in pack_base(root, manifest)}
    ranks = tuple(
        RankView(rank, *(_rank_bytes(manifest, rank)[tier] for tier in ("kept", "tail")))
        for rank in range(topology.ranks)
    )
    errors = {(entry.layer, entry.tier): entry.tier_sqnr_db for entry in manifest.report.experts_quantized}
    formats = Counter[str]()
    for tiers in manifest.layers.values():
        formats[KEPT_NAMES[tiers.kept_scale_format]] += len(tiers.kept)
        formats["NF3"] += len(tiers.tail)
    return Inspection(
        kind="pack",
        folder=folder or str(root),
        name=manifest.source.name,
        model_type=str(decoder.get("model_type") or "unknown"),
        hidden=geometry.hidden_size,
        intermediate=geometry.intermediate_size,
        intermediate_padded=geometry.intermediate_size_padded,
        num_experts=geometry.num_experts,
        top_k=geometry.top_k,
        activation=layout.activation,
        layers=tuple(
            LayerView(
                *(int(i), tiers.kept, tiers.tail, KEPT_NAMES[tiers.kept_scale_format], None),
                kept_sqnr_db=errors.get((int(i), "kept")),
                tail_sqnr_db=errors.get((int(i), "tail")),
            )
            for i, tiers in manifest.layers.items()
        ),
        expert_formats={kind: count for kind, count in formats.most_common() if count},
        base_dtypes=_dtypes(base.values()),
        base_dialect=_base_dialect({n: (t.header.dtype, t.header.shape) for n, t in base.items()}),
        file_bytes=sum(s.bytes for s in manifest.shards)
        + sum(f.bytes for f in (*manifest.base.files, *manifest.files)),
        topologies=(
            TopologyView(
                tp=topology.tensor_parallel,
                why_not=None,
                tiles=layout.tiles,
                kept_bytes=max(r.kept_bytes for r in ranks),
                tail_bytes=max(r.tail_bytes for r in ranks),
            ),
        ),
        legal_tp=(topology.tensor_parallel,),
        legal_ep=(topology.expert_parallel,),
        notes=manifest.report.notes,
        bit_map_from=MANIFEST,
        pack=PackView(
            tensor_parallel=topology.tensor_parallel,
            expert_parallel=topology.expert_parallel,
            ranks=ranks,
            created_by=f"{manifest.created_by.tool} {manifest.created_by.version}",
            abi=layout.abi,
            self_digest=manifest.self_digest,
            declared=declared(manifest.report),
            worst_experts=tuple(worst_of_tiers(manifest.report)),
        ),
    )


def open_path(root: Path, *, bit_map: Path | None = None, name: str | None = None) -> Checkpoint | Manifest:
    """A folder's checkpoint, opened, or its pack's manifest, checked.

    Args:
        root: The folder of a checkpoint or a pack.
        bit_map: A bit map that replaces the checkpoint's own; a pack takes none.
        name: Hub id it was fetched by, if it was.

    Raises:
        UsageError: Not a folder, or a bit map for a pack.
        DataError: Neither a checkpoint nor a pack that is right.
    """
    if not root.is_dir():
        problem = "not a folder" if root.exists() else "no such folder"
        raise UsageError(problem, where=root, expected="a checkpoint or a pack")
    unfinished = (root / STATE).exists()
    if (root / MANIFEST).exists() or unfinished or (root / "experts").is_dir():
        if bit_map is not None:
            raise UsageError("a pack has its own bit map", where="--bit-map", found=f"the pack {root}")
        if unfinished and not (root / MANIFEST).exists():
            raise DataError(
                "an unfinished conversion, or one that is running",
                where=root,
                hint="finish it with convert --resume",
            )
        return read_manifest(root)
    if not any((root / document).is_symlink() or (root / document).exists() for document in (CONFIG, INDEX)):
        raise DataError(f"neither a checkpoint nor a pack: it has no {CONFIG} and no {MANIFEST}", where=root)
    return open_checkpoint(root, bit_map_file=bit_map, name=name, require_map=False)


def inspect_opened(
    opened: Checkpoint | Manifest, root: Path, *, bit_map: Path | None = None, name: str | None = None
) -> Inspection:
    """Describe what ``open_path`` opened, with the same arguments.

    Raises:
        DataError: A pack's base file is not there, or its header is not right.
    """
    if isinstance(opened, Manifest):
        return inspect_pack(root, opened, folder=name)
    return inspect_checkpoint(opened, bit_map_file=bit_map, folder=name)


def inspect_path(
    path: str | os.PathLike[str], *, bit_map_file: str | os.PathLike[str] | None = None, name: str | None = None
) -> Inspection:
    """Describe a folder, whichever it is.

    Args:
        path: The folder of a checkpoint or a pack.
        bit_map_file: A bit map that replaces the checkpoint's own; a pack takes none.
        name: Hub id it was fetched by, if it was.

    Raises:
        UsageError: As ``open_path``.
        DataError: As ``open_path`` and ``inspect_opened``.
    """
    root, bit_map = Path(path), None if bit_map_file is None else Path(bit_map_file)
    return inspect_opened(open_path(root, bit_map=bit_map, name=name), root, bit_map=bit_map, name=name)
