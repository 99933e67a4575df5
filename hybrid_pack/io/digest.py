"""Digests: BLAKE3, and two small trees over it so that experts can be hashed and checked in any order.

``blake3``        BLAKE3-256 of the bytes.
``blake3-rows``   of a tensor: BLAKE3 of the concatenated 32-byte BLAKE3 digests of its rows ``tensor[i]``, in order.
``blake3-shard``  of a safetensors file: BLAKE3 of its bytes before the data, followed by the 32-byte digests of its
                  tensors (those in the manifest) in the order they lie in the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3

from hybrid_pack.errors import EnvironmentFailure


class Hasher(Protocol):
    """What ``blake3.blake3()`` returns."""

    def update(self, data: Any, /) -> Any:
        """Add bytes."""

    def digest(self) -> bytes:
        """32 bytes."""


def new_hasher() -> Hasher:
    """An empty BLAKE3 hasher, single-threaded: the workers are the threads."""
    hasher: Hasher = blake3()
    return hasher


def blake3_bytes(data: Any) -> bytes:
    """32-byte BLAKE3 digest of a buffer."""
    digest: bytes = blake3(data).digest()
    return digest


def blake3_digest(data: Any) -> str:
    """``blake3:<hex>`` of a buffer."""
    return f"blake3:{blake3_bytes(data).hex()}"


def blake3_file(path: Path) -> str:
    """``blake3:<hex>`` of a file's bytes, which need not fit into memory.

    Raises:
        EnvironmentFailure: It cannot be read.
    """
    hasher = new_hasher()
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                hasher.update(chunk)
    except OSError as error:
        raise EnvironmentFailure("cannot read", where=path, found=error.strerror) from error
    return finish(hasher)


def finish(hasher: Hasher) -> str:
    """``blake3:<hex>`` of what a hasher was given."""
    return f"blake3:{hasher.digest().hex()}"


def rows_digest(row_digests: Iterable[bytes]) -> str:
    """``blake3-rows:<hex>`` from the 32-byte digests of a tensor's rows."""
    return f"blake3-rows:{blake3_bytes(b''.join(row_digests)).hex()}"


def shard_digest(header: bytes, tensor_digests: Iterable[str]) -> str:
    """``blake3-shard:<hex>`` from a file's header bytes and its tensors' digests in file order."""
    hasher = new_hasher()
    hasher.update(header)
    for digest in tensor_digests:
        hasher.update(bytes.fromhex(digest.split(":", 1)[1]))
    return f"blake3-shard:{hasher.digest().hex()}"
