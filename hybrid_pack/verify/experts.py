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
from hybrid_pack.schemas.manifest import Manifest, QuantizedTier
from hybrid_pack.verify.compare import EXPERTS, Counts, LayerComparison, PackedShard
from hybrid_pack.verify.pool import Buffers, Pool
from hybrid_pack.verify.quantised import Quality
from hybrid_pack.verify.report import Recorder, Tally
from hybrid_pack.verify.scope import Scope


def source_bytes(source: Checkpoint, layers: list[int]) -> int:
    """Bytes of codes and scales of all experts of some layers."""
    return sum(expert.nbytes for layer in layers for expert in source.layers[layer].experts.values())


def _weights(source: Checkpoint, layers: list[int]) -> int:
    """Weights of all experts of some layers."""
    return sum(
        matrix.rows * matrix.columns
        for layer in layers
        for expert in source.layers[layer].experts.values()
        for matrix in expert.matrices
    )


def _say_what_is_not_proved(manifest: Manifest, layers: list[int], scope: Scope, recorder: Recorder) -> None:
    """What no comparison with the source can tell of quantised experts."""
    methods = {entry.method for entry in manifest.report.experts_quantized if entry.layer in layers}
    if "gptq" in methods:
        recorder.skip(
            "codes and scales of experts quantised by GPTQ", "they follow from Hessians; their error is compared"
        )
    if methods & {"absmax", "weighted"}:
        named = " and ".join(sorted(methods & {"absmax", "weighted"}))
        recorder.skip(f"whether scales are those of {named}", "their codes are nearest, their error is compared")
    if methods and scope.ranks is not None:
        recorder.skip("errors of quantised experts", "they are of all ranks together, and one rank was asked for")


EXACT_DB = 100.0
"""Errors of this and less are those of the arithmetic here."""

SQNR_MARGIN = 0.002
"""dB: the manifest rounds to 0.001."""


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
                comparison = LayerComparison(manifest, source, layer, shards, reader, recorder, buffers)
                pool.run(partial(totals.expert, comparison, expert) for expert in comparison.experts())
        _say_what_is_not_proved(manifest, layers, scope, recorder)
        if totals.complete and scope.ranks is None:
            whole = scope.whole and len(layers) == len(manifest.layers)
            _check_errors(manifest, source, totals.counts, layers, recorder)
            _check_totals(manifest, totals.counts, _weights(source, layers), whole, recorder)


def _check_errors(
    manifest: Manifest, source: Checkpoint, counts: Counts, layers: list[int], recorder: Recorder
) -> None:
    """The manifest tells the error of every quantised expert and tier."""
    for entry in manifest.report.experts_quantized:
        if entry.layer not in layers:
            continue
        found = [counts.quality.get((entry.layer, expert), Quality()) for expert in entry.experts]
        total = Quality()
        for quality in found:
            total.add(quality)
        places = [f"expert {expert}" for expert in entry.experts]
        rows = zip([*places, entry.tier], [*entry.sqnr_db, entry.tier_sqnr_db], [*found, total], strict=True)
        for place, told, quality in rows:
            measured = quality.sqnr_db()
            if not _same_error(told, measured):
                recorder.find(
                    EXPERTS, MANIFEST, "not the error of the packed weights", where=f"layer {entry.layer} {place}",
                    expected="none" if measured is None else f"{measured:.4f} dB",
                    found="none" if told is None else f"{told:.4f} dB",
                )  # fmt: skip
        counted: tuple[tuple[str, object, object], ...] = (
            ("groups", total.groups, entry.groups),
            ("groups_zero_scale", total.zero, entry.groups_zero_scale),
            ("scales_subnormal", total.subnormal, entry.scales_subnormal),
            ("sources", _sources(source, entry), entry.sources),
        )
        for what, expected, found_there in counted:
            if expected != found_there:
                recorder.find(
                    EXPERTS, MANIFEST, "not what shards and source come to",
                    where=f"report.experts_quantized of layer {entry.layer} {entry.tier}: {what}",
                    expected=expected, found=found_there,
                )  # fmt: skip


def _sources(source: Checkpoint, entry: QuantizedTier) -> tuple[str, ...]:
    """Formats of all matrices of the experts of an entry."""
    experts = (source.layers[entry.layer].experts[expert] for expert in entry.experts)
    return tuple(sorted({matrix.format.name for expert in experts for matrix in expert.matrices}))


def _same_error(told: float | None, measured: float | None) -> bool:
    """Whether two SQNRs are the same, to the manifest's rounding; beyond what binary32 resolves all are."""
    if min(EXACT_DB if db is None else db for db in (told, measured)) >= EXACT_DB:
        return True
    return told is not None and measured is not None and abs(told - measured) <= SQNR_MARGIN


def _check_totals(manifest: Manifest, counts: Counts, weights: int, whole: bool, recorder: Recorder) -> None:
    """The ranks together hold the whole source, and the manifest's report counts what was found."""
    if counts.weights != weights:
        message = "the ranks together do not hold the source"
        recorder.find(EXPERTS, MANIFEST, message, expected=f"{weights} weights", found=counts.weights)
    if not whole:
        return
    report = manifest.report
    for name, expected, found in (
        ("groups_zero_scale", counts.zero, report.groups_zero_scale),
        ("blocks_flushed", counts.flushed, report.blocks_flushed),
        ("scales_saturated", counts.saturated, report.scales_saturated),
        ("experts_cast", counts.cast, report.experts_cast),
    ):
        if expected != found:
            message, where = "not what shards and source come to", f"report.{name}"
            recorder.find(EXPERTS, MANIFEST, message, where=where, expected=expected, found=found)
