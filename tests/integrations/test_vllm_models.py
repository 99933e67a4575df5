"""The models of the engine tests, on the CPU: names and shapes, what BF16 does to them, what the comparison sees."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.gpu import vllm_cases
from tests.gpu.vllm_compare import MARGIN, PEAK, ROUNDING, allowance, compare, complaints
from tests.gpu.vllm_models import CLASSES, EVERY, SHAPES, make, prompts


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in EVERY:
        make(folder, name)
    return folder


def tensors(root: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(root.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_the_pack_is_the_source_and_the_base_is_the_same_everywhere(models: Path, name: str) -> None:
    root = models / name
    command = [sys.executable, "-m", "hybrid_pack.cli", "verify", str(root / "pack"), "--source", str(root / "source")]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    source, bf16, pack = (tensors(root / folder) for folder in ("source", "bf16", "pack"))
    base = {key for key in source if ".experts." not in key}
    assert {key for key in bf16 if ".experts." not in key} == base == set(pack)
    assert all(torch.equal(source[key], bf16[key]) and torch.equal(source[key], pack[key]) for key in base)
    shape = SHAPES[name]
    assert len(bf16) - len(base) == 3 * shape.experts * (shape.moe_layers + shape.mtp)
    downs = [value for key, value in bf16.items() if ".experts." in key and ".down_proj." in key]
    assert not any(down[:CLASSES].any() for down in downs) and all(down[CLASSES:].any() for down in downs)


class Oracle:
    """A model in transformers."""

    def __init__(self, root: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.model, self.info = AutoModelForCausalLM.from_pretrained(root, dtype=dtype, output_loading_info=True)

    def answers(self, given: list[list[int]]) -> dict[str, list[dict[str, Any]]]:
        """As an engine's: at each place of a prompt, what would come next."""
        with torch.no_grad():
            logits = self.model(torch.tensor(given)).logits.float().log_softmax(-1)
        best = logits.topk(8, -1)
        top = [
            [list(zip(i, v, strict=True)) for i, v in zip(ids, values, strict=True)]
            for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
        # Each place is a prompt of its own, since all are given the same tokens before it.
        return {"places": [{"tokens": [place[0][0]], "top": [place]} for prompt in top for place in prompt]}


def test_a_quantised_base_is_what_its_dequantised_twin_says(models: Path) -> None:
    stored, plain = (tensors(models / "fp8_base" / folder) for folder in ("pack", "bf16"))
    names = [name for name, value in stored.items() if value.dtype == torch.float8_e4m3fn]
    assert len(names) == 4 * EVERY["fp8_base"].moe_layers
    for name in names:
        codes, twin = stored[name].double(), plain[name]
        if ".o_proj." in name:
            scales = stored[f"{name}_scale_fp8"].double()[:, None]
        else:
            scales = torch.exp2(stored[f"{name}_scale"].double() - 127).repeat_interleave(32, dim=1)
        assert twin.dtype == torch.bfloat16 and torch.equal((codes * scales).float().to(torch.bfloat16), twin)
        assert codes.abs().max() > 200, "the scales leave most of E4M3 unused"


@pytest.fixture(scope="module", params=SHAPES)
def oracles(models: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, Oracle, Oracle]]:
    """A model in float32 and in BF16; skips without transformers, or fails where all oracles are promised."""
    if importlib.util.find_spec("transformers") is None:
        required = os.environ.get("HYBRID_PACK_REQUIRE_B12X") == "1"
        (pytest.fail if required else pytest.skip)("no transformers")
    root = models / request.param / "bf16"
    yield request.param, Oracle(root, torch.float32), Oracle(root, torch.bfloat16)


def test_transformers_knows_every_name_and_shape(oracles: tuple[str, Oracle, Oracle]) -> None:
    name, oracle, _ = oracles
    assert not oracle.info["missing_keys"] and not oracle.info["mismatched_keys"]
    layer = f"layers.{SHAPES[name].layers}."
    assert all(layer in key for key in oracle.info["unexpected_keys"])  # it has no multi-token prediction


