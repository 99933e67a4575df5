"""How good and how fast is quantising, beside trying every scale and beside compressed-tensors?

    python -m benchmarks.quantise [--runs N] [--device cuda] [--out FILE]

Error is the signal-to-quantisation-noise ratio in dB, of whole matrices and, beside the brute force, of the groups it
was run on. The brute force is the tests' reference: every scale of the format, in float64. Speed is weights a second,
on one thread and on two, blocks of 64 rows at a time; the baselines take turns with it: every NF3 scale tried with
whole-tensor operations of torch, and compressed-tensors' own FP4 quantiser (scales, rounding and packing).
With ``--device cuda``: speed on a GPU, with a copy of the weights on it as the floor, and the bytes held against the
CPU's. Most of its time is compiling, which several processes do at once. The result is written as it grows.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import common
from hybrid_pack.quantize import SEARCHES, Search, best_second_scale, nvfp4_second_scale
from hybrid_pack.quantize.cuda import Quantized, quantize_mxfp4_cuda, quantize_nf3_cuda, quantize_nvfp4_cuda
from hybrid_pack.quantize.second import SAMPLE
from tests.quantize.ours import (
    F32,
    NAMES,
    Name,
    decoded_rows,
    gaussian,
    quantize,
    real_tensor,
    some_importance,
    student,
)
from tests.reference.quantize import least_error
from tests.reference.source import GROUP, NF3_LEVELS, dequantize

BRUTE_ROWS = 64
PLAIN = (2048, 2048)
ROWS, COLUMNS, BLOCK_ROWS = 4096, 2048, 64
GPU_ROWS, GPU_COLUMNS = 16384, 6144
COMPARED_ROWS = 64
"""Whose bytes are held against the CPU's."""
GPU_DTYPES = (torch.float32, torch.bfloat16)
SIGMA = 0.02
GOALS = {"nf3 mse, weights/s, two threads": 100e6, "nf3 mse, dB below brute force": 0.01}
GPU_GOAL = 10e9


def real_matrix() -> F32:
    """f32 [N, 384]: every feed-forward matrix of all-MiniLM-L6-v2, rows cut so that groups stay whole."""
    names = [f"encoder.layer.{layer}.{part}.dense.weight" for layer in range(6) for part in ("intermediate", "output")]
    return np.concatenate([real_tensor(name).reshape(-1, 384) for name in names])


def sources() -> dict[str, F32]:
    """What is quantised, by name."""
    plain = gaussian(*PLAIN)
    return {
        "gaussian, sigma 0.02": plain,
        "gaussian, sigma 0.002": gaussian(*PLAIN, sigma=0.002),
        "student t4": student(*PLAIN),
        "all-MiniLM-L6-v2": real_matrix(),
        "gaussian, decoded from NVFP4": decoded(plain),
    }


def decoded(plain: F32) -> F32:
    """The weights an NVFP4 checkpoint made the usual way has of a matrix."""
    return decoded_rows(
        quantize("nvfp4", plain, "absmax", second=nvfp4_second_scale(float(np.abs(plain).max()), 448.0))
    )


def decibels(signal: float, error: float) -> float:
    """Signal to noise."""
    return 10 * math.log10(signal / error) if error else math.inf


