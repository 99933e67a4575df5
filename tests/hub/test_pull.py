"""``hybrid-pack pull`` against a Hub on loopback: exactly a rank's files, whatever goes wrong on the way."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hybrid_pack import open_pack
from hybrid_pack.cli.main import run
from hybrid_pack.errors import DataError, UsageError
from hybrid_pack.hub import pull
from hybrid_pack.hub.pull import STAGING
from hybrid_pack.io.manifest import MANIFEST, read_manifest
from hybrid_pack.verify import verify_pack
from tests.hub.conftest import REPO, SECRET, Client, tree
from tests.hub.expected import RANK, of_rank
from tests.hub.server import Hub


def test_exactly_the_files_of_a_rank(remote: Hub, good_pack: Path, tmp_path: Path, client: Client) -> None:
    out = tmp_path / "out"
    done = pull(REPO, out, ranks=[RANK])
    expected = of_rank(good_pack, RANK)
    assert tree(out) == expected
    assert (done.files_fetched, done.files_kept) == (len(expected) - 1, 0)
    assert done.bytes_fetched == sum(len(data) for path, data in expected.items() if path != MANIFEST)
    assert set(remote.sent) == set(expected), "nothing else was asked for"
    assert verify_pack(out, rank=RANK).ok
    loaded = open_pack(out).load_rank(RANK, check="digest")
    assert list(loaded) == [3, 4, 5]
    assert client.hosts == {"127.0.0.1"} or client.hosts == {"127.0.0.1", "::1"}
    assert remote.tokens == {SECRET}
    assert remote.cdn_tokens == {None}, "the token goes to the Hub, not to where its large files are"


def test_another_rank_adds_to_it(remote: Hub, good_pack: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pull(REPO, out, ranks=[RANK])
    remote.sent.clear()
    done = pull(REPO, out, ranks=[0])
    assert tree(out) == of_rank(good_pack, 0, RANK)
    assert set(remote.sent) == {MANIFEST, *(s.path for s in read_manifest(good_pack).shards if s.rank == 0)}
    assert done.files_kept == len(of_rank(good_pack)) - 1
    assert verify_pack(out, rank=RANK).ok and verify_pack(out, rank=0).ok


def test_experts_alone(remote: Hub, good_pack: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pull(REPO, out, ranks=[RANK], experts_only=True)
    assert tree(out) == of_rank(good_pack, RANK, base=False)
    assert not verify_pack(out, rank=RANK).ok
    assert verify_pack(out, rank=RANK, experts_only=True).ok
    pull(REPO, out, ranks=[RANK])
    assert tree(out) == of_rank(good_pack, RANK)


def test_all_ranks_are_the_pack(remote: Hub, good_pack: Path, tmp_path: Path) -> None:
    pull(REPO, tmp_path / "out")
    assert tree(tmp_path / "out") == of_rank(good_pack, 0, 1, 2, 3)
    assert verify_pack(tmp_path / "out").ok


def test_nothing_is_left_to_do(remote: Hub, good_pack: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pull(REPO, out, ranks=[RANK])
    stamps = {path: (out / path).stat().st_mtime_ns for path in tree(out)}
    remote.sent.clear()
    done = pull(REPO, out, ranks=[RANK])
    assert (done.files_fetched, done.replaced) == (0, ())
    assert set(remote.sent) == {MANIFEST}
    assert {path: (out / path).stat().st_mtime_ns for path in tree(out)} == stamps


def test_a_revision(remote: Hub, good_pack: Path, tmp_path: Path) -> None:
    first = remote.repos[REPO].branches["main"]
    remote.add(REPO, {"README.md": b"no pack any more"})
    with pytest.raises(DataError, match=r"org/name: hybrid_pack\.json: the repository is not a pack"):
        pull(REPO, tmp_path / "out")
    pull(REPO, tmp_path / "out", revision=first, ranks=[RANK])
    assert tree(tmp_path / "out") == of_rank(good_pack, RANK)


def test_a_push_during_a_pull_changes_nothing(remote: Hub, good_pack: Path, tmp_path: Path) -> None:
    """Everything comes from one commit, that the branch was at."""

    def push(method: str, path: str) -> None:
        if path.endswith("config.json") and method == "GET":
            remote.hook = lambda method, path: None
            remote.add(REPO, dict.fromkeys(tree(good_pack), b"other"))

    remote.hook = push
    pull(REPO, tmp_path / "out", ranks=[RANK], workers=1)
    assert tree(tmp_path / "out") == of_rank(good_pack, RANK)
    assert remote.files(REPO)["config.json"] == b"other"


def test_json(remote: Hub, good_pack: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pull", f"{REPO}@main", "--rank", "1", "--rank", "2", "--out", str(tmp_path / "out"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["ranks"], document["files_fetched"]) == ([1, 2], len(of_rank(good_pack, 1, 2)) - 1)
    assert document["commit"] == remote.repos[REPO].branches["main"]


USAGE = {
    "no such rank": (["--rank", "4"], r"--rank: the pack has no such rank \(expected 0\.\.3, found 4\)"),
    "negative rank": (["--rank", "-1"], r"--rank: the pack has no such rank"),
    "no such revision": (["--revision", "nothing"], r"org/name@nothing: no such revision"),
    "workers": (["--workers", "0"], r"--workers: not a number of workers \(expected 1 to 64, found 0\)"),
}


@pytest.mark.parametrize("case", USAGE)
def test_usage(case: str, remote: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = USAGE[case]
    assert run(["pull", REPO, "--out", str(tmp_path / "out"), *arguments]) == 2
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [("nobody/nothing", "nobody/nothing: no such repository on the Hub;"), ("name", "name: not a Hub id"),
     ("a/b@c --revision d", "a/b@c: two revisions")],
)  # fmt: skip
def test_no_such_repository(
    name: str, message: str, remote: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["pull", *name.split(), "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def something(out: Path) -> None:
    (out / "notes.txt").write_text("mine")


def a_checkpoint(out: Path) -> None:
    (out / "config.json").write_text("{}")


def a_conversion(out: Path) -> None:
    (out / "hybrid_pack.state.partial").write_text("")


def another_pack(out: Path) -> None:
    (out / MANIFEST).write_text("{}")


def another_pull(out: Path) -> None:
    (out / STAGING).mkdir()
    (out / STAGING / MANIFEST).write_text("{}")


IN_THE_WAY = {
    something: "not empty, and not a pull",
    a_checkpoint: "not empty, and not a pull",
    a_conversion: "an unfinished conversion is there",
    another_pack: "another pack, or another revision of it, is there",
    another_pull: "another pack, or another revision of it, is there",
}


@pytest.mark.parametrize("make", IN_THE_WAY)
def test_nothing_of_somebody_else_is_touched(make: Callable[[Path], None], remote: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    make(out)
    before = tree(out)
    with pytest.raises(UsageError, match=IN_THE_WAY[make]):
        pull(REPO, out, ranks=[RANK])
    assert tree(out) == before


def test_two_at_a_time(remote: Hub, good_pack: Path, tmp_path: Path) -> None:
    """The second is refused while the first is at work."""
    out, refused = tmp_path / "out", []

    def again(method: str, path: str) -> None:
        if path.startswith("/cdn/") and not refused:
            remote.hook = lambda method, path: None
            with pytest.raises(UsageError, match="another pull is writing here"):
                pull(REPO, out, ranks=[0])
            refused.append(True)

    remote.hook = again
    pull(REPO, out, ranks=[RANK], workers=1)
    assert refused
    assert tree(out) == of_rank(good_pack, RANK)


def test_a_pack_that_was_converted_here_counts_as_pulled(pack: Path, remote: Hub, good_pack: Path) -> None:
    shutil.rmtree(pack / "experts" / "tp2-ep2" / "rank-1")
    (pack / "README.md").write_text("mine")
    done = pull(REPO, pack)
    assert done.files_fetched == 3
    assert tree(pack) == {**tree(good_pack), "README.md": b"mine"}


def test_an_interrupted_pull_is_told_to_go_on(remote: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    fault = remote.fault("GET", r"/cdn/.*rank-1/layer-004", status=403, times=99)
    assert run(["pull", REPO, "--rank", "1", "--out", str(out)]) == 3
    capsys.readouterr()
    assert run(["verify", str(out)]) == 1
    assert "an interrupted pull, or one that is running: run the pull again" in capsys.readouterr().out
    with pytest.raises(DataError, match="interrupted, or is running; run the pull again"):
        read_manifest(out)
    fault.times = 0
    assert run(["pull", REPO, "--rank", "1", "--out", str(out)]) == 0


def test_a_pull_of_some_ranks_says_what_to_verify(
    remote: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that is printed passes; without its ranks one line says which they are."""
    out = tmp_path / "out"
    assert run(["pull", REPO, "--rank", "2", "--rank", "0", "--out", str(out)]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line == f"next: hybrid-pack verify {out} --rank 2 --rank 0"
    assert run(line.split()[2:]) == 0
    assert "shards of ranks other than 0, 2: only these ranks were asked for" in capsys.readouterr().out
    assert run(["verify", str(out)]) == 1
    found = [line for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert len(found) == 1
    assert re.search(r"missing, as every file of rank 1, ?3 is; .*verify them alone: --rank 0 --rank 2;", found[0]), (
        found
    )


def test_every_rank_that_is_asked_for_is_looked_at(remote: Hub, good_pack: Path, pack: Path) -> None:
    """No --rank hides another."""
    path = next(pack.rglob("rank-1/layer-004.safetensors"))
    path.unlink()
    for ranks, code in ((["1", "2"], 1), (["2", "1"], 1), (["2", "0"], 0)):
        assert run(["verify", str(pack), *(word for rank in ranks for word in ("--rank", rank))]) == code


LEADS: dict[str, Callable[[Path], Path]] = {
    "a link on the way": lambda root: (root / "link") / "out",
    "two dots": lambda root: root / "real" / ".." / "out",
    "two dots behind a link": lambda root: root / "link" / ".." / "out",
    "a link itself": lambda root: root / "link",
}


@pytest.mark.parametrize("case", LEADS)
def test_any_way_to_the_folder(case: str, remote: Hub, good_pack: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    out = LEADS[case](tmp_path)
    pull(REPO, out, ranks=[RANK])
    assert tree(out) == of_rank(good_pack, RANK)
    assert not (out / STAGING).exists()


def test_temporary_files_below_a_link(
    remote: Hub, good_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifests of pull, push and ``verify --remote`` arrive there."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "link"))
    monkeypatch.setattr("tempfile.tempdir", None)
    pull(REPO, tmp_path / "out", ranks=[RANK])
    assert tree(tmp_path / "out") == of_rank(good_pack, RANK)
    assert run(["verify", "--remote", REPO]) == 0
    assert list((tmp_path / "real").iterdir()) == []
