"""Packs in stock vLLM: the tokens and log-probabilities of the dequantised checkpoint, and what its calls do.

Engines run in processes of their own, several at a time (``vllm_cases``), before the first test that needs them;
results and logs of a stage go to two files in ``OUT``. ``HYBRID_PACK_VLLM_MODELS`` names a folder with models that are
made already (``python -m tests.gpu.vllm_models FOLDER``).
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu import vllm_cases, vllm_models
from tests.gpu.vllm_compare import MARGIN, Comparison, allowance, compare, complaints
from tests.gpu.vllm_models import SHAPES

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("b12x", "vllm")]

OUT = Path(os.environ.get("OUT", tempfile.gettempdir()))
Results = dict[str, dict[str, Any]]


@pytest.fixture
def vllm() -> None:
    """Skips without vLLM, or fails where HYBRID_PACK_REQUIRE_VLLM=1."""
    if importlib.util.find_spec("vllm") is None:
        required = os.environ.get("HYBRID_PACK_REQUIRE_VLLM") == "1"
        (pytest.fail if required else pytest.skip)("no vllm")


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Results]:
    """Results of a stage's cases; run when first asked for."""

    @cache
    def run(name: str) -> Results:
        work = tmp_path_factory.mktemp(name)
        models = Path(os.environ.get("HYBRID_PACK_VLLM_MODELS") or work / "models")
        cases = vllm_cases.STAGES[name]()
        for model in sorted({case.model for case in cases}):
            vllm_models.make(models, model)
        slots = int(os.environ.get("SLOTS", "8"))
        results = vllm_cases.run_cases(cases, models, work, slots, vllm_cases.PORTS[name])
        vllm_cases.keep(name, results, OUT)
        return results

    return run


def result_of(results: Results, name: str) -> dict[str, Any]:
    """A case's result; where it failed, so does the test."""
    result = results[name]
    if "error" in result:
        tail = result["log"][-3000:]
        pytest.fail(f"{name}: {result['error']}\n{result.get('traceback', '')}\n{tail}", pytrace=False)
    return result


def spreads(results: Results, model: str) -> list[Comparison]:
    """What the dequantised checkpoint's own batch sizes and modes differ by."""
    reference = result_of(results, f"{model}/bf16/eager")["answers"]
    others = [results[name] for name in (f"{model}/bf16/eager", f"{model}/bf16/graphs") if name in results]
    return [compare(reference, other["answers"], MARGIN) for other in others if "answers" in other]


def judge(results: Results, name: str) -> None:
    """Hold a case against the dequantised checkpoint in BF16."""
    model = name.partition("/")[0]
    reference, found = result_of(results, f"{model}/bf16/eager")["answers"], result_of(results, name)["answers"]
    own = spreads(results, model)
    allowed = allowance(own)
    comparison = compare(reference, found, MARGIN)
    numbers = {"case": name, "allowed": round(allowed, 4), **comparison.summary()}
    numbers |= {"bf16_spread": [spread.summary()["rms"] for spread in own]}
    with (OUT / "vllm_comparisons.jsonl").open("a") as file:
        file.write(json.dumps(numbers) + "\n")
    print(numbers)
    assert complaints(comparison, allowed) == []


PARITY = [case.name for case in vllm_cases.parity_cases() if case.kind == "parity"]


@pytest.mark.parametrize("name", PARITY)
def test_parity(stage: Callable[[str], Results], name: str) -> None:
    judge(stage("parity"), name)


@pytest.mark.parametrize("name", [name for name in PARITY if "/pack/" in name])
def test_the_plugin_was_chosen_by_the_config(stage: Callable[[str], Results], name: str) -> None:
    assert result_of(stage("parity"), name)["vllm"]["quantization"] == "hybrid_pack"


@pytest.mark.parametrize("model", SHAPES)
def test_graphs_were_full_and_piecewise(stage: Callable[[str], Results], model: str) -> None:
    found = result_of(stage("parity"), f"{model}/pack/graphs")["vllm"]
    assert "FULL_AND_PIECEWISE" in found["cudagraph_mode"] and found["capture_sizes"] == vllm_cases.CAPTURE
    assert found["multiproc_method"] == "spawn"
    log = stage("parity")[f"{model}/pack/graphs"]["log"]
    assert "CUDA graphs (mixed prefill-decode, PIECEWISE)" in log and "CUDA graphs (decode, FULL)" in log


