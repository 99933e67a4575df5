"""How a shard is read: direct or not, and what tells."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hybrid_pack
from hybrid_pack import EnvironmentFailure
from hybrid_pack.runtime import LoadedRank
from hybrid_pack.runtime.stream import files
from hybrid_pack.runtime.stream.cached import cached_share
from hybrid_pack.runtime.stream.device import HostMemory
from hybrid_pack.runtime.stream.files import ShardFile
from tests.runtime.dialects import Packs
from tests.runtime.test_stream_load import assert_same, stream


@pytest.fixture
def shard(packs: Packs) -> Iterator[ShardFile]:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    file = ShardFile(pack.root, pack.manifest, pack.manifest.shards[0])
    yield file
    file.close()
    file.close()
    assert file.fd == -1 and not file.direct


def load(packs: Packs, **options: Any) -> LoadedRank:
    pack = hybrid_pack.open_pack(packs.pack("nvfp4"))
    loaded = stream(pack, HostMemory(), **options)
    assert_same(pack, loaded)
    return loaded


def test_any_part_is_read(shard: ShardFile) -> None:
    data = shard.path.read_bytes()
    region = mmap.mmap(-1, 1 << 20)
    for direct in (False, True):
        shard.choose(direct)
        assert shard.direct == direct
        for begin, end in ((0, 1), (4096, 8192), (8192, 8193), (len(data) // 4096 * 4096, len(data)), (4096, 500_001)):
            shard.read(memoryview(region), begin, end)
            assert region[: end - begin] == data[begin:end]


@pytest.mark.parametrize(("share", "direct"), [(0.0, 2), (0.49, 2), (0.5, 0), (1.0, 0)])
def test_auto_reads_cold_files_directly(
    packs: Packs, monkeypatch: pytest.MonkeyPatch, share: float, direct: int
) -> None:
    monkeypatch.setattr(files, "cached_share", lambda fd, nbytes: share)
    assert load(packs).report.direct_files == direct
    assert load(packs, direct=False).report.direct_files == 0


def test_a_file_system_without_direct_reads(packs: Packs, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuses(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuses)
    monkeypatch.setattr(files, "cached_share", lambda fd, nbytes: 0.0)
    assert load(packs).report.direct_files == 0
    with pytest.raises(EnvironmentFailure, match=r"no direct reads here \(found Invalid argument\)"):
        load(packs, direct=True)


def test_a_file_system_that_only_opens_for_direct_reads(packs: Packs, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_files: set[int] = set()
    real_open, real_read = os.open, os.preadv

    def watched(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        fd = real_open(path, flags, *rest, **more)
        if flags & os.O_DIRECT:
            pack_files.add(fd)
        return fd

    def refuses(fd: int, *rest: Any) -> int:
        if fd in pack_files:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_read(fd, *rest)

    monkeypatch.setattr(os, "open", watched)
    monkeypatch.setattr(os, "preadv", refuses)
    load(packs, direct=True)
    assert pack_files


def test_what_was_just_read_is_cached(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 << 20))
    path.read_bytes()
    fd = os.open(path, os.O_RDONLY)
    try:
        assert cached_share(fd, 3 << 20) == 1.0
        assert cached_share(fd, 5000) == 1.0 and cached_share(fd, 0) == 1.0
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        dropped = cached_share(fd, 3 << 20)
        assert 0 <= dropped <= 1
        assert cached_share(fd, 3 << 20) == dropped, "asking reads nothing"
    finally:
        os.close(fd)
    ends = os.pipe()
    assert cached_share(ends[0], 3 << 20) == 1.0, "who cannot tell says so"
    for end in ends:
        os.close(end)
