"""Writing the bit map file that ``convert --bit-map`` takes."""

from __future__ import annotations

import json
from pathlib import Path

from hybrid_pack.errors import UsageError, writing
from hybrid_pack.io.bitmap import BitMap
from hybrid_pack.io.output import write_small


def require_free(out: Path, overwrite: bool, source: Path, inputs: tuple[Path, ...] = ()) -> None:
    """Refuse an output that is in the way, before any work.

    Args:
        out: File to write.
        overwrite: Whether one that is there is replaced.
        source: The checkpoint's folder, which nothing is written into.
        inputs: Files that are read.

    Raises:
        UsageError: It lies in the source, is an input, no regular file, or is there and not to be replaced.
    """
    target = out.resolve()
    if source.resolve() in target.parents:
        raise UsageError("the output would lie in the source", where=out, hint="write it somewhere else")
    if target in (path.resolve() for path in inputs):
        raise UsageError("the output is also the input", where=out, hint="write it somewhere else")
    if out.is_symlink() or (out.exists() and not out.is_file()):
        raise UsageError("in the way of the output", where=out, expected="a file or nothing", hint="remove it")
    if out.exists() and not overwrite:
        raise UsageError("already there", where=out, hint="give another --out, or --overwrite")
    if not target.parent.is_dir():
        raise UsageError("the folder of the output is not there", where=out.parent, hint="make it first")


def map_bytes(bit_map: BitMap) -> bytes:
    """A JSON object of the layers, one on a line."""
    lines = (f"{json.dumps(str(layer))}: {json.dumps(list(bits))}" for layer, bits in bit_map.items())
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def write_map(out: Path, bit_map: BitMap) -> None:
    """Write it atomically and durably.

    Raises:
        EnvironmentFailure: It cannot be written.
    """
    with writing(out):
        write_small(out, map_bytes(bit_map))
