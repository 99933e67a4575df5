"""A Hub id instead of a folder: what is asked for, what is remembered, and every way it can fail. No network."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from tests.cli.conftest import Command

Snapshot = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def snapshot(monkeypatch: pytest.MonkeyPatch) -> Snapshot:
    """Puts a folder or an error in the place of a download; returns the calls made."""

    def answer(with_what: Path | BaseException) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def snapshot_download(repo_id: str, **options: Any) -> str:
            calls.append({"repo_id": repo_id, **options})
            if isinstance(with_what, BaseException):
                raise with_what
            return str(with_what)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        monkeypatch.setattr("hybrid_pack.hub.errors.WAITS", ())
        return calls

    return answer


@pytest.fixture
def cached(source: Path, tmp_path: Path) -> Path:
    """The source as it lies in the Hugging Face cache: links to blobs."""
    repository = tmp_path / "hub" / "models--zai-org--GLM-X"
    blobs, folder = repository / "blobs", repository / "snapshots" / "0123abc"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    for number, path in enumerate(sorted(source.iterdir())):
        shutil.copy(path, blobs / str(number))
        (folder / path.name).symlink_to(Path("../../blobs") / str(number))
    return folder


def test_convert_and_verify(cached: Path, tmp_path: Path, command: Command, snapshot: Snapshot) -> None:
    """The whole checkpoint is fetched, and only what a conversion can use."""
    calls = snapshot(cached)
    out = tmp_path / "out"
    assert command("convert", "zai-org/GLM-X@v1.2", "--out", out).code == 0
    assert json.loads((out / "hybrid_pack.json").read_text())["source"]["name"] == "zai-org/GLM-X"
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert command("verify", out, "--source", "zai-org/GLM-X").code == 0
    fetched = [call for call in calls if not call.get("local_files_only")]
    assert [(call["repo_id"], call["revision"]) for call in fetched] == [
        ("zai-org/GLM-X", "v1.2"), ("zai-org/GLM-X", None)
    ]  # fmt: skip
    assert {"*.safetensors", "*.json", "LICENSE*"} <= set(fetched[0]["allow_patterns"])
    assert not {"*.bin", "*.gguf", "*.pt", "*"} & set(fetched[0]["allow_patterns"])


@pytest.mark.parametrize("wrong", [["--tp", "3"], ["--max-ram", "1MB"], ["--layers", "77"]])
def test_nothing_is_fetched_for_what_would_be_refused(
    wrong: list[str], source: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers are looked at first: hundreds of gigabytes are not downloaded to say that a size is illegal."""
    monkeypatch.setattr("hybrid_pack.hub.fetch_headers", link_to(source))
    monkeypatch.setattr("hybrid_pack.hub.fetch_checkpoint", lambda *_: pytest.fail("fetched"))
    assert command("convert", "org/name", "--out", tmp_path / "out", *wrong).code == 2


def link_to(source: Path) -> Callable[[str, str | None, Path], None]:
    """Headers as they come from the Hub: here the files themselves."""

    def fetch_headers(repo_id: str, revision: str | None, folder: Path) -> None:
        for path in source.iterdir():
            (folder / path.name).symlink_to(path)

    return fetch_headers


