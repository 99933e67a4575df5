"""Every way to fail: its exit code, and one line on stderr that says where, what and what to do."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.cli.main import run
from hybrid_pack.errors import DataError
from hybrid_pack.synthetic import write_checkpoint
from tests.checkpoints import edit_config, edit_tensors
from tests.cli.conftest import Command
from tests.convert.support import small

GATE = "model.layers.1.mlp.experts.0.gate_proj"


@dataclass(frozen=True)
class Case:
    """A call in a folder that holds ``source``, ``pack`` and ``out`` (not there yet)."""

    arguments: str
    code: int
    message: str
    prepare: Callable[[Path], object] = lambda _: None


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def put(name: str, text: str = "mine") -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    return make


def wrong_config(folder: Path) -> None:
    with edit_config(folder / "source") as config:
        config["hidden_size"] = 256


def nan_scale(folder: Path) -> None:
    with edit_tensors(folder / "source") as tensors:
        name = next(n for n in tensors.matching("model.layers.2.mlp.experts.3.down_proj") if n.endswith("weight_scale"))
        tensors[name].data = b"\x7f" + tensors[name].data[1:]


def truncate(folder: Path) -> None:
    path = next(iter((folder / "source").glob("*.safetensors")))
    os.truncate(path, path.stat().st_size - 1)


def flip(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[-1] ^= 1
        (folder / name).write_bytes(data)

    return change


CONVERT = "convert source --out out"
SHARD = "pack/experts/tp2-ep1/rank-1/layer-002.safetensors"

CASES = {
    # how it is called: 2
    "no_such_command": Case("pack source", 2, r"hybrid-pack: No such command 'pack'.* \(see hybrid-pack --help\)"),
    "no_such_option": Case(
        "convert source --fast", 2, r"^hybrid-pack: convert: No such option.*--fast.*\(see hybrid-pack convert --help\)"
    ),
    "no_such_global_option": Case("--verbose convert", 2, r"hybrid-pack: No such option.*--verbose"),
    "no_source": Case("convert --out out", 2, r"^hybrid-pack: convert: Missing argument 'SRC'"),
    "no_out": Case("convert source", 2, r"^hybrid-pack: convert: Missing option '--out'"),
    "tp_no_number": Case(f"{CONVERT} --tp two", 2, r"Invalid value for '--tp': 'two' is not a valid integer"),
    "tp_zero": Case(f"{CONVERT} --tp 0", 2, r"--tp: a parallel size must be at least 1 \(found 0\)"),
    "tp_illegal": Case(
        f"{CONVERT} --tp 4",
        2,
        r"--tp: tensor-parallel size 4 is not possible: .*; legal sizes: 1, 2; or --pad, to \d+$",
    ),
    "ep_negative": Case(f"{CONVERT} --ep -1", 2, r"--ep: a parallel size must be at least 1 \(found -1\)"),
    "ep_illegal": Case(f"{CONVERT} --ep 3", 2, r"--ep: .* 4 experts are not divisible by 3; legal sizes: 1, 2, 4$"),
    "layers_backwards": Case(f"{CONVERT} --layers 2-1", 2, r"'--layers': '2-1' is not a list such as 3-5,78"),
    "layers_words": Case(f"{CONVERT} --layers one", 2, r"'--layers': 'one' is not a list"),
    "layers_empty_part": Case(f"{CONVERT} --layers 1,,2", 2, r"'--layers': '1,,2' is not a list"),
    "layers_negative": Case(f"{CONVERT} --layers=-1", 2, r"'--layers': '-1' is not a list"),
    "layers_unknown": Case(
        f"{CONVERT} --layers 1,7", 2, r"--layers: no experts to pack in that layer \(expected layers of 1..2, found 7\)"
    ),
    "layers_dense": Case(f"{CONVERT} --layers 0", 2, r"--layers: no experts to pack in that layer .*found 0"),
    "workers_zero": Case(
        f"{CONVERT} --workers 0", 2, r"--workers: not a number of workers \(expected 1 to 1024, found 0"
    ),
    "workers_many": Case(f"{CONVERT} --workers 100000", 2, r"--workers: not a number of workers .*found 100000"),
    "max_ram_words": Case(f"{CONVERT} --max-ram lots", 2, r"'--max-ram': 'lots' is not a size such as 1GiB or 500MB"),
    "max_ram_small": Case(
        f"{CONVERT} --max-ram 64MiB",
        2,
        r"--max-ram: not even one worker fits \(expected \d+ MiB or more, found 64 MiB\)",
    ),
    "scale_rule": Case(f"{CONVERT} --on-scale-mismatch round", 2, r"'--on-scale-mismatch': 'round' is not one of"),
    "source_missing": Case(
        "convert nowhere --out out", 2, r"nowhere: not a checkpoint folder \(expected a folder, or a Hub"
    ),
    "source_is_a_file": Case("convert source/config.json --out out", 2, r"source/config.json: not a checkpoint folder"),
    "source_is_a_missing_path": Case("convert ./x/y --out out", 2, r"\./x/y: not a checkpoint folder"),
    "out_is_the_source": Case("convert source --out source", 2, r"the output would lie in the source or around it"),
    "out_in_the_source": Case(
        "convert source --out source/pack", 2, r"source/pack: the output would lie in the source"
    ),
    "out_has_files": Case(CONVERT, 2, r"out: the output folder is not empty and no pack \(found x", put("out/x")),
    "out_has_files_overwrite": Case(f"{CONVERT} --overwrite", 2, r"out: not a pack, so --overwrite", put("out/x")),
    "out_is_a_file": Case(CONVERT, 2, r"out: in the way of the output \(expected a folder or nothing\)", put("out")),
    "out_is_a_pack": Case("convert source --out pack --tp 2", 2, r"pack: a finished pack is already there; check and"),
    "out_is_another_pack": Case("convert source --out pack --resume", 2, r"options is there: --tp was 2, now 1"),
    "verify_workers_zero": Case(
        "verify pack --workers 0", 2, r"--workers: not a number of workers \(expected 1 to 1024, found 0\)"
    ),
    "verify_workers_many": Case(
        "verify pack --workers 1025", 2, r"--workers: not a number of workers \(expected 1 to 1024, found 1025\)"
    ),
    "verify_missing": Case("verify nowhere", 2, r"nowhere: .*no"),
    "verify_no_rank": Case("verify pack --rank 2", 2, r"rank"),
    "verify_map_without_source": Case("verify pack --bit-map map.json", 2, r"--source", put("map.json")),
    "verify_no_map_file": Case("verify pack --source source --bit-map no.json", 2, r"'--bit-map': .*no\.json"),
    "inspect_no_map_file": Case("inspect source --bit-map no.json", 2, r"'--bit-map': .*no\.json"),
    "inspect_map_of_a_pack": Case("inspect pack --bit-map map.json", 2, r"--bit-map: a pack has", put("map.json")),
    "inspect_missing": Case("inspect nowhere", 2, r"nowhere: not a checkpoint folder"),
    # what is in the files: 1
    "empty_source": Case(
        "convert empty --out out", 1, r"empty/config.json: no such file", lambda f: (f / "empty").mkdir()
    ),
    "no_config": Case(CONVERT, 1, r"source/config.json: no such file", remove("source/config.json")),
    "bad_config": Case(CONVERT, 1, r"source/config.json: .*JSON", put("source/config.json", "{")),
    "wrong_config": Case(CONVERT, 1, r"layer 1 expert 0: the stored matrix and config.json disagree", wrong_config),
    "no_shard": Case(
        CONVERT, 1, r"source/model-.*: no such file", lambda f: next((f / "source").glob("*.safetensors")).unlink()
    ),
    "truncated": Case(
        CONVERT, 1, r"source/model-.*: the file is truncated \(expected \d+ bytes, found \d+\)", truncate
    ),
    "no_bit_map_file": Case(f"{CONVERT} --bit-map nowhere.json", 2, r"'nowhere.json' does not exist"),
    "bit_map_file": Case(f"{CONVERT} --bit-map map.json", 1, r"layer 1 of the bit map", put("map.json", '{"1": [3]}')),
    "nan_scale": Case(
        CONVERT, 1, r"layers\.2\.mlp\.experts\.3\.down_proj.*: layer 2 expert 3: scale \[0, 0\]", nan_scale
    ),
    "inspect_neither": Case(
        "inspect empty", 1, r"empty: neither a checkpoint nor a pack", lambda f: (f / "empty").mkdir()
    ),
    "inspect_unfinished": Case(
        "inspect out",
        1,
        r"out: an unfinished conversion, or one that is running; finish it with convert --resume",
        put("out/hybrid_pack.state.partial"),
    ),
    # what the machine says: 3
    "out_below_a_file": Case("convert source --out file/out", 3, r"file/out: .*Not a directory", put("file")),
}


@pytest.fixture
def folder(source: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(source, tmp_path / "source")
    shutil.copytree(packed, tmp_path / "pack")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", CASES)
def test_line_and_exit_code(case: str, folder: Path, command: Command) -> None:
    call = CASES[case]
    call.prepare(folder)
    result = command(*call.arguments.split())
    assert result.code == call.code, result
    assert re.search(call.message, result.line), result.line


def test_verify_finds_a_flipped_bit(folder: Path, command: Command) -> None:
    """Its findings are data, on stdout; the line on stderr is there as everywhere."""
    flip(SHARD)(folder)
    result = command("verify", "pack")
    assert result.code == 1
    assert re.fullmatch(rf"hybrid-pack: pack: \d+ finding; first: .*{SHARD[5:]}.*", result.err.splitlines()[-1])


def fail_with(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


ERRORS: list[tuple[BaseException, int, str]] = [
    (KeyboardInterrupt(), 130, "hybrid-pack: interrupted; finished files are kept for --resume"),
    (MemoryError(), 3, "hybrid-pack: out of memory; try fewer --workers"),
    (
        OSError(errno.EACCES, "Permission denied", "/x/y"),
        3,
        "hybrid-pack: /x/y: the system failed (found Permission denied); change its permissions, or choose another "
        "place",
    ),
    (
        OSError(errno.EMFILE, "Too many open files"),
        3,
        "hybrid-pack: the system failed (found Too many open files); put that right and run again",
    ),
    (OSError("something"), 3, "hybrid-pack: the system failed (found something); put that right and run again"),
    (
        RuntimeError("bug"),
        3,
        "hybrid-pack: unexpected error: RuntimeError: bug; please report it with what --debug shows",
    ),
    (DataError("two\nlines", where="a\nb", hint="c\nd"), 1, "hybrid-pack: a b: two lines; c d"),
]


@pytest.mark.parametrize(("error", "code", "line"), ERRORS, ids=lambda value: type(value).__name__)
def test_errors_of_the_system(
    error: BaseException, code: int, line: str, folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybrid_pack.io.checkpoint.open_checkpoint", fail_with(error))
    result = command(*CONVERT.split())
    assert (result.code, result.line) == (code, line)


def test_errors_while_converting(folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own error with what was kept."""
    monkeypatch.setattr("os.posix_fallocate", fail_with(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    result = command(*CONVERT.split())
    assert result.code == 3
    assert re.search(r"out: the disk is full \(found No space left on device\); make room and run again$", result.line)


WRITING = {
    "plan plain --from-weights --keep 1 --out new": ("posix_fallocate", "pwrite", "fsync", "rename", "open"),
    "report pack --html new": ("write_bytes", "mkdtemp", "rename"),
    "report pack --quick --png new": ("write_bytes", "mkdtemp", "rename", "mkdir"),
}
CODES = {
    errno.ENOSPC: r"the disk is full \(found No space left on device\); make room and run again$",
    errno.EDQUOT: r"the disk is full \(found Disk quota exceeded\); make room and run again$",
    errno.EIO: r"cannot write \(found Input/output error\); the disk may be failing: see the system's log, or choose",
    errno.EROFS: r"cannot write \(found Read-only file system\); the file system is read-only: choose another place$",
    errno.EACCES: r"cannot write \(found Permission denied\); change its permissions, or choose another place$",
}


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(("arguments", "step"), [(a, step) for a, steps in WRITING.items() for step in steps])
def test_a_file_that_cannot_be_written(
    arguments: str, step: str, code: int, folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, whatever the system's error names; what to do is said, and nothing unfinished stays."""
    if "plain" in arguments:
        write_checkpoint(folder / "plain", small(map_in="none", stored=("bf16",)))
    failing = fail_with(OSError(code, os.strerror(code)))
    with monkeypatch.context() as patch:
        if step == "open":  # only what is new: sources are read with it too
            real = os.open
            patch.setattr(
                os,
                "open",
                lambda path, flags, *more, **how: (failing if flags & os.O_CREAT else real)(path, flags, *more, **how),
            )
        elif step == "rename":
            patch.setattr(Path, "replace", failing)
        elif step == "mkdtemp":
            patch.setattr("tempfile.mkdtemp", failing)
        elif step in ("write_bytes", "mkdir"):
            patch.setattr(Path, step, failing)
        else:
            patch.setattr(os, step, failing)
        result = command(*arguments.split())
    assert result.code == 3
    assert re.search(rf"^hybrid-pack: (\S*/)?new(/tier_map\.png)?: {CODES[code]}", result.line), result.line
    left = folder / "new"
    assert not left.exists() or (left.is_dir() and not list(left.iterdir()))
    assert not [path for path in folder.iterdir() if path.name.startswith((".new", "new."))]


def test_a_full_device(folder: Path, command: Command) -> None:
    """The system's own word, from a device that is always full."""
    result = command("report", "pack", "--html", "/dev/full")
    assert (result.code, result.line) == (
        3, "hybrid-pack: /dev/full: the disk is full (found No space left on device); make room and run again",
    )  # fmt: skip


@pytest.mark.parametrize("arguments", ["convert nowhere --out out", "convert source", "verify nowhere", "nothing"])
def test_debug_shows_the_traceback(arguments: str, folder: Path, command: Command) -> None:
    result = command("--debug", *arguments.split())
    assert result.code == 2
    assert result.err.count("Traceback (most recent call last)") >= 1
    assert result.err.splitlines()[-1].startswith("hybrid-pack: ")


def test_debug_changes_nothing_else(packed: Path, command: Command) -> None:
    assert command("--debug", "verify", packed, "--quick").code == 0


def test_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Usage: hybrid-pack")


@pytest.mark.parametrize("case", ["tp_illegal", "no_config", "out_below_a_file"])
def test_json_on_failure_is_nothing_on_stdout(case: str, folder: Path, command: Command) -> None:
    call = CASES[case]
    call.prepare(folder)
    result = command(*call.arguments.split(), "--json")
    assert result.code == call.code
    assert result.line
