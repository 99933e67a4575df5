"""How fast does vLLM start from a pack, against repacking the hybrid checkpoint at every start?

    python -m benchmarks.vllm_serve [--folder DIR] [--layers 4] [--seconds 500] [--out FILE]
    python -m benchmarks.vllm_serve --folder DIR --prepare        make source and pack, and end

A Qwen3-MoE of ``--layers`` MoE layers as wide as GLM-5.2's on one of four tensor-parallel ranks (hidden 6144, experts'
intermediate 512, 256 experts of which 64 are NVFP4 and 192 NF3, top-8; 1 GiB a layer), random weights. Both ways are
quantisation plugins of the same vLLM, found through entry points: the pack's, and ``benchmarks.vllm_repack``, which
does what the serving fork does. Same engine arguments, same ``HybridMoE``, same kernels. Each start is a process of its
own with the engine in it (vLLM would start one more process, for both ways alike), CUDA graphs on, compile caches
filled by a start before. Expert loading is the time in the methods' ``process_weights_after_loading``, waiting for
the GPU before and after, less the time to build ``HybridMoE`` (compiling and scratch), which both do alike. How fast
both decode then is ``vllm_decode``'s question.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks import common, watch
from benchmarks.parts import Run
from tests.gpu import vllm_cases
from tests.gpu.vllm_models import Shape, convert, prompts, write_source

WAYS = ("pack", "repack")
PROMPT = 16
ENTRY_POINT = "hybrid_repack = benchmarks.vllm_repack:register\n"
MIB = 1 << 20


def shape(layers: int, tiny: bool = False) -> Shape:
    """The model; a tiny one to try the script."""
    if tiny:
        return Shape("qwen3_moe", moe_layers=layers, steep=False)
    return Shape(
        "qwen3_moe", moe_layers=layers, hidden=6144, intermediate=512, experts=256, kept=64, top_k=8, vocab=4096,
        heads=16, kv_heads=2, head_dim=128, steep=False,
    )  # fmt: skip


def prepare(folder: Path, model: Shape) -> dict[str, Any]:
    """Source, pack, and the folder that serves the source by repacking: the pack's base, and where the source is."""
    seconds = {}
    source, pack, repack = folder / "source", folder / "pack", folder / "repack"
    if not (source / "config.json").exists():
        seconds["write source"] = common.timed(lambda: write_source(source, model))
    if not (pack / "hybrid_pack.json").exists():
        seconds["convert"] = common.timed(lambda: convert(source, pack))
    repack.mkdir(exist_ok=True)
    for path in [*pack.glob("*.safetensors"), pack / "model.safetensors.index.json"]:
        with suppress(FileExistsError):
            (repack / path.name).symlink_to(path.resolve())
    document = json.loads((pack / "config.json").read_text())
    document["quantization_config"] = {"quant_method": "hybrid_repack", "source": str(source.resolve())}
    (repack / "config.json").write_text(json.dumps(document, indent=1))
    return {name: round(value, 2) for name, value in seconds.items()}


# in the process of an engine


@dataclass
class Probe:
    """Times and memory of the load, from where vLLM calls the quantisation methods."""

    hooks: list[float] = field(default_factory=list)
    builds: list[float] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def install(self) -> None:
        """Stand before vLLM's ``process_weights_after_loading`` and ``HybridMoE``'s making."""
        from vllm.model_executor.model_loader import base_loader

        from hybrid_pack.runtime.moe import HybridMoE

        original, make = base_loader.process_weights_after_loading, HybridMoE.__init__

        def built(moe: Any, *args: Any, **kwargs: Any) -> None:
            self.builds.append(_waited(lambda: make(moe, *args, **kwargs)))

        def processed(model: Any, *args: Any, **kwargs: Any) -> None:
            for module in model.modules():
                method = getattr(module, "quant_method", None)
                if type(method).__name__ in ("HybridMoEMethod", "HybridRepackMethod"):
                    self._watch(method)
            assert self._watched, "no MoE layer is of a method that is to be measured"
            watch.settle(torch.device("cuda"))
            torch.cuda.reset_peak_memory_stats()
            with watch.LeastFree() as least:
                self.seconds = _waited(lambda: original(model, *args, **kwargs))
            self.memory = {
                "peak_allocated_over_resident": torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated(),
                "resident": torch.cuda.memory_allocated(),
                "driver_peak_over_allocated": torch.cuda.mem_get_info()[1] - least.free_bytes
                - torch.cuda.memory_allocated(),
            }  # fmt: skip

        base_loader.process_weights_after_loading = processed
        HybridMoE.__init__ = built  # type: ignore[method-assign,assignment]

    _watched: int = 0

    def _watch(self, method: Any) -> None:
        original = method.process_weights_after_loading
        self._watched += 1

        def timed(layer: Any) -> None:
            self.hooks.append(_waited(lambda: original(layer)))

        method.process_weights_after_loading = timed

    def summary(self) -> dict[str, Any]:
        """In numbers."""
        return {
            "expert_seconds": sum(self.hooks) - sum(self.builds), "hook_seconds": self.hooks,
            "build_seconds": self.builds, "all_methods_seconds": self.seconds, **self.memory,
        }  # fmt: skip


