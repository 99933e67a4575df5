"""One vLLM engine in a process of its own.

    python -m tests.gpu.vllm_run CASE.json RESULT.json

A case is a JSON object: ``kind`` (``parity``, ``calls`` or ``refuse``), ``engine`` (arguments of ``vllm.LLM``),
``vocab``, and what the kind needs. The plugin is found by vLLM itself, through its entry point: nothing here imports
hybrid_pack's integration. The result has ``error`` with a traceback where it failed.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from tests.gpu.vllm_models import prompts

BATCH_LENGTHS = (1, 2, 3, 5, 8, 9, 15, 16, 17, 31, 33, 47, 64, 65, 100, 127, 128, 129, 200, 255, 256, 300)
BATCH = tuple(BATCH_LENGTHS[i % len(BATCH_LENGTHS)] for i in range(64))
"""Lengths of the prompts of the largest batch; smaller batches are its first ones."""

LONG = (2048, 2047, 1500, 1025)
SCORED = (512, 700)
NEW_TOKENS = 12
"""Enough for all of the largest batch to decode together: its prompts need six steps of 1,024 tokens."""
FEW_SIZES = (1, 9)
SIZES = (1, 2, 4, 8, 9, 16, 33)
TOP = 5


def generate(llm: Any, given: list[list[int]], new_tokens: int = NEW_TOKENS, scored: bool = False) -> list[Any]:
    """Greedy tokens and the best log-probabilities at each place; of the prompt's own tokens too where scored."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=TOP,
        prompt_logprobs=1 if scored else None,
    )  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in given], parameters, use_tqdm=False)

    def best(place: Any) -> list[Any]:
        return sorted(([int(t), round(float(p.logprob), 5)] for t, p in place.items()), key=lambda pair: -pair[1])

    found = []
    for output in outputs:
        answer = output.outputs[0]
        entry: dict[str, Any] = {"tokens": list(map(int, answer.token_ids)), "top": [best(p) for p in answer.logprobs]}
        entry["cached"] = int(getattr(output, "num_cached_tokens", 0) or 0)
        if scored:
            entry["scored"] = [best(place) for place in output.prompt_logprobs[1:]]
        found.append(entry)
    return found


def parity(llm: Any, case: dict[str, Any]) -> dict[str, Any]:
    """All batches, long prompts twice, and prompts that are scored token by token."""
    batch, long = prompts(case["vocab"], BATCH), prompts(case["vocab"], LONG, 1)
    sizes = SIZES if case.get("all_sizes", True) else FEW_SIZES
    answers, seconds = {}, {}

    def phase(name: str, given: list[list[int]], **options: Any) -> None:
        began = time.perf_counter()
        answers[name] = generate(llm, given, **options)
        seconds[name] = round(time.perf_counter() - began, 2)

    phase("batch 64", batch)
    for size in sizes:
        llm.reset_prefix_cache()
        phase(f"batch {size}", batch[:size])
    phase("long", long)
    phase("long again", [*long, long[0][:1600] + batch[21]])
    phase("scored", prompts(case["vocab"], SCORED, 2), new_tokens=1, scored=True)
    return {"answers": answers, "seconds": seconds}


class Watch:
    """Stands before a layer's ``apply``: no wait for the device, and no allocation."""

    def __init__(self, method: Any) -> None:
        self.apply, self.calls, self.allocations, self.tokens = method.apply, 0, Counter[int](), set[int]()
        self.errors: list[str] = []
        method.apply = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch

        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            return self.apply(*args, **kwargs)
        except RuntimeError as error:
            self.errors.append(f"{error}\n{traceback.format_exc()[-2000:]}")
            raise
        finally:
            torch.cuda.set_sync_debug_mode("default")
            x = kwargs.get("x", args[1] if len(args) > 1 else None)
            self.tokens.add(int(x.shape[0]) if x is not None else -1)
            self.calls += 1
            self.allocations[int(torch.cuda.memory_stats()["allocation.all.allocated"]) - before] += 1


