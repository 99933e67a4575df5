"""Which engines are compared, and how they are run: each in a process of its own, several at a time on one GPU.

    python -m tests.gpu.vllm_cases STAGE MODELS_FOLDER WORK_FOLDER

KV caches have an explicit size, so vLLM profiles no memory that another process is just taking.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hybrid_pack
from tests.gpu.vllm_models import EVERY, SHAPES

ROOT = Path(__file__).resolve().parent.parent.parent
CAPTURE = [1, 2, 4, 8, 16, 32, 64]
GRAPHS: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": CAPTURE}}
PIECEWISE: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": CAPTURE, "cudagraph_mode": "PIECEWISE"}}
GRAPHS_OF_FEW = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
MTP = {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": "TRITON_ATTN"}
EAGER: dict[str, Any] = {"enforce_eager": True}
TORCH: dict[str, Any] = EAGER | {"additional_config": {"hybrid_pack": {"backend": "torch"}}}
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "disable_custom_all_reduce": True}
SPLITS: dict[str, dict[str, Any]] = {"tp2": {}, "ep2": {"enable_expert_parallel": True}}
"""Packs for two ranks, and what vLLM is told to split experts so."""
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
FORKED = {"VLLM_PLUGINS": "hybrid_pack"}
"""Without b12x's own plugin, whose imports initialise the CUDA driver; after that ours has engines spawned."""

ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_MLA_DISABLE": "1",  # MLA's prefill needs FlashAttention's library, which the bundle leaves out
    "OMP_NUM_THREADS": "2",
    "TORCHINDUCTOR_COMPILE_THREADS": "2",
}
"""Of the test machine, whose vLLM came without FlashAttention, FlashMLA and DeepGEMM; users need none of these."""


@dataclass(frozen=True)
class Case:
    """One engine.

    Attributes:
        name: Model, weights and way, such as ``qwen3_moe/pack/graphs``.
        kind: ``parity``, ``calls`` or ``refuse``.
        folder: Of the checkpoint, under the model's.
        engine: Arguments of ``vllm.LLM`` beyond the common ones.
        method: How vLLM starts its engine process.
        environment: Variables beyond the common ones.
        all_sizes: Whether all batch sizes are run, or a few.
        seconds: Until it is ended.
    """

    name: str
    kind: str
    folder: str
    engine: dict[str, Any] = field(default_factory=dict)
    method: str = "fork"
    environment: dict[str, str] = field(default_factory=dict)
    all_sizes: bool = False
    seconds: int = 270

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.name.partition("/")[0]

    @property
    def slug(self) -> str:
        """Name as part of a file's name."""
        return self.name.replace("/", "-").replace(" ", "-")


def parity_cases() -> list[Case]:
    """Pack and dequantised checkpoint of each model, the slowest to start first."""
    return [
        *(Case(f"{m}/pack/graphs", "parity", "pack", GRAPHS, method="spawn", all_sizes=True) for m in SHAPES),
        Case("qwen3_moe/bf16/graphs", "parity", "bf16", GRAPHS, environment=IN_PROCESS, all_sizes=True),
        Case("qwen3_moe/pack/piecewise", "parity", "pack", PIECEWISE),
        *(Case(f"{m}/pack/torch", "parity", "pack", TORCH, environment=IN_PROCESS) for m in SHAPES),
        *(Case(f"{m}/bf16/eager", "parity", "bf16", EAGER, environment=IN_PROCESS, all_sizes=True) for m in SHAPES),
        *(Case(f"{m}/pack/eager", "parity", "pack", EAGER, environment=FORKED, all_sizes=True) for m in SHAPES),
        Case("qwen3_moe/pack/small chunks", "parity", "pack", EAGER | {"max_num_batched_tokens": 128}, method="spawn"),
        Case(
            "deepseek_v3/pack/mtp", "parity", "pack",
            EAGER | {"speculative_config": MTP}, environment=IN_PROCESS,
        ),
        *(Case(f"fp8_base/{kind}/eager", "parity", kind, EAGER, method="spawn") for kind in ("bf16", "pack")),
        Case("qwen3_moe/refused/tp2 pack", "refuse", "pack-tp2", EAGER, environment=IN_PROCESS),
    ]  # fmt: skip


def calls_cases() -> list[Case]:
    """Engines in the process itself, so that calls and memory can be watched."""
    return [
        *(Case(f"{m}/calls/eager", "calls", "pack", EAGER, environment=IN_PROCESS) for m in SHAPES),
        Case("qwen3_moe/calls/graphs", "calls", "pack", GRAPHS, environment=IN_PROCESS),
        Case("deepseek_v3/calls/graphs", "calls", "pack", GRAPHS, environment=IN_PROCESS),
    ]


def two_rank_cases() -> list[Case]:
    """Tensor and expert parallelism on two GPUs against one, of the same checkpoint."""
    return [
        *(
            Case(f"qwen3_moe/{way}/{mode}", "parity", f"pack-{way}", engine | TWO | split, method="spawn")
            for way, split in SPLITS.items() for mode, engine in (("eager", EAGER), ("graphs", GRAPHS))
        ),
        Case("qwen3_moe/pack/eager", "parity", "pack", EAGER, all_sizes=True),
        Case("qwen3_moe/bf16/eager", "parity", "bf16", EAGER, environment=IN_PROCESS, all_sizes=True),
    ]  # fmt: skip


