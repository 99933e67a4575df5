"""Every packed expert against the stored one, through decoders only: codes bit for bit, scales as exact values.

A scale is right if ``source scale * second-level scale == value(device byte) * global scale`` in float64, where both
products are exact. What a device byte cannot hold is counted: NVFP4 blocks so small that the kernel wants them zero,
MXFP4 bytes above the largest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.errors import DataError
from hybrid_pack.formats import e4m3, e8m0
from hybrid_pack.formats.source import SourceFormat
from hybrid_pack.io.checkpoint import Checkpoint, Matrix
from hybrid_pack.io.manifest import MANIFEST, rank_geometry, rank_tiers, topology_of
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.safetensors import TensorHeader
from hybrid_pack.io.shards import Located
from hybrid_pack.layouts import scale_bytes
from hybrid_pack.layouts.shard import Matrix as MatrixName
from hybrid_pack.layouts.shard import Tier
from hybrid_pack.schemas.manifest import Manifest, ShardEntry
from hybrid_pack.verify.pool import Buffers, Pool
from hybrid_pack.verify.progress import Progress
from hybrid_pack.verify.report import Recorder, Tally
from hybrid_pack.verify.scope import Scope

EXPERTS = "experts against the source"
FLUSH_BELOW = 2.0
"""value(byte) below which b12x 1.1.0 wants NVFP4 blocks zero (2^-6 before its factor 2^7)."""

ROUNDING = 2.0**-4
"""Largest relative error of rounding to three mantissa bits."""

_SLACK = 1e-12

U8 = NDArray[np.uint8]
F64 = NDArray[np.float64]
Pairs = NDArray[np.bool_]
"""bool [256, 256]: for each source byte and device byte."""


@dataclass
class Counts:
    """What the scales of compared experts came to; adds up."""

    zero: int = 0
    flushed: int = 0
    saturated: int = 0


@dataclass(frozen=True)
class ScaleRule:
    """Which device byte is right for which source byte of one expert matrix.

    Attributes:
        exact: Same value.
        flushed: Allowed because the value is too small for the kernel.
        saturated: Allowed because the value is too large for it.
        rounded: Allowed because the expert was requantised, within the error reported.
        zero: bool [256], source bytes that mean zero and are counted as such.
    """

    exact: Pairs
    flushed: Pairs
    saturated: Pairs
    rounded: Pairs
    zero: NDArray[np.bool_]

    @property
    def right(self) -> Pairs:
        """All that is allowed."""
        return self.exact | self.flushed | self.saturated | self.rounded


def source_values(form: SourceFormat, second: float) -> F64:
    """f64 [256]: the scale each stored byte means, its second level included."""
    if form.name == "mxfp4":
        return e8m0.VALUES
    return e4m3.VALUES * second if form.name == "nvfp4" else e4m3.VALUES / (16.0 if form.scale_times_16 else 1.0)


def scale_rule(form: SourceFormat, second: float, global_scale: float, worst_error: float) -> ScaleRule:
    """The rule for one matrix.

    Args:
        form: How the source stores it.
        second: Its second-level scale; 1.0 where it has none.
        global_scale: Of the device matrix.
        worst_error: Relative error allowed; 0 unless the expert was requantised.
    """
    none = np.zeros((256, 256), np.bool_)
    source = source_values(form, second)[:, None]
    device_zero = (np.arange(256) == 0)[None, :]
    if form.name == "mxfp4":
        device = scale_bytes.E8M0_VALUES[None, :] * global_scale
        top = (np.arange(256) == scale_bytes.MXFP4_MAX_BYTE)[None, :]
        return ScaleRule(source == device, none, top & (source > device), none, np.zeros(256, np.bool_))
    nvfp4 = form.name == "nvfp4"
    unit = global_scale * 2.0 ** (scale_bytes.NVFP4_VALUE_EXPONENT if nvfp4 else scale_bytes.NF3_VALUE_EXPONENT)
    exact = source == scale_bytes.DEVICE_VALUES[None, :] * unit  # -0 is 0, NaN is nothing
    flushed, rounded = none, none
    if nvfp4:
        target = source / unit
        limit = FLUSH_BELOW if worst_error == 0 else FLUSH_BELOW * (1 + _SLACK)
        flushed = device_zero & (target > 0) & (target < limit)
        if worst_error > 0:
            with np.errstate(divide="ignore", invalid="ignore"):
                error = np.abs(scale_bytes.DEVICE_VALUES[None, :] / target - 1)
            rounded = ~exact & ~flushed & (target > 0) & (error <= min(worst_error, ROUNDING) + _SLACK)
    return ScaleRule(exact, flushed, none, rounded, source[:, 0] == 0)


@dataclass
class _Layer:
    """A layer while its experts are compared."""

    index: int
    shards: Mapping[int, ShardEntry]
    rows: Mapping[int, Mapping[int, tuple[Tier, int]]]
    reader: TensorReader = field(default_factory=TensorReader)


class Comparison:
    """Compares experts one after another, one a thread at a time.

    Attributes:
        counts: What the scales came to.
        source_bytes: Bytes of codes and scales of the source that were found in the pack.
    """

    def __init__(self, root: Path, manifest: Manifest, source: Checkpoint, pool: Pool, recorder: Recorder, progress: Progress) -> None:
        self._root, self._manifest, self._source = root, manifest, source
        self._pool, self._recorder, self._progress = pool, recorder, progress
        self._geometry, self._topology = rank_geometry(manifest), topology_of(manifest)
        self._errors = {(r.layer, r.expert): r.worst_relative_error for r in manifest.report.experts_requantized}
        self._buffers = Buffers()
        self.counts = Counts()
        self._lock = self._recorder_lock()

    @staticmethod
    def _recorder_lock():
        import threading

        return threading.Lock()
