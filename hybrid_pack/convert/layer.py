"""One layer: the files of its ranks, filled expert by expert by any number of threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_pack.convert.encode import MXFP4_ADVICE, Encoder, Encoding
from hybrid_pack.convert.expert import ExpertPacker, PackedRank
from hybrid_pack.convert.journal import Journal, Record
from hybrid_pack.convert.scales import OnScaleMismatch, ScaleStats
from hybrid_pack.errors import DataError
from hybrid_pack.io.checkpoint import Expert, Layer
from hybrid_pack.io.digest import blake3_bytes, blake3_digest, rows_digest, shard_digest
from hybrid_pack.io.output import OutputFile, make_folder
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.layouts.shard import MATRICES
from hybrid_pack.plan import Plan, ShardPlan


class ShardFile:
    """One rank's file while it is filled. Every expert has its own bytes in it, so threads need no order."""

    def __init__(self, root: Path, plan: ShardPlan) -> None:
        self.plan = plan
        make_folder(root, (root / plan.path).parent)
        self._file = OutputFile(root / plan.path, plan.nbytes)
        self._place = {e: ("kept", i) for i, e in enumerate(plan.kept)} | {
            e: ("tail", i) for i, e in enumerate(plan.tail)
        }
        self._digests: dict[str, list[bytes]] = {t.name: [b""] * t.shape[0] for t in plan.tensors}
        self._globals = {t.name: np.zeros(t.shape[0], "<f4") for t in plan.tensors if t.dtype == "F32"}
        self._row_bytes = {t.name: t.row_bytes for t in plan.tensors}
        self._stats: dict[int, ScaleStats] = {}
        self._flushed = 0
        self._quantized: dict[int, Record] = {}
        self._cast: set[int] = set()
        self._lost: dict[int, list[str]] = {}
        self._recorded = False

    def put(self, expert: int, packed: PackedRank, encoding: Encoding) -> None:
        """Hash and write one expert's rows."""
        tier, row = self._place[expert]
        for key, data in packed.rows.items():
            name = f"{tier}.{key}"
            self._digests[name][row] = blake3_bytes(data)
            self._file.write(self.plan.placed[name].begin + row * self._row_bytes[name], data)
        for key, value in packed.global_scales.items():
            self._globals[f"{tier}.{key}_global_scale"][row] = value
        if encoding.cast:
            self._cast.add(expert)
        if packed.lost:
            self._lost[expert] = list(packed.lost)
        self._stats[expert] = packed.stats
        self._flushed += packed.made.flushed
        if encoding.stats is not None:
            self._quantized[expert] = quantized_record(encoding, packed)

    def finish(self, journal: Journal) -> None:
        """Write the small tensors and the header, make all durable, record it, give it its name."""
        digests: dict[str, str] = {}
        for name, tensor in self.plan.placed.items():
            if name.split(".")[1].removesuffix("_scale") in MATRICES:
                digests[name] = rows_digest(self._digests[name])
                continue
            data = self._globals[name].tobytes() if tensor.dtype == "F32" else self._ids(name).tobytes()
            digests[name] = blake3_digest(data)
            self._file.write(tensor.begin, data)
        self._file.write(0, self.plan.header)
        self._file.sync()
        journal.add(self._record(digests))
        self._recorded = True
        self._file.publish()

    def _ids(self, name: str) -> Any:
        return np.array(self.plan.kept if name.startswith("kept.") else self.plan.tail, "<i4")

    def _record(self, digests: Mapping[str, str]) -> Record:
        total = ScaleStats()
        for stats in self._stats.values():
            total.add(stats)
        return {
            "path": self.plan.path,
            "bytes": self.plan.nbytes,
            "digest": shard_digest(self.plan.header, digests.values()),
            "tensors": dict(digests),
            "zero": total.zero,
            "flushed": total.flushed + self._flushed,
            "saturated": total.saturated,
            "requantized": {str(e): s.worst_error for e, s in sorted(self._stats.items()) if s.worst_error > 0},
            "cast": sorted(self._cast),
            "lost": {str(e): roles for e, roles in sorted(self._lost.items())},
            "quantized": {str(e): record for e, record in sorted(self._quantized.items())},
        }

    def discard(self) -> None:
        """Remove the file if it is unfinished; one that only lacks its name gets it from ``--resume``."""
        if self._recorded:
            self._file.close()
        else:
            self._file.discard()


