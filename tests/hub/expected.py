"""What a push and a pull must bring."""

from __future__ import annotations

from pathlib import Path

from hybrid_pack.io.manifest import MANIFEST, decode_manifest, read_manifest
from tests.hub.conftest import REPO, tree
from tests.hub.server import Hub

ATTRIBUTES = ".gitattributes"


def on_hub(hub: Hub, revision: str = "main") -> dict[str, bytes]:
    files = hub.files(REPO, revision)
    files.pop(ATTRIBUTES, None)
    return files


def check_history(hub: Hub) -> None:
    """Whoever takes any commit gets a whole pack, or a repository without a manifest."""
    for files in hub.repos[REPO].commits.values():
        if MANIFEST in files:
            sizes = decode_manifest(files[MANIFEST].data, "a commit").sizes()
            assert {path: len(files[path].data) for path in sizes if path in files} == sizes


RANK = 2


def of_rank(pack: Path, *ranks: int, base: bool = True) -> dict[str, bytes]:
    """What a pull must bring."""
    manifest = read_manifest(pack)
    wanted = {MANIFEST, *(f.path for f in manifest.files)} | {s.path for s in manifest.shards if s.rank in ranks}
    wanted |= {f.path for f in manifest.base.files} if base else set()
    return {path: data for path, data in tree(pack).items() if path in wanted}


def a_shard(pack: Path, rank: int = RANK) -> str:
    return next(s.path for s in read_manifest(pack).shards if s.rank == rank)
