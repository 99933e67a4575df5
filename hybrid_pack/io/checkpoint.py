"""A source checkpoint, opened from headers only: every expert matrix located, its format known, the map agreed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hybrid_pack.errors import DataError
from hybrid_pack.formats.source import SourceFormat, Unsupported, detect
from hybrid_pack.io.bitmap import TAIL_BITS, spans
from hybrid_pack.io.config import CONFIG, ModelConfig, read_config
from hybrid_pack.io.digest import blake3_digest
from hybrid_pack.io.excludes import matches
from hybrid_pack.io.names import PROJECTION_ROLES, ExpertName, looks_like_expert, parse
from hybrid_pack.io.safetensors import FileHeader
from hybrid_pack.io.shards import Located, Shards, read_shards

UNUSED_FIELDS = frozenset({"input_scale", "input_global_scale", "k_scale", "v_scale"})
"""Activation scales: W4A16 kernels do not use them, so they are dropped, present or not."""

HUB_CACHE_FOLDER = re.compile(r"models--([^/]+?)--([^/]+)")


@dataclass(frozen=True)
class Matrix:
    """One stored expert matrix.

    Attributes:
        name: Tensor name without its field.
        format: How it is stored.
        codes: The packed codes.
        scales: The block scales.
        second: NVFP4's second-level scale.
        rows: N.
        columns: K.
    """

    name: str
    format: SourceFormat
    codes: Located
    scales: Located
    second: Located | None
    rows: int
    columns: int


@dataclass(frozen=True)
class Expert:
    """The three matrices of an expert: gate and up [I, H], down [H, I]."""

    gate: Matrix
    up: Matrix
    down: Matrix

    @property
    def matrices(self) -> tuple[Matrix, Matrix, Matrix]:
        """Gate, up, down."""
        return self.gate, self.up, self.down


@dataclass(frozen=True)
class Layer:
    """A layer whose experts are packed.

    Attributes:
        index: Decoder layer.
        experts: By global id.
        kept: Ids in the kept tier, ascending.
        tail: Ids in the tail tier, ascending.
        kept_format: ``nvfp4`` or ``mxfp4``; None where no expert is kept.
        mapped: Whether the bit map names the layer.
    """

    index: int
    experts: Mapping[int, Expert]
    kept: tuple[int, ...]
    tail: tuple[int, ...]
    kept_format: str | None
    mapped: bool


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
    config_digest: str
    index_digest: str

    def file_name(self, file: FileHeader) -> str:
        """Path of one of its files inside its folder."""
        return file.path.relative_to(self.root).as_posix()


_Fields = dict[str, Located]
_Grouped = dict[int, dict[int, dict[str, _Fields]]]


def source_name(root: Path) -> str:
    """The name a pack remembers: ``org/name`` for a snapshot in the Hugging Face cache, else the folder's name."""
    match = next((m for part in reversed(root.absolute().parts) if (m := HUB_CACHE_FOLDER.fullmatch(part))), None)
    return f"{match[1]}/{match[2]}" if match else root.resolve().name


def _group(shards: Shards) -> tuple[_Grouped, list[Located], list[str]]:
    """(fields by layer, expert and role; every other tensor; notes)."""
    grouped: _Grouped = {}
    names: dict[int, ExpertName] = {}
    others: list[Located] = []
    strangers: list[str] = []
    for tensor, located in shards.tensors.items():
        name = parse(tensor)
        if name is None:
            others.append(located)
            if looks_like_expert(tensor):
                strangers.append(tensor)
            continue
        first = names.setdefault(name.layer, name)
        if first.family is not name.family:
            raise DataError(
                f"layer {name.layer} names its experts in two ways",
                where=located,
                found=f"{first.family.prefix} and {name.family.prefix}",
            )
        fields = grouped.setdefault(name.layer, {}).setdefault(name.expert, {}).setdefault(name.role, {})
        fields[name.field] = located
    notes = []
    if strangers:
        notes.append(
            f"{len(strangers)} expert-like tensors match no known name and stay in the base, such as {strangers[0]}"
        )
    return grouped, others, notes


def _module(fields: _Fields) -> str:
    return next(iter(fields.values())).header.name.rsplit(".", 1)[0]


