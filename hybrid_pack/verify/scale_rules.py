"""Which device scale byte is right for which stored one: exact values in float64, from decoders' tables alone.

A scale is right if ``stored scale * second-level scale == value(device byte) * global scale * 2^constant``; both sides
are exact. What a device byte cannot hold is told apart, to be counted: NVFP4 blocks so small that the kernel wants them
zero, MXFP4 bytes so small that it takes them for zero or above the largest one, and rounding where it was asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.formats import e4m3, e8m0
from hybrid_pack.formats.source import SourceFormat
from hybrid_pack.layouts import scale_bytes

FLUSH_BELOW = 2.0
"""NVFP4 blocks whose value(byte) is below it are zero (b12x 1.1.0: 2^-6, before its factor of 2^7)."""

MXFP4_FLUSH_BELOW = 121
"""MXFP4 groups with a smaller device byte are zero to the kernel (b12x 1.1.0: its operands are
``e2m1(code) * 2^(byte - 246)``, the least of them 2^(byte - 247), and BF16 is normal from 2^-126)."""

ROUNDING = 2.0**-4
"""Largest relative error of rounding to three mantissa bits."""

_DOUBLE_ROUNDING = 2.0**-5
"""How much farther than the nearest byte one may be: values go to binary16 first, which can make a tie of them."""

_SLACK = 1e-12
"""Of the comparisons that are no exact ones, those of requantised experts."""


def expected_global_scale(form: SourceFormat, seconds: list[float], scales: list[NDArray[np.uint8]]) -> float:
    """The global scale the page prescribes for a rank's matrix of an expert, from the stored scales alone.

    Args:
        form: How the source stores it.
        seconds: Second-level scale of each part.
        scales: u8 stored scale bytes of each part, this rank's share.
    """
    if form.name == "nf3":
        return scale_bytes.NF3_GLOBAL_SCALE
    used = [np.flatnonzero(np.bincount(part.reshape(-1), minlength=256)) for part in scales]
    if form.name == "mxfp4":
        highest = max(int(part[-1]) for part in used)
        return 2.0 ** -min(max(scale_bytes.MXFP4_TARGET_BYTE - highest, 0), scale_bytes.MXFP4_MAX_SHIFT)
    second = max(seconds)
    values = [float(np.nanmax(e4m3.VALUES[part])) * (own / second) for part, own in zip(used, seconds, strict=True)]
    largest, factor = max(values), 1.0
    while 0 < largest * factor * 2 <= e4m3.MAX:
        factor *= 2
    with np.errstate(over="ignore"):
        return float(np.float32(second * 2.0**scale_bytes.NVFP4_GLOBAL_EXPONENT / factor))


def nvfp4_values(global_scale: float) -> NDArray[np.float64]:
    """f64 [256]: the scale each device byte of NVFP4 means."""
    with np.errstate(all="ignore"):  # bytes that mean infinity or NaN
        return scale_bytes.DEVICE_VALUES * (global_scale * 2.0**scale_bytes.NVFP4_VALUE_EXPONENT)


Pairs = NDArray[np.bool_]
"""bool [256, 256]: for each stored byte and device byte."""


@dataclass(frozen=True)
class ScaleRule:
    """What is right for one expert matrix.

    Attributes:
        right: The same value, or one of the three below.
        flushed: Zero because the value is too small for the kernel, or of MXFP4 the same and zero to the kernel if the
            group is not zero by its codes.
        saturated: The largest because the value is too large for it.
        zero: bool [256], stored bytes that mean zero and are counted as such.
        values: f64 [256], the scale each stored byte means.
        device_values: f64 [256], the scale each device byte means.
    """

    right: Pairs
    flushed: Pairs
    saturated: Pairs
    zero: NDArray[np.bool_]
    values: NDArray[np.float64]
    device_values: NDArray[np.float64]


def _stored_values(form: SourceFormat, second: float) -> NDArray[np.float64]:
    if form.name == "mxfp4":
        return e8m0.VALUES
    return e4m3.VALUES * second if form.name == "nvfp4" else e4m3.VALUES / (16.0 if form.scale_times_16 else 1.0)


def _equal(values: NDArray[np.float64], device: NDArray[np.float64]) -> Pairs:
    """Which pairs mean the same finite number; -0 is 0."""
    pairs: Pairs = (values[:, None] == device[None, :]) & np.isfinite(values)[:, None]
    return pairs


def _mxfp4(global_scale: float) -> ScaleRule:
    with np.errstate(all="ignore"):
        values, device = e8m0.VALUES, scale_bytes.E8M0_VALUES * global_scale
        saturated = np.zeros((256, 256), np.bool_)
        saturated[:, scale_bytes.MXFP4_MAX_BYTE] = values > device[scale_bytes.MXFP4_MAX_BYTE]
        right = _equal(values, device)
        flushed = right & (np.arange(256) < MXFP4_FLUSH_BELOW)
    return ScaleRule(right | saturated, flushed, saturated, np.zeros(256, np.bool_), values, device)


@lru_cache(maxsize=64)
def scale_rule(form: SourceFormat, second: float, global_scale: float, worst_error: float) -> ScaleRule:
    """The rule for one matrix.

    Args:
        form: How the source stores it.
        second: Its second-level scale; 1.0 where it has none.
        global_scale: Of the device matrix.
        worst_error: Relative error allowed; 0 unless the expert was requantised.
    """
    if form.name == "mxfp4":
        return _mxfp4(global_scale)
    nvfp4 = form.name == "nvfp4"
    exponent = scale_bytes.NVFP4_VALUE_EXPONENT if nvfp4 else scale_bytes.NF3_VALUE_EXPONENT
    unit = global_scale * 2.0**exponent
    with np.errstate(all="ignore"):  # bytes that mean NaN or infinity
        values, device = _stored_values(form, second), scale_bytes.DEVICE_VALUES * unit
        right = _equal(values, device)
        flushed = np.zeros_like(right)
        outside = slice(1, scale_bytes.NVFP4_BYTES[0]) if nvfp4 else slice(scale_bytes.NF3_MAX_BYTE + 1, None)
        if nvfp4:
            wanted = values / unit  # in units of value(byte): times factor * 2^7, factor = second * 2^119 / global
            flushed[:, 0] = (wanted > 0) & (wanted < FLUSH_BELOW * (1 if worst_error == 0 else 1 + _SLACK))
            if worst_error > 0:
                first, last = scale_bytes.NVFP4_BYTES
                distance = np.full((256, 256), np.inf)
                distance[:, first : last + 1] = np.abs(
                    scale_bytes.DEVICE_VALUES[None, first : last + 1] - wanted[:, None]
                )
                nearest = distance <= distance.min(axis=1, keepdims=True) * (1 + _DOUBLE_ROUNDING)
                error = np.abs(scale_bytes.DEVICE_VALUES[None, :] / wanted[:, None] - 1)
                right |= (wanted[:, None] > 0) & nearest & (error <= min(worst_error, ROUNDING) + _SLACK)
        right[:, outside] = False  # the right number, but not to the kernel
    return ScaleRule(right | flushed, flushed, np.zeros_like(right), values == 0, values, device)
