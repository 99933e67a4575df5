"""What a shard says of itself, held against the manifest: header, expert ids, global scales. Cheap."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from hybrid_pack.errors import DataError, EnvironmentFailure
from hybrid_pack.io.manifest import expected_tensors, rank_tiers, shard_header
from hybrid_pack.layouts.scale_bytes import MXFP4_MAX_SHIFT, NF3_GLOBAL_SCALE
from hybrid_pack.schemas.manifest import Manifest, ShardEntry
from hybrid_pack.verify.pool import Pool, Task
from hybrid_pack.verify.reading import PackFile, opened
from hybrid_pack.verify.report import Recorder, Tally
from hybrid_pack.verify.scope import Scope

HEADERS = "shard headers, expert ids and global scales"


def check_shards(root: Path, manifest: Manifest, scope: Scope, pool: Pool, recorder: Recorder) -> None:
    """Check header bytes, expert ids and global scales of every shard of the scope that is there in its right size."""
    with recorder.checking(HEADERS, "shards", threads=True) as tally:

        def task(shard: ShardEntry) -> Task:
            return lambda: _shard(root, manifest, shard, recorder, tally)

        pool.run(task(shard) for shard in scope.shards(manifest) if shard.path not in recorder.bad_paths)


def _shard(root: Path, manifest: Manifest, shard: ShardEntry, recorder: Recorder, tally: Tally) -> None:
    expected = shard_header(expected_tensors(manifest, shard.layer, shard.rank))
    try:
        with opened(root, shard.path) as file:
            found = file.take(0, len(expected))
            tally.add(1, len(found))
            if found != expected:
                at = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
                recorder.find(
                    HEADERS, shard.path, "the header is not the one the manifest implies", where=f"byte {at}",
                    expected=repr(expected[at : at + 16]), found=repr(found[at : at + 16]),
                )  # fmt: skip
                recorder.spoil(shard.path)
            _ids(manifest, shard, file, recorder)
            for name in shard.tensors:
                if name.endswith("_global_scale"):
                    _global_scales(manifest, shard, name, file, recorder)
    except (DataError, EnvironmentFailure) as error:
        recorder.find_error(HEADERS, shard.path, error)
        recorder.spoil(shard.path)


def _ids(manifest: Manifest, shard: ShardEntry, file: PackFile, recorder: Recorder) -> None:
    for tier, ids in zip(("kept", "tail"), rank_tiers(manifest, shard.layer, shard.rank), strict=True):
        if not ids:
            continue
        entry = shard.tensors[f"{tier}.expert_ids"]
        found = np.frombuffer(file.take(entry.begin, entry.end), "<i4").tolist()
        if found != list(ids):
            row = next(i for i, (a, b) in enumerate(zip(found, ids, strict=True)) if a != b)
            recorder.find(
                HEADERS, shard.path, "not the expert the manifest has in this row", where=f"{tier}.expert_ids[{row}]",
                expected=ids[row], found=found[row],
            )  # fmt: skip
            recorder.tell(shard.path, f"{tier}.expert_ids")


def _global_scales(manifest: Manifest, shard: ShardEntry, name: str, file: PackFile, recorder: Recorder) -> None:
    entry = shard.tensors[name]
    with np.errstate(all="ignore"):  # a signalling NaN
        values = np.frombuffer(file.take(entry.begin, entry.end), "<f4").astype(np.float64)
    kept_format = manifest.layers[str(shard.layer)].kept_scale_format
    for row, value in enumerate(values.tolist()):
        right = math.isfinite(value) and value > 0
        wanted = "a finite positive number"
        if right and name.startswith("tail."):
            right, wanted = value == NF3_GLOBAL_SCALE, f"{NF3_GLOBAL_SCALE:g}, that of every NF3 expert"
        elif right and kept_format == "e8m0_k32":
            mantissa, exponent = math.frexp(value)
            right, wanted = mantissa == 0.5 and 0 <= 1 - exponent <= MXFP4_MAX_SHIFT, f"2^-0 to 2^-{MXFP4_MAX_SHIFT}"
        if not right:
            recorder.find(
                HEADERS, shard.path, "not a global scale", where=f"{name}[{row}]", expected=wanted, found=f"{value!r}"
            )
            recorder.tell(shard.path, name)
