"""What else brings safetensors files to a GPU, each timed to the last byte; and how fast bytes alone travel."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks import common

PINNED_BYTES = 256 << 20


def load_file(files: Sequence[Path], device: torch.device) -> float:
    """The official library, file by file."""
    from safetensors.torch import load_file

    def action() -> None:
        kept = [load_file(path, device=str(device)) for path in files]
        if device.type == "cuda":
            torch.cuda.synchronize()
        del kept

    return common.timed(action)


def fastsafetensors(files: Sequence[Path], *, direct: bool) -> float:
    """fastsafetensors without GPU Direct Storage, file by file: names are those of other layers, too, in each of them.

    Args:
        files: To load.
        direct: Whether it reads past the page cache, which it does unless told otherwise.
    """
    from fastsafetensors import SafeTensorsFileLoader  # type: ignore[import-not-found]

    os.environ["FASTSAFETENSORS_ODIRECT"] = str(int(direct))
    kept: list[tuple[Any, dict[str, torch.Tensor]]] = []
    loader = SafeTensorsFileLoader(None, "cuda:0", nogds=True)

    def action() -> None:
        for path in files:
            loader.reset()
            loader.add_filenames({0: [str(path)]})
            held = loader.copy_files_to_device()
            kept.append((held, {name: held.get_tensor(name) for name in loader.get_keys()}))
        torch.cuda.synchronize()

    try:
        return common.timed(action)
    finally:
        for held, tensors in kept:
            tensors.clear()
            held.close()
        kept.clear()
        loader.close()


@cache
def _pinned() -> torch.Tensor:
    return torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True).fill_(7)


def pinned_copy(nbytes: int, device: torch.device) -> float:
    """So many bytes from pinned memory to the GPU, over and over the same: the ceiling."""
    host = _pinned()
    target = torch.empty_like(host, device=device)
    torch.cuda.synchronize()
    began, left = time.perf_counter(), nbytes
    while left > 0:
        size = min(left, host.nbytes)
        target[:size].copy_(host[:size], non_blocking=True)
        left -= size
    torch.cuda.synchronize()
    return time.perf_counter() - began


def dd(files: Sequence[Path]) -> float:
    """``dd`` files past the page cache, one after the other."""
    command = ["dd", "of=/dev/null", "iflag=direct", "bs=16M", "status=none"]
    return common.timed(lambda: [subprocess.run([*command, f"if={path}"], check=True) for path in files])
