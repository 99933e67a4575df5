"""A source checkpoint, opened from headers only: every expert matrix located, its format known, the map agreed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hybrid_pack.errors import DataError, UsageError
from hybrid_pack.io.bitmap import spans
from hybrid_pack.io.config import CONFIG, ModelConfig, is_gated, read_config
from hybrid_pack.io.digest import blake3_digest
from hybrid_pack.io.disagreements import block_notes, claim_notes, kept_notes
from hybrid_pack.io.excludes import matches
from hybrid_pack.io.experts import BIAS, Expert, LayerTensors, Matrix, RowView
from hybrid_pack.io.names import likeliest_expert, looks_like_expert, parse
from hybrid_pack.io.safetensors import FileHeader
from hybrid_pack.io.shards import Located, Shards, read_shards
from hybrid_pack.io.tiers import KeptFormat, Layer, open_layer, tiers
from hybrid_pack.runnable import levels_problem, why_not_run

__all__ = [
    "Checkpoint", "Expert", "KeptFormat", "Layer", "Matrix", "RowView", "SourceOptions", "open_checkpoint",
    "source_name",
]  # fmt: skip

HUB_CACHE_FOLDER = re.compile(r"models--([^/]+?)--([^/]+)")


@dataclass(frozen=True)
class SourceOptions:
    """How a source was opened, as far as that decides what is packed.

    Attributes:
        kept_format: What the kept tier is packed as, where that was asked for.
        requantize: Whether 4-bit experts may become tail beside a stored tail.
        mx_bias: Bias of the E8M0 scales of compressed-tensors' MXFP4.
    """

    kept_format: KeptFormat | None = None
    requantize: bool = False
    mx_bias: int = 127


@dataclass(frozen=True)
class Checkpoint:
    """A source.

    Attributes:
        name: Hub id or folder name, never a path.
        root: Its folder.
        config: Its configuration.
        shards: Its files.
        layers: Layers to pack, by index.
        hidden: H.
        intermediate: I.
        base: Tensors that stay as they are, in (file, offset) order.
        notes: Oddities that are no errors.
        expert_biases: Whether experts have biases; they are base tensors.
        options: How it was opened.
        config_digest: Digest of config.json and hf_quant_config.json.
        index_digest: Digest of the index, or of the single file's header.
    """

    name: str
    root: Path
    config: ModelConfig
    shards: Shards
    layers: Mapping[int, Layer]
    hidden: int
    intermediate: int
    base: tuple[Located, ...]
    notes: tuple[str, ...]
    expert_biases: bool
    options: SourceOptions
    config_digest: str
    index_digest: str

    @property
    def gated(self) -> bool:
        """Whether every expert has a gate."""
        return all(e.gate is not None for layer in self.layers.values() for e in layer.experts.values())

    def file_name(self, file: FileHeader) -> str:
        """Path of one of its files inside its folder."""
        return file.path.relative_to(self.root).as_posix()


def source_name(root: Path) -> str:
    """The name a pack remembers: ``org/name`` for a snapshot in the Hugging Face cache, else the folder's name."""
    match = next((m for part in reversed(root.absolute().parts) if (m := HUB_CACHE_FOLDER.fullmatch(part))), None)
    return f"{match[1]}/{match[2]}" if match else root.resolve().name


def _group(shards: Shards) -> tuple[dict[int, LayerTensors], list[Located], list[str]]:
    """(experts' tensors by layer; every other tensor; notes)."""
    grouped: dict[int, LayerTensors] = {}
    others: list[Located] = []
    strangers: list[str] = []
    for tensor, located in shards.tensors.items():
        name = parse(tensor)
        if name is None:
            others.append(located)
            if looks_like_expert(tensor):
                strangers.append(tensor)
            continue
        if name.field == BIAS:
            others.append(located)
        layer = grouped.setdefault(name.layer, LayerTensors(name.family))
        if layer.family is not name.family:
            raise DataError(
                f"layer {name.layer} names its experts in two ways",
                where=located,
                found=f"{layer.family.prefix} and {name.family.prefix}",
            )
        roles = layer.stacks if name.expert is None else layer.experts.setdefault(name.expert, {})
        roles.setdefault(name.role, {})[name.field] = located
    notes = []
    if strangers:
        notes.append(
            f"{len(strangers)} expert-like tensors match no known name and stay in the base, such as {strangers[0]}"
        )
    return grouped, others, notes


