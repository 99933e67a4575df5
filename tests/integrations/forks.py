"""A process that imports once what many cases need, and is forked for each of them.

A case has a process of its own all the same: its globals, environment, folder, output, exit status and time limit; what
it shares with others is the state in which ``case`` was called, and the seed of string hashes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_S = 120
"""Time limit of a server's own start, beside that of the case it is started for."""


class Lost(Exception):
    """A case, or the process that it is forked from, ended without a word of its own, or not at all."""


def case() -> Any:
    """Wait for cases, fork for each; for the module that ``Server`` runs, when it has imported all that is shared.

    Returns:
        In each forked process, its case. The process that forks them ends here, when nobody is left to send one.
    """
    connection = Connection(int(sys.argv[1]))
    gc.freeze()  # a case neither looks through what is shared nor, at its end, takes it apart: both would copy it first
    while True:
        try:
            given, log, limit_s = connection.recv()
        except EOFError:
            sys.exit()
        threads = len(list(Path("/proc/self/task").iterdir()))
        assert threads == 1, f"{threads} threads before a fork: what the others hold would be held forever"
        if (child := os.fork()) == 0:
            break
        connection.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    connection.close()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGALRM, chain=True)  # tells where all threads are, then the signal ends the process
    signal.alarm(limit_s)
    return given


class Server:
    """Runs cases, one at a time.

    Args:
        module: Run as ``python -m MODULE``; calls ``case``.
        environment: Of the module and its cases.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-X", "faulthandler", "-m", module, str(theirs.fileno())],
                env=environment, cwd=ROOT, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip

    def send(self, case: Any, log: Path, limit_s: int) -> None:
        """Start a case, with its output in a file; past the limit it is ended by SIGALRM."""
        self.limit_s = limit_s
        with contextlib.suppress(BrokenPipeError):  # ``status`` tells
            self.connection.send((case, str(log), limit_s))

    def status(self) -> int:
        """Exit status of the case that was sent, when it has ended; negative, the signal that ended it.

        Raises:
            Lost: The server has ended, or hangs.
        """
        if not self.connection.poll(self.limit_s + START_S):
            raise Lost("the server of cases hangs")
        try:
            return int(self.connection.recv())
        except (EOFError, ConnectionResetError):
            raise Lost("the server of cases has ended; its own output says why") from None

    def stop(self) -> None:
        """End it, and the case that it runs."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
