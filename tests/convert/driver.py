"""A process that runs the command line in children of its own, each of which may be killed at a step or after a time.

Started once (everything imported, kernels compiled), then one JSON request a line on stdin and one answer on stdout:
``args`` of the command line; ``die_at``: the child gets ``signal`` (SIGKILL) instead of taking its n-th step;
``torn``: it takes the first half of that step if it is a write; ``kill_after``: SIGKILL after so many seconds;
``slow``: seconds to sleep before each write of data; ``base_file_bytes``: size of base files.
A step is a call that changes the file system. The package has no hooks for any of this. fsync only counts: a killed
process leaves what it wrote to the system, synced or not, and a disk is slow.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.convert.support import replace_in_os

STEPS = ("write", "pwrite", "posix_fallocate", "fsync", "ftruncate", "replace", "unlink", "mkdir", "rmdir")


class Driver:
    """The tests' side."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.convert.driver"],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *args: object, **request: Any) -> dict[str, Any]:
        """The answer: ``signal`` it died of or 0, ``code``, ``steps`` by name in order, ``stderr``."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps({**request, "args": [str(arg) for arg in args]}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.communicate(timeout=60)


def arm(request: dict[str, Any]) -> list[str]:
    """Count the steps of this process from here on, and die at one."""
    taken: list[str] = []
    lock = threading.Lock()
    die_at, slow = request.get("die_at"), request.get("slow", 0)

    def counted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            with lock:
                taken.append(name)
                number = len(taken)
            if number == die_at:
                if request.get("torn") and name in ("write", "pwrite"):
                    data = memoryview(args[1]).cast("B")
                    real(args[0], data[: len(data) // 2], *args[2:])
                os.kill(os.getpid(), request.get("signal", signal.SIGKILL))
            if slow and name == "pwrite":
                time.sleep(slow)
            return real(*args, **kwargs)

        return step

    os.fsync = lambda fd: None  # type: ignore[assignment]
    for name in STEPS:
        replace_in_os(setattr, name, counted(name, getattr(os, name)))
    return taken


def child(request: dict[str, Any], answer: int, log: int) -> None:
    from hybrid_pack import plan
    from hybrid_pack.cli.main import run

    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(log, 2)
    plan.BASE_FILE_BYTES = request.get("base_file_bytes", plan.BASE_FILE_BYTES)
    send, finish = os.write, os._exit
    taken = arm(request)
    code = run(request["args"])
    send(answer, json.dumps({"code": code, "steps": taken}).encode())
    finish(0)


def serve(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile() as log:
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                child(request, write, log.fileno())
            finally:
                os._exit(99)
        os.close(write)
        if "kill_after" in request:
            select.select([read], [], [], request["kill_after"])
            os.kill(pid, signal.SIGKILL)
        with os.fdopen(read, "rb") as pipe:
            text = pipe.read()
        _, status = os.waitpid(pid, 0)
        log.seek(0)
        died = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        told = json.loads(text) if text else {"code": None, "steps": []}
        return {"signal": died, "stderr": log.read().decode(), **told}


def main() -> None:
    import hybrid_pack.cli.convert
    import hybrid_pack.cli.tables  # noqa: F401
    from hybrid_pack.convert.warmup import compile_kernels

    list(compile_kernels())
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