def _matrix(layer: int, expert: int, fields: _Fields) -> Matrix | Unsupported:
    module = _module(fields)
    result = detect({field: (at.header.dtype, at.header.shape) for field, at in fields.items()})
    if isinstance(result, Unsupported):
        return result
    found, rows, columns = result
    used = {found.codes_field, found.scale_field, found.second_field}
    left = sorted(set(fields) - used - UNUSED_FIELDS)
    where = fields[found.codes_field]
    if left:
        raise DataError(
            f"layer {layer} expert {expert} has a field that {found.name} has not",
            where=fields[left[0]],
            expected=", ".join(sorted(f for f in used if f)),
            found=left[0],
        )
    second = None
    if found.second_field is not None:
        second = fields.get(found.second_field)
        if second is None:
            raise DataError(
                f"layer {layer} expert {expert}: {module}.{found.second_field} is missing",
                where=where.path,
                expected="the F32 second-level scale of NVFP4",
                hint="the export is incomplete; export it again",
            )
        if second.header.dtype != "F32" or second.header.shape not in ((), (1,)):
            raise DataError(
                f"layer {layer} expert {expert}: not a second-level scale",
                where=second,
                expected="F32 [] or [1]",
                found=f"{second.header.dtype} {list(second.header.shape)}",
            )
    return Matrix(module, found, where, fields[found.scale_field], second, rows, columns)


def _file(roles: Mapping[str, _Fields]) -> Path:
    """A file an expert is stored in."""
    return next(at.path for fields in roles.values() for at in fields.values())


def _expert(layer: int, expert: int, roles: Mapping[str, _Fields]) -> Expert | Unsupported:
    missing = [role for role in PROJECTION_ROLES if role not in roles]
    if missing:
        at = next(iter(next(iter(roles.values())).values()))
        raise DataError(
            f"layer {layer} expert {expert} has no {missing[0]} matrix", where=at.path, found=f"only {', '.join(roles)}"
        )
    matrices: dict[str, Matrix] = {}
    for role in PROJECTION_ROLES:
        matrix = _matrix(layer, expert, roles[role])
        if isinstance(matrix, Unsupported):
            return Unsupported(f"{_module(roles[role])}: {matrix.reason}", matrix.wide)
        matrices[role] = matrix
    return Expert(matrices["gate"], matrices["up"], matrices["down"])


def _sizes(layer: int, expert: int, matrices: Expert, config: ModelConfig) -> None:
    """Every expert of every layer has the sizes config.json gives."""
    width, inner = config.hidden, config.intermediate
    for matrix, rows, columns in (
        (matrices.gate, inner, width),
        (matrices.up, inner, width),
        (matrices.down, width, inner),
    ):
        if (matrix.rows, matrix.columns) != (rows, columns):
            raise DataError(
                f"layer {layer} expert {expert}: the stored matrix and {CONFIG} disagree on its size",
                where=matrix.codes,
                expected=f"[{rows}, {columns}] by the config",
                found=f"[{matrix.rows}, {matrix.columns}] ({matrix.format.name})",
            )


def _tier_of(layer: int, expert: int, matrices: Expert) -> str:
    names = {m.format.name for m in matrices.matrices}
    if len(names) > 1:
        found = ", ".join(f"{m.name.rsplit('.', 1)[1]} {m.format.name}" for m in matrices.matrices)
        raise DataError(f"layer {layer} expert {expert} mixes formats", where=matrices.gate.codes.path, found=found)
    return names.pop()


def _layer(index: int, experts: dict[int, dict[str, _Fields]], config: ModelConfig) -> Layer | str:
    """The layer, or why its experts stay in the base."""
    bits = None if config.bit_map is None else config.bit_map.get(index)
    lost = next((e for e in range(config.num_experts) if e not in experts), None)
    if lost is not None or len(experts) != config.num_experts:
        what = f"expert {max(experts)} is one too many" if lost is None else f"expert {lost} is missing"
        raise DataError(
            f"layer {index}: {what}",
            where=_file(next(iter(experts.values()))).parent,
            expected=f"{config.num_experts} experts by {CONFIG}",
            found=len(experts),
        )
    if bits is not None and len(bits) != config.num_experts:
        raise DataError(f"layer {index} of the bit map", expected=f"{config.num_experts} entries", found=len(bits))
    opened: dict[int, Expert] = {}
    kinds: dict[int, str] = {}
    wide: dict[int, str] = {}
    for expert in sorted(experts):
        result = _expert(index, expert, experts[expert])
        if isinstance(result, Unsupported):
            if bits is not None or not result.wide:
                says = (
                    " is not in the bit map;"
                    if bits is None
                    else f" is {'tail' if bits[expert] == TAIL_BITS else 'kept'} by the bit map;"
                )
                raise DataError(
                    f"layer {index} expert {expert}{':' if config.bit_map is None else says} "
                    "its stored format cannot be packed",
                    where=_file(experts[expert]),
                    found=result.reason,
                    expected="NVFP4, MXFP4 or NF3",
                    hint="this version moves what is stored, it does not quantise" if result.wide else None,
                )
            wide[expert] = result.reason
            continue
        _sizes(index, expert, result, config)
        opened[expert], kinds[expert] = result, _tier_of(index, expert, result)
    if wide and opened:
        raise DataError(
            f"layer {index}{'' if config.bit_map is None else ', not in the bit map,'} mixes packed and wide experts",
            expected="all NVFP4/MXFP4 or all BF16/FP8",
            found=f"expert {min(opened)} {kinds[min(opened)]}, expert {min(wide)}: {wide[min(wide)]}",
        )
    if wide:
        return wide[min(wide)]
    return _tiers(index, opened, kinds, bits, config)


