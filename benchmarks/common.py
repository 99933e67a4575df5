"""What every benchmark needs: interleaved runs, medians, the machine, a result file."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("hybrid-pack", "torch", "numpy", "numba", "blake3", "b12x", "safetensors", "fastsafetensors", "triton")


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    flags = next((line for line in lines if line.startswith("flags")), "")
    return f"{model} ({'AVX-512' if 'avx512bw' in flags else 'AVX2' if 'avx2' in flags else 'baseline'})"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine(folder: Path) -> dict[str, Any]:
    """The machine, its versions and the commit a result was made with; COMMIT names it where there is no git."""
    commit = (
        os.environ.get("COMMIT")
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    disk = subprocess.run(["df", "--output=fstype", str(folder)], capture_output=True, text=True, check=False)
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "file_system": disk.stdout.split()[-1] if disk.stdout else "unknown",
        "python": platform.python_version(),
        "packages": {p: v for p in PACKAGES if (v := _version(p))},
        "commit": commit,
    }


def summary(values: list[float]) -> dict[str, Any]:
    """Median, extremes and all values."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": values}


def interleaved(
    actions: Mapping[str, Callable[[], float]], runs: int, before: Callable[[str], None] | None = None
) -> dict[str, list[float]]:
    """Run each action in turn, A B C A B C ...; returns what each returned (seconds), by name.

    Args:
        actions: By name; each returns its own seconds.
        runs: Rounds.
        before: Called with the name before each action, outside its time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(runs):
        for name, action in actions.items():
            if before is not None:
                before(name)
            seconds[name].append(action())
            print(f"  {name}: {seconds[name][-1]:.2f} s", flush=True)
    return seconds


def ratios(seconds: Mapping[str, list[float]], of: str, to: str) -> dict[str, Any]:
    """Round by round ratio of one action's time to another's."""
    return summary([a / b for a, b in zip(seconds[of], seconds[to], strict=True)])


def timed(action: Callable[[], object]) -> float:
    """Seconds an action took."""
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def run_measured(command: list[str]) -> tuple[float, int, float]:
    """Run a process to its end: (seconds, peak resident bytes, CPU seconds)."""
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    errors = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {errors}")
    return time.perf_counter() - began, usage.ru_maxrss * 1024, usage.ru_utime + usage.ru_stime


def fresh(folder: Path) -> None:
    """Remove a folder and let the disk come to rest."""
    shutil.rmtree(folder, ignore_errors=True)
    os.sync()


def warm(folder: Path) -> None:
    """Bring every file of a folder into the page cache."""
    buffer = bytearray(8 << 20)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def cool(folder: Path) -> None:
    """Drop every file of a folder from the page cache."""
    os.sync()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def keep(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result, whole or not at all; what a benchmark has so far is kept so, in case it is ended early."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)


def result_path(name: str, out: Path | None = None) -> Path:
    """Where a result goes: the file that was asked for and no other, else the folder of the committed ones."""
    return RESULTS / f"{name}.json" if out is None else out


def save(name: str, result: Mapping[str, Any], out: Path | None = None) -> Path:
    """Keep a result."""
    path = result_path(name, out)
    keep(path, result)
    print(f"kept in {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}")
    return path


def peak_rss_bytes() -> int:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
