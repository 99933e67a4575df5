"""Ctrl-C while the Hub sends nothing: the process ends, says one line, and the next run goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybrid_pack.hub.crew import Crew
from hybrid_pack.hub.pull import STAGING
from tests.hub.conftest import REPO, child, tree
from tests.hub.server import Hub

SOON = 40
"""Seconds: start-up aside, far below what the Hub is silent for."""


@pytest.fixture
def silent() -> Iterator[threading.Event]:
    go = threading.Event()
    yield go
    go.set()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("command", ["pull", "convert shards", "convert headers"])
def test_interrupted_while_nothing_comes(
    command: str, number: signal.Signals, code: int, hub: Hub, good_pack: Path, small_checkpoint: Path,
    tmp_path: Path, silent: threading.Event,
) -> None:  # fmt: skip
    hub.add(REPO, tree(good_pack if command == "pull" else small_checkpoint))
    out, held, folder = tmp_path / "out", threading.Event(), tmp_path / ".out.source"

    def hold(method: str, path: str) -> None:
        if command == "convert headers":
            stuck = (folder / "config.json").exists() and ".safetensors" in path
        else:
            stuck = method == "GET" and path.startswith("/cdn/") and (command == "pull" or out.exists())
        if stuck:
            held.set()
            silent.wait(120)

    hub.hook = hold
    arguments = ["pull", REPO] if command == "pull" else ["convert", REPO, "--no-keep"]
    process = child(hub, tmp_path / "home", *arguments, "--out", out, HF_HUB_DOWNLOAD_TIMEOUT="100")
    assert held.wait(60), process.communicate()
    process.send_signal(number)
    try:
        stdout, stderr = process.communicate(timeout=SOON)
    finally:
        process.kill()
    assert (process.returncode, stdout) == (code, "")
    assert stderr.splitlines()[-1].startswith("hybrid-pack: interrupted; finished files are kept")
    assert "Traceback" not in stderr
    assert command != "pull" or (out / STAGING).is_dir()


def test_a_crew_carries_out_everything_and_says_what_failed() -> None:
    done: list[int] = []
    with Crew(3) as crew:
        crew.each(done.append, range(50))
    assert sorted(done) == list(range(50))
    with pytest.raises(ZeroDivisionError), Crew(2) as crew:
        crew.each(lambda n: 1 // n, [1, 0, 1])


def test_a_crew_that_failed_begins_nothing_more() -> None:
    began, go = threading.Event(), threading.Event()

    def first() -> None:
        began.set()
        go.wait(60)

    crew = Crew(1)
    at_work, later = crew.submit(first), crew.submit(first)
    assert began.wait(60)
    crew.end(0.0)
    assert later.cancelled() and not at_work.done()
    go.set()
    assert at_work.result(60) is None
