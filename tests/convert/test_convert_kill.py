"""Killed at any moment, a conversion goes on where it was: the same bytes, and nothing finished is done again."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.convert.journal import STATE
from tests.convert.conftest import Sources
from tests.convert.driver import Driver
from tests.convert.support import names, pack, partials, small, stamps, tree, weights

TINY = small(num_experts=2, kept=1, mtp_layer=False)
"""Two shards at tp 2 and one base file."""

BASE_FILE_BYTES = 150_000
MANIFEST = "hybrid_pack.json"


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    made = Driver()
    yield made
    made.close()


@pytest.fixture(scope="module")
def tiny(sources: Sources) -> Path:
    return sources(TINY)


@pytest.fixture(scope="module")
def tiny_whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "pack"
    pack(tiny, out, 2)
    return tree(out)


def convert(driver: Driver, source: Path, out: Path, *options: object, **request: Any) -> dict[str, Any]:
    return driver.run("convert", source, "--out", out, "--tp", 2, "--workers", 1, *options, **request)


def check_dead(out: Path, wanted: dict[str, bytes]) -> None:
    """Whatever has its final name is whole; a manifest is there only if everything is."""
    found = tree(out) if out.exists() else {}
    for name in found:
        if not name.endswith(".partial"):
            assert found[name] == wanted[name], name
    if MANIFEST in found:
        assert {name: data for name, data in found.items() if name != STATE} == wanted


def finish(driver: Driver, source: Path, out: Path, wanted: dict[str, bytes], **request: Any) -> None:
    """Go on to the end: the same pack, its finished files untouched."""
    before = stamps(out, weights(out)) if out.exists() else {}
    answer = convert(driver, source, out, "--resume", **request)
    assert (answer["signal"], answer["code"]) == (0, 0), answer["stderr"]
    assert tree(out) == wanted
    assert stamps(out, list(before)) == before


def chosen(steps: list[str]) -> list[int]:
    """Numbers of steps to die before: all that follow a change to the folder, of writes of data one in four."""
    before = zip(["", *steps], steps, strict=False)
    return [n for n, (last, name) in enumerate(before, 1) if last != "fsync" and (name != "pwrite" or n % 4 == 0)]


def test_killed_at_every_step(driver: Driver, tiny: Path, tiny_whole: dict[str, bytes], tmp_path: Path) -> None:
    steps = convert(driver, tiny, tmp_path / "out")["steps"]
    assert tree(tmp_path / "out") == tiny_whole
    assert len(steps) > 60
    for number in chosen(steps):
        out = tmp_path / str(number)
        answer = convert(driver, tiny, out, die_at=number)
        assert answer["signal"] == signal.SIGKILL, (number, answer)
        check_dead(out, tiny_whole)
        finish(driver, tiny, out, tiny_whole)
        shutil.rmtree(out)


def test_killed_in_the_middle_of_a_line_of_the_journal(
    driver: Driver, tiny: Path, tiny_whole: dict[str, bytes], tmp_path: Path
) -> None:
    steps = convert(driver, tiny, tmp_path / "out")["steps"]
    lines = [n for n, name in enumerate(steps, 1) if name == "write"]
    assert len(lines) >= 4
    for number in lines:
        out = tmp_path / str(number)
        assert convert(driver, tiny, out, die_at=number, torn=True)["signal"] == signal.SIGKILL
        assert not (out / STATE).read_bytes().endswith(b"\n")
        finish(driver, tiny, out, tiny_whole)
        shutil.rmtree(out)


def test_killed_again_and_again_at_steps(driver: Driver, source: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    for seed in range(4):
        rng, out = random.Random(seed), tmp_path / str(seed)
        kept: dict[str, Any] = {}
        for _ in range(8):
            answer = convert(driver, source, out, "--resume", die_at=rng.randrange(1, 70), torn=rng.random() < 0.5)
            assert stamps(out, list(kept)) == kept, "nothing finished is done again"
            if not answer["signal"]:
                break
            check_dead(out, whole)
            kept = stamps(out, weights(out))
        finish(driver, source, out, whole)


def test_killed_at_random_moments(driver: Driver, source: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    """With several workers, the disk made slow."""
    for seed in range(3):
        rng, out = random.Random(seed), tmp_path / str(seed)
        for _ in range(5):
            convert(driver, source, out, "--resume", "--workers", 3, slow=0.02, kill_after=rng.uniform(0.01, 0.3))
            check_dead(out, whole)
        finish(driver, source, out, whole)


def test_several_base_files(driver: Driver, source: Path, tmp_path: Path) -> None:
    request = {"base_file_bytes": BASE_FILE_BYTES}
    steps = convert(driver, source, tmp_path / "out", **request)["steps"]
    wanted = tree(tmp_path / "out")
    assert sum(name.startswith("model-") for name in wanted) > 2
    for number in range(5, len(steps), len(steps) // 7):
        out = tmp_path / str(number)
        assert convert(driver, source, out, die_at=number, **request)["signal"] == signal.SIGKILL
        check_dead(out, wanted)
        finish(driver, source, out, wanted, **request)


def test_killed_while_overwriting(driver: Driver, tiny: Path, tiny_whole: dict[str, bytes], tmp_path: Path) -> None:
    """Nothing of the old pack stays, whether the next run says resume or overwrite."""
    old, richer = tmp_path / "old", Path(shutil.copytree(tiny, tmp_path / "richer"))
    (richer / "chat_template.jinja").write_text("{{ only the old pack has this }}")
    pack(richer, old, 1)
    shutil.copytree(old, tmp_path / "out")
    steps = convert(driver, tiny, tmp_path / "out", "--overwrite")["steps"]
    assert tree(tmp_path / "out") == tiny_whole
    clearing = steps.index("posix_fallocate") + 1
    assert steps[:clearing].count("unlink") > 8, "the old pack's files are removed first"
    for number in (*chosen(steps[:clearing]), len(steps) - 20, len(steps) - 4):
        for option in ("--resume", "--overwrite"):
            out = tmp_path / f"{number}{option}"
            shutil.copytree(old, out)
            assert convert(driver, tiny, out, "--overwrite", die_at=number)["signal"] == signal.SIGKILL
            untouched = (out / MANIFEST).exists() and {**tree(out), STATE: b""} == {**tree(old), STATE: b""}
            answer = convert(driver, tiny, out, option)
            if untouched and option == "--resume":
                assert answer["code"] == 2, "the old pack is still there"
                assert "--tp was 1, now 2" in answer["stderr"]
            else:
                assert answer["code"] == 0, (number, answer["stderr"])
                assert tree(out) == tiny_whole
            shutil.rmtree(out)


def test_interrupted(driver: Driver, source: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    """Control-C cleans up, says so in a line, and the rest is done by --resume."""
    out = tmp_path / "out"
    answer = convert(driver, source, out, "--workers", 2, slow=0.01, die_at=30, signal=signal.SIGINT)
    assert (answer["signal"], answer["code"]) == (0, 130), answer
    assert answer["stderr"].splitlines()[-1] == "hybrid-pack: interrupted; finished files are kept for --resume"
    assert "Traceback" not in answer["stderr"]
    assert not partials(out)
    assert STATE in names(out)
    check_dead(out, whole)
    finish(driver, source, out, whole)


def test_the_lock_is_free_after_a_kill(driver: Driver, source: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    out = tmp_path / "out"
    assert convert(driver, source, out, die_at=40)["signal"] == signal.SIGKILL
    pack(source, out, 2, resume=True)
    assert tree(out) == whole
