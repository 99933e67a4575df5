"""``hybrid-pack push`` against a Hub on loopback: nothing is lost, no two packs are ever mixed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.cli.main import run
from hybrid_pack.cli.progress import size
from hybrid_pack.errors import EnvironmentFailure, UsageError
from hybrid_pack.hub import plan_push, pull, push
from hybrid_pack.io.manifest import MANIFEST, read_manifest
from hybrid_pack.io.progress import Silent
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import write_checkpoint
from hybrid_pack.verify import verify_pack
from tests.checkpoints import SMALL
from tests.hub.conftest import REPO, SECRET, Client, tree
from tests.hub.expected import check_history, on_hub
from tests.hub.server import LFS_SUFFIXES, Hub
from tests.verify.conftest import make_pack


def test_a_new_repository(hub: Hub, good_pack: Path, client: Client) -> None:
    done = push(good_pack, REPO, private=True)
    assert on_hub(hub) == tree(good_pack)
    assert hub.repos[REPO].private and done.private
    assert (done.files_sent, done.files_there) == (len(tree(good_pack)), 0)
    assert done.bytes_sent == sum(map(len, tree(good_pack).values()))
    assert done.commit == hub.repos[REPO].branches["main"]
    assert done.commit_url == f"{hub.url}/{REPO}/commit/{done.commit}"
    check_history(hub)
    titles = [title for _, title, _ in hub.repos[REPO].log]
    assert titles == ["initial commit", "Add hybrid-pack of small", "Add hybrid-pack of small: manifest"]
    assert client.hosts <= {"127.0.0.1", "::1"}
    assert hub.tokens == {SECRET}
    assert hub.cdn_tokens == {None}


def test_what_was_pushed_can_be_pulled(hub: Hub, good_pack: Path, tmp_path: Path) -> None:
    push(good_pack, REPO)
    pull(REPO, tmp_path / "out")
    assert verify_pack(tmp_path / "out").ok
    assert {**tree(tmp_path / "out"), "README.md": b""} == {**tree(good_pack), "README.md": b""}


def test_again_sends_nothing(hub: Hub, good_pack: Path) -> None:
    first = push(good_pack, REPO)
    received = hub.received_bytes
    again = push(good_pack, REPO)
    assert (again.files_sent, again.bytes_sent, again.commit) == (0, 0, first.commit)
    assert hub.received_bytes == received
    assert len(hub.repos[REPO].log) == 3


def test_only_the_packs_files_go(hub: Hub, pack: Path) -> None:
    before = tree(pack)
    (pack / ".secret").write_text("token")
    (pack / ".git").mkdir()
    (pack / ".git" / "config").write_text("x")
    (pack / ".hybrid-pack-pull" / "deep").mkdir(parents=True)
    (pack / ".hybrid-pack-pull" / "deep" / "x").write_text("x")
    (pack / "left.partial").write_text("x")
    (pack / "stranger.bin").write_text("x")
    push(pack, REPO)
    assert on_hub(hub) == before


NAMES = ["a [1] *?.json", "é ü.txt", "100%25 #x?&=.json", "emoji 😀.txt", "additional_chat_templates/[x]!y.jinja"]


def test_names_with_a_meaning_elsewhere(hub: Hub, small_checkpoint: Path, tmp_path: Path, good_pack: Path) -> None:
    """Patterns, escapes and other scripts, both ways."""
    source = tmp_path / "source"
    shutil.copytree(small_checkpoint, source)
    for name in NAMES:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(f'{{"name": "{name}"}}')
    made = make_pack(source, tmp_path / "made", Topology(2, 1))
    assert set(NAMES) <= set(tree(made))
    push(made, REPO)
    assert on_hub(hub) == tree(made)
    pull(REPO, tmp_path / "out")
    assert {**tree(tmp_path / "out"), "README.md": b""} == {**tree(made), "README.md": b""}


def test_an_earlier_pack_goes(hub: Hub, good_pack: Path, other_pack: Path) -> None:
    push(good_pack, REPO)
    mine = {"figure.png": b"png", "notes/x.txt": b"mine", ".gitignore": b"*.tmp"}
    hub.add(REPO, dict(mine), whole=False)
    done = push(other_pack, REPO, replace=True)
    assert on_hub(hub) == {**tree(other_pack), **mine}
    assert set(done.removed) == set(read_manifest(good_pack).sizes()) - set(read_manifest(other_pack).sizes())
    assert done.foreign == ("figure.png", "notes/x.txt")
    check_history(hub)


CHECKPOINT = {"model-00001-of-00002.safetensors": b"a", "model-00002-of-00002.safetensors": b"b", "config.json": b"{}"}
LEFT = {"experts/tp9-ep1/rank-0/layer-003.safetensors": b"x"}
IN_THE_WAY: dict[str, tuple[dict[str, bytes], str, bool]] = {
    "a checkpoint": (
        CHECKPOINT,
        r"org/name: the repository has the weights of a checkpoint, and no pack \(found model",
        False,
    ),
    "one file": ({"model.safetensors": b"a"}, r"the weights of a checkpoint, and no pack \(found model\.saf", False),
    "in a folder": ({"sub/x.safetensors": b"a"}, r"the weights of a checkpoint, and no pack", False),
    "left of a pack": (LEFT, r"files of another pack are there \(found 1 would be removed \(experts/tp9", True),
}


@pytest.mark.parametrize("way", [[], ["--dry-run"], ["--create-pr"], ["--revision", "new"]], ids=str)
@pytest.mark.parametrize("case", IN_THE_WAY)
def test_weights_of_something_else_are_not_removed(
    case: str, way: list[str], hub: Hub, good_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A push of a wrong name would otherwise end somebody's checkpoint."""
    there, message, replaceable = IN_THE_WAY[case]
    hub.add(REPO, dict(there))
    assert run(["push", str(good_pack), REPO, *way]) == 2
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])
    assert (hub.files(REPO), len(hub.repos[REPO].log), list(hub.repos[REPO].branches)) == (there, 1, ["main"])
    assert run(["push", str(good_pack), REPO, *way, "--replace"]) == (0 if replaceable else 2)


