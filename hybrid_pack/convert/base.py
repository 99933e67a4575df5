"""Base tensors: copied byte for byte into new files, in large aligned pieces, hashed on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hybrid_pack.convert.journal import Journal
from hybrid_pack.io.digest import finish, new_hasher
from hybrid_pack.io.output import OutputFile, aligned_buffer
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.plan import BasePlan

CHUNK_BYTES = 8 << 20


def copy_base(
    root: Path,
    plan: BasePlan,
    reader: TensorReader,
    journal: Journal,
    advance: Callable[[int], None],
    stop: Callable[[], bool],
) -> None:
    """Write one file of base tensors.

    Args:
        root: The pack.
        plan: The file.
        reader: Of the source.
        journal: Gets its record.
        advance: Told the source bytes read.
        stop: Asked between pieces; true ends the copy and removes the unfinished file.
    """
    file = OutputFile(root / plan.path, plan.nbytes)
    try:
        buffer = aligned_buffer(min(CHUNK_BYTES, plan.nbytes))
        hasher = new_hasher()
        offset = fill = 0

        def flush() -> None:
            nonlocal offset, fill
            piece = buffer[:fill]
            hasher.update(piece)
            whole = fill // 4096 * 4096
            for begin, end in ((0, whole), (whole, fill)):
                if end > begin:
                    file.write(offset + begin, piece[begin:end])
            offset, fill = offset + fill, 0

        header = memoryview(plan.header)
        while header.nbytes:
            part = header[: buffer.nbytes]
            buffer[: part.nbytes] = part
            fill, header = part.nbytes, header[part.nbytes :]
            if header.nbytes or fill == buffer.nbytes:
                flush()
        for tensor in plan.tensors:
            done = 0
            while done < tensor.header.nbytes:
                size = min(buffer.nbytes - fill, tensor.header.nbytes - done)
                reader.read(tensor, buffer[fill : fill + size], done)
                fill, done = fill + size, done + size
                advance(size)
                if fill == buffer.nbytes:
                    flush()
                    if stop():
                        file.discard()
                        return
        flush()
        file.sync()
        journal.add({"path": plan.path, "bytes": plan.nbytes, "digest": finish(hasher)})
    except BaseException:
        file.discard()
        raise
    file.publish()
