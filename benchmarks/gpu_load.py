"""How fast does one GLM-5.2 TP4 rank load to the GPU, against copying alone, safetensors, and repacking at start?

    python -m benchmarks.gpu_load [--folder DIR] [--layers 8] [--runs 5] [--seconds 220] [--out FILE]

Baselines, interleaved in the same run, medians, ratios round by round: the pinned host-to-device copy of as many
bytes; ``safetensors.torch.load_file(device="cuda")`` file by file; fastsafetensors, if it is there; ``dd iflag=direct``
for cold files; and reading the source and packing it on the GPU with b12x's packers, as serving does today. torch's
cached memory is given back before each action, so that all of them pay for allocation. A part that fails is recorded,
the others go on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import common, load_peers, repack_baseline, watch
from benchmarks.parts import Run
from hybrid_pack.convert import convert
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.plan import make_plan
from hybrid_pack.runtime import LoadBuffers, Pack, open_pack
from hybrid_pack.runtime.layer import Check
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec, write_checkpoint

MIB = 1 << 20


def spec(layers: int, tiny: bool) -> Spec:
    """TP1 of a model as wide as one rank of GLM-5.2 at TP4: the same bytes a layer."""
    sizes: dict[str, Any] = {"hidden": 6144, "intermediate": 512, "num_experts": 256, "kept": 64}
    if tiny:
        sizes = {"hidden": 256, "intermediate": 256, "num_experts": 16, "kept": 4}
    return Spec(
        **sizes, top_k=8, moe_layers=tuple(range(layers)), dense_layers=(), mtp_layer=False, base_dialect="fp8_row"
    )


class Bench:
    """The pack, its files and the device.

    Args:
        run: Where results go.
        folder: Where source and pack are.
        layers: How many.
        device: ``cuda``, or ``cpu`` to try the script.
        tiny: Small layers, likewise.
    """

    def __init__(self, run: Run, folder: Path, layers: int, device: str, tiny: bool) -> None:
        self.run, self.source, self.device = run, folder / "source", torch.device(device)
        root = folder / "pack"
        began = time.monotonic()
        if not (root / "hybrid_pack.json").exists():
            write_checkpoint(self.source, spec(layers, tiny))
            convert(make_plan(open_checkpoint(self.source), Topology(1, 1)), root)
        self.pack: Pack = open_pack(root)
        self.files = [root / shard.path for shard in self.pack.manifest.shards]
        self.nbytes = sum(t.end - t.begin for s in self.pack.manifest.shards for t in s.tensors.values())
        run.result["prepare_seconds"] = round(time.monotonic() - began, 2)
        run.result["layers"], run.result["payload_bytes"] = len(self.files), self.nbytes
        if self.device.type == "cuda":
            torch.ones(1, device=self.device)

    def rates(self, seconds: Mapping[str, list[float]]) -> dict[str, float]:
        """GB/s of the packed bytes."""
        return {name: round(self.nbytes / 1e9 / statistics.median(v), 2) for name, v in seconds.items()}

    def load(self, check: Check, **options: Any) -> Callable[[], float]:
        """``load_rank`` of everything."""
        return lambda: common.timed(lambda: self.pack.load_rank(0, self.device, check=check, **options))

    def layer_by_layer(self) -> float:
        """``load_layer`` for each, with buffers that are kept, as a serving engine calls it."""

        def action() -> None:
            with LoadBuffers(self.device) as buffers:
                kept = [
                    self.pack.load_layer(n, 0, self.device, check="structure", buffers=buffers)
                    for n in self.pack.layers
                ]
            del kept

        return common.timed(action)

    # parts

    def warm(self, runs: int) -> dict[str, Any]:
        """Everything in the page cache."""
        watch.warm(self.files)
        self.load("structure")()
        actions: dict[str, Callable[[], float]] = {
            "load_rank structure": self.load("structure"),
            "load_rank digest": self.load("digest"),
            "load_layer, kept buffers": self.layer_by_layer,
            "pinned copy": lambda: load_peers.pinned_copy(self.nbytes, self.device),
            "safetensors load_file": lambda: load_peers.load_file(self.files, self.device),
            "fastsafetensors": lambda: load_peers.fastsafetensors(self.files, direct=False),
        }
        seconds, failed = self.run.interleaved(actions, runs, lambda: watch.settle(self.device))
        ours = "load_rank structure"
        ratios = {f"{name} / {ours}": common.ratios(seconds, name, ours) for name in seconds if name != ours}
        summaries = {name: common.summary(values) for name, values in seconds.items()}
        return {"seconds": summaries, "gb_per_s": self.rates(seconds), "ratios": ratios, "failed": failed}

    def sweep(self, runs: int) -> list[dict[str, Any]]:
        """Chunk size and readers."""
        watch.warm(self.files)
        points: list[tuple[Check, int, int]] = [
            (check, chunk, readers)
            for check in ("structure", "digest") for chunk in (2, 4, 8, 16) for readers in (6, 8, 12, 16)
        ]  # fmt: skip
        seconds: dict[tuple[Check, int, int], list[float]] = {point: [] for point in points}
        for _ in range(runs):  # in turn, so that a machine that becomes slower does so for all
            for point in points:
                if self.run.over:
                    break
                check, chunk, readers = point
                options = {"chunk_bytes": chunk * MIB, "readers": readers, "host_memory_bytes": 1 << 30}
                watch.settle(self.device)
                seconds[point].append(self.load(check, **options)())
        rows = []
        for (check, chunk, readers), found in seconds.items():
            if found:
                rate = round(self.nbytes / 1e9 / statistics.median(found), 2)
                rows.append({"check": check, "chunk_mib": chunk, "readers": readers, "gb_per_s": rate})
                print(f"  {rows[-1]}", flush=True)
        return rows

    def repack(self, layers: int, loaded_seconds: float | None) -> dict[str, Any]:
        """As serving does today, for some layers after one to warm up."""
        tiles, seconds, wrong, peak = self.pack.tiles, [], set(), 0
        for number in (self.pack.layers[0], *self.pack.layers[:layers]):
            source = repack_baseline.source_layer(self.source, number)
            watch.settle(self.device)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            packed = repack_baseline.repack_layer(self.source, source, tiles, self.device)
            seconds.append(time.perf_counter() - began)
            peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
            ours = self.pack.load_layer(number, 0, self.device)
            wrong |= set(repack_baseline.differences(packed, ours))
            del packed, ours
            print(f"  layer {number}: {seconds[-1]:.3f} s", flush=True)
        per_layer = statistics.median(seconds[1:])
        found: dict[str, Any] = {"seconds_per_layer": seconds[1:], "warm_up_seconds": seconds[0], "peak_bytes": peak}
        found["tensors_that_differ"] = sorted(wrong)
        if loaded_seconds is not None:
            found["ratio_to_load_rank_structure"] = per_layer / (loaded_seconds / len(self.files))
        return found

    def memory(self) -> dict[str, Any]:
        """Device memory over the final bytes, pinned host memory, and what is given back."""
        watch.settle(self.device)
        torch.cuda.reset_peak_memory_stats()
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        free, resident = torch.cuda.mem_get_info()[0], watch.rss_bytes()
        with watch.LeastFree() as least:
            loaded = self.pack.load_rank(0, self.device)
        report, after = loaded.report, torch.cuda.mem_get_info()[0]
        found = {
            "payload_bytes": report.payload_bytes,
            "host_bytes": report.host_bytes,
            "peak_allocated_over_payload": torch.cuda.max_memory_allocated() - allocated - report.payload_bytes,
            "peak_reserved_over_payload": torch.cuda.max_memory_reserved() - reserved - report.payload_bytes,
            "driver_over_payload": free - after - report.payload_bytes,
            "driver_peak_over_payload": free - least.free_bytes - report.payload_bytes,
            "resident_kept": watch.rss_bytes() - resident,
            "report": str(report),
        }
        del loaded
        watch.settle(self.device)
        found["driver_kept"] = free - torch.cuda.mem_get_info()[0]
        return found

    def cold(self, layers: int, runs: int) -> dict[str, Any]:
        """Files that are not in the page cache."""
        wanted, files = self.pack.layers[:layers], self.files[:layers]
        nbytes = sum(path.stat().st_size for path in files)
        share: list[float] = []

        def drop() -> None:
            watch.settle(self.device)
            watch.drop_cache(files)
            share.append(max(watch.cached(path) for path in files))

        actions: dict[str, Callable[[], float]] = {
            "dd iflag=direct": lambda: load_peers.dd(files),
            "load_rank structure": self.load("structure", layers=wanted),
            "load_rank digest": self.load("digest", layers=wanted),
            "load_rank through the cache": self.load("structure", layers=wanted, direct=False),
            "safetensors load_file": lambda: load_peers.load_file(files, self.device),
            "fastsafetensors": lambda: load_peers.fastsafetensors(files, direct=True),
        }
        seconds, failed = self.run.interleaved(actions, runs, drop)
        return {
            "bytes": nbytes,
            "most_cached_before_an_action": max(share),
            "seconds": {name: common.summary(values) for name, values in seconds.items()},
            "gb_per_s": {name: round(nbytes / 1e9 / statistics.median(v), 3) for name, v in seconds.items()},
            "dd / load_rank": {
                n: common.ratios(seconds, "dd iflag=direct", n) for n in seconds if n.startswith("load_rank")
            },
            "failed": failed,
        }


def goals(result: Mapping[str, Any]) -> dict[str, Any]:
    """The issue's goals and what was reached; None where a part is missing."""

    def at(*keys: str) -> Any:
        value: Any = result
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    ours = "load_rank structure"
    return {
        "GB/s, structure (40)": at("warm", "gb_per_s", ours),
        "GB/s, digest": at("warm", "gb_per_s", "load_rank digest"),
        "GB/s, pinned copy alone": at("warm", "gb_per_s", "pinned copy"),
        "times load_file (4)": at("warm", "ratios", f"safetensors load_file / {ours}", "median"),
        "times repacking (20)": at("repack", "ratio_to_load_rank_structure"),
        "share of dd, cold (0.95)": at("cold", "dd / load_rank", ours, "median"),
        "device bytes over the tensors at most (64 MiB)": at("memory", "driver_peak_over_payload"),
        "host bytes (256 MiB)": at("memory", "host_bytes"),
    }


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All parts."""
    run = Run(options.seconds)
    run.result["question"] = (__doc__ or "").strip().splitlines()[0]
    run.part("machine", lambda: common.machine(folder))
    run.part("gpu", watch.gpu)
    bench = Bench(run, folder, options.layers, options.device, options.tiny)
    run.part("warm", lambda: bench.warm(options.runs))
    seconds = run.result.get("warm", {}).get("seconds", {}).get("load_rank structure", {}).get("median")
    run.part("repack", lambda: bench.repack(options.repack_layers, seconds))
    run.part("memory", bench.memory)
    run.part("cold", lambda: bench.cold(options.cold_layers, options.cold_runs))
    run.part("sweep", lambda: bench.sweep(options.sweep_runs))
    run.result["goals"] = goals(run.result)
    return run.result


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where source and pack are made; a pack that is there is used")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--repack-layers", type=int, default=2)
    parser.add_argument("--cold-layers", type=int, default=4)
    parser.add_argument("--cold-runs", type=int, default=3)
    parser.add_argument("--sweep-runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=220, help="parts that would begin later are left out")
    parser.add_argument("--out", type=Path, help="also write the result here")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small layers, to try the script")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        result = measure(options, folder)
    text = json.dumps(result, indent=1)
    if options.out is not None:
        options.out.write_text(text + "\n")
    if not options.tiny:
        common.save("gpu_load", result)
    for name, value in result["goals"].items():
        print(f"{name}: {value if not isinstance(value, float) else round(value, 3)}")
    for name, error in result["errors"].items():
        print(f"failed: {name}: {error}")


if __name__ == "__main__":
    main()
