"""A finished pack that has lost files: --resume writes just those, and the manifest's bytes stay what they were."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.convert.journal import STATE
from hybrid_pack.convert.layer import ShardFile
from hybrid_pack.errors import DataError, EnvironmentFailure, UsageError
from hybrid_pack.synthetic import write_checkpoint
from hybrid_pack.verify import verify_pack
from tests.convert.conftest import Sources
from tests.convert.driver import Driver
from tests.convert.support import names, pack, partials, plan_of, small, stamps, tree

MANIFEST = "hybrid_pack.json"
SHARD = "experts/tp2-ep1/rank-0/layer-001.safetensors"
BASE = "model-00001-of-00001.safetensors"
LOST = [[SHARD], [BASE], ["LICENSE"], ["config.json"], [SHARD, BASE, "tokenizer.json"]]


def remove(path: Path) -> None:
    path.unlink()


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nowhere")


def remove_folder(path: Path) -> None:
    path.unlink()
    while path.parent.name and not any(path.parent.iterdir()):
        path = path.parent
        path.rmdir()


@pytest.mark.parametrize("damage", [remove, shorten, link, remove_folder])
@pytest.mark.parametrize("lost", LOST, ids=lambda lost: "+".join(lost))
def test_just_the_lost_files_are_written(
    lost: list[str], damage: Callable[[Path], None], finished: Path, source: Path, whole: dict[str, bytes]
) -> None:
    for name in lost:
        damage(finished / name)
    good = [name for name in whole if name not in (*lost, MANIFEST)]
    before = stamps(finished, good)
    done = pack(source, finished, 2, resume=True)
    assert tree(finished) == whole
    assert stamps(finished, good) == before
    assert (done.files_written, done.files_kept) == (len(lost) + 1, len(whole) - len(lost) - 2)  # README.md apart
    assert pack(source, finished, 2, resume=True).files_written == 0


def test_a_file_with_a_wrong_digest_is_repaired_by_deleting_it(
    finished: Path, source: Path, whole: dict[str, bytes]
) -> None:
    data = bytearray(whole[SHARD])
    data[-1] ^= 1
    (finished / SHARD).write_bytes(data)
    assert not verify_pack(finished).ok
    (finished / SHARD).unlink()
    pack(source, finished, 2, resume=True)
    assert verify_pack(finished).ok
    assert tree(finished) == whole


def test_the_report_stays(sources: Sources, tmp_path: Path) -> None:
    """Counts and requantised experts, whatever was written anew; and the option must be that of the pack."""
    root, out = sources(small(second_scale="unequal")), tmp_path / "out"
    pack(root, out, 2, on_scale_mismatch="requantize")
    before = tree(out)
    (out / SHARD).unlink()
    with pytest.raises(UsageError, match="--on-scale-mismatch was requantize, now refuse"):
        pack(root, out, 2, resume=True)
    pack(root, out, 2, resume=True, on_scale_mismatch="requantize")
    assert tree(out) == before


def test_the_card_and_other_times_do_not_matter(copy: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    out = tmp_path / "out"
    pack(copy, out, 2)
    (out / SHARD).unlink()
    (out / "README.md").write_text("# Mine\n")
    for path in copy.iterdir():
        os.utime(path)
    pack(copy, out, 2, resume=True)
    assert tree(out) == {**whole, "README.md": b"# Mine\n"}


def test_a_source_that_is_another_by_now(copy: Path, tmp_path: Path) -> None:
    """What would differ is not put into the pack, which is left as it was found."""
    out = tmp_path / "out"
    pack(copy, out, 2)
    (out / SHARD).unlink()
    before = tree(out)
    codes = plan_of(copy, 2).source.layers[1].experts[0].gate.codes
    with codes.path.open("r+b") as file:
        file.seek(codes.header.begin)
        file.write(bytes(b ^ 1 for b in os.pread(file.fileno(), 64, codes.header.begin)))
    message = rf"{SHARD}: the source is no longer what the pack there was made from: .* \(expected blake3-shard:"
    with pytest.raises(DataError, match=message):
        pack(copy, out, 2, resume=True)
    assert tree(out) == before


def test_a_repair_that_fails_leaves_the_pack_as_it_was(
    source: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its manifest, and with what was written so far."""
    out = tmp_path / "out"
    pack(source, out, 2)
    other = SHARD.replace("001", "002")
    for name in (SHARD, other):
        (out / name).unlink()
    real, left = ShardFile.finish, [1]

    def finish(self: ShardFile, journal: Any) -> None:
        if not left[0]:
            raise OSError(errno.EIO, "Input/output error")
        left[0] -= 1
        real(self, journal)

    with monkeypatch.context() as patch:
        patch.setattr(ShardFile, "finish", finish)
        with pytest.raises(EnvironmentFailure, match="and run again with --resume"):
            pack(source, out, 2, resume=True, workers=1)
    assert tree(out) == {name: data for name, data in whole.items() if name != other}
    pack(source, out, 2, resume=True)
    assert tree(out) == whole