@pytest.mark.parametrize("arguments", ["inspect SRC", "inspect SRC --json", "convert SRC --out OUT --dry-run"])
def test_headers_are_enough(
    arguments: str, cached: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To inspect and to plan; the payload is not fetched."""
    calls: list[tuple[str, str | None]] = []

    def fetch_headers(repo_id: str, revision: str | None, folder: Path) -> None:
        calls.append((repo_id, revision))
        for path in cached.iterdir():
            (folder / path.name).symlink_to(path.resolve())

    monkeypatch.setattr("hybrid_pack.hub.fetch_headers", fetch_headers)
    monkeypatch.setattr("hybrid_pack.hub.fetch_checkpoint", lambda *_: pytest.fail("all of it is fetched"))
    monkeypatch.setattr("hybrid_pack.hub.cache_need", lambda *_: (tmp_path, 0))
    out = tmp_path / "out"
    result = command(*arguments.replace("SRC", "zai-org/GLM-X@v1.2").replace("OUT", str(out)).split())
    assert result.code == 0
    assert "zai-org/GLM-X" in result.out
    assert calls == [("zai-org/GLM-X", "v1.2")]
    assert not out.exists()


def test_a_snapshot_folder_is_remembered_by_its_hub_id(cached: Path, tmp_path: Path, command: Command) -> None:
    assert command("convert", cached, "--out", tmp_path / "out").code == 0
    assert json.loads((tmp_path / "out" / "hybrid_pack.json").read_text())["source"]["name"] == "zai-org/GLM-X"


def test_a_folder_goes_before_a_hub_id(
    source: Path, tmp_path: Path, command: Command, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = snapshot(AssertionError("not asked"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(source, tmp_path / "org" / "name")
    assert command("convert", "org/name", "--out", "out").code == 0
    assert json.loads((tmp_path / "out" / "hybrid_pack.json").read_text())["source"]["name"] == "name"
    assert not calls


@pytest.mark.parametrize(
    "text", ["name", "a/b/c", "/a/b", "./a/b", "../a/b", "~/a/b", "a/b@", "a//b", "-a/b", "a/b@v 1"]
)
def test_no_hub_id(text: str, command: Command, snapshot: Snapshot) -> None:
    calls = snapshot(AssertionError("not asked"))
    result = command("inspect", "--", text)
    assert result.code == 2
    assert re.search(r"not a checkpoint folder \(expected a folder, or a Hub id.* org/name", result.line), result.line
    assert not calls


def made(kind: type[Exception], text: str = "raw text of the library") -> Exception:
    """An error without the HTTP response its constructor wants."""
    return kind.__new__(kind, text)


ERRORS = {
    "gated": (made(errors.GatedRepoError), 3, "access to this repository must be granted; accept its terms and log in"),
    "no_repository": (
        made(errors.RepositoryNotFoundError),
        2,
        "no such repository on the Hub, nor a local folder; a priv",
    ),
    "bad_name": (made(errors.HFValidationError), 2, "no such repository on the Hub, nor a local folder"),
    "no_revision": (made(errors.RevisionNotFoundError), 2, "no such revision"),
    "offline": (
        made(errors.LocalEntryNotFoundError),
        3,
        "neither a local folder nor reachable on the Hub, and not whole in the local cache; check the path",
    ),
    "offline_mode": (made(errors.OfflineModeIsEnabled), 3, "neither a local folder nor reachable on the Hub"),
    "http": (made(errors.HfHubHTTPError), 3, "cannot fetch"),
    "no_room": (OSError(28, "No space left on device"), 3, r"the disk is full \(found No space left on device\)"),
    "reset": (
        ConnectionResetError(104, "Connection reset by peer"),
        3,
        r"cannot fetch \(expected an answer of .*, found .*reset by peer\); check",
    ),
    "timeout": (TimeoutError("timed out"), 3, r"cannot fetch \(expected an answer of http\S+, found timed out\)"),
}


@pytest.mark.parametrize("arguments", ["convert org/name@v1 --out OUT", "inspect org/name@v1"])
@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str, arguments: str, tmp_path: Path, command: Command, snapshot: Snapshot) -> None:
    error, code, message = ERRORS[case]
    snapshot(error)
    result = command(*arguments.replace("OUT", str(tmp_path / "out")).split())
    assert result.code == code
    assert re.search(rf"hybrid-pack: org/name@v1: {message}", result.line), result.line
    assert not list(tmp_path.iterdir())


def test_an_incomplete_snapshot(
    cached: Path, source: Path, tmp_path: Path, command: Command, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to a blob that the cache lost."""
    snapshot(cached)
    monkeypatch.setattr("hybrid_pack.hub.fetch_headers", link_to(source))
    monkeypatch.setattr("hybrid_pack.hub.cache_need", lambda *_: (tmp_path, 0))
    next(iter(cached.glob("*.safetensors"))).resolve().unlink()
    result = command("convert", "org/name", "--out", tmp_path / "out")
    assert result.code == 1
    assert re.search("a symbolic link to a file that is not there .*download it again", result.line), result.line
