"""A checkpoint of the Hub: whole, or its headers alone."""

from __future__ import annotations

import fnmatch
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hybrid_pack.errors import DataError, EnvironmentFailure
from hybrid_pack.hub.errors import at, errors, retrying
from hybrid_pack.hub.listing import list_files, open_remote
from hybrid_pack.io.config import read_document
from hybrid_pack.io.output import PARTIAL, make_folder, write_small
from hybrid_pack.io.safetensors import MAX_HEADER_BYTES
from hybrid_pack.io.shards import INDEX, SINGLE

SMALL_FILES = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.py",
    "*.tiktoken",
    "LICENSE*",
    "README.md",
    "additional_chat_templates/*",
)
WANTED = ("*.safetensors", *SMALL_FILES)
"""Files of a repository a conversion can use; other weight formats are left alone."""

FIRST_READ_BYTES = 1 << 20
"""Read at once from the start of a shard: its whole header, nearly always."""


def fetch_checkpoint(repo_id: str, revision: str | None = None) -> Path:
    """Bring a checkpoint into the Hugging Face cache, or find it there.

    Args:
        repo_id: ``org/name``.
        revision: Branch, tag or commit; by default the main branch.

    Returns:
        Its snapshot folder; files already in the cache are not fetched again.

    Raises:
        UsageError: No such repository or revision.
        EnvironmentFailure: No network, no access, no room.
    """
    from huggingface_hub import snapshot_download

    with errors(at(repo_id, revision), nor_folder=True):
        return Path(retrying(lambda: snapshot_download(repo_id, revision=revision, allow_patterns=list(WANTED))))


def _whole(snapshot: Path) -> bool:
    """Whether a snapshot has a config and every shard its index names."""
    if not (snapshot / "config.json").is_file():
        return False
    if not (snapshot / INDEX).is_file():
        return (snapshot / SINGLE).is_file() or len(list(snapshot.glob("*.safetensors"))) == 1
    try:
        weight_map = read_document(snapshot / INDEX)[0].get("weight_map")
    except (DataError, EnvironmentFailure):
        return False
    return isinstance(weight_map, dict) and all((snapshot / str(name)).is_file() for name in set(weight_map.values()))


def _cached(repo_id: str, revision: str | None) -> Path | None:
    """The snapshot in the local cache if it is whole, without asking the Hub."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(repo_id, revision=revision, allow_patterns=list(WANTED), local_files_only=True)
    except Exception:  # whatever it is, the Hub is asked next and says it better
        return None
    return Path(found) if _whole(Path(found)) else None


def cached_checkpoint(repo_id: str, revision: str | None = None) -> Path | None:
    """Its snapshot folder in the local cache, if it is whole there; the Hub is not asked."""
    with errors(at(repo_id, revision), nor_folder=True):
        return _cached(repo_id, revision)


def cache_need(repo_id: str, revision: str | None = None) -> tuple[Path, int]:
    """(the Hugging Face cache, bytes that ``fetch_checkpoint`` would add to it); what is whole there costs nothing.

    Raises:
        UsageError: No such repository or revision.
        DataError: A listing that cannot be.
        EnvironmentFailure: No network, no access.
    """
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    if cached_checkpoint(repo_id, revision) is not None:
        return cache, 0
    blobs = cache / f"models--{repo_id.replace('/', '--')}" / "blobs"
    files = list_files(open_remote(repo_id, revision)).values()
    wanted = [file for file in files if any(fnmatch.fnmatchcase(file.path, pattern) for pattern in WANTED)]
    distinct = {file.sha256 or file.git_sha1 or file.path: file.nbytes for file in wanted}  # a blob is stored once
    return cache, sum(nbytes for name, nbytes in distinct.items() if not (blobs / name).is_file())


def hub_files() -> Any:
    """Files of the Hub that can be read in parts."""
    from huggingface_hub import HfFileSystem

    return HfFileSystem()


def write_stub(files: Any, repo_id: str, commit: str, name: str, nbytes: int, folder: Path) -> None:
    """A shard's stand-in: a sparse file of its size with nothing but the header.

    Args:
        files: From ``hub_files``.
        repo_id: ``org/name``.
        commit: Its commit.
        name: Of the shard, at the top of the repository.
        nbytes: Its size.
        folder: Gets the file; one of that name is replaced.
    """
    where = f"{repo_id}@{commit}/{name}"

    def read(start: int, end: int) -> bytes:
        return bytes(retrying(lambda: files.cat_file(where, start=start, end=end)))

    header = read(0, min(FIRST_READ_BYTES, nbytes))
    end = 8 + int.from_bytes(header[:8], "little")
    if len(header) < end <= min(nbytes, 8 + MAX_HEADER_BYTES):  # another is no header; its reader says so
        header += read(len(header), end)
    new = folder / f"{name}{PARTIAL}"
    new.unlink(missing_ok=True)
    with new.open("xb") as file:  # an existing name, or what it leads to, is never opened for writing
        file.write(header[: min(end, len(header))])
        file.truncate(nbytes)
    new.replace(folder / name)


def copy_small_files(repo_id: str, commit: str, folder: Path) -> None:
    """Copies of a checkpoint's small files, as a conversion would find them in a snapshot folder; no dot files."""
    from huggingface_hub import snapshot_download

    snapshot = Path(snapshot_download(repo_id, revision=commit, allow_patterns=list(SMALL_FILES)))
    for path in snapshot.rglob("*"):
        name = path.relative_to(snapshot)
        if path.is_file() and not path.name.endswith(".safetensors") and not name.parts[0].startswith("."):
            make_folder(folder, (folder / name).parent)
            write_small(folder / name, path.read_bytes())


def fetch_headers(repo_id: str, revision: str | None, folder: Path) -> None:
    """Bring a checkpoint's small files, and of its shards only the headers.

    A snapshot that is whole in the local cache is used as it is, and the Hub is not asked. Otherwise shards become
    sparse files of their true size with nothing but the header, so that whatever reads headers works.

    Args:
        repo_id: ``org/name``.
        revision: Branch, tag or commit; by default the main branch.
        folder: Existing empty folder to fill.

    Raises:
        UsageError: No such repository or revision.
        EnvironmentFailure: No network, no access, no room.
    """
    from huggingface_hub import snapshot_download

    with errors(at(repo_id, revision), nor_folder=True):
        cached = _cached(repo_id, revision)
        snapshot = cached or Path(
            retrying(lambda: snapshot_download(repo_id, revision=revision, allow_patterns=list(SMALL_FILES)))
        )
        for path in snapshot.iterdir():
            (folder / path.name).symlink_to(path.resolve())
        if cached is not None:
            return
        files = hub_files()
        root = f"{repo_id}@{snapshot.name}"
        listed: Any = retrying(lambda: files.ls(root, detail=True))  # its type is not the same in every version
        sizes: dict[str, int] = {entry["name"].rsplit("/", 1)[1]: entry["size"] for entry in listed}
        shards = [n for n in sizes if n.endswith(".safetensors") and not (folder / n).exists()]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: write_stub(files, repo_id, snapshot.name, n, sizes[n], folder), shards))