@pytest.mark.parametrize("change", ["gone", "other"])
def test_a_small_file_the_source_has_no_more(change: str, copy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(copy, out, 2)
    (out / "LICENSE").unlink()
    if change == "gone":
        (copy / "LICENSE").unlink()
    else:
        (copy / "LICENSE").write_text("another")
    before = tree(out)
    with pytest.raises(
        UsageError, match=r"LICENSE: the pack has lost this file, .*; put the file back into the source"
    ):
        pack(copy, out, 2, resume=True)
    assert tree(out) == before


def test_small_files_that_are_there_are_not_held_against_the_source(
    copy: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    pack(copy, out, 2)
    (out / SHARD).unlink()
    (copy / "LICENSE").unlink()
    pack(copy, out, 2, resume=True)
    assert tree(out) == whole


def test_another_source_repairs_nothing(finished: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "other", small(seed=51))
    (finished / SHARD).unlink()
    before = tree(finished)
    with pytest.raises(UsageError, match="a pack of another source or other options is there"):
        pack(tmp_path / "other", finished, 2, resume=True)
    assert tree(finished) == before


def test_a_lost_manifest_is_refused_with_what_to_do(finished: Path, source: Path, whole: dict[str, bytes]) -> None:
    (finished / MANIFEST).unlink()
    before = tree(finished)
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(UsageError, match=rf"if it was a pack, put its {re.escape(MANIFEST)} back and use --resume"):
            pack(source, finished, 2, **options)
    assert tree(finished) == before


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.close()


def test_killed_at_every_step_of_a_repair(
    driver: Driver, source: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """No manifest while a file is missing that the repair began to write; what follows is the pack that was there."""

    def damaged(name: str) -> Path:
        out = tmp_path / name
        for path, data in whole.items():
            if path not in (SHARD, "LICENSE"):
                (out / path).parent.mkdir(parents=True, exist_ok=True)
                (out / path).write_bytes(data)
        return out

    def convert(out: Path, *options: object, **request: Any) -> dict[str, Any]:
        return driver.run("convert", source, "--out", out, "--tp", 2, "--workers", 1, "--resume", *options, **request)

    steps = convert(damaged("whole"))["steps"]
    assert tree(tmp_path / "whole") == whole
    good = [name for name in whole if name not in (SHARD, "LICENSE", MANIFEST)]
    for number in range(1, len(steps) + 1):
        if steps[number - 1] == "pwrite" and number % 4:
            continue
        out = damaged(str(number))
        before = stamps(out, good)
        assert convert(out, die_at=number)["signal"] == signal.SIGKILL
        found = tree(out)
        assert MANIFEST not in found or found[MANIFEST] == whole[MANIFEST]
        answer = convert(out)
        assert answer["code"] == 0, (number, answer["stderr"])
        assert tree(out) == whole, number
        assert stamps(out, good) == before
        shutil.rmtree(out)


def test_an_interrupted_repair_is_an_unfinished_conversion(
    driver: Driver, finished: Path, source: Path, whole: dict[str, bytes], copy: Path
) -> None:
    (finished / SHARD).unlink()
    arguments = ("convert", source, "--out", finished, "--tp", 2, "--resume", "--workers", 1)
    assert driver.run(*arguments, die_at=25)["signal"] == signal.SIGKILL
    assert {MANIFEST, STATE} & set(names(finished)) == {STATE}
    with pytest.raises(UsageError, match="an unfinished conversion is already there"):
        pack(source, finished, 2)
    with pytest.raises(UsageError, match="--tp was 2, now 1"):
        pack(source, finished, 1, resume=True)
    pack(copy, finished, 2, resume=True)
    assert tree(finished) == whole
    assert not partials(finished)
    (finished / SHARD).unlink()
    assert driver.run(*arguments, die_at=25)["signal"] == signal.SIGKILL
    pack(source, finished, 2, overwrite=True)
    assert tree(finished) == whole