def _exclude_notes(layers: Iterable[Layer], config: ModelConfig) -> list[str]:
    """Headers decide; an exclude list that says otherwise is reported with layer and expert."""
    patterns = [
        pattern
        for key in ("ignore", "exclude_modules", "ignored_layers", "modules_to_not_convert")
        if isinstance(listed := config.quantization.get(key), list)
        for pattern in listed
        if isinstance(pattern, str)
    ]
    for layer in layers:
        matrix = layer.experts[0].matrices[0]
        module = matrix.name.partition("[")[0]
        hit = next((p for p in patterns if matches(p, module)), None)
        stored = matrix.format.name.upper()
        if hit is not None and matrix.format.scale_field is not None:
            return [
                f"the config excludes {module} (layer {layer.index} expert 0) by {hit!r}, yet it is stored as {stored}"
            ]
        quantised = any(config.quantization.get(key) for key in ("quant_method", "quant_algo"))
        if hit is None and quantised and matrix.format.scale_field is None:
            return [f"the config quantises {module} (layer {layer.index} expert 0), yet it is stored as {stored}"]
    return []


def _format_notes(layers: Iterable[Layer], config: ModelConfig) -> list[str]:
    """Headers decide; a config without ``kept_format`` means NVFP4, so MXFP4 experts are worth a line."""
    found = next((layer.index for layer in layers if layer.mapped and "mxfp4" in _kept(layer)), None)
    if found is None or config.kept_format is not None:
        return []
    return [
        f"layer {found}: kept experts are stored as MXFP4, though the config has no kept_format (which means NVFP4)"
    ]


def _kept(layer: Layer) -> set[str]:
    return {layer.experts[e].stored for e in layer.kept}


def _require_gates(config: ModelConfig, layers: Mapping[int, Layer]) -> None:
    """Experts have a gate where the activation needs one.

    Raises:
        DataError: Experts without a gate whose activation needs one, or the other way round.
    """
    for layer in layers.values():
        gated = layer.experts[0].gate is not None
        if gated != is_gated(config.activation):
            raise DataError(
                f"layer {layer.index}: its experts have {'a' if gated else 'no'} gate",
                where=layer.experts[0].matrices[0].codes,
                expected=f"{'no' if gated else 'a'} gate for the activation {config.activation!r} of {CONFIG}",
            )


def _strangest(shards: Shards) -> str:
    """What there is instead of experts."""
    name = likeliest_expert(shards.tensors)
    return f"{len(shards.tensors)} tensors" + ("" if name is None else f", such as {name}")


def _bias_notes(layers: Iterable[Layer], mx_bias: int) -> list[str]:
    """MXFP4 of compressed-tensors whose bias is taken to be what it is today, which no header tells."""
    experts = (expert for layer in layers for expert in layer.experts.values())
    if mx_bias != 127 or not any(
        m.format.name == "mxfp4" and m.format.codes_field == "weight_packed" for e in experts for m in e.matrices
    ):
        return []
    return [
        "MXFP4 as compressed-tensors stores it: exports from before 2026-01 have scales with a bias of 125 and need "
        "--mx-bias 125"
    ]


def _run_notes(layers: Collection[Layer], config: ModelConfig, *, biased: bool) -> list[str]:
    """What keeps runtimes from running a pack of these experts, however well it was made."""
    problem = why_not_run(config.activation, gated=is_gated(config.activation), biases=biased)
    if problem is not None:
        return [
            f"no runtime of this version runs these experts: {problem}. A pack of them is marked so (layout of "
            "hybrid_pack.json): HybridMoE and vLLM's plugin refuse it by name"
        ]
    levels = levels_problem(config.nf3_levels) if any(layer.tail for layer in layers) else None
    return [] if levels is None else [f"only the backend torch, a slow reference, runs a pack of this tail: {levels}"]


