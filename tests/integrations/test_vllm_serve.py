"""The start-up benchmark of vLLM on the CPU: what it compares is the same model, and a failure is told and kept."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hybrid_pack
from benchmarks import common, vllm_serve
from benchmarks.repack_baseline import source_layer
from benchmarks.vllm_repack import repack


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("serve")
    vllm_serve.prepare(root, vllm_serve.shape(2, tiny=True))
    return root


def test_both_ways_serve_one_base_and_one_source(folder: Path) -> None:
    again = vllm_serve.prepare(folder, vllm_serve.shape(2, tiny=True))
    assert again == {}  # what is there stays
    pack, base = folder / "pack", folder / "repack"
    assert {p.name for p in base.glob("*.safetensors")} == {p.name for p in pack.glob("*.safetensors")}
    assert all(p.resolve().parent == pack.resolve() for p in base.glob("*.safetensors"))
    ours, theirs = (json.loads((root / "config.json").read_text()) for root in (pack, base))
    block = theirs.pop("quantization_config")
    assert ours.pop("quantization_config")["quant_method"] == "hybrid_pack" and ours == theirs
    assert block == {"quant_method": "hybrid_repack", "source": str((folder / "source").resolve())}


def test_repacked_experts_are_those_of_the_pack(folder: Path) -> None:
    pack = hybrid_pack.open_pack(folder / "pack")
    shape = vllm_serve.shape(2, tiny=True)
    for number in pack.layers:
        sizes = shape.hidden, shape.intermediate, shape.top_k
        found = repack(folder / "source", source_layer(folder / "source", number), number, sizes, torch.device("cpu"))
        ours = pack.load_layer(number)
        assert found.tiles == ours.tiles and found.geometry == ours.geometry
        assert found.expert_ids == ours.expert_ids
        for expert in ours.expert_ids:
            for one, other in zip(found.dequantize(expert), ours.dequantize(expert), strict=True):
                # b12x normalises NVFP4's scales over all experts, and so may flush the smallest ones.
                assert torch.equal(one, other) or float((one - other).norm() / other.norm()) < 1e-3


def started(seconds: float, first: float, over: int) -> dict[str, Any]:
    return {
        "expert_seconds": seconds, "process_to_first_token_seconds": first, "peak_allocated_over_resident": over,
    }  # fmt: skip


def test_goals_come_from_what_was_measured() -> None:
    result = {
        "pack warm #1": started(0.5, 30.0, 0),
        "repack warm #1": started(6.0, 36.0, 3 << 20),
        "pack warm #2": started(0.7, 30.0, 1 << 20),
        "pack cold": {"expert_seconds": 2.0, "process_to_first_token_seconds": 33.0},
    }
    assert vllm_serve.goals(result) == {
        "times faster expert loading, warm (10)": 10,
        "times faster expert loading, cold": None,
        "times sooner the first token, warm": 1.2,
        "times sooner the first token, cold": None,
        "pack: MiB of GPU memory over the resident at most (64)": 1,
        "repack: MiB of GPU memory over the resident at most": 3,
    }


def test_starts_that_fail_are_told_and_kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vllm is installed here")
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    out = tmp_path / "out" / "vllm_serve.json"
    options = argparse.Namespace(seconds=300.0, layers=2, tiny=True, out=out, rounds=1)
    result = vllm_serve.measure(options, folder, tmp_path)
    rounds = {f"{way} {heat}" for way in vllm_serve.WAYS for heat in ("warm #1", "cold")}
    assert set(result["errors"]) == {"first starts, at one time", *rounds}
    assert all("No module named 'vllm'" in error for error in result["errors"].values())
    assert json.loads(out.read_text())["errors"] == result["errors"]
    assert "ModuleNotFoundError" in out.with_suffix(".log").read_text()
    assert not any(result["goals"].values())
