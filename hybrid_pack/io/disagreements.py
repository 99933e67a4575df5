"""What a config says of the experts' storage and headers do not. Headers decide; the difference is worth a line.

One thing headers cannot always decide: the size of FP8 blocks, since ``[ceil(N / rows), ceil(K / columns)]`` scales may
fit several. 128x128 is taken; where the config says another size that fits as well and means other weights, nothing is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hybrid_pack.errors import DataError
from hybrid_pack.formats.source import FP8_BLOCK
from hybrid_pack.io.config import CONFIG, ModelConfig
from hybrid_pack.io.experts import Matrix
from hybrid_pack.io.tiers import Layer

FP8 = frozenset({"fp8_block", "fp8_row", "fp8_tensor"})
CLAIMS: Mapping[str, frozenset[str]] = {
    "nvfp4-pack-quantized": frozenset({"nvfp4"}),
    "mxfp4-pack-quantized": frozenset({"mxfp4"}),
    "mxfp8-quantized": frozenset({"mxfp8"}),
    "float-quantized": FP8,
    "nvfp4": frozenset({"nvfp4"}),
    "mxfp4": frozenset({"mxfp4"}),
    "mxfp8": frozenset({"mxfp8"}),
    "fp8": FP8 | {"mxfp8"},  # some tools call both so
}
"""Formats of experts by what ``CLAIMING`` may say, of compressed-tensors, ModelOpt and transformers."""

CLAIMING = ("format", "quant_algo", "quant_method")
WHOLE_MODEL = ("quant_method", "fp8")
"""Says nothing of experts: DeepSeek-V4's are MXFP4 in such a model."""

Block = tuple[int, int]


def _matrices(layers: Iterable[Layer]) -> Iterator[tuple[int, int, Matrix]]:
    """(layer, expert, matrix) of every matrix."""
    for layer in layers:
        for expert, opened in layer.experts.items():
            for matrix in opened.matrices:
                yield layer.index, expert, matrix


def _sizes(value: Any) -> Block | None:
    numbers = isinstance(value, list) and len(value) == 2 and all(type(v) is int and v > 0 for v in value)
    return (value[0], value[1]) if numbers else None


def claimed_block(quantization: Mapping[str, Any]) -> tuple[str, Block] | None:
    """(key, rows and columns) of the FP8 blocks a config speaks of, if it does."""
    found = [("weight_block_size", quantization.get("weight_block_size"))]
    groups = quantization.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            found.append((f"config_groups.{name}.weights.block_structure", weights.get("block_structure")))
    return next(((key, size) for key, value in found if (size := _sizes(value)) is not None), None)


def _scales(size: int, block: int) -> int:
    return -(-size // block)


def block_notes(layers: Iterable[Layer], config: ModelConfig) -> list[str]:
    """Hold the config's FP8 block size against the headers.

    Returns:
        A line where some matrix cannot have it; those that could are read as 128x128 like that one. One where it is
        none.

    Raises:
        DataError: Every matrix may have it, and it would mean other weights than 128x128.
    """
    claim = claimed_block(config.quantization)
    value = config.quantization.get("weight_block_size")
    odd = value is not None and _sizes(value) is None
    notes = [f"weight_block_size is not two sizes, and not looked at: {value!r:.60}"] if odd else []
    if claim is None or claim[1] == (FP8_BLOCK, FP8_BLOCK):
        return notes
    key, (rows, columns) = claim
    says = f"blocks of {rows}x{columns} by {key} of {CONFIG}"
    other: tuple[int, int, Matrix] | None = None
    for layer, expert, matrix in _matrices(layers):
        if matrix.format.name != "fp8_block":
            continue
        size = (matrix.stored_rows, matrix.columns)
        if any(_scales(n, FP8_BLOCK) != _scales(n, b) for n, b in zip(size, (rows, columns), strict=True)):
            line = f"layer {layer} expert {expert} is stored in FP8 blocks of {FP8_BLOCK}x{FP8_BLOCK}, not in {says}"
            return [*notes, line]
        if other is None and any(n > b != FP8_BLOCK for n, b in zip(size, (rows, columns), strict=True)):
            other = layer, expert, matrix
    if other is None:
        return notes
    layer, expert, matrix = other
    raise DataError(
        f"layer {layer} expert {expert}: its scales fit FP8 blocks of {FP8_BLOCK}x{FP8_BLOCK}, which can be read, and "
        "of another size by the config as well",
        where=matrix.scales,
        expected=f"blocks of {FP8_BLOCK}x{FP8_BLOCK}",
        found=says,
        hint=f"where the config is wrong, correct {key}",
    )


def claim_notes(layers: Iterable[Layer], config: ModelConfig) -> list[str]:
    """A line where the config names a format that no expert is stored in."""
    stored = {str(matrix.format.name) for _, _, matrix in _matrices(layers)} - {"nf3"}  # a tail's, beside what is kept
    for key in CLAIMING:
        value = config.quantization.get(key)
        claimed = CLAIMS.get(value.lower()) if isinstance(value, str) and (key, value) != WHOLE_MODEL else None
        if claimed is not None and stored and not claimed & stored:
            kinds = ", ".join(sorted(name.upper() for name in stored))
            return [f"the config says {value} ({key}), yet no expert is stored so: they are {kinds}, and read as such"]
        if claimed is not None:
            break
    return []


def kept_notes(layers: Iterable[Layer], config: ModelConfig) -> list[str]:
    """A line where ``kept_format``, which says how a hybrid checkpoint is stored, is not what will be packed."""
    for layer in layers:
        if config.kept_format is not None and layer.kept and layer.kept_format != config.kept_format:
            wanted, packed = config.kept_format, str(layer.kept_format)
            return [
                f"the config's kept_format says {wanted.upper()}, yet layer {layer.index} has no such experts: they "
                f"are packed as {packed.upper()}; --kept-format decides"
            ]
    return []
