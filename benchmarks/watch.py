"""Page cache, memory and GPU of the machine a benchmark runs on."""

from __future__ import annotations

import gc
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import torch

from hybrid_pack.runtime.stream.cached import cached_share


def settle(device: torch.device) -> None:
    """Give everything back before an action."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _read(path: Path) -> None:
    buffer = bytearray(8 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def warm(files: list[Path]) -> None:
    """Bring files into the page cache, one thread a file."""
    threads = [threading.Thread(target=_read, args=(path,)) for path in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def drop_cache(files: list[Path]) -> None:
    """Take files out of the page cache; all of it, where that is allowed."""
    os.sync()
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1\n")
    except OSError as error:
        print(f"  drop_caches: {error.strerror}")


def cached(path: Path) -> float:
    """Share of a file in the page cache."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return cached_share(fd, path.stat().st_size)
    finally:
        os.close(fd)


def rss_bytes() -> int:
    """Resident memory that is not of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem")))


def gpu() -> dict[str, Any]:
    """The card and its driver."""
    if not torch.cuda.is_available():
        return {}
    query = ["nvidia-smi", "--query-gpu=driver_version,pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader"]
    asked = subprocess.run(query, capture_output=True, text=True, check=False)
    return {"name": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "driver, pcie": asked.stdout.strip()}


class LeastFree:
    """Watches the driver's free memory from another thread.

    Attributes:
        free_bytes: Least that was seen.
    """

    def __enter__(self) -> LeastFree:
        self.free_bytes = torch.cuda.mem_get_info()[0]
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.free_bytes = min(self.free_bytes, torch.cuda.mem_get_info()[0])

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
