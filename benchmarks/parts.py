"""A benchmark of several parts: each is kept or its failure is, and those that would begin too late are left out."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any


class Run:
    """One run: its time limit, and what was found.

    Args:
        seconds: Parts that would begin later are left out.
    """

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds
        self.result: dict[str, Any] = {"parts_seconds": {}, "errors": {}, "left_out": []}

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._ends

    def part(self, name: str, action: Callable[[], Any]) -> None:
        """Keep what an action returns, or why it failed."""
        if self.over:
            self.result["left_out"].append(name)
            return
        print(f"{name}:", flush=True)
        began = time.monotonic()
        try:
            self.result[name] = action()
        except Exception as error:
            traceback.print_exc()
            self.result["errors"][name] = f"{type(error).__name__}: {error}"[:500]
        self.result["parts_seconds"][name] = round(time.monotonic() - began, 2)

    def interleaved(self, actions: Mapping[str, Callable[[], float]], runs: int, before: Callable[[], None]) -> Any:
        """Seconds of each action, round by round; one that fails is left out from then on, with the reason."""
        seconds: dict[str, list[float]] = {name: [] for name in actions}
        failed: dict[str, str] = {}
        for number in range(runs):
            if self.over and number:
                break
            for name, action in actions.items():
                if name in failed:
                    continue
                before()
                try:
                    seconds[name].append(action())
                    print(f"  {name}: {seconds[name][-1]:.4f} s", flush=True)
                except Exception as error:
                    failed[name] = f"{type(error).__name__}: {error}"[:500]
                    print(f"  {name}: {failed[name]}", flush=True)
        return {name: values for name, values in seconds.items() if values and name not in failed}, failed
