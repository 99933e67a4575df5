"""How the plugin is registered and its engines started, without vLLM."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from hybrid_pack.integrations.vllm import processes
from hybrid_pack.integrations.vllm.processes import METHOD, spawn_if_needed


def test_registering_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    import sys

    from hybrid_pack.integrations.vllm import register

    monkeypatch.setitem(sys.modules, "hybrid_pack.integrations.vllm.registration", SimpleNamespace())
    with caplog.at_level(logging.WARNING):
        register()
    assert "cannot be registered" in caplog.text


@pytest.mark.parametrize("before", ["fork", None, "spawn"])
@pytest.mark.parametrize("in_use", [False, True])
def test_engines_are_spawned_where_the_driver_is_in_use(
    before: str | None, in_use: bool, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {} if before is None else {METHOD: before}
    caplog.set_level(logging.INFO)
    spawn_if_needed(logging.getLogger("test"), environment, lambda: in_use)
    assert environment.get(METHOD) == ("spawn" if in_use else before)
    assert ("spawned, not forked" in caplog.text) == (in_use and before != "spawn")


def test_a_driver_that_is_not_there_is_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(processes.ctypes, "CDLL", missing)
    assert not processes.driver_in_use()
    monkeypatch.setattr(processes.ctypes, "CDLL", lambda name: SimpleNamespace(cuDeviceGetCount=lambda at: 3))
    assert not processes.driver_in_use()
    monkeypatch.setattr(processes.ctypes, "CDLL", lambda name: SimpleNamespace(cuDeviceGetCount=lambda at: 0))
    assert processes.driver_in_use()
