"""Every packed expert of every rank against the source, layer by layer, and that no part of the source is left over."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

from hybrid_pack.errors import DataError, EnvironmentFailure
from hybrid_pack.io.checkpoint import Checkpoint
from hybrid_pack.io.manifest import MANIFEST
from hybrid_pack.io.progress import Progress
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.schemas.manifest import Manifest
from hybrid_pack.verify.compare import EXPERTS, Counts, LayerComparison, PackedShard
from hybrid_pack.verify.pool import Buffers, Pool
from hybrid_pack.verify.report import Recorder, Tally
from hybrid_pack.verify.scope import Scope


def source_bytes(source: Checkpoint, layers: list[int]) -> int:
    """Bytes of codes and scales of all experts of some layers."""
    return sum(
        at.header.nbytes
        for layer in layers
        for expert in source.layers[layer].experts.values()
        for at in expert.tensors
    )


class _Totals:
    """Counts of all threads, and whether they are of everything that should have been compared."""

    def __init__(self, tally: Tally, recorder: Recorder, progress: Progress) -> None:
        self.counts, self.complete = Counts(), True
        self._tally, self._recorder, self._progress = tally, recorder, progress
        self._lock = threading.Lock()

    def expert(self, comparison: LayerComparison, expert: int) -> None:
        """Compare one expert."""
        try:
            counts = comparison.compare(expert)
        except EnvironmentFailure as error:
            self.complete = False
            self._recorder.cannot_read(EXPERTS, error.where or "", error)
            return
        except DataError as error:
            self.complete = False
            where = f"layer {comparison.layer} expert {expert}"
            self._recorder.find(
                EXPERTS, error.where or "", error.problem, where=where, expected=error.expected, found=error.found
            )
            return
        with self._lock:
            self.counts.add(counts)
        self._tally.add(1, counts.read_bytes)
        self._progress.advance(counts.read_bytes)


def check_experts(
    root: Path, manifest: Manifest, source: Checkpoint, layers: list[int], scope: Scope, pool: Pool, recorder: Recorder,
    progress: Progress,
) -> None:  # fmt: skip
    """Compare every expert of some layers on every rank of the scope.

    Args:
        root: The pack.
        manifest: Its manifest.
        source: What it was made from.
        layers: Layers of the scope that have the same structure in both.
        scope: Shards to look at; those that are spoiled are left out.
        pool: Threads.
        recorder: Gets the findings.
        progress: Told bytes read.
    """
    buffers = Buffers()
    with recorder.checking(EXPERTS, "experts", threads=True) as tally:
        totals = _Totals(tally, recorder, progress)
        for layer in layers:
            wanted = [entry for entry in scope.shards(manifest) if entry.layer == layer]
            shards = [PackedShard.of(root, manifest, e) for e in wanted if e.path not in recorder.bad_paths]
            totals.complete = totals.complete and len(shards) == len(wanted)
            with TensorReader() as reader:
                comparison = LayerComparison(manifest, source.layers[layer], shards, reader, recorder, buffers)
                pool.run(partial(totals.expert, comparison, expert) for expert in comparison.experts())
        if totals.complete and scope.rank is None:
            whole = scope.whole and len(layers) == len(manifest.layers)
            _check_totals(manifest, totals.counts, source_bytes(source, layers), whole, recorder)


def _check_totals(manifest: Manifest, counts: Counts, stored_bytes: int, whole: bool, recorder: Recorder) -> None:
    """The ranks together hold the whole source, and the manifest's report counts what was found."""
    if counts.source_bytes != stored_bytes:
        message = "the ranks together do not hold the source"
        recorder.find(EXPERTS, MANIFEST, message, expected=f"{stored_bytes} bytes", found=counts.source_bytes)
    if not whole:
        return
    report = manifest.report
    for name, expected, found in (
        ("groups_zero_scale", counts.zero, report.groups_zero_scale),
        ("blocks_flushed", counts.flushed, report.blocks_flushed),
        ("scales_saturated", counts.saturated, report.scales_saturated),
    ):
        if expected != found:
            message, where = "not what shards and source come to", f"report.{name}"
            recorder.find(EXPERTS, MANIFEST, message, where=where, expected=expected, found=found)
