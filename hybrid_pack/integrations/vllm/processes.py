"""How vLLM's engine processes may be started. Imports nothing of vLLM."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, MutableMapping

METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
"""vLLM's variable, which it sets itself where it must not fork; it goes by torch, which knows of its own CUDA alone."""

_NOT_INITIALIZED = 3
"""``CUDA_ERROR_NOT_INITIALIZED``, what every function of the driver answers before ``cuInit``."""


def driver_in_use() -> bool:
    """Whether anything in this process has called ``cuInit``; False where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return bool(driver.cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALIZED)


def spawn_if_needed(
    log: logging.Logger,
    environment: MutableMapping[str, str] = os.environ,
    in_use: Callable[[], bool] = driver_in_use,
) -> None:
    """Have vLLM spawn its engine processes where a forked one could not use the GPU.

    Importing CUTLASS's DSL calls ``cuInit``, and b12x 1.1.0 brings a vLLM plugin of its own that imports it in every
    process. A process that is forked after that cannot initialise CUDA again.

    Args:
        log: Told of a change.
        environment: Where the method is chosen.
        in_use: Whether the driver was initialised.
    """
    if environment.get(METHOD) != "spawn" and in_use():
        environment[METHOD] = "spawn"
        log.info("hybrid_pack: the CUDA driver is in use in this process, so engine processes are spawned, not forked")
