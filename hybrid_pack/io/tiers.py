"""Which experts of a layer are kept and which are tail: what the bit map says, held against what is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hybrid_pack.errors import DataError
from hybrid_pack.formats.source import FOUR_BIT, Unsupported
from hybrid_pack.io.bitmap import TAIL_BITS
from hybrid_pack.io.config import CONFIG, ModelConfig
from hybrid_pack.io.experts import Expert, LayerTensors, experts_of

KeptFormat = Literal["nvfp4", "mxfp4"]
READABLE = "NVFP4, MXFP4, NF3, MXFP8, FP8, BF16, F16 or F32"


@dataclass(frozen=True)
class Layer:
    """A layer whose experts are packed.

    Attributes:
        index: Decoder layer.
        experts: By global id.
        kept: Ids in the kept tier, ascending.
        tail: Ids in the tail tier, ascending.
        kept_format: What the kept tier is packed as, ``nvfp4`` or ``mxfp4``; None where no expert is kept.
        mapped: Whether the bit map names the layer.
    """

    index: int
    experts: Mapping[int, Expert]
    kept: tuple[int, ...]
    tail: tuple[int, ...]
    kept_format: str | None
    mapped: bool

    @property
    def stored(self) -> Mapping[int, str]:
        """What each expert is stored as: ``nvfp4``, ``bf16``, or ``mxfp4+bf16`` where its matrices differ."""
        return {e: expert.stored for e, expert in self.experts.items()}


@dataclass(frozen=True)
class OpenedLayer:
    """A layer's experts before their tiers are known.

    Attributes:
        index: Decoder layer.
        experts: By global id; empty where the layer stays in the base.
        stays: Why it stays in the base, if it does.
        bits: What the map says of it; None where it does not name it.
    """

    index: int
    experts: Mapping[int, Expert]
    stays: str | None
    bits: tuple[int, ...] | None

    @property
    def has_nf3(self) -> bool:
        """Whether some matrix is stored as NF3."""
        return any(m.format.name == "nf3" for expert in self.experts.values() for m in expert.matrices)


def _count(index: int, tensors: LayerTensors, bits: tuple[int, ...] | None, config: ModelConfig) -> None:
    experts, where = tensors.experts, next(tensors.located()).path.parent
    if not tensors.family.fused:
        lost = next((e for e in range(config.num_experts) if e not in experts), None)
        if lost is not None or len(experts) != config.num_experts:
            raise DataError(
                f"layer {index}: expert {max(experts)} is one too many"
                if lost is None
                else f"layer {index}: expert {lost} is missing",
                where=where,
                expected=f"{config.num_experts} experts by {CONFIG}",
                found=len(experts),
            )
    if bits is not None and len(bits) != config.num_experts:
        raise DataError(
            f"layer {index} of the bit map",
            where=config.bit_map_from,
            expected=f"{config.num_experts} entries, the experts by {CONFIG}",
            found=len(bits),
        )


def _says(bits: tuple[int, ...] | None, expert: int, config: ModelConfig) -> str:
    if config.bit_map is None:
        return ":"
    if bits is None:
        return " is not in the bit map;"
    return f" is {'tail' if bits[expert] == TAIL_BITS else 'kept'} by the bit map;"


def open_layer(index: int, tensors: LayerTensors, config: ModelConfig, mx_bias: int) -> OpenedLayer:
    """Locate a layer's experts.

    A layer the map does not name is packed where all of it is packed in four bits, and stays in the base where all of
    it is wide. Without a map, every layer is packed.

    Raises:
        DataError: An expert is missing or one too many, its format cannot be read, or the layer is neither of the two.
    """
    bits = None if config.bit_map is None else config.bit_map.get(index)
    _count(index, tensors, bits, config)
    unmapped = config.bit_map is not None and bits is None
    opened: dict[int, Expert] = {}
    wide: dict[int, str] = {}
    for expert, result in experts_of(index, tensors, config, mx_bias):
        if isinstance(result, Unsupported):
            if bits is not None or not result.wide:
                raise DataError(
                    f"layer {index} expert {expert}{_says(bits, expert, config)} its stored format cannot be packed",
                    where=next(tensors.located()).path if tensors.family.fused else _path(tensors, expert),
                    found=result.reason,
                    expected=READABLE,
                )
            wide[expert] = result.reason
            continue
        opened[expert] = result
        widest = next((m for m in result.matrices if m.format.wide), None)
        if unmapped and widest is not None:
            wide[expert] = f"{widest.name}: {widest.format.codes_field} is {widest.codes.header.dtype}"
            if all(m.format.wide for m in result.matrices):
                del opened[expert]
    if wide and opened:
        first = min(opened)
        raise DataError(
            f"layer {index}{'' if config.bit_map is None else ', not in the bit map,'} mixes packed and wide experts",
            expected="all NVFP4/MXFP4 or all BF16/FP8",
            found=f"expert {first} {opened[first].stored}, expert {min(wide)}: {wide[min(wide)]}",
        )
    return OpenedLayer(index, opened, wide[min(wide)] if wide else None, bits)


def _path(tensors: LayerTensors, expert: int) -> object:
    return next(at.path for fields in tensors.experts[expert].values() for at in fields.values())


def tiers(
    layer: OpenedLayer, config: ModelConfig, *, hybrid: bool, requantize: bool, kept_format: KeptFormat | None
) -> Layer:
    """Sort a layer's experts into tiers, as the map says, or as they are stored where there is none.

    Args:
        layer: The layer.
        config: Of the model.
        hybrid: Whether the source has an expert stored as NF3 anywhere. Its map then says what is stored, so that a
            4-bit expert called tail means a wrong map. Elsewhere a map says what is wanted, and the tail is made.
        requantize: Take a map that makes tail experts of 4-bit ones of a hybrid source.
        kept_format: What the kept tier is packed as, whatever it is stored as.

    Raises:
        DataError: Map, config and stored formats disagree.
    """
    bits = layer.bits
    kept: list[int] = []
    tail: list[int] = []
    for e, expert in layer.experts.items():
        names = {m.format.name for m in expert.matrices}
        if config.bit_map is None:
            is_tail = "nf3" in names
        else:
            is_tail = bits is not None and bits[e] == TAIL_BITS
            wrong = (names & FOUR_BIT if hybrid and not requantize else ()) if is_tail else names & {"nf3"}
            if wrong:
                says = "not named by the bit map, so kept" if bits is None else ("tail (3)" if is_tail else "kept (4)")
                raise DataError(
                    f"layer {layer.index} expert {e}: the bit map and the stored format disagree",
                    where=next(m.codes for m in expert.matrices if m.format.name in wrong),
                    expected=f"{'NF3' if is_tail else 'NVFP4 or MXFP4'}: the expert is {says}",
                    found=expert.stored.upper(),
                    hint="give the right map with --bit-map"
                    + (", or --requantize to make tail experts of 4-bit ones" if is_tail and not requantize else ""),
                )
        (tail if is_tail else kept).append(e)
    stored = {m.format.name: e for e in reversed(kept) for m in reversed(layer.experts[e].matrices)}
    claimed = config.kept_format if hybrid and bits is not None else None
    other = next((name for name in sorted(stored) if name in FOUR_BIT and claimed not in (None, name)), None)
    if other is not None:
        e = stored[other]
        raise DataError(
            f"layer {layer.index} expert {e}: config and stored format disagree",
            where=next(m.codes for m in layer.experts[e].matrices if m.format.name == other),
            expected=f"{str(claimed).upper()} by kept_format",
            found=other.upper(),
        )
    target: str | None = None
    if kept:
        target = kept_format or ("mxfp4" if set(stored) == {"mxfp4"} else "nvfp4")
    return Layer(layer.index, layer.experts, tuple(kept), tuple(tail), target, bits is not None)
