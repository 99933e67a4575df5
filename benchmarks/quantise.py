"""How good and how fast is quantising, beside trying every scale and beside compressed-tensors?

    python -m benchmarks.quantise [--runs N] [--device cuda] [--out FILE]

Error is the signal-to-quantisation-noise ratio in dB, of whole matrices and, beside the brute force, of the groups it
was run on. The brute force is the tests' reference: every scale of the format, in float64. Speed is weights a second,
on one thread and on two, blocks of 64 rows at a time; the baselines take turns with it: every NF3 scale tried with
whole-tensor operations of torch, and compressed-tensors' own FP4 quantiser (scales, rounding and packing).
With ``--device cuda``: speed on a GPU, with a copy of the weights on it as the floor, and the bytes held against the
CPU's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import common
from hybrid_pack.quantize import SEARCHES, Search, nvfp4_second_scale
from hybrid_pack.quantize.cuda import Quantized, quantize_mxfp4_cuda, quantize_nf3_cuda, quantize_nvfp4_cuda
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
    return decoded_rows(quantize("nvfp4", plain, "absmax", second=second_of("nvfp4", plain)))


def decibels(signal: float, error: float) -> float:
    """Signal to noise."""
    return 10 * math.log10(signal / error) if error else math.inf


def second_of(name: Name, weights: F32) -> float:
    """Second-level scale of a matrix, 1 where the format has none."""
    return nvfp4_second_scale(float(np.abs(weights).max())) if name == "nvfp4" else 1.0


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


def gpu(runs: int) -> dict[str, Any]:
    """Weights a second on a GPU; the bytes are compared with the CPU's first."""
    generator = torch.Generator("cuda").manual_seed(1)
    weights = torch.randn(GPU_ROWS, GPU_COLUMNS, generator=generator, device="cuda") * 0.02
    importance = some_importance(GPU_COLUMNS)
    second = nvfp4_second_scale(float(weights.abs().max()))
    head = weights[:256].cpu().numpy()
    result: dict[str, Any] = {"weights": weights.numel(), "weights_per_second": {}, "bytes_equal_cpu": {}}

    def measure(action: Callable[[], object]) -> dict[str, Any]:
        action()
        seconds = []
        for _ in range(runs):
            torch.cuda.synchronize()
            began = time.perf_counter()
            action()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        return common.summary([weights.numel() / s for s in seconds])

    for dtype in (torch.float32, torch.bfloat16):
        tensor = weights.to(dtype)
        for name in NAMES:
            for search in SEARCHES:
                given = torch.from_numpy(importance).cuda() if search == "weighted" else None
                key = f"{name} {search}, {str(dtype).removeprefix('torch.')}"

                def action(
                    tensor: torch.Tensor = tensor, name: Name = name, search: Search = search, given: Any = given
                ) -> Quantized:
                    if name == "nf3":
                        return quantize_nf3_cuda(tensor, NF3_LEVELS, search, given)
                    if name == "nvfp4":
                        return quantize_nvfp4_cuda(tensor, second, search, given)
                    return quantize_mxfp4_cuda(tensor, search, given)

                result["weights_per_second"][key] = measure(action)
                codes, scales, _ = action()
                part = head if dtype == torch.float32 else tensor[:256].float().cpu().numpy()
                on_cpu = quantize(
                    name, part, search, importance if given is not None else None, second if name == "nvfp4" else 1.0
                )
                result["bytes_equal_cpu"][key] = bool(
                    np.array_equal(codes[:256].cpu().numpy(), on_cpu.codes)
                    and np.array_equal(scales[:256].cpu().numpy(), on_cpu.scales)
                )
                rate = result["weights_per_second"][key]["median"]
                print(f"  {key}: {rate / 1e9:.1f} G weights/s, equal {result['bytes_equal_cpu'][key]}", flush=True)
    few = weights[: GPU_ROWS // 16]
    every = measure(lambda: every_scale(few))
    result["every_scale_torch_weights_per_second"] = every["median"] / 16
    result["copy_weights_per_second"] = measure(weights.clone)
    found = result["weights_per_second"]["nf3 mse, float32"]["median"]
    result["goals"] = {"nf3 mse, weights/s": {"least": GPU_GOAL, "found": found, "met": found >= GPU_GOAL}}
    return result


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="Write the result here, too.")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "question": (__doc__ or "").strip().splitlines()[0],
        "machine": {**common.machine(Path.cwd()), "load_before": os.getloadavg()[0]},
    }
    if os.environ.get("COMMIT"):
        result["machine"]["commit"] = os.environ["COMMIT"]
    if options.device == "cuda":
        result["machine"] |= {"gpu": torch.cuda.get_device_name(), "torch_cuda": torch.version.cuda}
        result["gpu"] = gpu(options.runs)
        print(json.dumps(result["gpu"]["goals"], indent=1))
    else:
        result["errors"] = {}
        plain = gaussian(*PLAIN)
        twice = decoded_rows(quantize("nf3", decoded(plain)))
        result["nf3_from_nvfp4_db_to_the_original"] = decibels(
            float((plain.astype(np.float64) ** 2).sum()), float(((plain.astype(np.float64) - twice) ** 2).sum())
        )
        for name, weights in sources().items():
            result["errors"][name] = errors(weights)
            for form, row in result["errors"][name].items():
                line = ", ".join(f"{search} {row[search]['db']:.2f}" for search in SEARCHES)
                brute = row["brute_force"]
                print(
                    f"{name}: {form} {line} dB; of {brute['db']:.4f} by brute force {brute['mse_db']:.4f}", flush=True
                )
        result["speed"] = {f"{n} thread{'s' * (n > 1)}": speeds(n, options.runs) for n in (1, 2)}
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
    common.save("quantise" if options.device == "cpu" else "quantise_gpu", result)
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
