"""The manifest of a pack, ``hybrid_pack.json``, format version 1. Unknown keys are refused."""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

FORMAT = "hybrid-pack"
FORMAT_VERSION = 1
LAYOUT_ABI = "b12x-1.1.0/nf3_2p1+packed/1"
"""Changes whenever the bytes of the same input and options would."""

Size = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
PlainDigest = Annotated[str, StringConstraints(pattern=r"^blake3:[0-9a-f]{64}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^blake3(-rows|-shard)?:[0-9a-f]{64}$")]
KeptScaleFormat = Literal["e4m3_k16", "e8m0_k32"]
MAX_PATH_CHARS = 1024
MAX_NAME_BYTES = 240
"""Of a part of a path; file systems hold 255, and files have longer names while they are written."""


def is_pack_path(path: str) -> bool:
    """Whether it is a relative POSIX path without ``..`` that every file system can hold."""
    parts = path.split("/")
    bad = any(part in ("", ".", "..") for part in parts) or re.search(r"[\x00-\x1f\x7f\\:\ud800-\udfff]", path)
    if bad or any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        return False
    return len(path) <= MAX_PATH_CHARS and unicodedata.normalize("NFC", path) == path


def path_key(path: str) -> str:
    """The same for paths that some file system takes for one."""
    return unicodedata.normalize("NFKC", path).casefold()


def _inside(path: str) -> str:
    """Nothing in a manifest leads outside its pack."""
    if not is_pack_path(path):
        raise ValueError("not a plain relative path inside the pack")
    return path


PackPath = Annotated[str, StringConstraints(min_length=1, max_length=MAX_PATH_CHARS), AfterValidator(_inside)]


class Strict(BaseModel):
    """Frozen, with unknown keys and silent conversions refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class CreatedBy(Strict):
    """Who wrote the pack."""

    tool: str
    version: str


class LayoutInfo(Strict):
    """How the bytes are laid out; a reader of another layout must refuse the pack."""

    abi: str
    tiles: tuple[Count, Count, Count, Count]
    kept_weight_layout: Literal["packed"]
    tail_weight_layout: Literal["nf3_2p1"]
    tail_scale_format: Literal["e4m3_k32"]
    w13_order: Literal["gate_up", "up"]
    expert_biases: bool
    nf3_levels: Annotated[tuple[float, ...], Field(min_length=8, max_length=8)]
    activation: str


class TopologyInfo(Strict):
    """How experts are split; rank = ep_rank * tensor_parallel + tp_rank."""

    tensor_parallel: Count
    expert_parallel: Count


class Geometry(Strict):
    """Sizes of the whole model's experts."""

    hidden_size: Count
    intermediate_size: Count
    intermediate_size_padded: Count
    num_experts: Count
    top_k: Count


class LayerTiers(Strict):
    """Which experts of a layer are in which tier, ascending global ids."""

    kept: tuple[Size, ...]
    tail: tuple[Size, ...]
    kept_scale_format: KeptScaleFormat | None


class TensorEntry(Strict):
    """A tensor of a shard; offsets are absolute in the file."""

    dtype: Literal["I32", "U8", "F32"]
    shape: tuple[Size, ...]
    begin: Size
    end: Size
    digest: Digest


class ShardEntry(Strict):
    """The file of one rank and one layer."""

    path: PackPath
    layer: Size
    rank: Size
    bytes: Size
    digest: Digest
    tensors: dict[str, TensorEntry]


class FileEntry(Strict):
    """Any other file of the pack."""

    path: PackPath
    bytes: Size
    digest: Digest


class BaseFiles(Strict):
    """The base tensors: the path of their index, which is among ``files``, and their files. No base tensors: none."""

    index: PackPath | None
    files: tuple[FileEntry, ...]


class SourceFile(Strict):
    """A safetensors file of the source; the digest covers its header."""

    path: PackPath
    bytes: Size
    digest: PlainDigest


class SourceInfo(Strict):
    """What the pack was made from."""

    name: str
    config_digest: PlainDigest
    index_digest: PlainDigest
    files: tuple[SourceFile, ...]


class Requantized(Strict):
    """An expert whose gate and up scales were brought to one second-level scale with rounding."""

    layer: Size
    expert: Size
    worst_relative_error: Annotated[float, Field(ge=0, allow_inf_nan=False)]


Decibel = Annotated[float, Field(ge=-10_000, le=10_000, allow_inf_nan=False)]
"""More than the square of what binary64 holds needs."""
SearchName = Literal["absmax", "mse", "weighted"]


class QuantizedTier(Strict):
    """Experts of one tier of a layer whose codes were made here, and how far they are from the source's weights.

    SQNR is 10 log10 of the sum of squares of the source's weights over that of the differences, all three matrices
    together; null where there is no difference. It is unweighted, whatever the method minimised. ``gptq_to_rtn`` is the
    error that GPTQ minimises, over that of rounding to nearest on the same Hessians.
    """

    layer: Size
    tier: Literal["kept", "tail"]
    method: Literal["absmax", "mse", "weighted", "gptq"]
    sources: tuple[str, ...]
    experts: tuple[Size, ...]
    sqnr_db: tuple[Decibel | None, ...]
    tier_sqnr_db: Decibel | None
    gptq_to_rtn: Annotated[float, Field(ge=0, le=1)] | None
    groups: Size
    groups_zero_scale: Size
    scales_subnormal: Size
    scales_saturated: Size


class Options(Strict):
    """Options of the conversion that decide the bytes of the experts; the bit map is in config.json."""

    kept_format: Literal["nvfp4", "mxfp4"] | None
    requantize: bool
    mx_bias: Literal[125, 127]
    search: SearchName
    importance: PlainDigest | None
    hessians: PlainDigest | None


class Report(Strict):
    """What conversion met. Every group of the source is counted once, whatever the number of ranks."""

    experts_kept: Size
    experts_tail: Size
    groups_zero_scale: Size
    blocks_flushed: Size
    scales_saturated: Size
    experts_requantized: tuple[Requantized, ...]
    experts_cast: Size
    experts_quantized: tuple[QuantizedTier, ...]
    options: Options
    layers_omitted: tuple[Size, ...]
    notes: tuple[str, ...]


LayerKey = Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,5})$")]


class Manifest(Strict):
    """``hybrid_pack.json``: written last; without it there is no pack."""

    format: Literal["hybrid-pack"]
    format_version: Literal[1]
    created_by: CreatedBy
    layout: LayoutInfo
    topology: TopologyInfo
    geometry: Geometry
    layers: Annotated[dict[LayerKey, LayerTiers], Field(json_schema_extra={"additionalProperties": False})]
    shards: tuple[ShardEntry, ...]
    base: BaseFiles
    files: tuple[FileEntry, ...]
    source: SourceInfo
    report: Report
    self_digest: Digest

    @model_validator(mode="after")
    def _no_twins(self) -> Manifest:
        """No two files that one file system could take for the same."""
        seen: dict[str, str] = {}
        for path in self.paths():
            key = path_key(path)
            if key in seen:
                raise ValueError(f"two files with one name: {seen[key]} and {path}")
            seen[key] = path
        return self

    def paths(self) -> list[str]:
        """Every file the manifest covers; itself and README.md not."""
        return [s.path for s in self.shards] + [f.path for f in self.base.files] + [f.path for f in self.files]

    def sizes(self) -> dict[str, int]:
        """Bytes of each of them."""
        sizes = {shard.path: shard.bytes for shard in self.shards}
        return sizes | {file.path: file.bytes for file in (*self.base.files, *self.files)}
