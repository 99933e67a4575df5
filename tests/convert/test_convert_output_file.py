"""The writer: the same bytes whatever the file system takes, and a name only for a whole file."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_pack.errors import UsageError
from hybrid_pack.io.output import OutputFile, aligned_buffer, make_folder, write_small
from tests.convert.conftest import Sources
from tests.convert.support import pack, small, tree

ALIGNED = small(seed=60, hidden=256, intermediate=256, num_experts=2, kept=1, mtp_layer=False)
"""At tp 1 every row of codes and scales but two is a multiple of 4096 bytes."""
UNALIGNED = small(seed=61, num_experts=2, kept=1, mtp_layer=False)
"""At tp 2 none of the scales is."""

Faults = Callable[[pytest.MonkeyPatch], object]


def direct_fds(patch: pytest.MonkeyPatch) -> set[int]:
    """File descriptors opened for direct I/O from here on."""
    real, found = os.open, set()

    def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        fd = real(path, flags & ~os.O_DIRECT, *args, **kwargs)
        (found.add if flags & os.O_DIRECT else found.discard)(fd)
        return fd

    patch.setattr(os, "open", opened)
    return found


def no_direct_open(patch: pytest.MonkeyPatch) -> None:
    """As tmpfs was before Linux 6.6."""
    real = os.open

    def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        return real(path, flags, *args, **kwargs)

    patch.setattr(os, "open", opened)


def direct_write_refused(patch: pytest.MonkeyPatch) -> None:
    """As some network and overlay file systems."""
    direct, real = direct_fds(patch), os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, data, offset)

    patch.setattr(os, "pwrite", pwrite)


def direct_write_refused_halfway(patch: pytest.MonkeyPatch) -> None:
    """A direct write that is short leaves an offset that is no multiple of 4096."""
    direct, real = direct_fds(patch), os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if fd not in direct:
            return real(fd, data, offset)
        if offset % 4096:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, memoryview(data).cast("B")[:1000], offset)

    patch.setattr(os, "pwrite", pwrite)


def short_writes(size: int) -> Faults:
    def patch_with(patch: pytest.MonkeyPatch) -> None:
        real = os.pwrite
        patch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, memoryview(data).cast("B")[:size], offset))

    return patch_with


def partial_after_a_signal(patch: pytest.MonkeyPatch) -> None:
    """Every other write is cut after its first page, as one interrupted by a signal."""
    real, calls = os.pwrite, []

    def pwrite(fd: int, data: Any, offset: int) -> int:
        calls.append(offset)
        whole = memoryview(data).cast("B")
        return real(fd, whole[: 4096 if len(calls) % 2 else whole.nbytes], offset)

    patch.setattr(os, "pwrite", pwrite)


FAULTS: dict[str, Faults] = {
    "none": lambda patch: None,
    "no_direct_open": no_direct_open,
    "direct_write_refused": direct_write_refused,
    "direct_write_refused_halfway": direct_write_refused_halfway,
    "writes_of_4096": short_writes(4096),
    "writes_of_1001": short_writes(1001),
    "partial_after_a_signal": partial_after_a_signal,
}


@pytest.fixture
def fault(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[request.param](monkeypatch)


def data_of(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    buffer = aligned_buffer(nbytes)
    buffer[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    return buffer


PIECES = {
    "one": [(0, 12288)],
    "whole_pages": [(0, 4096), (4096, 12288), (12288, 16384)],
    "no_pages": [(0, 1), (1, 5000), (5000, 9001)],
    "mixed": [(0, 4096), (4096, 8192), (8192, 8200), (8200, 16384), (16384, 20480), (20480, 20481)],
    "backwards": [(8192, 16384), (0, 8192)],
}


@pytest.mark.parametrize("case", PIECES)
@pytest.mark.parametrize("fault", FAULTS, indirect=True)
def test_pieces(fault: None, case: str, tmp_path: Path) -> None:
    pieces = PIECES[case]
    data = data_of(max(end for _, end in pieces))
    file = OutputFile(tmp_path / "x", data.nbytes)
    assert (tmp_path / "x.partial").stat().st_size == data.nbytes
    for begin, end in pieces:
        file.write(begin, data[begin:end] if begin % 3 else data[begin:end].tobytes())
    file.sync()
    assert not (tmp_path / "x").exists()
    file.publish()
    assert (tmp_path / "x").read_bytes() == data.tobytes()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("fault", FAULTS, indirect=True)
def test_unaligned_memory(fault: None, tmp_path: Path) -> None:
    """Whole pages at a page's offset, from an address that is not."""
    data = data_of(3 * 4096)
    file = OutputFile(tmp_path / "x", 8192)
    file.write(0, data[5 : 5 + 8192])
    file.publish()
    assert (tmp_path / "x").read_bytes() == data[5 : 5 + 8192].tobytes()


