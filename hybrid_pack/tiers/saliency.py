"""The saliency file: one number for each layer and expert, larger where keeping the expert matters more.

JSON ``{"3": [0.12, ...], ...}``, alone or as ``{"metric": "reap", "saliency": {...}}``; or safetensors with a tensor
``layer.3`` or ``3`` of shape [E] for each layer, F32, F64 or BF16. The ending ``.safetensors`` tells which. The usual
number is REAP's (router-weighted expert activation pruning, arXiv 2510.13999): the mean over the tokens routed to an
expert of its router weight times the norm of its output.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_pack.errors import DataError, EnvironmentFailure
from hybrid_pack.io.bitmap import spans
from hybrid_pack.io.config import MAX_DOCUMENT_BYTES, read_document
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.safetensors import read_header
from hybrid_pack.io.shards import Located

LARGEST = 1e300
"""Above it, sums over a layer may not fit a float."""

HOW = "see docs/planning.md for the file and how REAP's dump becomes one"
_LAYER = re.compile(r"0|[1-9][0-9]{0,5}")
_TENSOR = re.compile(r"(?:layer\.)?(0|[1-9][0-9]{0,5})")
_DTYPES = {"F32": "<f4", "F64": "<f8", "BF16": "<u2"}
_PICKLES = (b"PK\x03\x04", b"\x80\x02")
"""How ``torch.save`` begins, today's and the old way."""

Scores = Mapping[int, tuple[float, ...]]
"""Layer to one number for each expert, by id."""


@dataclass(frozen=True)
class Saliency:
    """What is known of the experts.

    Attributes:
        layers: Finite numbers, not negative, by layer and expert.
        metric: What they are, by whoever made them; None where nothing is said.
        where: The file, for errors.
    """

    layers: Scores
    metric: str | None
    where: str


def _number(value: Any, layer: int, expert: int, where: object) -> float:
    fine = type(value) in (int, float) and 0 <= value <= LARGEST
    if not fine:
        negative = type(value) in (int, float) and value < 0
        raise DataError(
            f"layer {layer} expert {expert} of the saliency",
            where=where,
            expected=f"a finite number, 0 or more, at most {LARGEST:g}",
            found=repr(value)[:60],
            hint="saliency is a magnitude, and shares of it are compared: shift or flip it so that none is negative"
            if negative
            else None,
        )
    return float(value)


def _json(path: Path) -> Saliency:
    document, _ = read_document(path)
    wrapped = "saliency" in document
    raw, metric = (document["saliency"], document.get("metric")) if wrapped else (document, None)
    if metric is not None and not (isinstance(metric, str) and metric.isprintable() and len(metric) <= 200):
        raise DataError("metric is not a name", where=path, expected="a line of text", found=repr(metric)[:60])
    if not isinstance(raw, Mapping) or not raw:
        found = "nothing" if raw in ({}, [], None) else type(raw).__name__
        raise DataError("the saliency is not an object of layers", where=path, found=found, hint=HOW)
    layers: dict[int, tuple[float, ...]] = {}
    for key, values in raw.items():
        if _LAYER.fullmatch(key) is None:
            hint = f'write "{int(key)}"' if key.isascii() and key.isdigit() and len(key) <= 6 else HOW
            raise DataError(
                "a key of the saliency is not a layer number",
                where=path,
                expected='a decimal number without leading zeros, such as "3"',
                found=repr(key)[:60],
                hint=hint,
            )
        layer = int(key)
        if not isinstance(values, list):
            raise DataError(
                f"layer {layer} of the saliency",
                where=path,
                expected="a list of one number for each expert",
                found=repr(values)[:60],
            )
        layers[layer] = tuple(_number(value, layer, expert, path) for expert, value in enumerate(values))
    return Saliency(dict(sorted(layers.items())), metric, str(path))