class LayerJob:
    """All unfinished files of one layer; its experts may be packed by any thread in any order.

    Args:
        root: The pack.
        plan: The whole plan.
        layer: The layer.
        shards: Its files that are not done.
        seconds: Second-level scales of gate, up and down of each expert.
        on_mismatch: What to do where gate's and up's cannot be brought together exactly.
    """

    def __init__(
        self,
        root: Path,
        plan: Plan,
        layer: Layer,
        shards: list[ShardPlan],
        seconds: Mapping[int, list[float]],
        on_mismatch: OnScaleMismatch = "refuse",
    ) -> None:
        self._on_mismatch = on_mismatch
        self._root, self._plan, self.layer, self._shards, self._seconds = root, plan, layer, shards, seconds
        self.experts = sorted({e for shard in shards for e in (*shard.kept, *shard.tail)})
        self._left = len(self.experts)
        self._files: dict[int, ShardFile] | None = None
        self._lock = threading.Lock()

    def _open(self) -> dict[int, ShardFile]:
        with self._lock:
            if self._files is None:
                self._files = {}
                for shard in self._shards:
                    self._files[shard.rank] = ShardFile(self._root, shard)
            return self._files

    def pack(self, expert: int, encoder: Encoder, packer: ExpertPacker, reader: TensorReader, journal: Journal) -> int:
        """Read, encode, pack, hash and write one expert; the thread that packs the last one finishes the files.

        Returns:
            Source bytes read.
        """
        files = self._open()
        matrices = self.layer.experts[expert]
        stored = packer.read(matrices, reader)
        topology = self._plan.topology
        ep_rank = expert // (self._plan.source.config.num_experts // topology.expert_parallel)
        where = f"layer {self.layer.index} expert {expert}"
        encoding = encoder.encode(self.layer, expert, stored, self._seconds[expert], where)
        for tp_rank, packed in enumerate(packer.pack(encoding, where)):
            if packed.stats.moved_away and self._on_mismatch == "refuse":
                raise _too_far_apart(matrices, where, packed.stats.moved_away)
            too_small = packed.made.flushed and encoding.w2[0].format.name != "mxfp4"  # its bytes stay: only counted
            if too_small or packed.made.saturated:
                raise _out_of_range(matrices, where, packed.made, encoding.w2[0].format.name)
            file = files.get(ep_rank * topology.tensor_parallel + tp_rank)
            if file is not None:
                file.put(expert, packed, encoding)
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self._plan.quantization.require_unchanged(self.layer.index)
            for file in files.values():
                file.finish(journal)
        return sum(part.nbytes for part in stored.values())

    def discard(self) -> None:
        """Remove the files that are not finished."""
        for file in (self._files or {}).values():
            file.discard()


def quantized_record(encoding: Encoding, packed: PackedRank) -> Record:
    """What the journal remembers of a quantised expert: of all of it, but for the groups that are zero, this rank's."""
    stats = encoding.stats
    assert stats is not None
    return {
        "sources": sorted({part.matrix.format.name for part in encoding.parts}),
        "signal": stats.signal,
        "error": stats.error + packed.moved_error,
        "matrices": {
            role: [part.stats.signal, part.stats.error]
            for role, part in zip(encoding.roles, encoding.parts, strict=True)
            if part.stats is not None and not part.lost
        },
        "small": {
            role: [part.stats.small, part.stats.groups, part.stats.small_signal, part.stats.small_error]
            for role, part in zip(encoding.roles, encoding.parts, strict=True)
            if part.stats is not None and not part.lost and part.stats.small
        },
        "on_hessians": [encoding.on_hessians.gptq, encoding.on_hessians.rtn],
        "groups": stats.groups,
        "subnormal": stats.subnormal,
        "saturated": stats.saturated,
        "zero": packed.made.zero,
    }


def _out_of_range(expert: Expert, where: str, made: ScaleStats, target: str) -> DataError:
    """Quantised weights that the device's scale byte cannot hold: too large, or too far from a gate that was moved."""
    return DataError(
        f"{where}: {made.flushed + made.saturated} scales of quantised weights do not fit the kernel's scale byte",
        where=expert.up.codes,
        expected="weights of a usual size, gate and up of about the same",
        found=f"{made.saturated} too large, {made.flushed} too small",
        hint=f"{MXFP4_ADVICE} may hold them" if target == "nvfp4" else None,
    )


def _too_far_apart(expert: Expert, where: str, blocks: int) -> DataError:
    """Gate's and up's second-level scales are a power of two apart, but one too large for block scales to take in."""
    return DataError(
        f"{where}: gate and up are so far apart in their second-level scales that {blocks} blocks would become zero",
        where=None if expert.gate is None else expert.gate.second or expert.gate.codes,
        expected="second-level scales that block scales can make up for exactly",
        hint="--on-scale-mismatch requantize lets them become zero, and counts them",
    )
