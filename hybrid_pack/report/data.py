"""What a report shows: a frozen view of a pack, made from its manifest alone."""

from __future__ import annotations

import stat
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from hybrid_pack.io.declared import differences, quantized_lines
from hybrid_pack.io.manifest import topology_of
from hybrid_pack.runnable import levels_problem, why_not_run
from hybrid_pack.schemas.manifest import Manifest, Report, ShardEntry

Tier = Literal["kept", "tail"]
TIERS: tuple[Tier, Tier] = ("kept", "tail")
KEPT_NAMES: Mapping[str | None, str] = {"e4m3_k16": "NVFP4", "e8m0_k32": "MXFP4", None: ""}
TAIL_NAME = "NF3"


@dataclass(frozen=True)
class LayerView:
    """Tiers of one layer.

    Attributes:
        layer: Decoder layer.
        kept: Kept expert ids, ascending.
        tail: Tail expert ids, ascending.
        kept_format: ``NVFP4`` or ``MXFP4``; empty where nothing is kept.
    """

    layer: int
    kept: tuple[int, ...]
    tail: tuple[int, ...]
    kept_format: str


@dataclass(frozen=True)
class RankView:
    """What one rank loads.

    Attributes:
        rank: The rank.
        kept_bytes: Of its kept experts, all layers.
        tail_bytes: Likewise of its tail.
        shards: Its files.
        shards_here: Those of them that are in the folder, whole.
    """

    rank: int
    kept_bytes: int
    tail_bytes: int
    shards: int
    shards_here: int

    @property
    def nbytes(self) -> int:
        """Of both tiers."""
        return self.kept_bytes + self.tail_bytes

    def tier_bytes(self, tier: Tier) -> int:
        """Of one tier."""
        return self.kept_bytes if tier == "kept" else self.tail_bytes


@dataclass(frozen=True)
class QuantizedView:
    """Experts of one tier of a layer that were quantised when the pack was made.

    Attributes:
        layer: Decoder layer.
        tier: Their tier.
        method: How codes were chosen.
        sources: Formats they were stored in, in upper case as all formats are shown.
        sqnr_db: By expert id; None where there is no difference.
        tier_sqnr_db: Of all of them together; None likewise.
        gptq_to_rtn: Of GPTQ, the error on the Hessians over that of rounding to nearest, 0 to 1; None otherwise.
        groups: Groups quantised.
        zero: Of these, with scale zero.
        subnormal: With a subnormal scale.
        saturated: With a scale that was cut.
    """

    layer: int
    tier: Tier
    method: str
    sources: tuple[str, ...]
    sqnr_db: Mapping[int, float | None]
    tier_sqnr_db: float | None
    gptq_to_rtn: float | None
    groups: int
    zero: int
    subnormal: int
    saturated: int


