"""Cases in forked processes: each ends in its own way, which is told, and leaves no trace in another."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integrations import forks
from tests.integrations.forks import Lost, Server

MODULE = "tests.integrations.test_forks"
KEEP = "import builtins, os; builtins.kept = os.environ['KEPT'] = 'of another'; os.chdir('/')"
LOOK = f"""
import builtins, os
assert not hasattr(builtins, "kept") and "KEPT" not in os.environ and os.getcwd() == {str(forks.ROOT)!r}
"""
LIMIT_S = 60


@pytest.fixture
def server() -> Iterator[Callable[..., Server]]:
    started = []

    def start(module: str = MODULE, **environment: str) -> Server:
        started.append(Server(module, {**os.environ, **environment}))
        return started[-1]

    yield start
    for each in started:
        each.stop()


def test_a_case_ends_as_it_does_and_others_go_on(server: Callable[..., Server], tmp_path: Path) -> None:
    running = server()
    for number, (code, status, said) in enumerate(
        (
            (KEEP, 0, ""),
            (LOOK, 0, ""),
            ("import os; print('said'); os.system('echo by a child')", 0, "said\nby a child\n"),
            ("import atexit; atexit.register(print, 'goodbye')", 0, "goodbye"),
            ("raise ValueError('refused')", 1, "ValueError: refused"),
            ("import os; os._exit(3)", 3, ""),
            ("import os; os.abort()", -signal.SIGABRT, "Fatal Python error: Aborted"),
            ("import threading; threading.Event().wait()", -signal.SIGALRM, "threading.py"),
            (LOOK, 0, ""),
        )
    ):
        log = tmp_path / f"log-{number}"
        running.send(code, log, 1 if status == -signal.SIGALRM else LIMIT_S)
        assert running.status() == status, (code, log.read_text())
        assert said in log.read_text(), code


@pytest.mark.parametrize(
    ("module", "environment", "why"),
    [
        ("tests.integrations.no_such_module", {}, "No module named"),
        (MODULE, {"A_THREAD_IS_LEFT": "1"}, "2 threads before a fork"),
    ],
)
def test_a_server_that_cannot_start_or_fork_is_told(
    module: str,
    environment: dict[str, str],
    why: str,
    server: Callable[..., Server],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    running = server(module, **environment)
    running.send("", tmp_path / "log", LIMIT_S)
    with pytest.raises(Lost, match="has ended"):
        running.status()
    assert why in capfd.readouterr().err


def test_a_server_that_hangs_is_told(
    server: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "START_S", 0)
    running = server(HANGS="1")
    running.send("", tmp_path / "log", 1)
    with pytest.raises(Lost, match="hangs"):
        running.status()


if __name__ == "__main__":
    if "HANGS" in os.environ:
        threading.Event().wait()
    if "A_THREAD_IS_LEFT" in os.environ:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    exec(forks.case())
