"""Where a conversion may write and where not: never into the source, never over what is not its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.convert import convert, finish
from hybrid_pack.convert.journal import STATE
from hybrid_pack.errors import DataError, EnvironmentFailure, UsageError
from hybrid_pack.synthetic import write_checkpoint
from tests.checkpoints import edit_config, edit_header, edit_json
from tests.convert.conftest import Sources
from tests.convert.support import names, pack, partials, plan_of, small, stamps, tree, weights

MANIFEST = "hybrid_pack.json"
SHARD = "experts/tp2-ep1/rank-0/layer-001.safetensors"


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    """A source of one's own."""
    return Path(shutil.copytree(source, tmp_path / "source"))


@pytest.fixture
def finished(source: Path, tmp_path: Path) -> Path:
    """A pack for tp 2."""
    pack(source, tmp_path / "out", 2)
    return tmp_path / "out"


class Stop(Exception):
    """The conversion ends here."""


def stop_after(patch: pytest.MonkeyPatch, files: int) -> None:
    """Fail when the next file after so many is to be recorded."""
    from hybrid_pack.convert.journal import Journal

    real, left = Journal.add, [files]

    def add(self: Journal, record: dict[str, Any]) -> None:
        if not left[0]:
            raise Stop
        left[0] -= 1
        real(self, record)

    patch.setattr(Journal, "add", add)


