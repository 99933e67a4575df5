"""Models loaded in vLLM's own code, on the CPU, each rank in a process of its own (``vllm_cpu``)."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.convert.support import pack as convert
from tests.integrations import checkpoint
from tests.integrations.forks import ROOT, Lost, Server

TIMEOUT_S = 300
Made = tuple[Path, dict[str, torch.Tensor]]


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def servers() -> Iterator[dict[int, Server]]:
    """Processes that have imported vLLM, by number; ``serve`` starts them when they are needed."""
    running: dict[int, Server] = {}
    yield running
    for server in running.values():
        server.stop()


@pytest.fixture
def serve(servers: dict[int, Server], plugins: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Load a model in one process a rank; what each found, with its output under ``text``.

    Ranks are forked from servers of their own, from ``first`` on, since processes of one server have the same seed of
    hashes: what depends on the order of a set is seen only between servers.
    """

    def run(
        model: Path,
        tp: int = 1,
        missing: Sequence[Sequence[str]] = (),
        more: dict[str, Any] | None = None,
        first: int = 0,
        **engine: Any,
    ) -> list[dict[str, Any]]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        path = os.pathsep.join([str(plugins), str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTEST_CURRENT_TEST", None)  # it alone differs between tests
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        outs, logs = [[folder / f"{name}-{rank}" for rank in range(tp)] for name in ("out", "log")]
        places = range(first, first + tp)
        try:
            for rank, place in enumerate(places):
                if place in servers and servers[place].environment != environment:
                    servers.pop(place).stop()
                if place not in servers:
                    servers[place] = Server("tests.integrations.vllm_cpu", environment)
                case = {"model": str(model), "tp": tp, "rank": rank, "port": port, "engine": engine, "missing": missing}
                servers[place].send({**case, **(more or {}), "out": str(outs[rank])}, logs[rank], TIMEOUT_S)
            codes = [servers[place].status() for place in places]
        except BaseException:
            for place in servers.keys() & {*places}:
                servers.pop(place).stop()
            raise
        texts = [log.read_text() for log in logs]
        if not {*codes} <= {0, 1}:
            ends = f"ranks ended with {codes} (of a signal if negative, {-signal.SIGALRM:d} after {TIMEOUT_S} s)"
            raise Lost("\n".join([ends, *texts]))
        if any(codes):
            raise Failed(texts[codes.index(1)])
        return [{**torch.load(out), "text": text} for out, text in zip(outs, texts, strict=True)]

    return run


Serve = Callable[..., list[dict[str, Any]]]
TORCH = {"hybrid_pack": {"backend": "torch"}}