def _tiers(
    index: int, opened: dict[int, Expert], kinds: dict[int, str], bits: tuple[int, ...] | None, config: ModelConfig
) -> Layer:
    for expert, kind in kinds.items():
        tail = bits is not None and bits[expert] == TAIL_BITS
        if tail != (kind == "nf3") and config.bit_map is not None:
            says = "not named by the bit map, so kept" if bits is None else ("tail (3)" if tail else "kept (4)")
            raise DataError(
                f"layer {index} expert {expert}: the bit map and the stored format disagree",
                where=opened[expert].gate.codes,
                expected=f"{'NF3' if tail else 'NVFP4 or MXFP4'}: the expert is {says}",
                found=kind.upper(),
                hint="give the right map with --bit-map",
            )
    kept = tuple(e for e, kind in kinds.items() if kind != "nf3")
    tail_ids = tuple(e for e, kind in kinds.items() if kind == "nf3")
    formats = {kinds[e]: e for e in reversed(kept)}
    if len(formats) > 1:
        found = ", ".join(f"expert {e} {kind.upper()}" for kind, e in sorted(formats.items()))
        raise DataError(f"layer {index}: kept experts of two formats", expected="one", found=found)
    kept_format = next(iter(formats), None)
    if bits is not None and kept and config.kept_format is not None and config.kept_format != kept_format:
        raise DataError(
            f"layer {index} expert {kept[0]}: config and stored format disagree",
            where=opened[kept[0]].gate.codes,
            expected=f"{config.kept_format.upper()} by kept_format",
            found=str(kept_format).upper(),
        )
    return Layer(index, opened, kept, tail_ids, kept_format, bits is not None)


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
        module = layer.experts[0].gate.name
        hit = next((p for p in patterns if matches(p, module)), None)
        if hit is not None:
            stored = layer.experts[0].gate.format.name.upper()
            return [
                f"the config excludes {module} (layer {layer.index} expert 0) by {hit!r}, yet it is stored as {stored}"
            ]
    return []


def _format_notes(layers: Iterable[Layer], config: ModelConfig) -> list[str]:
    """Headers decide; a config without ``kept_format`` means NVFP4, so MXFP4 experts are worth a line."""
    found = next((layer.index for layer in layers if layer.mapped and layer.kept_format == "mxfp4"), None)
    if found is None or config.kept_format is not None:
        return []
    return [
        f"layer {found}: kept experts are stored as MXFP4, though the config has no kept_format (which means NVFP4)"
    ]


def open_checkpoint(
    root: str | Path, *, bit_map_file: str | Path | None = None, name: str | None = None, require_map: bool = True
) -> Checkpoint:
    """Open a source checkpoint: all headers read and agreed, no payload touched.

    Args:
        root: Its folder.
        bit_map_file: A bit map that replaces the checkpoint's own.
        name: Name to remember; by default the Hub id or folder name.
        require_map: Refuse a checkpoint without a bit map; otherwise the stored formats alone tell its tiers.

    Raises:
        DataError: Any fault of the checkpoint, naming file, tensor, layer and expert.
        EnvironmentFailure: A file cannot be read.
    """
    root, bit_map_file = Path(root), None if bit_map_file is None else Path(bit_map_file)
    config = read_config(root, bit_map_file)
    if config.bit_map is None and require_map:
        raise DataError("no hybrid_bit_map", where=root / CONFIG, hint="give one with --bit-map FILE")
    shards = read_shards(root)
    grouped, others, notes = _group(shards)
    if not grouped:
        raise DataError(
            "no routed expert found under any known name",
            where=root,
            found=f"{len(shards.tensors)} tensors",
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
    layers: dict[int, Layer] = {}
    for index in sorted(grouped):
        result = _layer(index, grouped[index], config)
        if isinstance(result, str):
            what = "not packed" if config.bit_map is None else "not in the bit map and not packed"
            notes.append(f"layer {index} is {what} ({result}): its experts stay in the base")
            others += [at for roles in grouped[index].values() for fields in roles.values() for at in fields.values()]
        else:
            layers[index] = result
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
            *_format_notes(layers.values(), config),
            *_exclude_notes(layers.values(), config),
        ),
        config_digest=blake3_digest(config.digest_input),
        index_digest=index_digest,
    )
