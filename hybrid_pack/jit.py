"""One way to compile the kernels: no GIL, cached on disk where some folder can be written."""

from __future__ import annotations

import pickle
from typing import Any

import numba

CACHE_ERRORS = (OSError, EOFError, pickle.UnpicklingError, ImportError, AttributeError, IndexError)
"""What a cache on a full disk or with damaged files makes of a call; kernels themselves raise none of these."""


class Kernel:
    """A loop over arrays, compiled by numba on first use (a second or two, then cached beside the module).

    numba refuses to cache where neither the package folder nor the user's cache folder can be written (a read-only
    container, say), and fails where the cache is damaged or its disk is full. The kernel is then compiled anew in each
    process: a cache is no reason to fail.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._cached = True
        try:
            self._compiled = numba.njit(nogil=True, cache=True)(function)
        except RuntimeError:
            self._give_up_cache()

    def _give_up_cache(self) -> None:
        self._cached = False
        self._compiled = numba.njit(nogil=True)(self._function)

    def __call__(self, *arguments: Any) -> Any:
        """Run it. What fails for the cache's sake fails before the loop begins, so that it can be run again."""
        try:
            return self._compiled(*arguments)
        except CACHE_ERRORS:
            if not self._cached:
                raise
            self._give_up_cache()
            return self._compiled(*arguments)

    @property
    def stats(self) -> Any:
        """numba's counts of compilations and cache hits."""
        return self._compiled.stats


kernel = Kernel


def inline(function: Any) -> Any:
    """Compile a small function of words that kernels call."""
    return numba.njit(nogil=True, inline="always")(function)


def part(function: Any) -> Any:
    """Compile a part of a kernel that calls it, where it is too long to be copied into it.

    Without numba's reference counting, whose atomic operations for each array argument of each call would take longer
    than the part itself; so it allocates no arrays, and returns none.
    """
    return numba.njit(nogil=True, _nrt=False)(function)
