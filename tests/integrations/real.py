"""Models loaded in vLLM's own code, on the CPU, each rank in a process of its own (``vllm_cpu``)."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.convert.support import pack as convert
from tests.integrations import checkpoint

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
Made = tuple[Path, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Metadata with the entry point of pyproject.toml, so that vLLM finds the plugin as it finds an installed one."""
    text = (ROOT / "pyproject.toml").read_text()
    _, _, rest = text.partition('[project.entry-points."vllm.general_plugins"]\n')
    entry = rest.splitlines()[0].replace('"', "")
    assert entry.startswith("hybrid_pack = "), "the entry point is gone from pyproject.toml"
    folder = tmp_path_factory.mktemp("plugins")
    info = folder / "hybrid_pack_under_test-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hybrid_pack_under_test\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{entry}\n")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """A pack of a dialect and topology, with what its linear layers mean."""
    done: dict[tuple[Any, ...], Made] = {}

    def make(dialect: str = "bf16", tp: int = 1, ep: int = 1) -> Made:
        key = (dialect, tp, ep)
        if key not in done:
            folder = tmp_path_factory.mktemp("real")
            meanings = checkpoint.write(folder / "source", dialect)
            convert(folder / "source", folder / "pack", tp, ep)
            done[key] = folder / "pack", meanings
        return done[key]

    return make


class Failed(Exception):
    """vLLM refused; the text of its output."""


@pytest.fixture
def serve(plugins: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Load a model in one process a rank; what each found, with its output under ``text``."""

    def run(
        model: Path,
        tp: int = 1,
        missing: Sequence[Sequence[str]] = (),
        more: dict[str, Any] | None = None,
        **engine: Any,
    ) -> list[dict[str, Any]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        path = os.pathsep.join([str(plugins), str(ROOT), os.environ.get("PYTHONPATH", "")])
        processes = []
        for rank in range(tp):
            case = {"model": str(model), "tp": tp, "rank": rank, "port": port, "engine": engine, "missing": missing}
            case |= more or {}
            case["out"] = str(tmp_path / f"out-{rank}.pt")
            file = tmp_path / f"case-{rank}.json"
            file.write_text(json.dumps(case))
            command = [sys.executable, "-m", "tests.integrations.vllm_cpu", str(file)]
            log = (tmp_path / f"log-{rank}.txt").open("w")
            environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            processes.append((subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT), case))
        try:
            codes = [process.wait(TIMEOUT_S) for process, _ in processes]
        finally:
            for process, _ in processes:
                process.kill()
        texts = [(tmp_path / f"log-{rank}.txt").read_text() for rank in range(tp)]
        if any(codes):
            raise Failed(texts[next(i for i, code in enumerate(codes) if code)])
        return [{**torch.load(case["out"]), "text": text} for (_, case), text in zip(processes, texts, strict=True)]

    return run


Serve = Callable[..., list[dict[str, Any]]]
TORCH = {"hybrid_pack": {"backend": "torch"}}