def _safetensors(path: Path) -> Saliency:
    header = read_header(path)
    if not header.tensors:
        raise DataError("the saliency has no layer", where=path, found="no tensor", hint=HOW)
    layers: dict[int, tuple[float, ...]] = {}
    with TensorReader() as reader:
        for name, tensor in header.tensors.items():
            match = _TENSOR.fullmatch(name)
            if match is None:
                raise DataError(
                    "a tensor that is no layer", where=path, expected="layer.<L> or <L>", found=name[:60], hint=HOW
                )
            layer = int(match[1])
            if layer in layers:
                raise DataError(f"layer {layer} occurs twice in the saliency", where=path, found=name)
            if tensor.dtype not in _DTYPES or len(tensor.shape) != 1:
                raise DataError(
                    f"layer {layer} of the saliency",
                    where=path,
                    expected=f"{', '.join(_DTYPES)} [experts]",
                    found=f"{tensor.dtype} {list(tensor.shape)}",
                )
            raw = np.empty(tensor.nbytes, np.uint8)
            reader.read(Located(path, tensor), raw)
            values = raw.view(_DTYPES[tensor.dtype])
            if tensor.dtype == "BF16":
                values = (values.astype(np.uint32) << 16).view(np.float32)
            layers[layer] = tuple(_number(v, layer, e, path) for e, v in enumerate(values.astype(np.float64).tolist()))
    return Saliency(dict(sorted(layers.items())), None, str(path))


def _refuse_pickle(path: Path) -> None:
    """A dump of ``torch.save``, by its ending or first bytes: opening one may run code, so none is opened."""
    head = b""
    try:
        if path.is_file():
            with path.open("rb") as file:
                head = file.read(4)
    except OSError as error:
        raise EnvironmentFailure("cannot read", where=path, found=error.strerror) from error
    if path.suffix in (".pt", ".pth", ".pkl") or head.startswith(_PICKLES):
        raise DataError(
            "a file of torch.save or pickle is not read, since opening one may run code",
            where=path,
            expected="JSON or safetensors",
            hint=HOW,
        )


def read_saliency(path: Path) -> Saliency:
    """Read a saliency file; which layers it must have is ``for_layers``'s question.

    Raises:
        DataError: Missing, too large, not JSON or safetensors, a key twice, a key that is no layer, a value that is
            no finite number or negative.
        EnvironmentFailure: It cannot be read.
    """
    _refuse_pickle(path)
    if path.suffix != ".safetensors":
        return _json(path)
    if path.is_file() and path.stat().st_size > MAX_DOCUMENT_BYTES:
        raise DataError(
            "too large for saliency",
            where=path,
            expected=f"at most {MAX_DOCUMENT_BYTES} bytes",
            found=path.stat().st_size,
        )
    return _safetensors(path)


def for_layers(
    saliency: Saliency, wanted: Iterable[int], moe_layers: Iterable[int], num_experts: int
) -> tuple[Scores, tuple[str, ...]]:
    """(the numbers of the layers to plan, notes).

    Args:
        saliency: As read.
        wanted: Layers to plan.
        moe_layers: All layers with experts; the file may have more of them than are wanted.
        num_experts: Experts in each.

    Raises:
        DataError: A layer is missing, has no experts, or a list has another length.
    """
    wanted, known = sorted(wanted), sorted(moe_layers)
    has = saliency.layers
    where = saliency.where
    for layer in has:
        if layer not in known:
            raise DataError(
                f"the saliency has layer {layer}, which has no routed experts",
                where=where,
                expected=f"layers of {spans(known)}",
                found=spans(has),
                hint="layers are counted from 0 over all decoder layers, dense ones too",
            )
    missing = [layer for layer in wanted if layer not in has]
    if missing:
        raise DataError(
            f"the saliency has no layer {missing[0]}", where=where, expected=f"layers {spans(wanted)}", found=spans(has)
        )
    for layer in has:
        if len(has[layer]) != num_experts:
            raise DataError(
                f"layer {layer} of the saliency",
                where=where,
                expected=f"{num_experts} numbers, one for each expert",
                found=len(has[layer]),
                hint="is it of a pruned or another model?",
            )
    notes = []
    unused = [layer for layer in has if layer not in wanted]
    if unused:
        notes.append(f"the saliency of layer {spans(unused)} is not used: its experts are not chosen here")
    flat = [layer for layer in wanted if not math.fsum(has[layer])]
    if flat:
        notes.append(f"the saliency of layer {spans(flat)} is all zero: its experts are chosen by their ids alone")
    return {layer: has[layer] for layer in wanted}, tuple(notes)