@pytest.mark.parametrize("name", PARITY)
def test_long_prompts_came_in_chunks_and_again_from_the_cache(stage: Callable[[str], Results], name: str) -> None:
    result = result_of(stage("parity"), name)
    assert result["vllm"]["chunked_prefill"] and result["vllm"]["prefix_caching"]
    assert result["vllm"]["max_num_batched_tokens"] < 2048
    # The last block of a cached prompt is computed again, so that there is a place to predict from.
    assert [answer["cached"] > 1000 for answer in result["answers"]["long again"]] == [True] * 5


@pytest.mark.parametrize("model", SHAPES)
def test_engines_in_a_forked_process_too(stage: Callable[[str], Results], model: str) -> None:
    """vLLM says so in the environment where it must spawn after all."""
    assert result_of(stage("parity"), f"{model}/pack/eager")["vllm"]["multiproc_method"] == "fork"


def test_what_cannot_be_forked_is_spawned(stage: Callable[[str], Results]) -> None:
    """vLLM was to fork, and b12x's own plugin had initialised the driver."""
    name = "qwen3_moe/pack/piecewise"
    assert result_of(stage("parity"), name)["vllm"]["multiproc_method"] == "spawn"
    assert "hybrid_pack: the CUDA driver is in use in this process" in stage("parity")[name]["log"]


def test_base_layers_run_by_vllm_s_methods_or_in_bfloat16(stage: Callable[[str], Results]) -> None:
    result_of(stage("parity"), "fp8_base/pack/eager")
    log = stage("parity")["fp8_base/pack/eager"]["log"]
    assert (
        "stored as mxfp8 (from model.layers.0.self_attn.qkv_proj on) are run by vLLM's ModelOptMxFp8LinearMethod" in log
    )
    assert "stored as fp8_row (from model.layers.0.self_attn.o_proj on) are dequantised to BF16" in log


def test_a_pack_for_other_ranks_is_refused_before_anything_is_loaded(stage: Callable[[str], Results]) -> None:
    result = result_of(stage("parity"), "qwen3_moe/refused/tp2 pack")
    said = " ".join(result["refused"])
    assert result["opened"] == []
    assert "tp 2" in said and "--tp 1" in said, said


@pytest.mark.parametrize("name", [case.name for case in vllm_cases.calls_cases() if case.name.endswith("eager")])
def test_calls_wait_for_nothing_and_allocate_nothing(stage: Callable[[str], Results], name: str) -> None:
    result = result_of(stage("calls"), name)
    assert result["backends"] == ["b12x"] and result["errors"] == []
    assert result["calls"] >= 4 * 16 * len(result["layers"])
    assert {1, 9, 64} <= set(result["tokens"]) and max(result["tokens"]) == 1024
    assert set(result["allocations"]) == {"0"}, f"calls by number of allocations: {result['allocations']}"


@pytest.mark.parametrize("name", [case.name for case in vllm_cases.calls_cases()])
def test_memory_does_not_grow_with_requests(stage: Callable[[str], Results], name: str) -> None:
    """After the first two rounds, in which vLLM's own parts allocate too, nothing more is taken from the driver."""
    after = result_of(stage("calls"), name)["memory"][2:]
    assert len({round_["reserved"] for round_ in after}) == 1, after
    assert len({round_["segments"] for round_ in after}) == 1, after


@pytest.mark.parametrize("name", [case.name for case in vllm_cases.two_rank_cases() if case.folder != "bf16"])
def test_two_ranks_are_one(stage: Callable[[str], Results], name: str) -> None:
    if torch.cuda.device_count() < 2:
        wanted = int(os.environ.get("HYBRID_PACK_REQUIRE_GPUS", "1"))
        (pytest.fail if wanted > 1 else pytest.skip)(f"needs two GPUs, found {torch.cuda.device_count()}")
    judge(stage("two_ranks"), name)


@pytest.mark.parametrize("split", vllm_cases.SPLITS)
def test_ranks_that_share_a_gpu_are_one(stage: Callable[[str], Results], split: str) -> None:
    name = f"qwen3_moe/{split}/one GPU"
    judge(stage("shared"), name)
    for rank in range(2):
        assert f"3 layers of rank {rank} on cuda:0" in stage("shared")[name]["log"]
