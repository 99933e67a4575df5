"""Base tensors of a pack, from the headers of their files."""

from __future__ import annotations

from pathlib import Path

from hybrid_pack.errors import DataError
from hybrid_pack.io.safetensors import read_header
from hybrid_pack.io.shards import Located
from hybrid_pack.schemas.manifest import Manifest


def pack_base(root: Path, manifest: Manifest) -> tuple[Located, ...]:
    """Every base tensor, in the order of files and offsets; no payload is read.

    Args:
        root: The pack.
        manifest: Its manifest.

    Raises:
        DataError: A base file is not there, or its header is not right.
        EnvironmentFailure: A file cannot be read.
    """
    found = []
    for file in manifest.base.files:
        path = root / file.path
        if not path.exists() and not path.is_symlink():
            raise DataError(
                "a file of base tensors is not there, and its header is needed",
                where=path,
                hint="get it with hybrid-pack pull, without --experts-only",
            )
        found += [Located(path, tensor) for tensor in read_header(path).tensors.values()]
    return tuple(found)
