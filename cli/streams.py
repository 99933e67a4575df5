"""Standard streams that may be closed, broken or full, and signals that end a command."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from hybrid_pack.errors import EnvironmentFailure, plain


def open_streams() -> None:
    """Put the null device where a standard stream is closed: no file that is opened later may get its number."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, this one
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115


def drop_stdout() -> None:
    """Let go of what stdout does not take, now and when the interpreter ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def put(text: str) -> None:
    """Print to stdout; control characters of names and configurations are written as escapes.

    Raises:
        BrokenPipeError: Nobody reads it any more.
        EnvironmentFailure: It cannot be written otherwise.
    """
    try:
        click.echo(plain(text))
    except BrokenPipeError:
        drop_stdout()
        raise
    except OSError as error:
        raise stdout_failure(error) from error


def stdout_failure(error: OSError) -> EnvironmentFailure:
    """What to say of a stdout that cannot be written to; nothing more is tried."""
    drop_stdout()
    return EnvironmentFailure("cannot write to stdout", found=error.strerror or error)


def in_echo(error: BaseException) -> bool:
    """Whether it was raised while something was printed."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and at.tb_frame.f_code is click.echo.__code__


class Signals:
    """Whether a signal to end was received.

    Attributes:
        terminated: SIGTERM was.
    """

    def __init__(self) -> None:
        self.terminated = False


@contextmanager
def terminable() -> Iterator[Signals]:
    """Make SIGTERM end a command as Ctrl-C does."""
    seen = Signals()

    def end(*_: Any) -> None:
        seen.terminated = True
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield seen
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
