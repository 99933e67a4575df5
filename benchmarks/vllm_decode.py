"""Does vLLM decode as fast from a pack as from the hybrid checkpoint repacked at load?

    python -m benchmarks.vllm_decode [--folder DIR] [--layers 4] [--rounds 40] [--out FILE]

The model, the two ways and their engines are ``vllm_serve``'s. Both engines are on one GPU at one time and decode in
turns, so both meet the machine as it is just then: between starts of one engine its rate was seen to differ by 1.6
times, with the speed of the host. A round is 128 tokens of each, greedy, the prompts' own step included. Few layers
make a step that the host's part rules; what the GPU does in a step is therefore timed too, by replaying the CUDA graph
that vLLM captured for it. Ratios are taken round by round, and a median has a range that holds it with 95 % (the order
statistics of the sign test).
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks import common, watch
from benchmarks.parts import Run
from benchmarks.vllm_serve import PROMPT, WAYS, Bench, end_with, prepare, shape
from hybrid_pack.runtime import timing
from tests.gpu.vllm_models import prompts

BATCHES = (1, 8)
NEW_TOKENS = 128
MEASURES = ("tokens a second", "GPU steps a second")


# in the process of an engine


def child(case: Mapping[str, Any]) -> dict[str, Any]:
    """Start an engine and do what is asked; what it answered to prompts last, by batch size."""
    from vllm import LLM, SamplingParams

    talk = Connection(case["talk"])
    llm = LLM(**case["engine"])
    parameters = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    answers: dict[str, Any] = {}

    def decode(batch: int) -> float:
        given = [{"prompt_token_ids": ids} for ids in prompts(case["vocab"], (PROMPT,) * batch, 3)]
        began = time.perf_counter()
        outputs = llm.generate(given, parameters, use_tqdm=False)
        seconds = time.perf_counter() - began
        answers[str(batch)] = [list(map(int, output.outputs[0].token_ids)) for output in outputs]
        return batch * NEW_TOKENS / seconds

    serve(talk, {"tokens a second": decode, "GPU steps a second": replay})
    return answers


def replay(batch: int) -> float:
    """How often a second the GPU does the step of a batch, by vLLM's own graph; it computes the last step again."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    graphs = [
        entry.cudagraph
        for wrapper in CUDAGraphWrapper._all_instances if wrapper.runtime_mode.name == "FULL"
        for size, entry in wrapper.concrete_cudagraph_entries.items() if size.num_tokens == batch
    ]  # fmt: skip
    assert len(graphs) == 1, f"{len(graphs)} full graphs of {batch}"
    return 1 / timing.gpu_seconds(graphs[0].replay, torch.device("cuda"))


def serve(talk: Connection, actions: Mapping[str, Callable[[int], float]]) -> None:
    """Say that it is ready; then a rate for each action and batch size that come, until None does."""
    talk.send("ready")
    while (asked := talk.recv()) is not None:
        action, batch = asked
        talk.send(actions[action](batch))


# in the process that asks them


def median_range(values: list[float]) -> tuple[float, float]:
    """Least and greatest that the median can be, with 95 %: the order statistics that the sign test allows."""
    ordered, n = sorted(values), len(values)
    below, k = 0.0, 0  # chance that at most k - 1 of n values are below the median
    while k < n // 2 and below + math.comb(n, k) / 2**n <= 0.025:
        below += math.comb(n, k) / 2**n
        k += 1
    k = max(k, 1)
    return ordered[k - 1], ordered[n - k]


def in_turns(talks: Mapping[str, Connection], rounds: int, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Rates of both ways and their ratios, by batch size; ``keep`` gets what is there after each measure."""
    found: dict[str, Any] = {}

    def rate(way: str, asked: tuple[str, int]) -> float:
        talks[way].send(asked)
        return float(talks[way].recv())

    for way in WAYS:
        assert talks[way].recv() == "ready"
    for batch, measure in product(BATCHES, MEASURES):
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        for number in range(rounds + 2):
            for way in WAYS if number % 2 else WAYS[::-1]:
                value = rate(way, (measure, batch))
                if number >= 2:  # those before warm up
                    rates[way].append(value)
        ratios = [a / b for a, b in zip(rates["pack"], rates["repack"], strict=True)]
        found[f"batch {batch}, {measure}"] = {
            **{way: common.summary(rates[way]) for way in WAYS},
            "pack to repack": {**common.summary(ratios), "median lies in": median_range(ratios)},
        }
        keep(found)
    for way in WAYS:
        talks[way].send(None)
    return found


def measure(options: argparse.Namespace, folder: Path, work: Path) -> dict[str, Any]:
    """Start both engines, let them decode in turns, and keep what there is."""
    run = Run(options.seconds)
    run.result["question"] = (__doc__ or "").strip().splitlines()[0]
    run.part("machine", lambda: common.machine(folder))
    run.part("gpu", watch.gpu)
    model = shape(options.layers, options.tiny)
    run.part("prepare", lambda: prepare(folder, model))
    bench = Bench(run, folder, model, work)
    run.result["layers"] = options.layers

    def keep(found: dict[str, Any]) -> None:
        run.result["rates"] = found
        if options.out is not None:
            common.keep(options.out, run.result)

    def decode() -> dict[str, Any]:
        pipes = {way: Pipe() for way in WAYS}

        def engine(way: str) -> dict[str, Any]:
            end = pipes[way][1]
            try:
                return bench.engine(f"decode-{way}", way, "benchmarks.vllm_decode", options.seconds, end.fileno())
            finally:
                end.close()  # so that one who waits for a word of a process that has ended hears of it

        with ThreadPoolExecutor(len(WAYS)) as pool:
            running: dict[str, Future[dict[str, Any]]] = {way: pool.submit(engine, way) for way in WAYS}
            try:
                in_turns({way: pipe[0] for way, pipe in pipes.items()}, options.rounds, keep)
            except (EOFError, OSError):
                pass  # an engine ended early: its own error follows
            finally:
                for pipe in pipes.values():
                    pipe[0].close()
            answers = {way: future.result() for way, future in running.items()}
        return {batch: answers["pack"][batch] == answers["repack"][batch] for batch in answers["pack"]}

    run.part("the same tokens, by batch size", decode)
    if options.out is not None:
        common.keep(options.out, run.result)
        options.out.with_suffix(".log").write_text("\n".join(bench.logs))
    return run.result


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where source and pack are made; those that are there are used")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=400, help="until the engines are ended")
    parser.add_argument("--out", type=Path, help="where the result goes")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        end_with(child, options.child, options.out)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch, "models")
        folder.mkdir(parents=True, exist_ok=True)
        result = measure(options, folder, Path(scratch))
    if not options.tiny:
        common.save("vllm_decode", result, options.out)
    for name, found in result.get("rates", {}).items():
        ratio = found["pack to repack"]
        low, high = ratio["median lies in"]
        print(f"{name}: {ratio['median']:.4f} of repacking's ({low:.4f} to {high:.4f}); goal 1")
    for name, error in result["errors"].items():
        print(f"failed: {name}: {error}")


if __name__ == "__main__":
    main()
