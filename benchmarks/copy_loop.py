"""A plain tuned copy: threads, large reads, space taken ahead, writes past the page cache, fsync. Nothing is computed.

python -m benchmarks.copy_loop SOURCE OUT THREADS
"""

from __future__ import annotations

import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE = 8 << 20


def copy_piece(source: int, plain: int, direct: int | None, offset: int, nbytes: int) -> None:
    """Copy one piece through a page-aligned buffer."""
    buffer = memoryview(mmap.mmap(-1, PIECE))[:nbytes]
    done = 0
    while done < nbytes:
        done += os.preadv(source, [buffer[done:]], offset + done)
    whole = nbytes // 4096 * 4096 if direct is not None else 0
    at = 0
    while at < whole and direct is not None:
        at += os.pwrite(direct, buffer[at:whole], offset + at)
    while at < nbytes:
        at += os.pwrite(plain, buffer[at:], offset + at)


def main() -> None:
    """Copy every file of a flat folder."""
    source, out, threads = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    out.mkdir()
    with ThreadPoolExecutor(threads) as pool:
        opened = []
        jobs = []
        for path in sorted(p for p in source.iterdir() if p.is_file()):
            size = path.stat().st_size
            read = os.open(path, os.O_RDONLY)
            plain = os.open(out / path.name, os.O_RDWR | os.O_CREAT, 0o644)
            if size:
                os.posix_fallocate(plain, 0, size)
            direct = os.open(out / path.name, os.O_WRONLY | os.O_DIRECT)
            opened.append(plain)
            jobs += [
                pool.submit(copy_piece, read, plain, direct, at, min(PIECE, size - at)) for at in range(0, size, PIECE)
            ]
        for job in jobs:
            job.result()
        for plain in opened:
            os.fsync(plain)
    folder = os.open(out, os.O_RDONLY)
    os.fsync(folder)


if __name__ == "__main__":
    main()