def _waited(action: Any) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _peak_host_bytes() -> int:
    """Peak resident memory, mapped files included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")]  # some kernels have none
    return found[0] if found else common.peak_rss_bytes()


def child(case: Mapping[str, Any]) -> dict[str, Any]:
    """Start an engine and say how that went."""
    began = time.time()
    from vllm import LLM, SamplingParams, __version__

    imported = time.time()
    probe = Probe()
    probe.install()
    llm = LLM(**case["engine"])
    started = time.time()
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": ids} for ids in prompts(case["vocab"], (PROMPT,), 4)], one, use_tqdm=False)
    first = time.time()
    return {
        "vllm": __version__, "process_to_first_token_seconds": first - case["spawned"],
        "python_and_torch_seconds": began - case["spawned"], "import_seconds": imported - began,
        "engine_seconds": started - imported, **probe.summary(), "peak_host_bytes": _peak_host_bytes(),
    }  # fmt: skip


def end_with(action: Callable[[Mapping[str, Any]], Any], given: Path, out: Path) -> NoReturn:
    """Do what this process is for, keep what it returns, and end without waiting for any thread of the engine."""
    status = 1
    try:
        out.write_text(json.dumps(action(json.loads(given.read_text()))))
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# in the process that starts them


class Bench:
    """Starts engines and keeps what they say."""

    def __init__(self, run: Run, folder: Path, model: Shape, work: Path) -> None:
        self.run, self.folder, self.model, self.work = run, folder, model, work
        self.logs: list[str] = []
        vllm_cases.write_entry_points(work / "plugin", ENTRY_POINT)

    def files(self, way: str) -> list[Path]:
        """What a start reads."""
        base = sorted((self.folder / "pack").glob("*.safetensors"))
        experts = (self.folder / "pack").rglob("experts/**/*.safetensors")
        return [*base, *(experts if way == "pack" else (self.folder / "source").glob("*.safetensors"))]

    def engine(self, name: str, way: str, module: str, seconds: float, talk: int | None = None) -> dict[str, Any]:
        """Run ``module`` on an engine in a process of its own; what it said.

        Args:
            name: Of its files.
            way: Whose engine.
            module: Given ``--child CASE --out RESULT``.
            seconds: Until it is ended.
            talk: A file descriptor for it.

        Raises:
            RuntimeError: With the end of its log, where it said nothing.
        """
        given, out, log = (self.work / f"{name}.{kind}" for kind in ("case.json", "result.json", "log"))
        out.unlink(missing_ok=True)
        case = vllm_cases.Case(f"serve/{name}", "serve", way, {"compilation_config": vllm_cases.GRAPHS_OF_FEW})
        engine = vllm_cases.engine_arguments(self.folder / way, case)
        document = {"engine": engine, "vocab": self.model.vocab, "talk": talk, "spawned": time.time()}
        given.write_text(json.dumps(document))
        environment = vllm_cases.child_environment(self.work, way, vllm_cases.IN_PROCESS)
        environment |= {"OMP_NUM_THREADS": "16", "TORCHINDUCTOR_COMPILE_THREADS": "8"}
        command = [sys.executable, "-m", module, "--child", str(given), "--out", str(out)]
        kept = () if talk is None else (talk,)
        status = vllm_cases.run_limited(command, environment, log, seconds, kept)
        text = log.read_text(errors="replace")
        self.logs.append(f"{'=' * 20} {name}: exit status {status}\n{text}")
        if not out.exists():
            raise RuntimeError(f"{name}: exit status {status}: ...{text[-300:]}")
        return dict(json.loads(out.read_text()))

    def start(self, way: str, *, cold: bool | None = None, seconds: int = 200) -> dict[str, Any]:
        """One start; ``cold`` takes the files out of the page cache before, or brings them all into it."""
        if cold is not None:
            (watch.drop_cache if cold else watch.warm)(self.files(way))
        share = [watch.cached(path) for path in self.files(way)]
        name = f"{way}-{'fill' if cold is None else 'cold' if cold else 'warm'}"
        result = self.engine(name, way, "benchmarks.vllm_serve", seconds)
        result["cached_before"] = [round(min(share), 3), round(max(share), 3)]
        brief = {key: round(result[key], 2) for key in ("process_to_first_token_seconds", "expert_seconds")}
        print(f"  {name}: {brief}", flush=True)
        return result


def warm_rounds(result: Mapping[str, Any], way: str) -> list[Mapping[str, Any]]:
    """What the warm starts of a way said, all rounds."""
    return [value for name, value in result.items() if name.split(" #")[0] == f"{way} warm"]


def goals(result: Mapping[str, Any]) -> dict[str, Any]:
    """The goals and what was reached, medians of the warm rounds; None where a part is missing."""

    def median(way: str, value: Callable[[Mapping[str, Any]], float]) -> float | None:
        rounds = warm_rounds(result, way)
        return statistics.median(map(value, rounds)) if rounds else None

    def cold(way: str, key: str) -> Any:
        return result.get(f"{way} cold", {}).get(key)

    def ratio(one: Any, other: Any) -> float | None:
        return None if one is None or not other else one / other

    experts, first = "expert_seconds", "process_to_first_token_seconds"
    found: dict[str, Any] = {}
    for key, name in ((experts, "times faster expert loading, {} (10)"), (first, "times sooner the first token, {}")):
        both = [median(way, lambda start, key=key: start[key]) for way in WAYS]  # type: ignore[misc]
        found[name.format("warm")] = ratio(both[1], both[0])
        found[name.format("cold").removesuffix(" (10)")] = ratio(cold("repack", key), cold("pack", key))
    for way in WAYS:
        goal = " (64)" if way == "pack" else ""
        over = [start["peak_allocated_over_resident"] / MIB for start in warm_rounds(result, way)]
        found[f"{way}: MiB of GPU memory over the resident at most{goal}"] = max(over, default=None)
    return found


def measure(options: argparse.Namespace, folder: Path, work: Path) -> dict[str, Any]:
    """All starts; what is there so far is kept after each.

    First one of each way at one time, which fills the compile caches; then warm ones in turns, last a cold one of each.
    """
    run = Run(options.seconds)
    run.result["question"] = (__doc__ or "").strip().splitlines()[0]
    model = shape(options.layers, options.tiny)
    run.part("machine", lambda: common.machine(folder))
    run.part("gpu", watch.gpu)
    run.part("prepare", lambda: prepare(folder, model))
    bench = Bench(run, folder, model, work)
    run.result["layers"] = options.layers
    run.result["bytes"] = {way: sum(path.stat().st_size for path in bench.files(way)) for way in WAYS}

    def part(name: str, action: Callable[[], Any]) -> None:
        run.part(name, action)
        run.result["goals"] = goals(run.result)
        if options.out is not None:
            common.keep(options.out, run.result)
            options.out.with_suffix(".log").write_text("\n".join(bench.logs))

    def fill() -> dict[str, Any]:
        with ThreadPoolExecutor(len(WAYS)) as pool:
            return dict(zip(WAYS, pool.map(bench.start, WAYS), strict=True))

    part("first starts, at one time", fill)
    for number in range(options.rounds):
        for way in WAYS:
            part(f"{way} warm #{number + 1}", partial(bench.start, way, cold=False))
    for way in WAYS:
        part(f"{way} cold", partial(bench.start, way, cold=True))
    return run.result


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where source and pack are made; those that are there are used")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2, help="warm starts of each way")
    parser.add_argument("--seconds", type=float, default=500, help="starts that would begin later are left out")
    parser.add_argument("--out", type=Path, help="where the result goes")
    parser.add_argument("--prepare", action="store_true", help="make source and pack, and end")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        end_with(child, options.child, options.out)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch, "models")
        folder.mkdir(parents=True, exist_ok=True)
        if options.prepare:
            print(prepare(folder, shape(options.layers, options.tiny)))
            return
        result = measure(options, folder, Path(scratch))
    if not options.tiny:
        common.save("vllm_serve", result, options.out)
    for name, value in result["goals"].items():
        print(f"{name}: {value if not isinstance(value, float) else round(value, 3)}")
    for name, error in result["errors"].items():
        print(f"failed: {name}: {error}")


if __name__ == "__main__":
    main()
