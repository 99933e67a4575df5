"""The calls made for every chunk, straight to CUDA's driver and without letting go of Python's interpreter lock.

torch lets go of the lock in each call, even in one that takes a slice of a tensor, so that another thread can run
meanwhile. These calls only put something into a queue and take microseconds, while whoever was let in must be woken up
and then waited for: with eight readers on a virtual machine with 16 cores, starting a copy took 120 us through torch
and takes 23 us here, recording an event 90 us and 7 us. A reader lets go of the lock to read and to hash, and nowhere
else.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from hybrid_pack.errors import EnvironmentFailure

LIBRARY = "libcuda.so.1"
NOT_READY = 600
"""``CUDA_ERROR_NOT_READY``: what an event was recorded after is still under way."""

_HANDLE = ctypes.c_void_p
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuStreamGetCtx": (_HANDLE, ctypes.POINTER(_HANDLE)),
    "cuCtxSetCurrent": (_HANDLE,),
    "cuMemcpyHtoDAsync_v2": (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, _HANDLE),
    "cuEventRecord": (_HANDLE, _HANDLE),
    "cuEventQuery": (_HANDLE,),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}
"""Of each function, as ``cuda.h`` has them; all return a ``CUresult``, 0 where all is well."""


@cache
def library() -> Any:
    """The driver's library, which every program that uses a CUDA device has loaded.

    Raises:
        EnvironmentFailure: There is none.
    """
    try:
        driver = ctypes.PyDLL(LIBRARY)
    except OSError as error:
        raise EnvironmentFailure("the CUDA driver is not there", where=LIBRARY, found=str(error)) from None
    for name, arguments in _ARGUMENTS.items():
        getattr(driver, name).argtypes = arguments
    return driver


def context_of(stream: int) -> int:
    """The context of a stream, by their handles.

    Raises:
        RuntimeError: The driver failed.
    """
    context = _HANDLE()
    require(library().cuStreamGetCtx(stream, ctypes.byref(context)))
    return context.value or 0


def require(code: int) -> None:
    """Hold a result against success.

    Raises:
        RuntimeError: With the name of the error, as torch would.
    """
    if code:
        name = ctypes.c_char_p()
        library().cuGetErrorName(code, ctypes.byref(name))
        raise RuntimeError(f"CUDA error: {(name.value or str(code).encode()).decode()}")