def _require_bias_use(layers: Iterable[Layer], mx_bias: int) -> None:
    formats = (m.format for layer in layers for e in layer.experts.values() for m in e.matrices)
    if mx_bias != 127 and not any(form.scale_bias == mx_bias for form in formats):
        raise UsageError(
            f"a bias of {mx_bias} for the scales of MXFP4",
            expected="MXFP4 experts as compressed-tensors stores them",
            found="none",
        )


def open_checkpoint(
    root: str | Path,
    *,
    bit_map_file: str | Path | None = None,
    name: str | None = None,
    require_map: bool = True,
    kept_format: KeptFormat | None = None,
    requantize: bool = False,
    mx_bias: int = 127,
) -> Checkpoint:
    """Open a source checkpoint: all headers read and agreed, no payload touched.

    Args:
        root: Its folder.
        bit_map_file: A bit map that replaces the checkpoint's own.
        name: Name to remember; by default the Hub id or folder name.
        require_map: Refuse a checkpoint without a bit map; otherwise the stored formats alone tell its tiers.
        kept_format: What the kept tier is packed as; by default what its experts are stored as, NVFP4 where they are
            wide or of both formats.
        requantize: Take a map that makes tail experts of 4-bit ones, though the source has a tail of its own.
        mx_bias: Bias of the E8M0 scales of compressed-tensors' MXFP4: 125 for exports from before 2026.

    Raises:
        DataError: Any fault of the checkpoint, naming file, tensor, layer and expert.
        UsageError: An option that does not fit the checkpoint.
        EnvironmentFailure: A file cannot be read.
    """
    root, bit_map_file = Path(root), None if bit_map_file is None else Path(bit_map_file)
    if mx_bias not in (125, 127):
        raise UsageError("the bias of MXFP4 scales", expected="127 or 125", found=mx_bias)
    config = read_config(root, bit_map_file)
    if config.bit_map is None and require_map:
        raise DataError("no hybrid_bit_map", where=root / CONFIG, hint="give one with --bit-map FILE")
    shards = read_shards(root)
    grouped, others, notes = _group(shards)
    if not grouped:
        raise DataError(
            "no routed expert found under any known name",
            where=root,
            found=_strangest(shards),
            hint="is the family in hybrid_pack/io/names.py?",
        )
    missing = sorted(set(config.bit_map or ()) - set(grouped))
    if missing:
        raise DataError(
            f"layer {missing[0]} is in the bit map but has no experts",
            where=root,
            found=f"experts in layers {spans(sorted(grouped))}",
            hint=notes[0] if notes else None,
        )
    opened = [open_layer(index, grouped[index], config, mx_bias) for index in sorted(grouped)]
    hybrid = any(layer.has_nf3 for layer in opened)
    layers: dict[int, Layer] = {}
    for layer in opened:
        if layer.stays is not None:
            what = "not packed" if config.bit_map is None else "not in the bit map and not packed"
            notes.append(f"layer {layer.index} is {what} ({layer.stays}): its experts stay in the base")
            others += grouped[layer.index].located()
        else:
            layers[layer.index] = tiers(layer, config, hybrid=hybrid, requantize=requantize, kept_format=kept_format)
    _require_bias_use(layers.values(), mx_bias)
    biased = any(expert.biases for layer in layers.values() for expert in layer.experts.values())
    _require_gates(config, layers)
    notes += _run_notes(layers.values(), config, biased=biased)
    index_digest = shards.files[0].digest if shards.index_text is None else blake3_digest(shards.index_text)
    order = {file.path: i for i, file in enumerate(shards.files)}
    return Checkpoint(
        name=name or source_name(root),
        root=root,
        config=config,
        shards=shards,
        layers=layers,
        hidden=config.hidden,
        intermediate=config.intermediate,
        base=tuple(sorted(others, key=lambda at: (order[at.path], at.header.begin, at.header.name))),
        notes=(
            *config.notes,
            *shards.notes,
            *notes,
            *(_format_notes if hybrid else kept_notes)(layers.values(), config),
            *(claim_notes(layers.values(), config) or _exclude_notes(layers.values(), config)),
            *block_notes(layers.values(), config),
            *_bias_notes(layers.values(), mx_bias),
        ),
        expert_biases=biased,
        options=SourceOptions(kept_format, requantize, mx_bias),
        config_digest=blake3_digest(config.digest_input),
        index_digest=index_digest,
    )
