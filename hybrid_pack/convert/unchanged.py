"""Whether the source is still what the plan was made from: a pack is of one source, not of two halves."""

from __future__ import annotations

import json

from hybrid_pack.errors import DataError
from hybrid_pack.io.digest import blake3_digest
from hybrid_pack.plan import Plan


def source_times(plan: Plan) -> str:
    """A digest of sizes and modification times of all source files with tensors."""
    state = [(s.st_size, s.st_mtime_ns) for s in (file.path.stat() for file in plan.source.shards.files)]
    return blake3_digest(json.dumps(state).encode())


def require_same_headers(plan: Plan) -> None:
    """Hold sizes and headers of the source against those the plan was made from.

    Raises:
        DataError: A file was written to since.
    """
    for file in plan.source.shards.files:
        with file.path.open("rb") as stream:
            same = blake3_digest(stream.read(file.data_begin)) == file.digest
        if not same or file.path.stat().st_size != file.nbytes:
            raise DataError("the source changed since it was opened", where=file.path, hint="run again")
