"""How fast are conversion and its packers, against ``cp`` and against b12x's own packers?

    python -m benchmarks.convert [--folder DIR] [--runs N]

Packers: GB of stored bytes (codes and scales) a second, one GLM-5.2 TP4 rank's share of an expert at a time, on one
thread and on two. Conversion: two layers of 128 experts at GLM-5.2 widths (4.5 GB), whole processes, digests and fsync
included, interleaved with ``cp -r`` and ``sync``, source in the page cache.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import common
from hybrid_pack.convert.work import Run
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.layouts.shard import RankGeometry
from hybrid_pack.plan import Plan, make_plan
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec, write_checkpoint

TP = 4
GEOMETRY = RankGeometry(6144, 2048 // TP, (64, 256, 64, 256))
SECONDS = 2.0


def checkpoint(folder: Path, kept_format: str, experts: int) -> Path:
    """Two layers at GLM-5.2 widths, a quarter of the experts kept: 32 MB an expert and layer pair."""
    root = folder / f"source-{kept_format}"
    spec = Spec(
        hidden=6144, intermediate=2048, num_experts=experts, kept=experts // 4, top_k=8, moe_layers=(3, 4),
        dense_layers=(0,), mtp_layer=False, kept_format="mxfp4" if kept_format == "mxfp4" else "nvfp4",
    )  # fmt: skip
    write_checkpoint(root, spec)
    return root


def plan_of(source: Path) -> Plan:
    """For TP4."""
    return make_plan(open_checkpoint(source), Topology(TP))


def rate(action: Callable[[], int], threads: int) -> float:
    """GB a second of an action that returns the bytes it packed, on some threads at once."""

    def work() -> tuple[int, float]:
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < SECONDS:
            done += action()
        return done, time.perf_counter() - began

    with ThreadPoolExecutor(threads) as pool:
        results = [future.result() for future in [pool.submit(work) for _ in range(threads)]]
    return sum(done / seconds for done, seconds in results) / 1e9


def our_rate(plan: Plan, tier: str, threads: int) -> float:
    """Codes, scales, tables and counts of a whole expert for all ranks, already read and moved as it is."""
    local = threading.local()
    layer = next(iter(plan.source.layers.values()))
    number = getattr(layer, tier)[0]

    def action() -> int:
        if not hasattr(local, "worker"):
            local.worker = Run(plan, threads).worker()
            with TensorReader() as reader:
                local.stored = local.worker.packer.read(layer.experts[number], reader)
        encoding = local.worker.encoder.encode(layer, number, local.stored, (1e-3,) * 3, "benchmark")
        for _ in local.worker.packer.pack(encoding, "benchmark"):
            pass
        return sum(part.nbytes for part in local.stored.values())

    return rate(action, threads)


def b12x_rates() -> dict[str, float]:
    """b12x 1.1.0's own packers on a w13 of one rank; torch threads as they are set by default."""
    import torch
    from b12x.moe._shared.kernels.w4a16 import prepare

    n, k = GEOMETRY.size("w13")
    codes = torch.randint(0, 8, (n, k), dtype=torch.uint8)
    fp4 = torch.randint(0, 256, (1, n, k // 2), dtype=torch.uint8)

    def nf3() -> int:
        prepare._nf3_pack_codes(codes, size_k=k, size_n=n, tile_n=256)
        return n * k // 8 * 3

    def packed() -> int:
        prepare._repack_weight(fp4, size_k=k, size_n=n)
        return n * k // 2

    return {"nf3": rate(nf3, 1), "fp4": rate(packed, 1)}


def convert_and_cp(source: Path, out: Path, runs: int) -> dict[str, Any]:
    """Whole conversion against ``cp -r`` and ``sync``."""
    command = [sys.executable, "-m", "hybrid_pack.cli", "convert", str(source), "--out", str(out), "--tp", str(TP)]

    def cp() -> float:
        return common.timed(lambda: subprocess.run(f"cp -r '{source}' '{out}' && sync", shell=True, check=True))

    def prepare(_: str) -> None:
        common.fresh(out)
        common.warm(source)

    seconds = common.interleaved({"convert": lambda: common.run_measured(command)[0], "cp": cp}, runs, prepare)
    common.fresh(out)
    nbytes = sum(p.stat().st_size for p in source.iterdir())
    return {
        "source_bytes": nbytes,
        "seconds": {name: common.summary(values) for name, values in seconds.items()},
        "ratio_to_cp": common.ratios(seconds, "convert", "cp"),
    }


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to work; 10 GB are needed")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        folder = Path(work)
        result: dict[str, Any] = {"question": __doc__.strip().splitlines()[0], "machine": common.machine(folder)}
        source = checkpoint(folder, "nvfp4", 128)
        result["conversion"] = convert_and_cp(source, folder / "out", options.runs)
        plan, mxfp4 = plan_of(source), plan_of(checkpoint(folder, "mxfp4", 8))
        result["packers_gb_per_s"] = {
            name: {"one_thread": our_rate(of, tier, 1), "two_threads": our_rate(of, tier, 2)}
            for name, of, tier in (("nf3", plan, "tail"), ("nvfp4", plan, "kept"), ("mxfp4", mxfp4, "kept"))
        }
        result["b12x_packers_gb_per_s"] = b12x_rates()
    ours, theirs = result["packers_gb_per_s"], result["b12x_packers_gb_per_s"]
    result["speed_up_over_b12x"] = {
        "nf3": ours["nf3"]["one_thread"] / theirs["nf3"],
        "nvfp4": ours["nvfp4"]["one_thread"] / theirs["fp4"],
    }
    common.save("convert", result)
    for name, speeds in ours.items():
        print(f"{name}: {speeds['one_thread']:.2f} GB/s on one thread, {speeds['two_threads']:.2f} on two")
    print(f"b12x: NF3 {theirs['nf3']:.4f} GB/s, FP4 {theirs['fp4']:.3f}")
    print(f"conversion: {result['conversion']['ratio_to_cp']['median']:.2f}x cp")


if __name__ == "__main__":
    main()
