"""The decoding benchmark of vLLM on the CPU: fair turns, ratios of one round, and an engine that ends is told."""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from benchmarks import vllm_decode
from benchmarks.vllm_serve import WAYS

ENGINE = """
import os, sys, time
from types import ModuleType, SimpleNamespace as N

class SamplingParams:
    def __init__(self, **known):
        self.max_tokens = known["max_tokens"]

class LLM:
    def __init__(self, model, **engine):
        self.model = os.path.basename(model)

    def generate(self, given, parameters, use_tqdm):
        if self.model == "repack" and os.environ.get("REPACK_ENDS"):
            raise MemoryError("no memory for repacking")
        time.sleep(0.001)
        last = 8 if self.model == "repack" and parameters.max_tokens == 2 and len(given) == 8 else 7
        return [N(outputs=[N(token_ids=[7] * (parameters.max_tokens - 1) + [last])]) for _ in given]

def graphs(mode, sizes):
    entries = {N1(n): N(cudagraph=N(replay=(mode, n))) for n in sizes}
    return N(runtime_mode=N(name=mode), concrete_cudagraph_entries=entries)

class N1:
    def __init__(self, num_tokens):
        self.num_tokens = num_tokens

from hybrid_pack.runtime import timing
timing.gpu_seconds = lambda replay, device: 1 / {"FULL": 100}[replay[0]] / replay[1]
sys.modules["vllm.compilation"] = ModuleType("vllm.compilation")
module = sys.modules["vllm.compilation.cuda_graph"] = ModuleType("vllm.compilation.cuda_graph")
module.CUDAGraphWrapper = N(_all_instances=[graphs("PIECEWISE", (1, 2, 8)), graphs("FULL", (1, 2, 8))])
"""


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Of a run in which vLLM is a stand-in that decodes nothing."""
    stand_in = tmp_path / "vllm.py"
    stand_in.write_text(ENGINE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return argparse.Namespace(seconds=120.0, layers=2, tiny=True, out=tmp_path / "out" / "d.json", rounds=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decode")


def test_ratios_are_taken_round_by_round_and_turns_begin_with_either() -> None:
    """A machine that slows down all the time, which the order of turns and the pairs take out."""
    said: list[str] = []
    speed = {"pack": 3.0, "repack": 2.0}
    pipes = {way: Pipe() for way in WAYS}

    def decoder(way: str) -> Any:
        def rate(batch: int, number: int) -> tuple[list[list[int]], float]:
            said.append(f"{way} {batch} {number}")
            slower = 0.99 ** ((len(said) - 1) // 2)  # both of a round alike
            return [[number, 5 if way == "pack" else number % 2]], speed[way] * batch * slower

        return dict.fromkeys(vllm_decode.MEASURES, rate)

    threads = [Thread(target=vllm_decode.serve, args=(pipes[way][1], decoder(way))) for way in WAYS]
    for thread in threads:
        thread.start()
    kept: list[list[str]] = []
    rounds = 4
    found = vllm_decode.in_turns({way: pipes[way][0] for way in WAYS}, rounds, lambda so_far: kept.append([*so_far]))
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    names = [f"batch {batch}, {measure}" for batch in (1, 8) for measure in vllm_decode.MEASURES]
    assert kept == [names[: number + 1] for number in range(4)]
    assert said[:8] == [
        *("repack 1 0", "pack 1 0", "pack 1 1", "repack 1 1"),
        *("repack 1 2", "pack 1 2", "pack 1 3", "repack 1 3"),
    ]
    for name in names:
        assert [len(found[name][way]["runs"]) for way in WAYS] == [rounds, rounds]
        assert found[name]["pack to repack"]["runs"] == pytest.approx([1.5] * rounds)
        assert found[name]["share of tokens that are the same"] == 0.5


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 1), (6, 1), (9, 2), (20, 6), (40, 14)])
def test_the_range_of_a_median_is_that_of_the_sign_test(n: int, k: int) -> None:
    """k from the tables of the binomial distribution; five values or fewer give no 95 %, so all of them."""
    values = [float(value) for value in range(1, n + 1)]
    random.Random(1).shuffle(values)
    assert vllm_decode.median_range(values) == (k, n + 1 - k)


def test_the_range_holds_the_median_as_often_as_it_says() -> None:
    draw = random.Random(3)
    samples = ([draw.expovariate(1.0) for _ in range(15)] for _ in range(2000))
    ranges = [vllm_decode.median_range(sample) for sample in samples]
    median = 0.6931471805599453
    held = statistics.mean(low <= median <= high for low, high in ranges)
    assert 0.94 < held < 0.985  # 15 values: 96.5 %


def test_two_engines_are_asked_in_turns_and_end(folder: Path, tmp_path: Path, options: argparse.Namespace) -> None:
    result = vllm_decode.measure(options, folder, tmp_path)
    assert result["errors"] == {}
    kept = json.loads(options.out.read_text())
    assert len(kept["rates"]) == 4
    assert all(len(rates["pack to repack"]["runs"]) == options.rounds for rates in kept["rates"].values())
    for batch in (1, 8):  # the graph of that size, and no piece
        assert kept["rates"][f"batch {batch}, GPU steps a second"]["pack"]["median"] == pytest.approx(100 * batch)
        assert kept["rates"][f"batch {batch}, tokens a second"]["share of tokens that are the same"] == 1
    shares = [kept["rates"][f"batch {n}, GPU steps a second"]["share of tokens that are the same"] for n in (1, 8)]
    assert shares == [1, 0.5]
    log = options.out.with_suffix(".log").read_text()
    assert all(f"decode-{way}: exit status 0" in log for way in WAYS)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("REPACK_ENDS", "1")
    yield


@pytest.mark.usefixtures("ends")
def test_an_engine_that_ends_is_told_and_the_other_one_ended(
    folder: Path, tmp_path: Path, options: argparse.Namespace
) -> None:
    result = vllm_decode.measure(options, folder, tmp_path)
    assert "rates" not in result and "decode" not in result
    assert list(result["errors"]) == ["decode"]
    log = options.out.with_suffix(".log").read_text()
    assert "no memory for repacking" in log and "EOFError" in log


def test_without_vllm_it_says_so(folder: Path, tmp_path: Path, options: argparse.Namespace) -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vllm is installed here")
    (tmp_path / "vllm.py").unlink()
    result = vllm_decode.measure(options, folder, tmp_path)
    assert "No module named 'vllm'" in result["errors"]["decode"]