def shared_cases() -> list[Case]:
    """The same with both ranks on one GPU."""
    sharing = EAGER | TWO | {"worker_cls": "tests.gpu.vllm_one_gpu.SharingWorker"}
    gloo = {"VLLM_DISABLE_PYNCCL": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return [
        *(
            Case(f"qwen3_moe/{way}/one GPU", "parity", f"pack-{way}", sharing | split, "spawn", gloo)
            for way, split in SPLITS.items()
        ),
        Case("qwen3_moe/bf16/eager", "parity", "bf16", EAGER, environment=IN_PROCESS, all_sizes=True),
    ]


STAGES = {"parity": parity_cases, "calls": calls_cases, "two_ranks": two_rank_cases, "shared": shared_cases}
PORTS = {"parity": 21000, "calls": 31000, "two_ranks": 41000, "shared": 51000}
"""First port of each stage, since stages may run at one time."""


def engine_arguments(model: Path, case: Case) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``."""
    return {
        "model": str(model), "skip_tokenizer_init": True, "dtype": "bfloat16", "attention_backend": "TRITON_ATTN",
        "max_model_len": 2304, "max_num_seqs": 64, "max_num_batched_tokens": 1024, "enable_prefix_caching": True,
        "kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.05, "seed": 0, "generation_config": "vllm",
        "disable_log_stats": True, **case.engine,
    }  # fmt: skip


def write_entry_points(folder: Path, extra: str = "") -> None:
    """What an installed wheel would have: metadata with the entry point, so that vLLM finds the plugin itself."""
    info = folder / f"hybrid_pack-{hybrid_pack.__version__}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    version = f"Metadata-Version: 2.1\nName: hybrid-pack\nVersion: {hybrid_pack.__version__}\n"
    (info / "METADATA").write_text(version)
    points = f"[vllm.general_plugins]\nhybrid_pack = hybrid_pack.integrations.vllm:register\n{extra}"
    (info / "entry_points.txt").write_text(points)


def child_environment(work: Path, name: str, more: dict[str, str]) -> dict[str, str]:
    """The variables of a case; vLLM's compile cache is its own, so that cases that start together do not meet in it."""
    plugin = work / "plugin"
    path = os.pathsep.join([str(ROOT), str(plugin), *filter(None, [os.environ.get("PYTHONPATH")])])
    cache = {"VLLM_CACHE_ROOT": str(work / "cache" / name)}
    return os.environ | ENVIRONMENT | cache | {"PYTHONPATH": path} | more


def run_case(case: Case, models: Path, work: Path, port: int) -> dict[str, Any]:
    """Run a case in a process; its result, with ``log``, ``wall_seconds`` and, where it failed, ``error``.

    Args:
        case: What to run.
        models: Where the models are.
        work: For its files.
        port: First of those its engine may use, so that engines that start together do not pick the same.
    """
    work.mkdir(parents=True, exist_ok=True)
    given, out, log = (work / f"{case.slug}.{kind}" for kind in ("case.json", "result.json", "log"))
    out.unlink(missing_ok=True)
    engine = engine_arguments(models / case.model / case.folder, case)
    vocab = EVERY[case.model].vocab
    document = {"name": case.name, "kind": case.kind, "vocab": vocab, "all_sizes": case.all_sizes, "engine": engine}
    given.write_text(json.dumps(document))
    own = {"VLLM_WORKER_MULTIPROC_METHOD": case.method, "VLLM_PORT": str(port)} | case.environment
    environment = child_environment(work, case.slug, own)
    began = time.monotonic()
    status = run_limited(
        [sys.executable, "-m", "tests.gpu.vllm_run", str(given), str(out)], environment, log, case.seconds
    )
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    if status and "error" not in result:
        result["error"] = f"exit status {status}" if status != "timeout" else f"ended after {case.seconds} s"
    result["wall_seconds"] = round(time.monotonic() - began, 1)
    result["log"] = log.read_text(errors="replace")
    print(f"{case.name}: {result.get('error', 'done')} ({result['wall_seconds']} s)", flush=True)
    return result


def run_limited(
    command: list[str], environment: dict[str, str], log: Path, seconds: float, pass_fds: Sequence[int] = ()
) -> int | str:
    """Run a command with its output in a file; at the time limit it is ended with all of its children."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            pass_fds=pass_fds,
        )  # fmt: skip
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return "timeout"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # engine processes that outlived it hold GPU memory
            process.wait()


def run_cases(
    cases: Sequence[Case], models: Path, work: Path, slots: int, first_port: int = 21000
) -> dict[str, dict[str, Any]]:
    """All cases, as many at a time as there are slots; results by name."""
    write_entry_points(work / "plugin")
    ports = range(first_port, 65000, 200)
    with ThreadPoolExecutor(slots) as pool:
        results = pool.map(lambda case, port: run_case(case, models, work, port), cases, ports)
        return {case.name: result for case, result in zip(cases, results, strict=True)}


def keep(stage: str, results: dict[str, dict[str, Any]], out: Path) -> None:
    """Two files of a stage: results, and all logs one after the other."""
    out.mkdir(parents=True, exist_ok=True)
    logs = [f"{'=' * 20} {name}: {r.get('error', 'done')}\n{r['log']}" for name, r in results.items()]
    (out / f"vllm_{stage}.log").write_text("\n".join(logs))
    bare = {name: {k: v for k, v in result.items() if k != "log"} for name, result in results.items()}
    (out / f"vllm_{stage}.json").write_text(json.dumps(bare))


if __name__ == "__main__":
    stage, slots = sys.argv[1], int(os.environ.get("SLOTS", "8"))
    found = run_cases(STAGES[stage](), Path(sys.argv[2]), Path(sys.argv[3]), slots, PORTS[stage])
    keep(stage, found, Path(os.environ.get("OUT", sys.argv[3])))
    sys.exit(any("error" in result for result in found.values()))
