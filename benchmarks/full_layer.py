"""How fast is one full GLM-5.2 layer (256 experts, 6144/2048, 64 kept) for TP4, and what memory does it take?

    python -m benchmarks.full_layer [--folder DIR] [--runs N] [--cold-runs N]

Baselines, interleaved in the same run, source and output on one disk: ``cp -r`` and ``sync``; and a plain tuned copy
loop (threads, large reads, fallocate, direct writes, fsync; nothing computed). Whole processes, with digests and fsync.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import common
from hybrid_pack.synthetic import Spec, write_checkpoint

GLM_LAYER = Spec(
    hidden=6144, intermediate=2048, num_experts=256, kept=64, top_k=8, moe_layers=(3,), dense_layers=(), mtp_layer=False
)
TP = 4
CONVERT = [sys.executable, "-m", "hybrid_pack.cli", "convert"]


def measure(folder: Path, runs: int, cold: bool, workers: int) -> dict[str, Any]:
    """Interleaved runs of the conversion and both baselines."""
    source, out = folder / "source", folder / "out"
    peaks: list[int] = []
    cpu: list[float] = []

    def convert() -> float:
        command = [*CONVERT, str(source), "--out", str(out), "--tp", str(TP), "--workers", str(workers)]
        seconds, peak, used = common.run_measured(command)
        peaks.append(peak)
        cpu.append(used)
        return seconds

    def cp() -> float:
        return common.timed(lambda: subprocess.run(f"cp -r '{source}' '{out}' && sync", shell=True, check=True))

    def copy_loop() -> float:
        command = [sys.executable, "-m", "benchmarks.copy_loop", str(source), str(out), str(workers)]
        return common.run_measured(command)[0]

    def prepare(_: str) -> None:
        common.fresh(out)
        (common.cool if cold else common.warm)(source)

    seconds = common.interleaved({"convert": convert, "cp": cp, "copy_loop": copy_loop}, runs, prepare)
    common.fresh(out)
    nbytes = sum(p.stat().st_size for p in source.iterdir())
    return {
        "source_bytes": nbytes,
        "workers": workers,
        "seconds": {name: common.summary(values) for name, values in seconds.items()},
        "gb_per_s": {name: nbytes / 1e9 / common.summary(values)["median"] for name, values in seconds.items()},
        "ratio_to_cp": common.ratios(seconds, "convert", "cp"),
        "ratio_to_copy_loop": common.ratios(seconds, "convert", "copy_loop"),
        "peak_rss_bytes": max(peaks),
        "cpu_seconds": common.summary(cpu),
    }


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where to work; 10 GB are needed")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cold-runs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        folder = Path(work)
        write_checkpoint(folder / "source", GLM_LAYER)
        result: dict[str, Any] = {"question": __doc__.strip().splitlines()[0], "machine": common.machine(folder)}
        for name, cold, runs in (("warm", False, options.runs), ("cold", True, options.cold_runs)):
            print(f"{name} source:")
            result[name] = measure(folder, runs, cold, options.workers)
        two = common.run_measured(
            [*CONVERT, str(folder / "source"), "--out", str(folder / "out"), "--tp", str(TP), "--workers", "2"]
        )
        result["two_workers"] = {"seconds": two[0], "peak_rss_bytes": two[1]}
    common.save("full_layer", result)
    for name in ("warm", "cold"):
        part = result[name]
        print(
            f"{name}: {part['gb_per_s']['convert']:.2f} GB/s, {part['ratio_to_cp']['median']:.2f}x cp, "
            f"{part['ratio_to_copy_loop']['median']:.2f}x copy loop, peak {part['peak_rss_bytes'] / 2**20:.0f} MiB"
        )


if __name__ == "__main__":
    main()
