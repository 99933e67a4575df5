"""One way to compile the kernels: no GIL, cached on disk where some folder can be written."""

from __future__ import annotations

from typing import Any

import numba


def kernel(function: Any) -> Any:
    """Compile a loop over arrays with numba on first use (a second or two, then cached beside the module).

    numba refuses to cache where neither the package folder nor the user's cache folder can be written (a read-only
    container, say); the kernel is then compiled anew in each process.
    """
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return numba.njit(nogil=True)(function)


def inline(function: Any) -> Any:
    """Compile a small function of words that kernels call."""
    return numba.njit(nogil=True, inline="always")(function)
