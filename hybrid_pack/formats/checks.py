"""What a stored scale or weight must not be. Faults are found here and told by whoever knows the tensor's name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.formats import decode_kernels, nf3
from hybrid_pack.formats.decode import F32, U8, float_scales, scale_values
from hybrid_pack.formats.source import SourceFormat


@dataclass(frozen=True)
class Fault:
    """A scale or a weight that means nothing.

    Attributes:
        row: Its row among those looked at.
        column: Its column.
        expected: What it should be, in words.
        found: What it is.
    """

    row: int
    column: int
    expected: str
    found: str


@lru_cache(maxsize=16)
def refused_bytes(form: SourceFormat) -> NDArray[np.bool_]:
    """bool [256]: scale bytes that are refused: NaN, negative, and NF3 scales of 32 or more.

    Where the bias is 125, also those that no byte of bias 127 can say.
    """
    values = scale_values(form)
    refused = np.isnan(values) | (values < 0)
    if form.name == "nf3":
        refused |= values >= nf3.SCALE_LIMIT
    if form.scale_bias != 127:
        refused |= values >= 2.0**128
    return refused


def scale_fault(form: SourceFormat, scales: U8) -> Fault | None:
    """The first scale that is refused.

    Args:
        form: Their format.
        scales: The stored bytes, u8 [scale rows, bytes].
    """
    if form.scale_bytes > 1:
        numbers = float_scales(form, scales)
        bad = ~(np.isfinite(numbers) & (numbers >= 0))
        if not bad.any():
            return None
        row, column = np.argwhere(bad)[0]
        return Fault(int(row), int(column), "a finite scale that is not negative", f"{numbers[row, column]:g}")
    flat = np.ascontiguousarray(scales).reshape(-1)
    at = decode_kernels.first_refused(flat, refused_bytes(form))
    if at < 0:
        return None
    byte = int(flat[at])
    limit = f"below {nf3.SCALE_LIMIT:g}" if form.name == "nf3" else "finite"
    row, column = divmod(at, scales.shape[1])
    value = float(scale_values(form)[byte])
    return Fault(row, column, f"a scale that is not negative and {limit}", f"byte 0x{byte:02X} = {value:g}")


def value_fault(values: F32) -> Fault | None:
    """The first weight of f32 [rows, K] that is infinite or no number."""
    flat = values.reshape(-1)
    at = decode_kernels.first_not_finite(flat.view(np.uint32))
    if at < 0:
        return None
    row, column = divmod(at, values.shape[1])
    return Fault(row, column, "a finite weight", f"{flat[at]:g}")


def second_value(form: SourceFormat, stored: float) -> float:
    """The second-level scale that a stored float32 means.

    compressed-tensors stores one over it. What is used is float32(1 / stored), which gives the stored number back to
    one unit in the last place and not always exactly.
    """
    if not form.second_reciprocal:
        return stored
    with np.errstate(divide="ignore", over="ignore"):
        return float(np.float32(1) / np.float32(stored))


def second_fault(form: SourceFormat, stored: float) -> str | None:
    """What is wrong with a stored second-level scale: it and, where one over it counts, that must be finite above 0."""
    if math.isfinite(stored) and stored > 0 and math.isfinite(second_value(form, stored)):
        return None if second_value(form, stored) > 0 else f"{stored:g}"
    return f"{stored:g}"
