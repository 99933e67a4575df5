"""A quantised matrix against the weights it was made from: its codes, its scales, its error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.formats import e4m3, nf3
from hybrid_pack.io.weights import NativeRows
from hybrid_pack.layouts import scale_bytes
from hybrid_pack.verify.quality import FP4_LEVELS, ScaleLadder, examine, mxfp4_ladder, nf3_ladder, nvfp4_ladder
from hybrid_pack.verify.scale_rules import ScaleRule
from hybrid_pack.verify.stored import F32, U8

BLOCK_SCALES = (256.0, 288.0, 320.0, 352.0, 384.0, 416.0, 448.0, 240.0)
"""What the second-level scale of NVFP4 may give the block of the largest magnitude, coded 6; first the usual."""

SMALLEST_SECOND = 2.0**-126
"""So that it has an inverse in binary32."""

NEAREST = frozenset({"absmax", "mse", "weighted"})
"""Methods whose codes are the nearest levels."""
CAST_OCTAVES = 14
"""Between the largest scale, 2^8, and the smallest that the kernel does not take for zero, 2^-6."""
LEAST = frozenset({"mse"})
"""Methods whose scales have the least squared error, which is known here; weights of channels are not."""


@dataclass
class Quality:
    """What the matrices of an expert come to; adds up over its ranks.

    Attributes:
        sums: f64 [2], squares of the weights and of the differences.
        groups: Groups of its quantised matrices.
        zero: Those with scale zero.
        subnormal: Those with a subnormal E4M3 scale.
    """

    sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros(2))
    groups: int = 0
    zero: int = 0
    subnormal: int = 0

    def add(self, other: Quality) -> None:
        """Add another's."""
        self.sums = self.sums + other.sums
        self.groups += other.groups
        self.zero += other.zero
        self.subnormal += other.subnormal

    def sqnr_db(self) -> float | None:
        """10 log10 of their ratio; None where there is no difference."""
        signal, error = self.sums
        if error <= 0:
            return None
        return 10 * math.log10(signal / error) if signal > 0 else 0.0


@dataclass(frozen=True)
class Fault:
    """Something wrong with a quantised matrix.

    Attributes:
        what: In words.
        row: Of the first place.
        column: Column or group of it.
        unit: Which of the two.
    """

    what: str
    row: int
    column: int
    unit: str


def used_groups(codes: U8) -> NDArray[np.bool_]:
    """bool [N, K/32]: groups of E2M1 codes u8 [N, K/2] with one that is not zero."""
    return np.asarray((codes.reshape(len(codes), -1, 16) & 0x77).any(axis=2))


def moved_error(codes: U8, stored: U8, device: U8, rule: ScaleRule) -> float:
    """Sum of squared differences of E2M1 weights that were moved with scales the device rounds, flushes or saturates.

    Args:
        codes: u8 [R, K/2], the source's.
        stored: u8 [R, groups], the source's scale bytes.
        device: u8 [R, groups], the pack's.
        rule: Of both; a device byte that is wrong is found elsewhere, and not counted here.
    """
    held = np.where(rule.flushed[stored, device], 0.0, rule.device_values[device])
    change = np.where(rule.right[stored, device], held - rule.values[stored], 0.0)
    rows, groups = np.nonzero(change)
    here = codes.reshape(*stored.shape, -1)[rows, groups]
    squares = FP4_LEVELS.astype(np.float64) ** 2
    return float((change[rows, groups, None] ** 2 * (squares[here & 15] + squares[here >> 4])).sum())


def can_be_cast(matrices: Sequence[NativeRows]) -> bool:
    """Whether the scales of MXFP4 matrices are in what NVFP4's scale byte holds beside the largest one, 2^8."""
    used = np.concatenate([rows.scales[used_groups(rows.codes)] for rows in matrices])
    return not used.size or int(used.max()) - int(used.min()) <= CAST_OCTAVES


def second_scale_of(largest: float, block_scale: float = BLOCK_SCALES[0]) -> float:
    """NVFP4's second-level scale of matrices with this largest magnitude (binary32)."""
    value = float(np.float32(largest) / np.float32(6 * block_scale))
    return max(value, SMALLEST_SECOND) if largest > 0 else 1.0


