"""How much of a file is in the page cache."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

_WINDOWS = 32
_WINDOW_PAGES = 16


def cached_share(fd: int, nbytes: int) -> float:
    """Share of a file that is in the page cache, 0 to 1, from samples all over it.

    ``mincore`` looks without reading, so that asking changes nothing. Where it cannot tell (the kernel answers "all"
    for files of somebody else), the answer is 1.

    Args:
        fd: Open for reading.
        nbytes: Size of the file.
    """
    if not nbytes:
        return 1.0
    pages = -(-nbytes // mmap.PAGESIZE)
    window = min(_WINDOW_PAGES, pages)
    firsts = np.unique(np.linspace(0, pages - window, _WINDOWS).astype(np.int64))
    flags = np.ones((len(firsts), window), np.uint8)
    try:
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        with mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ) as mapping:
            address = np.frombuffer(mapping, np.uint8).ctypes.data
            for first, row in zip(firsts.tolist(), flags, strict=True):
                if mincore(address + first * mmap.PAGESIZE, window * mmap.PAGESIZE, row.ctypes.data):
                    return 1.0
    except (AttributeError, OSError, ValueError):
        return 1.0
    return float((flags & 1).mean())
