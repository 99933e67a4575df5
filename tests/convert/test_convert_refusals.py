"""A refused conversion has changed nothing: the old pack is whole, and a new folder is not there."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.convert import check, convert
from hybrid_pack.convert.warmup import compile_kernels
from hybrid_pack.errors import DataError, EnvironmentFailure, HybridPackError, UsageError
from hybrid_pack.synthetic import write_checkpoint
from tests.convert.conftest import Sources
from tests.convert.support import pack, plan_of, small, stamps, tree


class Usage:
    free = 1000


def no_room(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr("shutil.disk_usage", lambda _: Usage)
    return {}


REFUSALS: dict[str, tuple[type[HybridPackError], Callable[[pytest.MonkeyPatch], dict[str, Any]]]] = {
    "scales": (DataError, lambda _: {}),
    "workers": (UsageError, lambda _: {"workers": 0}),
    "memory": (UsageError, lambda _: {"max_ram": 1 << 20}),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_overwrite_removes_nothing_before_all_is_checked(
    case: str, sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, change = REFUSALS[case]
    out = tmp_path / "out"
    pack(sources(small()), out, 2)
    before = tree(out), stamps(out)
    with pytest.raises(kind):
        pack(sources(small(second_scale="unequal")), out, 2, overwrite=True, **change(monkeypatch))
    assert (tree(out), stamps(out)) == before


def test_overwrite_counts_the_space_of_the_old_pack(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    pack(sources(small()), out, 2)
    before = stamps(out)
    no_room(monkeypatch)
    with pytest.raises(EnvironmentFailure, match=r"not enough disk space .*found 1,000 free and [\d,]+ to be removed"):
        pack(sources(small(num_experts=8)), out, 2, overwrite=True)
    assert stamps(out) == before
    pack(sources(small(num_experts=2, kept=1)), out, 2, overwrite=True)


def test_resume_and_overwrite_exclude_each_other(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="give one of them"):
        pack(source, tmp_path / "out", resume=True, overwrite=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("folder", ["new", "deep/down/new", "there"])
def test_nothing_is_left_of_a_refused_run(folder: str, sources: Sources, tmp_path: Path) -> None:
    root, out = sources(small(second_scale="unequal")), tmp_path / folder
    (tmp_path / "there").mkdir()
    with pytest.raises(DataError, match="--on-scale-mismatch requantize"):
        pack(root, out)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["there"]
    pack(root, out, on_scale_mismatch="requantize")


def test_nothing_is_left_of_a_run_that_failed_before_its_first_file(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fallocate(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", fallocate)
        with pytest.raises(EnvironmentFailure, match=r"the disk is full .*; make room and run again$"):
            pack(source, tmp_path / "a" / "out", 2)
    assert not list(tmp_path.iterdir())
    pack(source, tmp_path / "a" / "out", 1)


def in_the_source(source: Path, out: Path) -> Path:
    return source / "out"


def a_file(source: Path, out: Path) -> Path:
    out.write_text("mine")
    return out


def below_a_file(source: Path, out: Path) -> Path:
    return a_file(source, out) / "out"


def a_foreign_folder(source: Path, out: Path) -> Path:
    out.mkdir()
    (out / "x").write_text("mine")
    return out


def a_pack_of_other_options(source: Path, out: Path) -> Path:
    pack(source, out, 1)
    return out


SAME = [in_the_source, a_file, below_a_file, a_foreign_folder, a_pack_of_other_options]


@pytest.mark.parametrize("options", [{}, {"resume": True}, {"overwrite": True}, {"resume": True, "overwrite": True}])
@pytest.mark.parametrize("make", SAME)
def test_check_refuses_what_convert_refuses(
    make: Callable[[Path, Path], Path], options: dict[str, bool], tmp_path: Path
) -> None:
    """With the same words, and without writing."""
    source = tmp_path / "source"
    write_checkpoint(source, small())
    out = make(source, tmp_path / "out")
    plan, before = plan_of(source, 2), tree(tmp_path)
    errors = []
    for call in (check, convert):
        try:
            call(plan, out, workers=2, **options)  # type: ignore[operator]
        except HybridPackError as error:
            errors.append((type(error), str(error)))
        if call is check:
            assert tree(tmp_path) == before
    assert len(errors) == (0 if make is a_pack_of_other_options and options == {"overwrite": True} else 2)
    assert len(set(errors)) <= 1


def test_check_of_a_folder_that_is_not_writable(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, _: Path(path) != tmp_path)
    for call in (check, convert):
        with pytest.raises(
            EnvironmentFailure, match=r"out: the system failed \(found Permission denied\); put that right"
        ):
            call(plan_of(source), tmp_path / "out")  # type: ignore[operator]


def test_check_knows_what_is_finished(source: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    out, plan = tmp_path / "out", plan_of(source, 2)
    _, found = check(plan, out)
    assert (found.complete, found.done, found.space.needed) == (False, frozenset(), plan.nbytes)
    pack(source, out, 2)
    _, found = check(plan, out, resume=True)
    assert (found.complete, found.space.needed) == (True, 0)
    lost = next(name for name in whole if "rank-1" in name)
    (out / lost).unlink()
    before = stamps(out)
    _, found = check(plan, out, resume=True)
    assert not found.complete
    assert lost not in found.done
    assert len(found.done) == 4
    assert found.space.needed < plan.nbytes
    _, found = check(plan, out, overwrite=True)
    assert (found.done, found.space.needed) == (frozenset(), plan.nbytes)
    assert found.space.reclaimed > 0
    assert stamps(out) == before


def test_check_with_headers_from_the_hub(
    source: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their stand-ins have times of their own, which are not held against an unfinished conversion."""
    out, copy = tmp_path / "out", Path(shutil.copytree(source, tmp_path / "copy", copy_function=shutil.copy))

    def stop(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("hybrid_pack.convert.write_manifest", stop)
        with pytest.raises(EnvironmentFailure, match="5 of 5 weight files finished and kept"):
            pack(source, out, 2)
    with pytest.raises(UsageError, match="a safetensors file of the source was written to"):
        check(plan_of(copy, 2), out, resume=True)
    _, found = check(plan_of(copy, 2), out, resume=True, headers_only=True)
    assert len(found.done) == 5


def test_memory_estimate(source: Path, tmp_path: Path) -> None:
    """The process, and for each worker an expert as stored with one rank's share of it packed."""
    plan = plan_of(source, 2)
    estimates = [check(plan, tmp_path / "out", workers=workers)[0].memory_bytes for workers in (1, 4)]
    assert 170 << 20 <= estimates[0] < estimates[1] < 250 << 20


class Kernel:
    """What a compiled function tells of itself."""

    def __init__(self, cached: bool) -> None:
        self.cache_misses: dict[str, int] = {}
        self.cache_path = "/cache" if cached else None

    @property
    def stats(self) -> Kernel:
        return self


@pytest.mark.parametrize(
    ("compiles", "cached", "line"),
    [
        (True, True, "first use; cached for the next"),
        (True, False, "no folder to cache them in can be written"),
        (False, True, None),
    ],
)
def test_what_is_said_of_compiling(
    compiles: bool, cached: bool, line: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing if it only took long to load them."""
    kernel = Kernel(cached)

    def count(_: object) -> None:
        if compiles:
            kernel.cache_misses["signature"] = 1

    monkeypatch.setattr("hybrid_pack.convert.warmup._kernels", lambda: [kernel])
    monkeypatch.setattr("hybrid_pack.convert.warmup.count_scale_bytes", count)
    monkeypatch.setattr("hybrid_pack.convert.warmup.WORTH_SAYING_SECONDS", -1)
    said = list(compile_kernels())
    assert len(said) == (line is not None)
    assert line is None or line in said[0]


def test_kernels_tell_what_was_compiled() -> None:
    from hybrid_pack.convert.warmup import _kernels

    list(compile_kernels())
    for kernel in _kernels():
        assert sum(kernel.stats.cache_hits.values()) + sum(kernel.stats.cache_misses.values()) > 0