@pytest.fixture
def unfinish(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Leaves a conversion with two finished files."""

    def make(source: Path, out: Path, tp: int = 2, ep: int = 1, **options: Any) -> Path:
        with monkeypatch.context() as patch:
            stop_after(patch, 2)
            with pytest.raises(Stop):
                pack(source, out, tp, ep, workers=1, **options)
        assert len(weights(out)) == 2
        return out

    return make


OVERLAPS: dict[str, Callable[[Path], Path]] = {
    "the source itself": lambda source: source,
    "with dots": lambda source: source / "x" / "..",
    "inside": lambda source: source / "pack",
    "deep inside": lambda source: source / "a" / "b",
    "around": lambda source: source.parent,
}


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}], ids=["new", "overwrite", "resume"])
@pytest.mark.parametrize("case", OVERLAPS)
def test_never_into_the_source(case: str, options: dict[str, Any], copy: Path) -> None:
    before = tree(copy), stamps(copy)
    with pytest.raises(UsageError, match=r"the output would lie in the source or around it \(found .*\); choose"):
        pack(copy, OVERLAPS[case](copy), 2, **options)
    assert (tree(copy), stamps(copy)) == before
    assert sorted(path.name for path in copy.parent.iterdir()) == ["source"]


def test_never_through_a_link_to_the_source(copy: Path, tmp_path: Path) -> None:
    before = tree(copy)
    (tmp_path / "link").symlink_to(copy)
    for out in (tmp_path / "link", tmp_path / "link" / "pack"):
        with pytest.raises(UsageError, match="the output would lie in the source"):
            pack(copy, out, 2)
    (tmp_path / "to-source").symlink_to(copy)
    with pytest.raises(UsageError, match="the output would lie in the source"):
        pack(tmp_path / "to-source", copy / "pack", 2)
    assert tree(copy) == before


def test_never_into_the_folder_of_linked_shards(copy: Path, tmp_path: Path) -> None:
    """As in the Hugging Face cache, where a snapshot links to a folder of blobs."""
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "x"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(copy.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(blobs / str(number))
    before = tree(blobs)
    for out in (blobs, blobs / "pack", tmp_path / "cache"):
        with pytest.raises(UsageError, match="the output would lie in the source or around it"):
            pack(snapshot, out, 2, overwrite=True)
    assert tree(blobs) == before
    pack(snapshot, tmp_path / "out", 2)


def test_the_source_is_not_touched(copy: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    """A read-only folder of read-only files is enough."""
    for path in copy.iterdir():
        path.chmod(0o444)
    copy.chmod(0o555)
    before = tree(copy), stamps(copy), copy.stat().st_mtime_ns
    try:
        pack(copy, tmp_path / "out", 2)
        assert (tree(copy), stamps(copy), copy.stat().st_mtime_ns) == before
        assert tree(tmp_path / "out") == whole
    finally:
        copy.chmod(0o755)


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a file": lambda out: (out / "notes.txt").write_text("mine"),
    "a folder": lambda out: (out / "experts").mkdir(),
    "a checkpoint": lambda out: write_checkpoint(out, small()),
    "a link": lambda out: (out / "link").symlink_to("/nowhere"),
    "a file with a name of ours": lambda out: (out / "config.json").write_text("{}"),
}


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}], ids=["new", "overwrite", "resume"])
@pytest.mark.parametrize("case", FOREIGN)
def test_a_foreign_folder_is_refused_and_untouched(
    case: str, options: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    FOREIGN[case](out)
    before, when = tree(out), out.stat().st_mtime_ns
    message = "not a pack, so --overwrite will not touch it" if "overwrite" in options else "is not empty and no pack"
    with pytest.raises(UsageError, match=message):
        pack(source, out, 2, **options)
    assert (tree(out), out.stat().st_mtime_ns) == (before, when)


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}], ids=["new", "overwrite", "resume"])
@pytest.mark.parametrize("kind", ["file", "dangling link", "link to a file"])
def test_something_that_is_no_folder(kind: str, options: dict[str, Any], source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "victim").write_text("mine")
    if kind == "file":
        out.write_text("mine")
    else:
        out.symlink_to(tmp_path / ("victim" if kind == "link to a file" else "nowhere"))
    with pytest.raises(UsageError, match=r"in the way of the output \(expected a folder or nothing\)"):
        pack(source, out, 2, **options)
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_an_empty_folder_a_card_and_dot_files_are_no_hindrance(
    source: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    (out / ".git" / "refs" / "tags").mkdir(parents=True)
    (out / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    (out / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    (out / "README.md").write_text("# A card\n")
    own = tree(out)
    pack(source, out, 2)
    assert tree(out) == {**whole, **own}
    pack(source, out, 2, overwrite=True)
    assert tree(out) == {**whole, **own}
    assert (out / ".git" / "refs" / "tags").is_dir()


def test_a_link_to_a_folder_elsewhere_is_as_good(source: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    pack(source, tmp_path / "out", 2)
    assert tree(tmp_path / "elsewhere") == whole


def test_a_temporary_name_that_is_a_link(
    source: Path, tmp_path: Path, whole: dict[str, bytes], unfinish: Callable[..., Path]
) -> None:
    """The link is replaced; what it leads to is not written."""
    out = unfinish(source, tmp_path / "out")
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    for name in whole:
        if name not in weights(out):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / f"{name}.partial").symlink_to(victim)
    pack(source, out, 2, resume=True)
    assert victim.read_bytes() == b"mine"
    assert tree(out) == whole
    assert not any(path.is_symlink() for path in out.rglob("*"))


def test_a_final_name_that_is_a_link(
    source: Path, tmp_path: Path, whole: dict[str, bytes], unfinish: Callable[..., Path]
) -> None:
    out = unfinish(source, tmp_path / "out")
    victim = tmp_path / "victim"
    done = weights(out)[0]
    (out / done).rename(victim)
    before = victim.read_bytes()
    (out / done).symlink_to(victim)
    pack(source, out, 2, resume=True)
    assert tree(out) == whole
    assert not (out / done).is_symlink()
    assert victim.read_bytes() == before


@pytest.mark.parametrize("link", ["experts", "experts/tp2-ep1", "experts/tp2-ep1/rank-1"])
def test_a_folder_of_the_output_that_is_a_link(
    link: str, source: Path, tmp_path: Path, unfinish: Callable[..., Path]
) -> None:
    """Refused even where all its files are done: a pack holds no link out."""
    out, elsewhere = unfinish(source, tmp_path / "out"), tmp_path / "elsewhere"
    (out / link).rename(elsewhere)
    (out / link).symlink_to(elsewhere)
    before = tree(elsewhere)
    with pytest.raises(UsageError, match=rf"out/{link}: in the way of the output \(expected a folder, found a symb"):
        pack(source, out, 2, resume=True)
    assert tree(elsewhere) == before
    with pytest.raises(UsageError, match="no conversion wrote are in the way"):
        pack(source, out, 2, overwrite=True)
    assert tree(elsewhere) == before


def test_a_state_file_that_is_a_link(source: Path, tmp_path: Path) -> None:
    out, victim = tmp_path / "out", tmp_path / "victim"
    victim.write_text("mine")
    out.mkdir()
    (out / STATE).symlink_to(victim)
    for options in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(EnvironmentFailure, match=r"hybrid_pack\.state\.partial: the system failed"):
            pack(source, out, 2, **options)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("name", ["notes.txt", "experts/mine", "experts/tp2-ep1/rank-0/layer-001.json", "sub/x.json"])
def test_overwrite_refuses_a_pack_with_foreign_files(
    name: str, finished: Path, source: Path, whole: dict[str, bytes]
) -> None:
    """Before anything is removed; the pack stays whole."""
    (finished / name).parent.mkdir(exist_ok=True)
    (finished / name).write_text("mine")
    with pytest.raises(UsageError, match=rf"no conversion wrote are in the way \(found {re.escape(name)}\); move"):
        pack(source, finished, 1, overwrite=True)
    assert tree(finished) == {**whole, name: b"mine"}
    (finished / name).unlink()
    pack(source, finished, 1, overwrite=True)
    assert SHARD not in names(finished)


def test_overwrite_leaves_foreign_folders(finished: Path, source: Path) -> None:
    (finished / "empty").mkdir()
    pack(source, finished, 1, overwrite=True)
    assert (finished / "empty").is_dir()


def test_overwrite_a_pack(finished: Path, source: Path, tmp_path: Path) -> None:
    """Nothing of the old one stays, not even its folders or small files the new source has not."""
    (tmp_path / "with-more").mkdir()
    shutil.copytree(source, tmp_path / "with-more", dirs_exist_ok=True)
    (tmp_path / "with-more" / "chat_template.jinja").write_text("{{ x }}")
    (tmp_path / "with-more" / "additional_chat_templates").mkdir()
    (tmp_path / "with-more" / "additional_chat_templates" / "tool.jinja").write_text("{{ y }}")
    pack(tmp_path / "with-more", finished, 2, overwrite=True)
    assert "additional_chat_templates/tool.jinja" in names(finished)
    pack(source, finished, 1, overwrite=True)
    pack(source, tmp_path / "new", 1)
    assert tree(finished) == tree(tmp_path / "new")
    assert sorted(p for p in finished.rglob("*") if p.is_dir()) == [
        finished / "experts", finished / "experts/tp1-ep1", finished / "experts/tp1-ep1/rank-0"
    ]  # fmt: skip


def test_overwrite_an_unfinished_conversion(
    source: Path, tmp_path: Path, unfinish: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other options, at two stages: in the middle, and when only the manifest was missing."""
    pack(source, tmp_path / "wanted", 1)
    out = unfinish(source, tmp_path / "out", 2)
    pack(source, out, 1, overwrite=True)
    assert tree(out) == tree(tmp_path / "wanted")
    with monkeypatch.context() as patch:
        written = finish._small_files

        def stop(*arguments: Any) -> None:
            written(*arguments)
            raise Stop

        patch.setattr(finish, "_small_files", stop)
        with pytest.raises(Stop):
            pack(source, out, 2, overwrite=True)
    assert {"LICENSE", "tokenizer.json"} <= set(names(out))
    pack(source, out, 1, overwrite=True)
    assert tree(out) == tree(tmp_path / "wanted")


def test_overwrite_a_damaged_pack(finished: Path, source: Path, whole: dict[str, bytes]) -> None:
    """Its manifest tells nothing any more; small files that are going to be replaced are not in the way."""
    (finished / MANIFEST).write_bytes(whole[MANIFEST].replace(b"kept", b"lost"))
    pack(source, finished, 2, overwrite=True)
    assert tree(finished) == whole


def test_without_an_option_nothing_is_gone_on_with(
    finished: Path, source: Path, tmp_path: Path, unfinish: Callable[..., Path]
) -> None:
    out = unfinish(source, tmp_path / "unfinished")
    for folder, what in (
        (
            finished,
            "a finished pack is already there; check and repair it with --resume, or replace it with --overwrite",
        ),
        (out, "an unfinished conversion is already there; go on with --resume, or start over with --overwrite"),
    ):
        before = tree(folder)
        with pytest.raises(UsageError, match=what):
            pack(source, folder, 2)
        assert tree(folder) == before


UNMAPPED = small(seed=50)
"""Its MTP layer may be in the map or not."""


def another_source(root: Path, tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "other", small(seed=51))
    return tmp_path / "other"


def with_mtp_in_the_map(root: Path, tmp_path: Path) -> dict[str, Any]:
    bit_map = json.loads((root / "config.json").read_text())["quantization_config"]["hybrid_bit_map"]
    path = tmp_path / "map.json"
    path.write_text(json.dumps({**bit_map, "2": [4] * 4}))
    return {"bit_map_file": path}


CHANGES: dict[str, tuple[str, str, Callable[[Path, Path], dict[str, Any]]]] = {
    "tp": ("tensor_parallel", "tensor_parallel was 2, now 1", lambda *_: {"tp": 1}),
    "ep": ("expert_parallel", "expert_parallel was 1, now 2", lambda *_: {"ep": 2}),
    "layers": ("layers", r"layers was \[1, 2\], now \[2\]", lambda *_: {"layers": [2]}),
    "bit map": ("bit_map", "the bit map has changed", with_mtp_in_the_map),
}


@pytest.mark.parametrize("case", CHANGES)
def test_resume_with_other_options(case: str, sources: Sources, tmp_path: Path, unfinish: Callable[..., Path]) -> None:
    root = sources(UNMAPPED)
    key, difference, change = CHANGES[case]
    options = {"tp": 2, "ep": 1, **change(root, tmp_path)}
    tp, ep = options.pop("tp"), options.pop("ep")
    plan = plan_of(root, tp, ep, **options)
    unfinished, done = unfinish(root, tmp_path / "unfinished"), tmp_path / "done"
    pack(root, done, 2)
    for out, message in (
        (unfinished, rf"the unfinished conversion there is of another source or other options: {key} was "),
        (done, rf"a pack of another source or other options is there: {difference}; choose another --out"),
    ):
        before = tree(out)
        with pytest.raises(UsageError, match=message):
            convert(plan, out, workers=1, resume=True)
        assert tree(out) == before


def test_resume_with_another_scale_rule(sources: Sources, tmp_path: Path, unfinish: Callable[..., Path]) -> None:
    root = sources(small(seed=52, second_scale="unequal"))
    out = unfinish(root, tmp_path / "unfinished", on_scale_mismatch="requantize")
    with pytest.raises(UsageError, match=r"other options: on_scale_mismatch was requantize, now refuse"):
        pack(root, out, 2, resume=True)
    pack(root, out, 2, resume=True, on_scale_mismatch="requantize")
    with pytest.raises(UsageError, match="on_scale_mismatch was requantize, now refuse"):
        pack(root, out, 2, resume=True)


def test_resume_with_another_scale_rule_where_it_makes_no_difference(finished: Path, source: Path) -> None:
    before = stamps(finished)
    pack(source, finished, 2, resume=True, on_scale_mismatch="requantize")
    assert stamps(finished) == before


def edit_generation(root: Path) -> None:
    with edit_config(root) as config:
        config["vocab_size"] += 1


def edit_metadata(root: Path) -> None:
    edit_header(next(iter(root.glob("*.safetensors"))), lambda header: header.update(__metadata__={"format": "np"}))


def edit_weight_index(root: Path) -> None:
    with edit_json(root / "model.safetensors.index.json") as index:
        index["metadata"]["more"] = 1


SOURCE_CHANGES: dict[str, tuple[str, str | None, Callable[[Path], object]]] = {
    "config": ("source_config", "source_config was", edit_generation),
    "index": ("source_index", "source_index was", edit_weight_index),
    "header": ("source_files", "the source's safetensors files have changed", edit_metadata),
    "payload": ("source_times", None, lambda root: os.utime(next(iter(root.glob("*.safetensors"))))),
}


@pytest.mark.parametrize("case", SOURCE_CHANGES)
def test_resume_with_a_changed_source(case: str, copy: Path, tmp_path: Path, unfinish: Callable[..., Path]) -> None:
    """A payload written anew under the same header is seen by its time, as long as the pack is not finished."""
    key, difference, change = SOURCE_CHANGES[case]
    unfinished, done = unfinish(copy, tmp_path / "unfinished"), tmp_path / "done"
    pack(copy, done, 2)
    change(copy)
    before = tree(unfinished), tree(done)
    with pytest.raises(UsageError, match=rf"of another source or other options: {key} was .*; give the same"):
        pack(copy, unfinished, 2, resume=True)
    if difference:
        with pytest.raises(UsageError, match=rf"a pack of another source or other options is there: {difference}"):
            pack(copy, done, 2, resume=True)
    assert (tree(unfinished), tree(done)) == before


def test_resume_with_another_source(source: Path, tmp_path: Path, unfinish: Callable[..., Path]) -> None:
    other = another_source(source, tmp_path)
    out = unfinish(source, tmp_path / "out")
    with pytest.raises(UsageError, match="of another source or other options"):
        pack(other, out, 2, resume=True)


def test_resume_of_an_edited_pack(finished: Path, source: Path) -> None:
    (finished / MANIFEST).write_text((finished / MANIFEST).read_text().replace('"silu"', '"gelu"'))
    with pytest.raises(UsageError, match=r"the pack there cannot be resumed: .*self_digest"):
        pack(source, finished, 2, resume=True)


LOCK = (
    "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); input()"
)


@pytest.fixture
def hold() -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Another process that has the lock of an output folder."""
    holders: list[subprocess.Popen[str]] = []

    def make(out: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LOCK, str(out / STATE)]
        holders.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert holders[-1].stdout
        assert holders[-1].stdout.readline() == "held\n"
        return holders[-1]

    yield make
    for holder in holders:
        holder.kill()
        holder.communicate()


def test_a_second_conversion_is_refused(
    source: Path, tmp_path: Path, whole: dict[str, bytes], hold: Callable[[Path], Any], unfinish: Callable[..., Path]
) -> None:
    out = unfinish(source, tmp_path / "out")
    holder = hold(out)
    before = tree(out)
    for options in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(UsageError, match="another conversion is writing here; wait for it, or choose another"):
            pack(source, out, 2, **options)
    with pytest.raises(UsageError, match="another conversion is writing here"):
        pack(source, out, 2)
    assert tree(out) == before
    holder.kill()
    holder.wait()
    pack(source, out, 2, resume=True)
    assert tree(out) == whole


def test_two_at_once(source: Path, tmp_path: Path, whole: dict[str, bytes]) -> None:
    """One is refused, the other undisturbed."""
    refused: list[BaseException] = []

    class Second:
        def start(self, total_bytes: int, done_bytes: int) -> None:
            for options in ({}, {"resume": True}, {"overwrite": True}):
                try:
                    pack(source, tmp_path / "out", 1, **options)
                except UsageError as error:
                    refused.append(error)

        def advance(self, nbytes: int) -> None:
            pass

        def note(self, text: str) -> None:
            pass

    pack(source, tmp_path / "out", 2, progress=Second())
    assert len(refused) == 3
    assert tree(tmp_path / "out") == whole


def test_another_that_finished_between_look_and_lock(
    source: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybrid_pack.convert import survey

    out = tmp_path / "out"

    def look(*args: Any, **options: Any) -> Any:
        found = survey(*args, **options)
        monkeypatch.setattr("hybrid_pack.convert.survey", survey)
        pack(source, out, 2)
        return found

    monkeypatch.setattr("hybrid_pack.convert.survey", look)
    with pytest.raises(UsageError, match="a finished pack is already there"):
        pack(source, out, 1)
    assert tree(out) == whole


class Meddler:
    """Does something to the source once so many bytes were read."""

    def __init__(self, meddle: Callable[[], object]) -> None:
        self._meddle = meddle
        self._lock = threading.Lock()
        self._done = False

    def start(self, total_bytes: int, done_bytes: int) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        with self._lock:
            if not self._done:
                self._done = True
                self._meddle()

    def note(self, text: str) -> None:
        pass


def test_a_source_that_changes_meanwhile(copy: Path, tmp_path: Path) -> None:
    """Nothing of it is kept, for no file tells whether it is of the old or the new; the next run starts over."""
    out = tmp_path / "out"
    path = next(iter(copy.glob("*.safetensors")))

    def meddle() -> None:
        with path.open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(b"\1" * 100)
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))

    with pytest.raises(DataError, match="the source changed while it was read: what was written is removed"):
        pack(copy, out, 2, progress=Meddler(meddle))
    assert not out.exists()
    pack(copy, out, 2, resume=True)
    pack(copy, tmp_path / "fresh", 2)
    assert tree(out) == tree(tmp_path / "fresh")


def test_a_source_that_changes_meanwhile_beside_a_foreign_file(copy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def meddle() -> None:
        (out / "notes.txt").write_text("mine")
        os.utime(next(iter(copy.glob("*.safetensors"))))

    with pytest.raises(DataError, match="the source changed while it was read"):
        pack(copy, out, 2, progress=Meddler(meddle))
    assert names(out) == ["notes.txt"]


def test_a_source_that_becomes_shorter(copy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    path = max(copy.glob("*.safetensors"))
    with pytest.raises(DataError, match="the file became shorter while it was read"):
        pack(copy, out, 2, workers=1, progress=Meddler(lambda: os.truncate(path, path.stat().st_size // 2)))
    assert not partials(out)
    assert MANIFEST not in names(out)


def test_a_source_that_changed_since_it_was_opened(copy: Path, tmp_path: Path) -> None:
    plan = plan_of(copy, 2)
    edit_metadata(copy)
    with pytest.raises(DataError, match=r"\.safetensors: the source changed since it was opened; run again"):
        convert(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_that_are_no_text(source: Path, tmp_path: Path) -> None:
    """A folder with a name of bytes that are not UTF-8 does not break the end of a long conversion."""
    root = Path(os.fsdecode(bytes(tmp_path / "caf") + b"\xe9"))
    try:
        shutil.copytree(source, root)
    except OSError:
        pytest.skip("the file system takes UTF-8 names only")
    pack(root, tmp_path / "out", 2)
    assert json.loads((tmp_path / "out" / MANIFEST).read_text())["source"]["name"] == "caf\\udce9"


def test_a_small_file_the_source_lost_before_the_end(
    copy: Path, tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "chat_template.jinja").write_text("{{ x }}")
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        written = finish._small_files

        def stop(*arguments: Any) -> None:
            written(*arguments)
            raise Stop

        patch.setattr(finish, "_small_files", stop)
        with pytest.raises(Stop):
            pack(copy, out, 2)
    assert "chat_template.jinja" in names(out)
    (copy / "chat_template.jinja").unlink()
    pack(copy, out, 2, resume=True)
    assert tree(out) == whole


@pytest.mark.parametrize("victim", ["../victim.txt", "/absolute", "README.md", "a/../../victim.txt"])
def test_a_journal_cannot_name_files_outside(
    copy: Path, tmp_path: Path, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, outside = tmp_path / "out", tmp_path / "victim.txt"
    outside.write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(finish, "_small_files", lambda *_: (_ for _ in ()).throw(Stop))
        with pytest.raises(Stop):
            pack(copy, out, 2)
    (out / "README.md").write_text("mine")
    with (out / STATE).open("a") as file:
        file.write(json.dumps({"path": victim, "bytes": 1, "digest": "x"}) + "\n")
    pack(copy, out, 2, resume=True)
    assert outside.read_text() == (out / "README.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda root: (root / "A.txt").write_text("x") and (root / "a.txt").write_text("x"), "two files with one name"),
        (lambda root: edit(root, num_experts_per_tok=99), "geometry.top_k is above num_experts"),
    ],
)
def test_what_no_manifest_may_have_is_refused_before_any_work(
    copy: Path, tmp_path: Path, change: Callable[[Path], object], says: str
) -> None:
    change(copy)
    with pytest.raises(DataError, match=says):
        pack(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def edit(root: Path, **values: object) -> None:
    with edit_config(root) as config:
        config.update(values)