def test_another_pack_is_replaced_only_when_asked(
    hub: Hub, good_pack: Path, other_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    push(good_pack, REPO)
    before = hub.files(REPO)
    assert run(["push", str(other_pack), REPO]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    gone = set(read_manifest(good_pack).sizes()) - set(read_manifest(other_pack).sizes())
    assert re.search(rf"another pack is there \(found {len(gone)} would be removed \(experts/tp2-ep2.*--replace", line)
    assert hub.files(REPO) == before
    assert run(["push", str(other_pack), REPO, "--dry-run"]) == 2
    out = capsys.readouterr().out
    assert {line.split()[2][:-1] for line in out.splitlines() if "to remove" in line} == gone
    assert hub.files(REPO) == before


def test_a_pack_of_the_same_shape_is_another_pack(hub: Hub, good_pack: Path, tmp_path: Path) -> None:
    """No file would be removed, but every one overwritten."""
    source = tmp_path / "source"
    write_checkpoint(source, replace(SMALL, seed=SMALL.seed + 1))
    other = make_pack(source, tmp_path / "other", Topology(2, 2))
    push(good_pack, REPO)
    with pytest.raises(UsageError, match=r"another pack is there \(found \d+ would be overwritten \(experts/"):
        push(other, REPO)
    assert on_hub(hub) == tree(good_pack)
    push(other, REPO, replace=True)
    assert on_hub(hub) == tree(other)


def test_an_interrupted_push_goes_on_unasked_but_not_that_of_another_pack(
    hub: Hub, good_pack: Path, other_pack: Path
) -> None:
    """Between its commits there is no manifest: what is there is known by its bytes."""
    files = tree(good_pack)
    weights = {path: data for path, data in files.items() if path.endswith(".safetensors")}
    hub.add(REPO, dict(weights))
    with pytest.raises(UsageError, match="files of another pack are there"):
        push(other_pack, REPO)
    push(good_pack, REPO)
    assert on_hub(hub) == files
    path = next(iter(weights))
    hub.add(REPO, {**weights, path: bytes([weights[path][0] ^ 1]) + weights[path][1:]})
    with pytest.raises(UsageError, match=r"1 would be overwritten"):
        push(good_pack, REPO)


def test_a_replacement_that_was_interrupted_goes_on(hub: Hub, good_pack: Path, other_pack: Path) -> None:
    push(good_pack, REPO)
    fault = hub.fault("POST", "/commit/", status=403, after=1, times=9)
    with pytest.raises(EnvironmentFailure):
        push(other_pack, REPO, replace=True)
    fault.times = 0
    push(other_pack, REPO, replace=True)
    assert on_hub(hub) == tree(other_pack)


def test_a_card_edited_on_the_hub_stays(
    hub: Hub, other_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    push(other_pack, REPO)
    ours = tree(other_pack)["README.md"]
    edited = ours.replace(b"## Sizes", b"## My words\n## Sizes")
    assert edited != ours
    hub.add(REPO, {"README.md": edited}, whole=False)
    again = tmp_path / "again"
    shutil.copytree(other_pack, again)
    for more, word in ((["--dry-run"], "keeps"), ([], "kept")):
        assert run(["push", str(again), REPO, *more]) == 0
        assert f"{word} " in capsys.readouterr().out
        assert hub.files(REPO)["README.md"] == edited
    assert push(again, REPO, replace=True).card_kept is False
    assert hub.files(REPO)["README.md"] == ours


def test_a_card_nobody_edited_is_brought_up_to_date(hub: Hub, good_pack: Path, other_pack: Path) -> None:
    push(other_pack, REPO)
    (files := tree(good_pack))["README.md"] = tree(other_pack)["README.md"]
    hub.add(REPO, dict(files))
    assert not push(good_pack, REPO).card_kept
    assert hub.files(REPO)["README.md"] == tree(good_pack)["README.md"]


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=str)
def test_a_card_that_is_missing_or_anothers_is_said(
    more: list[str], hub: Hub, pack: Path, other_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["push", str(pack), REPO, *more]) == 0
    assert "warning" not in capsys.readouterr().err
    (pack / "README.md").write_bytes((other_pack / "README.md").read_bytes() + b"edited")
    assert run(["push", str(pack), REPO, *more]) == 0
    found = capsys.readouterr().err
    assert "warning: README.md is of another pack" in found
    assert read_manifest(other_pack).self_digest in found
    (pack / "README.md").unlink()
    assert run(["push", str(pack), REPO, *more]) == 0
    assert "warning: README.md is missing" in capsys.readouterr().err
    assert run(["push", str(other_pack), "org/other", *more]) == 0
    assert "warning" not in capsys.readouterr().err


def test_files_of_a_pack_nobody_lists_go_too(hub: Hub, good_pack: Path) -> None:
    left = {"experts/tp9-ep1/rank-0/layer-003.safetensors": b"x", "model-00009-of-00009.safetensors": b"y"}
    hub.add(REPO, dict(left))
    assert set(push(good_pack, REPO, replace=True).removed) == set(left)
    assert on_hub(hub) == tree(good_pack)


@pytest.mark.parametrize("damage", [b"", b"{", b'{"format": "hybrid-pack"}'])
def test_a_broken_manifest_on_the_hub_is_replaced(damage: bytes, hub: Hub, good_pack: Path) -> None:
    hub.add(REPO, {**tree(good_pack), MANIFEST: damage})
    push(good_pack, REPO)
    assert on_hub(hub) == tree(good_pack)


class Broken:
    """Packs ``verify`` refuses."""

    @staticmethod
    def truncated(pack: Path) -> None:
        path = next(pack.rglob("layer-003.safetensors"))
        path.write_bytes(path.read_bytes()[:-1])

    @staticmethod
    def header(pack: Path) -> None:
        path = next(pack.rglob("layer-003.safetensors"))
        data = path.read_bytes()
        path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])

    @staticmethod
    def missing(pack: Path) -> None:
        next(pack.rglob("layer-004.safetensors")).unlink()

    @staticmethod
    def manifest(pack: Path) -> None:
        (pack / MANIFEST).write_text((pack / MANIFEST).read_text().replace("small", "large"))

    @staticmethod
    def stranger(pack: Path) -> None:
        (pack / "more.txt").write_text("x")

    @staticmethod
    def unfinished(pack: Path) -> None:
        (pack / "x.safetensors.partial").write_text("x")

    @staticmethod
    def one_rank(pack: Path) -> None:
        shutil.rmtree(pack / "experts" / "tp2-ep2" / "rank-3")


