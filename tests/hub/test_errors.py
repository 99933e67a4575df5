"""Which failures may pass, how long to wait for them, and what is said of those that do not."""

from __future__ import annotations

import errno
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from hybrid_pack.errors import DataError, EnvironmentFailure, HybridPackError
from hybrid_pack.hub import errors as module
from hybrid_pack.hub.errors import MOST_WAIT, WAITS, Stopped, errors, is_transient, retrying, sleep


class Answered(Exception):
    """As huggingface_hub's errors: with the response they came of."""

    def __init__(self, status: int, headers: dict[str, str] | None = None) -> None:
        super().__init__(f"HTTP {status}\nmore lines")
        self.response = SimpleNamespace(status_code=status, headers=headers or {})


class TransportError(Exception):
    """By the name of httpx's."""


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


TRANSIENT: list[tuple[Exception, bool]] = [
    *((Answered(status), True) for status in (408, 429, 500, 502, 503, 504, 599)),
    *((Answered(status), False) for status in (400, 401, 403, 404, 409, 412, 416)),
    (TransportError("reset"), True),
    (ConnectionResetError(errno.ECONNRESET, "reset"), True),
    (TimeoutError("timed out"), True),
    (OSError("Consistency check failed: file should be of size 5"), True),
    (OSError(errno.ENOSPC, "No space left on device"), False),
    (PermissionError(errno.EACCES, "Permission denied"), False),
    (caused(RuntimeError("while uploading"), Answered(503)), True),
    (caused(RuntimeError("while uploading"), Answered(403)), False),
    (caused(RuntimeError("while uploading"), TransportError()), True),
    (ValueError("a bug"), False),
    (DataError("wrong"), False),
    (caused(DataError("wrong"), TransportError()), False),
    (Stopped(), False),
    (OfflineModeIsEnabled("HF_HUB_OFFLINE"), False),
    (caused(ConnectionError("cannot reach"), OfflineModeIsEnabled("HF_HUB_OFFLINE")), False),
]


@pytest.mark.parametrize(("error", "passes"), TRANSIENT, ids=repr)
def test_is_transient(error: Exception, passes: bool) -> None:
    assert is_transient(error) is passes


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(module, "sleep", lambda seconds, stop: found.append(seconds))
    return found


def failing(*failures: Exception) -> Any:
    left = list(failures)

    def call() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return call


def test_it_waits_longer_each_time(waits: list[float]) -> None:
    told: list[str] = []
    assert retrying(failing(*[Answered(503)] * len(WAITS)), tell=told.append) == "done"
    assert waits == list(WAITS)
    assert told[0] == "HTTP 503; trying again in 1 s"


def test_it_goes_on_for_five_minutes_with_growing_pauses() -> None:
    assert list(WAITS) == sorted(WAITS)
    assert max(WAITS) == 60
    assert 290 <= sum(WAITS) <= 310


def test_every_retry_is_told_even_where_nobody_asks(waits: list[float], caplog: pytest.LogCaptureFixture) -> None:
    assert retrying(failing(*[Answered(503)] * 3)) == "done"
    assert [r.message for r in caplog.records] == [f"HTTP 503; trying again in {n} s" for n in (1, 2, 4)]


def test_it_gives_up_with_the_last_error(waits: list[float]) -> None:
    last = Answered(500)
    with pytest.raises(Answered) as caught:
        retrying(failing(*[Answered(503)] * len(WAITS), last))
    assert caught.value is last
    assert len(waits) == len(WAITS)


def test_what_does_not_pass_is_raised_at_once(waits: list[float]) -> None:
    with pytest.raises(ValueError, match="a bug"):
        retrying(failing(ValueError("a bug")))
    assert waits == []


@pytest.mark.parametrize(("asked", "waited"), [("30", 30), ("0", 1), ("1000000", MOST_WAIT), ("soon", 1), ("-5", 1)])
def test_retry_after(asked: str, waited: float, waits: list[float]) -> None:
    assert retrying(failing(Answered(429, {"Retry-After": asked}))) == "done"
    assert waits == [waited]


def test_a_wait_ends_when_all_is_stopped() -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(Stopped):
        sleep(1000, stop)


def answered_by(url: str, status: int) -> Answered:
    error = Answered(status)
    error.response.url = url
    return error


SAID: list[tuple[Exception, type[HybridPackError], str]] = [
    (Answered(401), EnvironmentFailure, r"org/name: not logged in, or the token is not valid; log in with `hf auth"),
    (Answered(403), EnvironmentFailure, r"org/name: the Hub does not allow it \(found HTTP 403\); .* may push there"),
    (Answered(429), EnvironmentFailure, r"org/name: the Hub asks for fewer requests \(HTTP 429\)"),
    (Answered(500), EnvironmentFailure, r"org/name: cannot send \(found HTTP 500\)$"),
    (
        caused(RuntimeError("x"), OSError(errno.ENOSPC, "No space left on device", "/d/f")),
        EnvironmentFailure,
        r"/d/f: the disk is full \(found No space left on device\); make room and run the same command again",
    ),
    (
        TransportError("refused"),
        EnvironmentFailure,
        r"org/name: cannot send \(expected an answer of https?://\S+, found refused\); check the network.* HF_ENDPOINT",
    ),
    (
        answered_by("https://cdn.example.org/a/b?X-Amz-Signature=5ec5e7", 403),
        EnvironmentFailure,
        r"does not allow it \(found HTTP 403 from cdn\.example\.org\); its links last for a time only: run the s",
    ),
    (DataError("wrong", where="f"), DataError, r"^f: wrong$"),
]


@pytest.mark.parametrize(("error", "kind", "message"), SAID, ids=repr)
def test_what_is_said(error: Exception, kind: type[HybridPackError], message: str) -> None:
    with pytest.raises(kind, match=message), errors("org/name", "send"):
        raise error