def nvfp4_seconds(largest: float, native: Sequence[float | None], global_scale: float) -> list[float]:
    """Second-level scale of each part of a device matrix.

    Args:
        largest: Magnitude of the quantised parts' largest weight.
        native: Of each part its own where it is NVFP4 already, else None.
        global_scale: On the device; where it fits none, the usual scale is taken.
    """
    own = next((value for value in native if value is not None), None)
    if own is not None:
        wanted = own * 2.0 ** math.ceil(math.log2(second_scale_of(largest) / own))
    else:
        possible = [second_scale_of(largest, block_scale) for block_scale in BLOCK_SCALES]
        wanted = next((second for second in possible if _fits(second, global_scale)), possible[0])
    return [wanted if value is None else value for value in native]


def _fits(second: float, global_scale: float) -> bool:
    """Whether a device's global scale is that of a second-level scale, over a power of two."""
    return 0 < global_scale < math.inf and math.frexp(second / global_scale)[0] == 0.5


def stored_bytes(target: str, device: U8, global_scale: float, seconds: Sequence[float], part: int) -> U8 | None:
    """The scale bytes a checkpoint of the target format would have; None where the global scale is impossible.

    A device byte that is none of the format's scales becomes 255, which no ladder has.
    """
    table = np.full(256, 255, np.uint8)
    if target == "mxfp4":
        shift = -round(math.log2(global_scale))
        bytes_ = np.arange(256) - shift
        usable = (bytes_ >= 0) & (bytes_ < 255)
        table[usable] = bytes_[usable]
        return np.asarray(table[device], np.uint8)
    device_values = np.where(np.isfinite(scale_bytes.DEVICE_VALUES), scale_bytes.DEVICE_VALUES, -1)
    if target == "nf3":
        values = device_values * 16
    else:
        largest = max(seconds)
        if not _fits(largest, global_scale):
            return None
        factor = largest * 2.0**scale_bytes.NVFP4_GLOBAL_EXPONENT / global_scale
        values = device_values / (128 * factor) * (largest / seconds[part])
    ladder = e4m3.VALUES[:0x7F]  # ascending
    at = np.clip(np.searchsorted(ladder, values), 0, 0x7E)
    hit = ladder[at] == values
    table[hit] = at[hit]
    return np.asarray(table[device], np.uint8)


SMALLEST_NORMAL_BYTE = 8
"""E4M3 byte of 2^-6; smaller scales but zero are subnormal, and the device has none of them for NVFP4."""


def _ladder(target: str, second: float) -> ScaleLadder:
    if target == "mxfp4":
        return mxfp4_ladder()
    return nf3_ladder(nf3.SCALE_LIMIT) if target == "nf3" else nvfp4_ladder(second)


def check_part(
    target: str, method: str, weights: F32, codes: U8, scales: U8, second: float, levels: F32, quality: Quality
) -> list[Fault]:
    """Hold a rank's part of a matrix against its weights.

    Args:
        target: ``nvfp4``, ``mxfp4`` or ``nf3``.
        method: By which it was quantised.
        weights: f32 [R, K], what the source stores, contiguous.
        codes: u8 [R, bytes], unpacked.
        scales: u8 [R, groups], as ``stored_bytes`` gives them.
        second: Second-level scale.
        levels: f32 [8] of NF3.
        quality: Its sums are added to.
    """
    group = 16 if target == "nvfp4" else 32
    ladder = _ladder(target, second)
    unknown = scales == 255
    if unknown.any():
        row, at = map(int, np.argwhere(unknown)[0])
        return [Fault(f"{int(unknown.sum())} scales are none the format has", row, at, "group")]
    quality.groups += scales.size
    if target != "mxfp4":
        quality.zero += int((scales == 0).sum())
        quality.subnormal += int(((scales > 0) & (scales < SMALLEST_NORMAL_BYTE)).sum())
    found = np.zeros(6, np.int64)
    examine(
        weights, codes, scales, 3 if target == "nf3" else 4, group, levels if target == "nf3" else FP4_LEVELS,
        ladder.values, ladder.lower, ladder.higher, method in NEAREST, method in LEAST, quality.sums, found,
    )  # fmt: skip
    faults = []
    if found[0]:
        faults.append(Fault(f"{found[0]} codes are not the nearest levels", int(found[1]), int(found[2]), "column"))
    if found[3]:
        what = f"{found[3]} scales have a neighbour of less squared error"
        faults.append(Fault(what, int(found[4]), int(found[5]), "group"))
    return faults