def calls(llm: Any, case: dict[str, Any]) -> dict[str, Any]:
    """What calls of ``apply`` do, and what memory does while requests come; engine in this process."""
    import torch

    methods = expert_methods(llm)
    batch, long = prompts(case["vocab"], BATCH), prompts(case["vocab"], LONG, 1)
    short = prompts(case["vocab"], (4,) * 64, 6)  # all of them are decoded together
    eager = bool(case["engine"].get("enforce_eager"))
    watches = [Watch(method) for method in methods.values()] if eager else []

    def memory() -> dict[str, int]:
        stats = torch.cuda.memory_stats()
        return {
            "reserved": int(stats["reserved_bytes.all.current"]), "segments": int(stats["segment.all.allocated"]),
            "allocated": int(stats["allocated_bytes.all.current"]), "free": int(torch.cuda.mem_get_info()[0]),
        }  # fmt: skip

    snapshots = [memory()]
    for number in range(4):
        for given in (batch, short, batch[:9], batch[:1], long):
            generate(llm, given, new_tokens=4)
        llm.reset_prefix_cache()
        snapshots.append(memory() | {"round": number})
    return {
        "layers": list(methods), "backends": sorted({str(m.hybrid.backend) for m in methods.values()}),
        "reports": sorted({str(getattr(m, "report", None)) for m in methods.values()}),
        "calls": sum(w.calls for w in watches), "tokens": sorted({t for w in watches for t in w.tokens}),
        "allocations": dict(sum((w.allocations for w in watches), Counter[int]())),
        "errors": [e for w in watches for e in w.errors], "memory": snapshots,
    }  # fmt: skip


def expert_methods(llm: Any) -> dict[str, Any]:
    """By the layer's name: the quantisation methods that hold a ``HybridMoE``."""

    def look(model: Any) -> dict[str, Any]:
        methods = {name: getattr(module, "quant_method", None) for name, module in model.named_modules()}
        return {name: method for name, method in methods.items() if getattr(method, "hybrid", None) is not None}

    found = llm.apply_model(look)[0]
    assert found, "no layer of this model has a HybridMoE as its quant_method.hybrid"
    return dict(found)


def refuse(case: dict[str, Any]) -> dict[str, Any]:
    """An engine that must not start: the message, and which expert shards were opened before it."""
    opened: list[str] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and "/experts/" in str(args[0]) and str(args[0]).endswith(".safetensors"):
            opened.append(str(args[0]))

    sys.addaudithook(hook)
    from vllm import LLM

    try:
        LLM(**case["engine"])
    except Exception as error:
        chain, at = [], error
        while at is not None:
            chain.append(f"{type(at).__name__}: {at}")
            at = at.__cause__ or at.__context__  # type: ignore[assignment]
        return {"refused": chain, "opened": opened}
    return {"refused": [], "opened": opened}


def run(case: dict[str, Any]) -> dict[str, Any]:
    """The case's kind."""
    began = time.perf_counter()
    if case["kind"] == "refuse":
        return refuse(case)
    from vllm import LLM, __version__

    imported = time.perf_counter() - began
    llm = LLM(**case["engine"])
    started = time.perf_counter() - began
    result = {"parity": parity, "calls": calls}[case["kind"]](llm, case)
    config = llm.llm_engine.vllm_config
    result["vllm"] = {
        "version": __version__, "quantization": str(config.model_config.quantization),
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "capture_sizes": list(config.compilation_config.cudagraph_capture_sizes or []),
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "multiproc_method": os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork"),
        "import_seconds": round(imported, 1), "start_seconds": round(started - imported, 1),
    }  # fmt: skip
    return result


def main() -> int:
    """Run one case; 0 only where nothing was raised."""
    case, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    try:
        result = run(case)
    except BaseException as error:
        result = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        traceback.print_exc()
    out.write_text(json.dumps(result))
    print(f"case {case['name']}: {'FAILED' if 'error' in result else 'done'}", flush=True)
    return int("error" in result)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # what an engine leaves running at exit must not hold up a machine that is paid by the minute