@dataclass(frozen=True)
class PackView:
    """Everything a report shows but the scales.

    Attributes:
        name: Of the source.
        made_by: Tool and version.
        abi: Id of the byte rules.
        self_digest: Of the manifest.
        tensor_parallel: Made for.
        expert_parallel: Made for.
        hidden: H.
        intermediate: I.
        num_experts: E.
        top_k: Experts a token visits.
        activation: Of the experts.
        not_run: Why no backend runs them; None where one does.
        not_b12x: Why only the reference backend does; None where b12x does too, or none does.
        matrices: Matrices of an expert, 3 or (without a gate) 2.
        layers: Ascending.
        ranks: Ascending.
        base_bytes: Of all tensors that are no packed expert.
        total_bytes: Of all files that the manifest lists.
        files: Their number.
        quantized: By layer and tier.
        requantized: (layer, expert, worst relative error of a scale).
        experts_cast: Experts whose format was changed without loss.
        counts: What else conversion counted, in words, with the number.
        options: Options of the conversion that decide bytes, in words.
        omitted: Layers whose experts are not in the pack.
        differs: In what the pack is not its source, as far as no other attribute says it.
        notes: Of the conversion.
        source_digests: Of the source, by what they cover.
        source_bytes: Of its safetensors files.
        source_files: Their number.
    """

    name: str
    made_by: str
    abi: str
    self_digest: str
    tensor_parallel: int
    expert_parallel: int
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    activation: str
    not_run: str | None
    not_b12x: str | None
    matrices: int
    layers: tuple[LayerView, ...]
    ranks: tuple[RankView, ...]
    base_bytes: int
    total_bytes: int
    files: int
    quantized: tuple[QuantizedView, ...]
    requantized: tuple[tuple[int, int, float], ...]
    experts_cast: int
    counts: tuple[tuple[str, int], ...]
    options: tuple[tuple[str, str], ...]
    omitted: tuple[int, ...]
    differs: tuple[str, ...]
    notes: tuple[str, ...]
    source_digests: tuple[tuple[str, str], ...]
    source_bytes: int
    source_files: int

    @property
    def experts_kept(self) -> int:
        """Kept experts of all layers."""
        return sum(len(layer.kept) for layer in self.layers)

    @property
    def experts_tail(self) -> int:
        """Tail experts of all layers."""
        return sum(len(layer.tail) for layer in self.layers)

    def experts(self, tier: Tier) -> int:
        """Experts of one tier in all layers."""
        return self.experts_kept if tier == "kept" else self.experts_tail

    @property
    def largest_rank(self) -> RankView:
        """The rank with most bytes."""
        return max(self.ranks, key=lambda rank: rank.nbytes)

    @property
    def expert_bytes(self) -> int:
        """Of the experts on all ranks."""
        return sum(rank.nbytes for rank in self.ranks)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits, scales included, for one weight of an expert."""
        weights = len(self.layers) * self.num_experts * self.matrices * self.hidden * self.intermediate
        return 8 * self.expert_bytes / weights

    @cached_property
    def kept_formats(self) -> tuple[str, ...]:
        """Formats of kept experts, the most frequent first."""
        found = Counter(layer.kept_format for layer in self.layers for _ in layer.kept)
        return tuple(kind for kind, _ in found.most_common())

    def tier_name(self, tier: Tier) -> str:
        """``kept (NVFP4)``, ``tail (NF3)``."""
        formats = " and ".join(self.kept_formats) if tier == "kept" else TAIL_NAME
        return f"{tier} ({formats})" if formats else tier

    def matrix_name(self, matrix: str) -> str:
        """What ``w13`` or ``w2`` is."""
        return "down" if matrix == "w2" else "gate and up" if self.matrices == 3 else "up"

    @property
    def ranks_here(self) -> tuple[int, ...]:
        """Ranks whose files are all in the folder."""
        return tuple(r.rank for r in self.ranks if r.shards_here == r.shards)


def _tier_bytes(shards: Collection[ShardEntry], tier: Tier) -> int:
    return sum(t.end - t.begin for s in shards for name, t in s.tensors.items() if name.startswith(f"{tier}."))


def _ranks(manifest: Manifest, here: Collection[str]) -> tuple[RankView, ...]:
    by_rank: dict[int, list[ShardEntry]] = {rank: [] for rank in range(topology_of(manifest).ranks)}
    for shard in manifest.shards:
        by_rank[shard.rank].append(shard)
    return tuple(
        RankView(
            rank,
            _tier_bytes(shards, "kept"),
            _tier_bytes(shards, "tail"),
            len(shards),
            sum(shard.path in here for shard in shards),
        )
        for rank, shards in by_rank.items()
    )


def _options(manifest: Manifest) -> tuple[tuple[str, str], ...]:
    options = manifest.report.options
    return (
        ("kept format", options.kept_format or "as the source has it"),
        ("search for scales", options.search),
        ("unequal gate and up scales", "requantised" if options.requantize else "refused"),
        ("bias of MXFP4 scales", str(options.mx_bias)),
        ("importance", options.importance or "none"),
        ("Hessians", options.hessians or "none"),
    )


def _differs(report: Report) -> tuple[str, ...]:
    """Differences that no number and no table of a report says, and the warnings."""
    told: dict[str, Any] = {"experts_cast": 0, "blocks_flushed": 0, "scales_saturated": 0}
    told |= {"experts_quantized": (), "experts_requantized": ()}
    warnings = [line for line in quantized_lines(report) if line.startswith("WARNING")]
    return (*warnings, *differences(report.model_copy(update=told)))


def make_view(manifest: Manifest, here: Collection[str]) -> PackView:
    """The view of a manifest.

    Args:
        manifest: Checked.
        here: Paths of the shards that are in the folder, whole.
    """
    report, geometry, layout, source = manifest.report, manifest.geometry, manifest.layout, manifest.source
    files = (*manifest.base.files, *manifest.files)
    gated = layout.w13_order != "up"
    not_run = why_not_run(layout.activation, gated=gated, biases=layout.expert_biases)
    tail = any(tiers.tail for tiers in manifest.layers.values())
    return PackView(
        name=source.name,
        made_by=f"{manifest.created_by.tool} {manifest.created_by.version}",
        abi=layout.abi,
        self_digest=manifest.self_digest,
        tensor_parallel=manifest.topology.tensor_parallel,
        expert_parallel=manifest.topology.expert_parallel,
        hidden=geometry.hidden_size,
        intermediate=geometry.intermediate_size,
        num_experts=geometry.num_experts,
        top_k=geometry.top_k,
        activation=layout.activation,
        not_run=not_run,
        not_b12x=levels_problem(layout.nf3_levels) if tail and not_run is None else None,
        matrices=3 if gated else 2,
        layers=tuple(
            LayerView(int(i), tiers.kept, tiers.tail, KEPT_NAMES[tiers.kept_scale_format])
            for i, tiers in manifest.layers.items()
        ),
        ranks=_ranks(manifest, here),
        base_bytes=sum(file.bytes for file in manifest.base.files),
        total_bytes=sum(shard.bytes for shard in manifest.shards) + sum(file.bytes for file in files),
        files=len(manifest.shards) + len(files),
        quantized=tuple(
            QuantizedView(
                layer=entry.layer,
                tier=entry.tier,
                method=entry.method,
                sources=tuple(source.upper() for source in entry.sources),
                sqnr_db=dict(zip(entry.experts, entry.sqnr_db, strict=True)),
                tier_sqnr_db=entry.tier_sqnr_db,
                gptq_to_rtn=entry.gptq_to_rtn,
                groups=entry.groups,
                zero=entry.groups_zero_scale,
                subnormal=entry.scales_subnormal,
                saturated=entry.scales_saturated,
            )
            for entry in report.experts_quantized
        ),
        requantized=tuple((e.layer, e.expert, e.worst_relative_error) for e in report.experts_requantized),
        experts_cast=report.experts_cast,
        counts=(
            ("groups with scale zero, kept exactly zero", report.groups_zero_scale),
            ("kept blocks too small for the kernel beside the largest of the matrix", report.blocks_flushed),
            ("MXFP4 scales above the kernel's largest, saturated", report.scales_saturated),
        ),
        options=_options(manifest),
        omitted=report.layers_omitted,
        differs=_differs(report),
        notes=report.notes,
        source_digests=(("configuration", source.config_digest), ("index", source.index_digest)),
        source_bytes=sum(file.bytes for file in source.files),
        source_files=len(source.files),
    )


def shards_here(root: Path, manifest: Manifest) -> frozenset[str]:
    """Paths of the shards that are in the folder with the size they should have."""
    return frozenset(shard.path for shard in manifest.shards if is_here(root / shard.path, shard.bytes))


def is_here(path: Path, nbytes: int) -> bool:
    """Whether it is a regular file (links followed) of that size."""
    try:
        state = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(state.st_mode) and state.st_size == nbytes