def second_of(name: Name, weights: F32) -> float:
    """Second-level scale of a matrix, chosen as ``convert`` does; 1 where the format has none."""
    if name != "nvfp4":
        return 1.0
    sample = np.ascontiguousarray(weights[:: max(1, weights.size // SAMPLE)])
    return best_second_scale(sample, float(np.abs(weights).max()), "mse")


def errors(weights: F32) -> dict[str, Any]:
    """Every format and search on one source, against the brute force and compressed-tensors."""
    from tests.quantize import theirs

    importance = some_importance(weights.shape[1])
    rows: dict[str, Any] = {}
    for name in NAMES:
        second, group = second_of(name, weights), GROUP[name]
        found: dict[str, Any] = {}
        signal = float((weights.astype(np.float64) ** 2 * importance).sum())
        for search in SEARCHES:
            made = quantize(name, weights, search, importance if search == "weighted" else None, second)
            stats = made.stats
            found[search] = {
                "db": stats.sqnr_db,
                "weighted_db": decibels(signal, float(made.errors(weights, importance).sum())),
                "zero_groups": stats.zero,
                "subnormal_scales": stats.subnormal,
                "saturated": stats.saturated,
            }
        part = weights[:BRUTE_ROWS]
        signal = float((part.astype(np.float64) ** 2).sum())
        brute = least_error(name, part.astype(np.float64), second)
        ours = quantize(name, part, "mse", None, second).errors(part)
        found["brute_force"] = {
            "weights": part.size,
            "db": decibels(signal, float(brute.sum())),
            "mse_db": decibels(signal, float(ours.sum())),
            "worst_group_excess": float((ours / np.maximum(brute, 1e-300) - 1).max()),
        }
        if name != "nf3":
            other = theirs.quantize(weights, group)
            error = float(((weights - dequantize(name, other.codes, other.scales, other.second)) ** 2).sum())
            found["compressed_tensors_db"] = decibels(float((weights.astype(np.float64) ** 2).sum()), error)
        rows[name] = found
    return rows


def every_scale(weights: torch.Tensor) -> torch.Tensor:
    """NF3 by trying all scales with operations on whole tensors; returns the index of the best, [groups]."""
    levels = torch.tensor(NF3_LEVELS, device=weights.device)
    middles = (levels[1:] + levels[:-1]) / 2
    scales = torch.arange(1, 0x60, dtype=torch.uint8, device=weights.device).view(torch.float8_e4m3fn).float()
    groups = weights.reshape(-1, 32)
    best = torch.full((len(groups),), math.inf, device=weights.device)
    index = torch.zeros(len(groups), dtype=torch.int64, device=weights.device)
    for i, scale in enumerate(scales):
        error = (groups - levels[torch.bucketize(groups, middles * scale)] * scale).square().sum(1)
        index = torch.where(error < best, i + 1, index)
        best = torch.minimum(best, error)
    return index


def speeds(threads: int, runs: int) -> dict[str, Any]:
    """Weights a second of every format and search, and of the baselines, all taking turns."""
    from tests.quantize import theirs

    weights = gaussian(ROWS, COLUMNS)
    importance = some_importance(COLUMNS)
    torch.set_num_threads(threads)

    def ours(name: Name, search: Search) -> Callable[[], float]:
        second, given = second_of(name, weights), importance if search == "weighted" else None

        def block(first: int) -> None:
            quantize(name, weights[first : first + BLOCK_ROWS], search, given, second)

        def run() -> float:
            began = time.perf_counter()
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(block, range(0, ROWS, BLOCK_ROWS)))
            return time.perf_counter() - began

        block(0)
        return run

    few = weights[: ROWS // 32]
    actions = {f"{name} {search}": ours(name, search) for name in NAMES for search in SEARCHES}
    actions["nf3 every scale, torch"] = lambda: common.timed(lambda: every_scale(torch.from_numpy(few)))
    actions["nvfp4 compressed-tensors"] = lambda: common.timed(lambda: theirs.quantize(weights, 16))
    actions["mxfp4 compressed-tensors"] = lambda: common.timed(lambda: theirs.quantize(weights, 32))
    seconds = common.interleaved(actions, runs)
    sizes = {name: few.size if "every" in name else weights.size for name in actions}
    rates = {name: common.summary([sizes[name] / s for s in values]) for name, values in seconds.items()}
    ratio = {
        f"{name} mse": rates[f"{name} mse"]["median"] / rates[baseline]["median"]
        for name, baseline in zip(NAMES, list(actions)[-3:], strict=True)
    }
    return {"weights_per_second": rates, "speed_up_over_baseline": ratio}


def on_gpu(name: Name, search: Search, tensor: torch.Tensor, second: float, importance: F32) -> Quantized:
    """Quantise a tensor where it is."""
    given = torch.from_numpy(importance).to(tensor.device) if search == "weighted" else None
    if name == "nf3":
        return quantize_nf3_cuda(tensor, NF3_LEVELS, search, given)
    if name == "nvfp4":
        return quantize_nvfp4_cuda(tensor, second, search, given)
    return quantize_mxfp4_cuda(tensor, search, given)


def compile_kernels(name: Name, search: Search) -> None:
    """Fill Triton's cache on the disk, in a process of its own: few rows, in all else as they are measured."""
    for dtype in GPU_DTYPES:
        tensor = torch.full((COMPARED_ROWS, GPU_COLUMNS), SIGMA, device="cuda", dtype=dtype)
        on_gpu(name, search, tensor, 1.0, some_importance(GPU_COLUMNS))


def compile_all() -> None:
    """All of them at once; what fails there is compiled again, or fails, where it is measured."""
    kinds = [(name, search) for name in NAMES for search in SEARCHES]
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(min(len(kinds), cores), multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(compile_kernels, *kind) for kind in kinds]
        few = gaussian(1, GPU_COLUMNS)
        for name in NAMES:  # the CPU's, here and meanwhile
            quantize(name, few)
        for kind, future in zip(kinds, futures, strict=True):
            if (error := future.exception()) is not None:
                print(f"  {' '.join(kind)} did not compile beforehand: {error}", flush=True)


def gpu(runs: int, keep: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """Weights a second on a GPU, the bytes compared with the CPU's; ``keep`` gets what there is after each kind."""
    began = time.perf_counter()
    compile_all()
    result: dict[str, Any] = {"compiling_seconds": time.perf_counter() - began}
    generator = torch.Generator("cuda").manual_seed(1)
    weights = torch.randn(GPU_ROWS, GPU_COLUMNS, generator=generator, device="cuda") * SIGMA
    importance = some_importance(GPU_COLUMNS)
    second = nvfp4_second_scale(float(weights.abs().max()))
    rates: dict[str, Any] = {}
    equal: dict[str, bool] = {}
    result |= {"weights": weights.numel(), "weights_per_second": rates, "bytes_equal_cpu": equal}

    def measure(action: Callable[[], object], times: int = runs) -> dict[str, Any]:
        action()
        seconds = []
        for _ in range(times):
            torch.cuda.synchronize()
            began = time.perf_counter()
            action()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return common.summary([weights.numel() / s for s in seconds])

    result["copy_weights_per_second"] = measure(weights.clone)
    few = weights[: GPU_ROWS // 16]
    result["every_scale_torch_weights_per_second"] = measure(lambda: every_scale(few), 1)["median"] / 16
    for dtype in GPU_DTYPES:
        tensor = weights.to(dtype)
        part = tensor[:COMPARED_ROWS].float().cpu().numpy()
        for name in NAMES:
            for search in SEARCHES:
                key = f"{name} {search}, {str(dtype).removeprefix('torch.')}"
                action = partial(on_gpu, name, search, tensor, second, importance)
                rates[key] = measure(action)
                codes, scales, _ = action()
                given = importance if search == "weighted" else None
                on_cpu = quantize(name, part, search, given, second if name == "nvfp4" else 1.0)
                equal[key] = bool(
                    np.array_equal(codes[:COMPARED_ROWS].cpu().numpy(), on_cpu.codes)
                    and np.array_equal(scales[:COMPARED_ROWS].cpu().numpy(), on_cpu.scales)
                )
                print(f"  {key}: {rates[key]['median'] / 1e9:.1f} G weights/s, equal {equal[key]}", flush=True)
                keep(result)
    found = rates["nf3 mse, float32"]["median"]
    result["goals"] = {"nf3 mse, weights/s": {"least": GPU_GOAL, "found": found, "met": found >= GPU_GOAL}}
    return result


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="Write the result there, not into benchmarks/results.")
    options = parser.parse_args()
    name = "quantise" if options.device == "cpu" else "quantise_gpu"
    path = common.result_path(name, options.out)
    result: dict[str, Any] = {
        "question": (__doc__ or "").strip().splitlines()[0],
        "machine": {**common.machine(Path.cwd()), "load_before": os.getloadavg()[0]},
    }
    if os.environ.get("COMMIT"):
        result["machine"]["commit"] = os.environ["COMMIT"]
    if options.device == "cuda":
        result["machine"] |= {"gpu": torch.cuda.get_device_name(), "torch_cuda": torch.version.cuda}
        result["gpu"] = gpu(options.runs, lambda so_far: common.keep(path, {**result, "gpu": so_far}))
        print(json.dumps(result["gpu"]["goals"], indent=1))
    else:
        result["errors"] = {}
        plain = gaussian(*PLAIN)
        twice = decoded_rows(quantize("nf3", decoded(plain)))
        result["nf3_from_nvfp4_db_to_the_original"] = decibels(
            float((plain.astype(np.float64) ** 2).sum()), float(((plain.astype(np.float64) - twice) ** 2).sum())
        )
        for kind, weights in sources().items():
            result["errors"][kind] = errors(weights)
            common.keep(path, result)
            for form, row in result["errors"][kind].items():
                line = ", ".join(f"{search} {row[search]['db']:.2f}" for search in SEARCHES)
                brute = row["brute_force"]
                print(
                    f"{kind}: {form} {line} dB; of {brute['db']:.4f} by brute force {brute['mse_db']:.4f}", flush=True
                )
        result["speed"] = {}
        for n in (1, 2):
            result["speed"][f"{n} thread{'s' * (n > 1)}"] = speeds(n, options.runs)
            common.keep(path, result)
        rate = result["speed"]["2 threads"]["weights_per_second"]["nf3 mse"]["median"]
        below = max(
            row["nf3"]["brute_force"]["db"] - row["nf3"]["brute_force"]["mse_db"] for row in result["errors"].values()
        )
        least, most = GOALS.values()
        result["goals"] = dict(
            zip(
                GOALS,
                (
                    {"least": least, "found": rate, "met": rate >= least},
                    {"most": most, "found": below, "met": below <= most},
                ),
                strict=True,
            )
        )
        print(json.dumps(result["goals"], indent=1))
    common.save(name, result, options.out)


if __name__ == "__main__":
    main()