def test_direct_io_is_used_for_whole_pages_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    direct, real, seen = direct_fds(monkeypatch), os.pwrite, []

    def pwrite(fd: int, data: Any, offset: int) -> int:
        seen.append((fd in direct, offset))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    data = data_of(16384)
    file = OutputFile(tmp_path / "x", 16384)
    file.write(0, data[:8192])
    file.write(8192, data[8192:8200])
    file.write(8200, data[8200:12288])
    file.write(12288, data[12288:])
    file.publish()
    assert seen == [(True, 0), (False, 8192), (False, 8200), (True, 12288)]


@pytest.mark.parametrize("written", [0, -1])
def test_a_write_that_writes_nothing(written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: written)
    file = OutputFile(tmp_path / "x", 10)
    with pytest.raises(OSError, match="the system wrote nothing") as caught:
        file.write(0, b"0123456789")
    assert caught.value.errno == errno.EIO
    file.discard()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_other_errors_are_not_hidden(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    direct, real = direct_fds(monkeypatch), os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if fd in direct:
            raise OSError(code, os.strerror(code))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    file = OutputFile(tmp_path / "x", 4096)
    with pytest.raises(OSError) as caught:
        file.write(0, data_of(4096))
    assert caught.value.errno == code
    file.discard()


def test_many_threads(tmp_path: Path) -> None:
    """Neighbouring parts, direct and not."""
    data = data_of(64 * 5000)
    file = OutputFile(tmp_path / "x", data.nbytes)
    bounds = sorted({*range(0, data.nbytes, 5000), *range(0, data.nbytes, 4096), data.nbytes})
    parts = list(pairwise(bounds))

    def work(mine: list[tuple[int, int]]) -> None:
        for begin, end in mine:
            file.write(begin, data[begin:end])

    threads = [threading.Thread(target=work, args=(parts[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.publish()
    assert (tmp_path / "x").read_bytes() == data.tobytes()


def test_an_empty_file(tmp_path: Path) -> None:
    write_small(tmp_path / "x", b"")
    assert (tmp_path / "x").read_bytes() == b""


def test_write_small_replaces_and_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: 0)
        with pytest.raises(OSError):
            write_small(tmp_path / "x", b"new")
    assert tree(tmp_path) == {"x": b"old"}
    write_small(tmp_path / "x", b"new")
    assert tree(tmp_path) == {"x": b"new"}


def test_a_leftover_or_link_under_the_temporary_name(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"mine")
    (tmp_path / "x.partial").symlink_to(tmp_path / "victim")
    (tmp_path / "y.partial").write_bytes(b"left over from a killed run, and longer")
    write_small(tmp_path / "x", b"new")
    write_small(tmp_path / "y", b"new")
    assert tree(tmp_path) == {"victim": b"mine", "x": b"new", "y": b"new"}


@pytest.mark.parametrize("kind", ["link", "file"])
def test_make_folder_goes_through_folders_only(kind: str, tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    elsewhere.mkdir()
    root.mkdir()
    make_folder(root, root / "a" / "b")
    make_folder(root, root / "a" / "b")
    if kind == "link":
        (root / "a" / "c").symlink_to(elsewhere)
    else:
        (root / "a" / "c").write_text("")
    with pytest.raises(UsageError, match=r"root/a/c: in the way of the output \(expected a folder\); remove it"):
        make_folder(root, root / "a" / "c" / "d")
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("fault", FAULTS, indirect=True)
@pytest.mark.parametrize(("spec", "tp"), [(ALIGNED, 1), (UNALIGNED, 2)], ids=["aligned", "unaligned"])
def test_packs(
    fault: None, spec: Any, tp: int, sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid_pack.convert.base.CHUNK_BYTES", 64 << 10)
    root = sources(spec)
    pack(root, tmp_path / "out", tp)
    monkeypatch.undo()
    pack(root, tmp_path / "plain", tp)
    assert tree(tmp_path / "out") == tree(tmp_path / "plain")