def broken() -> Iterator[Any]:
    for name, change in vars(Broken).items():
        if isinstance(change, staticmethod):
            yield pytest.param(change.__func__, id=name)


@pytest.mark.parametrize("change", list(broken()))
@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["push", "dry run"])
def test_what_verify_refuses_is_not_sent(
    more: list[str], change: Callable[[Path], None], hub: Hub, pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(pack)
    assert run(["push", str(pack), REPO, *more]) == 1
    assert "not pushed: verify finds" in capsys.readouterr().err.splitlines()[-1]
    assert hub.requests == []


def test_full_looks_at_the_payload(hub: Hub, pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = next(pack.rglob("layer-003.safetensors"))
    data = path.read_bytes()
    path.write_bytes(data[:8000] + bytes([data[8000] ^ 1]) + data[8001:])
    assert run(["push", str(pack), REPO, "--full"]) == 1
    assert hub.requests == []
    capsys.readouterr()
    assert run(["push", str(pack), REPO]) == 0
    assert "payload digests were not (--full checks them)" in capsys.readouterr().err


def test_the_summary(hub: Hub, good_pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["push", str(good_pack), f"{REPO}@tp2"]) == 0
    captured = capsys.readouterr()
    commit = hub.repos[REPO].branches["tp2"]
    assert captured.out.splitlines() == [
        f"pushed {good_pack} to {REPO}",
        f"  commit     {hub.url}/{REPO}/commit/{commit}",
        f"  sent       {len(tree(good_pack))} files, {size(sum(map(len, tree(good_pack).values())))}",
        "  there      0 files, 0 B",
        f"proof: hybrid-pack verify --remote {REPO}@tp2 --against {good_pack}",
        f"get a rank: hybrid-pack pull {REPO}@tp2 --rank 0 --out DIR",
    ]
    assert MANIFEST not in hub.files(REPO), "main is not touched"
    assert run(["push", str(good_pack), REPO, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["commit"] == hub.repos[REPO].branches["main"]
    assert document["bytes_sent"] + document["bytes_there"] == sum(map(len, tree(good_pack).values()))


def test_a_dry_run_changes_nothing(hub: Hub, good_pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["push", str(good_pack), REPO, "--dry-run"]) == 0
    assert "would make the repository" in capsys.readouterr().out
    assert not hub.repos
    files = tree(good_pack)
    shard = "experts/tp2-ep2/rank-1/layer-004.safetensors"
    gone = "experts/tp2-ep2/rank-2/layer-004.safetensors"
    stale = "experts/tp8-ep1/rank-0/layer-003.safetensors"
    there = {**files, shard: bytes(len(files[shard])), stale: b"x", "figure.png": b"png"}
    del there[gone]
    hub.add(REPO, dict(there))
    plan = plan_push(good_pack, REPO)
    assert plan.send == {shard: len(files[shard]), gone: len(files[gone])}
    assert plan.there == {path: len(data) for path, data in files.items() if path not in plan.send}
    assert (plan.stale, plan.foreign) == ((stale,), ("figure.png",))
    assert plan_push(good_pack, REPO, revision="tp2").new_branch
    assert run(["push", str(good_pack), REPO, "--dry-run", "--json", "--replace"]) == 0
    assert set(json.loads(capsys.readouterr().out)["send"]) == {shard, gone}
    assert len(hub.repos[REPO].log) == 1
    assert {method for method, path in hub.requests if "/commit/" in path or "/lfs" in path} == set()


def test_a_public_repository_is_not_private(hub: Hub, good_pack: Path) -> None:
    hub.add(REPO, {"README.md": b"mine"})
    with pytest.raises(UsageError, match="the repository is there and public"):
        push(good_pack, REPO, private=True)
    assert len(hub.repos[REPO].log) == 1


def test_a_pull_request(hub: Hub, good_pack: Path, other_pack: Path) -> None:
    push(good_pack, REPO)
    before = hub.files(REPO)
    done = push(other_pack, REPO, create_pr=True, replace=True)
    assert done.revision == "refs/pr/1"
    assert done.pr_url == f"{hub.url}/{REPO}/discussions/1"
    assert hub.files(REPO) == before
    assert on_hub(hub, "refs/pr/1") == tree(other_pack)
    check_history(hub)


def test_a_pull_request_that_failed_is_gone_on_with(
    hub: Hub, good_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add(REPO, {".gitattributes": b"*"})
    fault = hub.fault("POST", "/commit/", status=403, times=9)
    assert run(["push", str(good_pack), REPO, "--create-pr"]) == 3
    assert "go on with --revision refs/pr/1, without --create-pr" in capsys.readouterr().err.splitlines()[-1]
    fault.times = 0
    assert run(["push", str(good_pack), REPO, "--revision", "refs/pr/1"]) == 0
    assert on_hub(hub, "refs/pr/1") == tree(good_pack)
    assert [name for name in hub.repos[REPO].branches if name.startswith("refs/pr")] == ["refs/pr/1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--create-pr", "--revision", "tp2"], "a new pull request is always against the main branch"),
        (["--revision", "0" * 40], "a commit cannot be added to"),
    ],
)
def test_usage(
    arguments: list[str], message: str, hub: Hub, good_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["push", str(good_pack), REPO, *arguments]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert hub.requests == []


def test_no_folder(hub: Hub, tmp_path: Path) -> None:
    assert run(["push", str(tmp_path / "nothing"), REPO]) == 2
    assert run(["push", str(tmp_path), "no id"]) == 2
    assert run(["push", str(tmp_path), REPO]) == 1
    assert hub.requests == []


class Counter(Silent):
    def __init__(self) -> None:
        self.total = self.before = self.sent = 0

    def start(self, total_bytes: int, done_bytes: int = 0) -> None:
        self.total, self.before = total_bytes, done_bytes

    def advance(self, nbytes: int) -> None:
        self.sent += nbytes


def large_bytes(root: Path) -> int:
    return sum(len(data) for path, data in tree(root).items() if path.endswith(LFS_SUFFIXES))


def test_bytes_that_go_out_are_told(hub: Hub, good_pack: Path) -> None:
    counter = Counter()
    done = push(good_pack, REPO, progress=counter)
    assert (counter.total, counter.before) == (sum(map(len, tree(good_pack).values())), 0)
    assert counter.sent == hub.received_bytes == done.bytes_moved == done.bytes_large == large_bytes(good_pack)


def test_a_line_off_a_terminal(hub: Hub, good_pack: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("hybrid_pack.cli.progress.LINE_SECONDS", 0.0)
    assert run(["push", str(good_pack), REPO]) == 0
    assert re.search(r"^push: \d+ % of .*/s", capsys.readouterr().err, re.MULTILINE)


def test_what_the_hub_had_stored_is_not_counted_as_sent(
    hub: Hub, good_pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After an interruption large files are stored, but in no commit yet."""
    fault = hub.fault("POST", "/commit/", status=403, times=9)
    assert run(["push", str(good_pack), REPO]) == 3
    fault.times = 0
    assert hub.received_bytes == large_bytes(good_pack)
    capsys.readouterr()
    assert run(["push", str(good_pack), REPO]) == 0
    assert "; 0 B went over the network, the Hub had stored the rest before" in capsys.readouterr().out
    assert hub.received_bytes == large_bytes(good_pack)
