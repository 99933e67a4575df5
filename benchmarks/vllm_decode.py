"""Does vLLM decode as fast from a pack as from the hybrid checkpoint repacked at load?

    python -m benchmarks.vllm_decode [--folder DIR] [--layers 8] [--rounds 24] [--out FILE]

The model, the two ways and their engines are ``vllm_serve``'s; so many layers that a step is the GPU's work and not
the host's. Both engines are on one GPU at one time and decode in turns, from one core, so both meet the machine as it
is just then: between starts of one engine its rate was seen to differ by 1.6 times, with the speed of the host. A round
is 128 tokens of each, greedy, the prompts' own step included. What the GPU does in a step is timed too, by replaying
the CUDA graph that vLLM captured for it, after one step of prompts that are new in each round: both engines then visit
the same experts, and the rounds visit different ones. Ratios are taken round by round, and a median has a range that
holds it with 95 % (the order statistics of the sign test).
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks import common, watch
from benchmarks.parts import Run
from benchmarks.vllm_serve import PROMPT, WAYS, Bench, end_with, prepare, shape
from hybrid_pack.runtime import timing
from tests.gpu.vllm_models import prompts

BATCHES = (1, 8)
NEW_TOKENS = 128
WARM_UP = 2
"""Rounds that are not counted."""

Tokens = list[list[int]]
Generate = Callable[[int, int, int], tuple[Tokens, float]]
Measure = Callable[[int, int], tuple[Tokens, float]]


# in the process of an engine


def child(case: Mapping[str, Any]) -> dict[str, Any]:
    """Start an engine and do what is asked, all from the last core that this process may use."""
    from vllm import LLM

    talk = Connection(case["talk"])
    llm = LLM(**case["engine"])
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # this thread, which drives the engine
    serve(talk, {name: partial(measure, partial(generate, llm, case["vocab"])) for name, measure in MEASURES.items()})
    return {}


def generate(llm: Any, vocab: int, batch: int, number: int, new: int) -> tuple[Tokens, float]:
    """Tokens of a batch of prompts that are new with each ``number``, and seconds."""
    from vllm import SamplingParams

    given = [{"prompt_token_ids": ids} for ids in prompts(vocab, (PROMPT,) * batch, number)]
    parameters = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    outputs = llm.generate(given, parameters, use_tqdm=False)
    return [list(map(int, output.outputs[0].token_ids)) for output in outputs], time.perf_counter() - began


def decode(given: Generate, batch: int, number: int) -> tuple[Tokens, float]:
    """Tokens, and how many a second."""
    tokens, seconds = given(batch, number, NEW_TOKENS)
    return tokens, batch * NEW_TOKENS / seconds


def step(given: Generate, batch: int, number: int) -> tuple[Tokens, float]:
    """Tokens, and how often a second the GPU does the step that made the last of them, by vLLM's own graph."""
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    tokens, _ = given(batch, number, 2)
    graphs = [
        entry.cudagraph
        for wrapper in CUDAGraphWrapper._all_instances if wrapper.runtime_mode.name == "FULL"
        for size, entry in wrapper.concrete_cudagraph_entries.items() if size.num_tokens == batch
    ]  # fmt: skip
    assert len(graphs) == 1, f"{len(graphs)} full graphs of {batch}"
    return tokens, 1 / timing.gpu_seconds(graphs[0].replay, torch.device("cuda"))


MEASURES: dict[str, Callable[[Generate, int, int], tuple[Tokens, float]]] = {
    "tokens a second": decode,
    "GPU steps a second": step,
}


def serve(talk: Connection, measures: Mapping[str, Measure]) -> None:
    """Say that it is ready; then measure for each name, batch size and number that come, until None does."""
    talk.send("ready")
    while (asked := talk.recv()) is not None:
        name, batch, number = asked
        talk.send(measures[name](batch, number))


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

    def ask(way: str, *asked: str | int) -> tuple[Tokens, float]:
        talks[way].send(asked)
        return cast("tuple[Tokens, float]", talks[way].recv())

    for way in WAYS:
        assert talks[way].recv() == "ready"
    for batch, measure in product(BATCHES, MEASURES):
        rates: dict[str, list[float]] = {way: [] for way in WAYS}
        same = []
        for number in range(rounds + WARM_UP):
            said = {way: ask(way, measure, batch, number) for way in (WAYS if number % 2 else WAYS[::-1])}
            if number < WARM_UP:
                continue
            for way, (_, rate) in said.items():
                rates[way].append(rate)
            same.append(alike(*(said[way][0] for way in WAYS)))
        ratios = [a / b for a, b in zip(rates["pack"], rates["repack"], strict=True)]
        found[f"batch {batch}, {measure}"] = {
            **{way: common.summary(rates[way]) for way in WAYS},
            "pack to repack": {**common.summary(ratios), "median lies in": median_range(ratios)},
            "share of tokens that are the same": statistics.mean(same),
        }
        keep(found)
    for way in WAYS:
        talks[way].send(None)
    return found


def alike(one: Tokens, other: Tokens) -> float:
    """Share of places with the same token."""
    pairs = [a == b for ours, theirs in zip(one, other, strict=True) for a, b in zip(ours, theirs, strict=True)]
    return sum(pairs) / len(pairs)


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

    def turns() -> list[dict[str, Any]]:
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
            return [future.result() for future in running.values()]

    run.part("decode", turns)
    if options.out is not None:
        common.keep(options.out, run.result)
        options.out.with_suffix(".log").write_text("\n".join(bench.logs))
    return run.result


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where source and pack are made; those that are there are used")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=24)
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
