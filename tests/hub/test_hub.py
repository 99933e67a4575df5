"""The Hub, with huggingface_hub's own calls replaced: what is asked for, what comes back, what errors mean."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub
import pytest
from huggingface_hub import errors

from hybrid_pack import hub
from hybrid_pack.errors import EnvironmentFailure, HybridPackError, UsageError
from hybrid_pack.hub import fetch
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.plan import make_plan
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import write_checkpoint
from tests.checkpoints import SMALL

REVISION = "0" * 40


class Response:
    """As much of an HTTP response as the errors ask for."""

    headers: ClassVar[dict[str, str]] = {}
    request = None
    status_code = 404


def http_error(kind: type[Exception]) -> Exception:
    return kind("no", response=Response())  # type: ignore[call-arg]


class FakeFiles:
    """The parts of HfFileSystem that are used, over a local folder; counts the bytes asked for."""

    def __init__(self, root: Path) -> None:
        self.root, self.read_bytes = root, 0

    def ls(self, path: str, detail: bool) -> list[dict[str, Any]]:
        assert path == f"org/name@{REVISION}" and detail
        return [{"name": f"{path}/{p.name}", "size": p.stat().st_size} for p in self.root.iterdir()]

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        data = (self.root / path.rsplit("/", 1)[1]).read_bytes()[start:end]
        self.read_bytes += len(data)
        return data


@pytest.fixture
def files(small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFiles:
    fake = FakeFiles(small_checkpoint)
    snapshot = tmp_path / "snapshots" / REVISION
    snapshot.mkdir(parents=True)

    def download(repo_id: str, revision: str | None, allow_patterns: list[str], local_files_only: bool = False) -> str:
        assert repo_id == "org/name"
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not there")
        assert "*.safetensors" not in allow_patterns
        for path in small_checkpoint.glob("*.json"):
            (snapshot / path.name).write_bytes(path.read_bytes())
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", lambda: fake)
    return fake


@pytest.mark.parametrize("first", [8, 100, 1 << 20])
def test_headers_alone_make_the_same_plan(
    files: FakeFiles, small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.setattr(fetch, "FIRST_READ_BYTES", first)
    folder = tmp_path / "stubs"
    folder.mkdir()
    hub.fetch_headers("org/name", None, folder)
    stub, real = open_checkpoint(folder, name="x"), open_checkpoint(small_checkpoint, name="x")
    assert make_plan(stub, Topology(1)).fingerprint() == make_plan(real, Topology(1)).fingerprint()
    if first < 1 << 20:
        assert files.read_bytes < sum(p.stat().st_size for p in small_checkpoint.iterdir()) / 4


class Cache:
    """A local cache with a snapshot; the Hub itself must not be asked while it is whole."""

    def __init__(self, source: Path, root: Path) -> None:
        self.snapshot, self.online = root / "snapshots" / REVISION, 0
        shutil.copytree(source, self.snapshot)

    def download(
        self, repo_id: str, revision: str | None, allow_patterns: list[str], local_files_only: bool = False
    ) -> str:
        if not local_files_only:
            self.online += 1
            raise errors.LocalEntryNotFoundError("no network")
        assert tuple(allow_patterns) == fetch.WANTED
        return str(self.snapshot)


@pytest.fixture
def cache(small_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    made = Cache(small_checkpoint, tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.download)
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", lambda: pytest.fail("the Hub is asked"))
    return made


def test_a_whole_snapshot_is_used_without_the_hub(cache: Cache, small_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    hub.fetch_headers("org/name", None, folder)
    found, real = open_checkpoint(folder, name="x"), open_checkpoint(small_checkpoint, name="x")
    assert make_plan(found, Topology(1)).fingerprint() == make_plan(real, Topology(1)).fingerprint()
    assert not cache.online


def test_a_single_file_needs_no_index(cache: Cache, tmp_path: Path) -> None:
    shutil.rmtree(cache.snapshot)
    write_checkpoint(cache.snapshot, replace(SMALL, single_file=True))
    folder = tmp_path / "folder"
    folder.mkdir()
    hub.fetch_headers("org/name", None, folder)
    assert open_checkpoint(folder).layers and not cache.online


@pytest.mark.parametrize("lost", ["model-00002-*", "model.safetensors.index.json", "config.json"])
def test_a_snapshot_that_lacks_a_file_is_not_used(cache: Cache, tmp_path: Path, lost: str) -> None:
    next(iter(cache.snapshot.glob(lost))).unlink()
    with pytest.raises(EnvironmentFailure, match="not whole in the local cache"):
        hub.fetch_headers("org/name", None, tmp_path)
    assert cache.online == 1


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": []}'])
def test_a_snapshot_with_a_broken_index_is_not_used(cache: Cache, tmp_path: Path, text: str) -> None:
    (cache.snapshot / "model.safetensors.index.json").write_text(text)
    with pytest.raises(EnvironmentFailure):
        hub.fetch_headers("org/name", None, tmp_path)
    assert cache.online == 1


def test_a_whole_checkpoint_is_fetched_without_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo_id: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert (repo_id, revision) == ("org/name", "v1")
        assert "*.safetensors" in allow_patterns and not any("bin" in p or p == "*" for p in allow_patterns)
        return "/somewhere"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert hub.fetch_checkpoint("org/name", "v1") == Path("/somewhere")


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (http_error(errors.RepositoryNotFoundError), UsageError, "no such repository"),
        (http_error(errors.GatedRepoError), EnvironmentFailure, "access to this repository must be granted"),
        (http_error(errors.RevisionNotFoundError), UsageError, "no such revision"),
        (errors.HFValidationError("bad"), UsageError, "no such repository"),
        (
            errors.LocalEntryNotFoundError("offline"),
            EnvironmentFailure,
            "neither a local folder nor reachable on the Hub",
        ),
        (errors.OfflineModeIsEnabled("offline"), EnvironmentFailure, "neither a local folder nor reachable on the Hub"),
        (OSError(28, "No space left on device"), EnvironmentFailure, "No space left"),
        (RuntimeError("connection reset"), EnvironmentFailure, "cannot fetch .found connection reset"),
    ],
)
def test_errors(monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[HybridPackError], says: str) -> None:
    def download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(kind, match=says) as caught:
        hub.fetch_checkpoint("org/name", "v1")
    assert caught.value.where == "org/name@v1"
