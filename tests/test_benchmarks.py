"""Where benchmarks put their results, and what is left of one that was ended."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import common, convert, gptq, quantise
from hybrid_pack.synthetic import Spec, write_checkpoint


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the folder of the committed results."""
    monkeypatch.setattr(common, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def call(main: Callable[[], None], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, arguments)])
    main()


@pytest.fixture
def no_gptq(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gptq, "seconds", lambda *_: {"quantise_s": 1.0})
    monkeypatch.setattr(gptq, "gains", lambda *_: [])


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(quantise, "gpu", lambda runs, keep: {"goals": {}})


@pytest.mark.usefixtures("no_gptq", "no_gpu")
@pytest.mark.parametrize(
    ("main", "arguments", "name"),
    [(gptq.main, (), "gptq"), (quantise.main, ("--device", "cuda"), "quantise_gpu")],
    ids=["gptq", "quantise"],
)
def test_a_result_goes_to_one_place(
    main: Callable[[], None], arguments: tuple[str, ...], name: str, results: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    call(main, monkeypatch, *arguments, "--out", tmp_path / "new" / "mine.json")
    assert "machine" in json.loads((tmp_path / "new" / "mine.json").read_text())
    assert not results.exists()
    call(main, monkeypatch, *arguments)
    assert [path.name for path in results.iterdir()] == [f"{name}.json"]


@pytest.mark.usefixtures("no_gpu")
def test_what_was_measured_before_the_end_is_kept(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(runs: int, keep: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
        keep({"weights_per_second": {"first": 1.0}})
        raise KeyboardInterrupt

    monkeypatch.setattr(quantise, "gpu", ended)
    with pytest.raises(KeyboardInterrupt):
        call(quantise.main, monkeypatch, "--device", "cuda", "--out", tmp_path / "mine.json")
    assert json.loads((tmp_path / "mine.json").read_text())["gpu"] == {"weights_per_second": {"first": 1.0}}
    assert not results.exists()


def test_each_kind_is_kept_as_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole measurement with the CPU in the place of a GPU: kinds, comparisons and the growing result."""
    made: list[tuple[str, str]] = []

    def on_cpu(name: Any, search: Any, tensor: torch.Tensor, second: float, importance: Any) -> Any:
        made.append((name, search))
        given = importance if search == "weighted" else None
        found = quantise.quantize(
            name, tensor.float().numpy(), search, given, second if name == "nvfp4" else 1.0
        )  # fmt: skip
        return torch.from_numpy(found.codes), torch.from_numpy(found.scales), found.stats

    randn = torch.randn
    monkeypatch.setattr(quantise, "on_gpu", on_cpu)
    monkeypatch.setattr(quantise, "compile_all", lambda: None)
    monkeypatch.setattr(quantise, "GPU_ROWS", 128)
    monkeypatch.setattr(quantise, "GPU_COLUMNS", 64)
    monkeypatch.setattr(torch, "Generator", lambda _: torch.random.default_generator)
    monkeypatch.setattr(torch, "randn", lambda *shape, generator, device: randn(*shape))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    kept: list[int] = []
    result = quantise.gpu(1, lambda so_far: kept.append(len(so_far["weights_per_second"])))
    assert kept == list(range(1, 19))
    assert len(set(made)) == 9 and all(result["bytes_equal_cpu"].values())
    assert np.isfinite([rate["median"] for rate in result["weights_per_second"].values()]).all()


def test_packers_are_called_as_they_are_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole benchmark takes minutes and gigabytes."""
    monkeypatch.setattr(convert, "SECONDS", 0.01)
    write_checkpoint(tmp_path, Spec(hidden=256, intermediate=256, num_experts=4, kept=2, vocab=8))
    plan = convert.plan_of(tmp_path)
    assert all(convert.our_rate(plan, tier, 2) > 0 for tier in ("kept", "tail"))
