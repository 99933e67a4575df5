"""Where a conversion may write and where not: never into the source, never over what is not its own."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.convert import finish
from hybrid_pack.convert.journal import STATE
from hybrid_pack.errors import DataError, EnvironmentFailure, UsageError
from hybrid_pack.synthetic import write_checkpoint
from tests.checkpoints import edit_config
from tests.convert.interrupted import Stop
from tests.convert.support import names, pack, small, stamps, tree, weights

MANIFEST = "hybrid_pack.json"
SHARD = "experts/tp2-ep1/rank-0/layer-001.safetensors"


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


def test_names_that_are_no_text(source: Path, tmp_path: Path) -> None:
    """A folder with a name of bytes that are not UTF-8 does not break the end of a long conversion."""
    root = Path(os.fsdecode(bytes(tmp_path / "caf") + b"\xe9"))
    try:
        shutil.copytree(source, root)
    except OSError:
        pytest.skip("the file system takes UTF-8 names only")
    pack(root, tmp_path / "out", 2)
    assert json.loads((tmp_path / "out" / MANIFEST).read_text())["source"]["name"] == "caf\\udce9"


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
        (lambda root: edit(root, num_experts_per_tok=99), "num_experts_per_tok is above num_experts"),
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