def test_what_rounding_does_and_that_the_comparison_sees_more(oracles: tuple[str, Oracle, Oracle]) -> None:
    name, exact, rounded = oracles
    given = prompts(SHAPES[name].vocab, (128,) * 8, 5)
    expected = exact.answers(given)
    noise = compare(expected, rounded.answers(given), MARGIN)
    assert 0.5 * ROUNDING <= noise.rms <= 1.3 * ROUNDING and noise.peak <= PEAK * 2 * ROUNDING
    assert complaints(noise, allowance([])) == [] and noise.decided > 6 * noise.near_ties
    places = len(expected["places"])
    assert noise.decided >= places // 2

    # One expert of 32 in one of three layers with the weights of another: seen by values.
    experts = exact.model.model.layers[-1].mlp.experts
    with torch.no_grad():
        down = experts.down_proj
        kept = down[3].clone()
        down[3] = down[4]
        one = compare(expected, exact.answers(given), MARGIN)
        down[3] = kept
        down *= 1.25
        scaled = compare(expected, exact.answers(given), MARGIN)
        down /= 1.25
    assert complaints(one, allowance([])) and complaints(scaled, allowance([]))


def answer(tokens: list[int], lead: float = 1.0) -> dict[str, Any]:
    return {"tokens": tokens, "top": [[[token, -1.0], [999, -1.0 - lead]] for token in tokens]}


REFERENCE = {"batch 64": [answer([1, 2, 3]), answer([4, 5, 6])], "long": [answer([7, 8, 9])]}
MUTATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "token": ({"long": [answer([7, 1, 9])]}, "long, prompt 0, token 1: 1 instead of 8"),
    "short": ({"long": [answer([7, 8])]}, "2 tokens instead of 3"),
    "nothing": ({"long": []}, "0 answers for 1 prompts"),
    "more": ({"long": [answer([7, 8, 9])] * 2}, "2 answers for 1 prompts"),
    "batch": ({"batch 2": [answer([1, 2, 3]), answer([4, 5, 5])]}, "batch 2, prompt 1, token 2: 5 instead of 6"),
    "value": (
        {"long": [answer([7, 8, 9]) | {"top": [[[t, -1.0 - PEAK * 0.1], [999, -2.0]] for t in (7, 8, 9)]}]},
        "log-probabilities differ by 0.7",
    ),
    "nothing decided": (
        {"long": [answer([6, 8, 9])]}, "hardly anything was decided",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", MUTATIONS)
def test_every_difference_is_seen(kind: str) -> None:
    found, message = MUTATIONS[kind]
    reference = REFERENCE
    if kind == "nothing decided":
        reference = {"long": [answer([7, 8, 9], lead=0.01)]}
    assert any(message in said for said in complaints(compare(reference, found, MARGIN), 2 * ROUNDING))
    assert complaints(compare(REFERENCE, REFERENCE, MARGIN), 2 * ROUNDING) == []


def test_a_near_tie_ends_a_prompt_without_complaint() -> None:
    one = answer([1, 2, 3])
    one["top"][1] = [[2, -1.0], [8, -1.01]]
    found = compare({"long": [one]}, {"long": [answer([1, 8, 5])]}, MARGIN)
    assert (found.near_ties, found.same, found.wrong) == (1, 1, [])


def test_cases_name_models_and_folders_that_are_made(models: Path) -> None:
    for stage in vllm_cases.STAGES.values():
        cases = stage()
        assert len({case.slug for case in cases}) == len(cases)
        assert all((models / case.model / case.folder / "config.json").exists() for case in cases)


def test_a_case_that_hangs_is_ended_with_its_children_and_told(tmp_path: Path) -> None:
    """Its output stays, and what it started is gone."""
    child = tmp_path / "child"
    code = (
        f"import subprocess, sys; p = subprocess.Popen(['sleep', '60']); open({str(child)!r}, 'w').write(str(p.pid)); "
    )
    code += "print('started', flush=True); p.wait()"
    found = vllm_cases.run_limited([sys.executable, "-c", code], dict(os.environ), tmp_path / "log", 5)
    assert found == "timeout" and (tmp_path / "log").read_text() == "started\n"
    state = Path("/proc", child.read_text(), "status")
    for _ in range(100):  # the kernel takes its time to end what was killed
        if not state.exists() or "Z (zombie)" in state.read_text():
            return
        time.sleep(0.1)
    pytest.fail(state.read_text())


def test_a_case_without_vllm_says_what_failed(models: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vllm is installed here")
    case = next(case for case in vllm_cases.parity_cases() if case.kind == "parity")
    results = vllm_cases.run_cases([case], models, tmp_path, 1)
    vllm_cases.keep("parity", results, tmp_path / "out")
    assert "No module named 'vllm'" in results[case.name]["error"]
    assert (
        "No module named 'vllm'" in json.loads((tmp_path / "out" / "vllm_parity.json").read_text())[case.name]["error"]
    )
    assert "ModuleNotFoundError" in (tmp_path / "out" / "vllm_parity.log").read_text()
