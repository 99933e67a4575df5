"""Statistics of what experts receive, by layer, expert and matrix: found, checked and read the same way for all kinds.

A matrix is ``gate_up`` (gate and up have the same inputs) or ``down``. A tensor may stand for one expert or, with the
name ``shared`` in the place of the expert, for all experts of its layer that have none of their own. Everything that
headers can tell is checked before anything is read, and all values before they are used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hybrid_pack.errors import DataError, EnvironmentFailure
from hybrid_pack.io.digest import Hasher, blake3_digest, finish, new_hasher
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.safetensors import TensorHeader
from hybrid_pack.io.shards import Located

F32 = NDArray[np.float32]
SHARED = "shared"
MATRICES = ("gate_up", "down")
NUMBER = "(0|[1-9][0-9]{0,5})"
"""Pattern of a layer or expert in a name: decimal, no leading zeros, so that each has one name."""

Key = tuple[int, int | None, str]
"""(layer, expert or None for shared, matrix)."""


@dataclass(frozen=True)
class Wanted:
    """What is going to be read.

    Attributes:
        experts: By layer, global ids.
        channels: Input channels K by matrix, of the whole model: ``gate_up`` hidden size, ``down`` intermediate size. A
            matrix that is not in it is not wanted.
    """

    experts: Mapping[int, Collection[int]]
    channels: Mapping[str, int]


@dataclass(frozen=True)
class Kind:
    """A kind of statistics.

    Attributes:
        noun: For messages.
        rank: Dimensions of a tensor, each of K.
        name: Its name in the file, from layer, expert (or ``shared``) and matrix.
        problem: What is wrong with the values of a tensor and what to do about it, or None; called with finite values.
    """

    noun: str
    rank: int
    name: Callable[[int, int | str, str], str]
    problem: Callable[[F32], tuple[str, str] | None]


UNSEEN = "collect it again, over text that reaches every expert"
"""What to do about statistics that are all zero."""

CHUNK_BYTES = 4 << 20


def _state(path: Path) -> tuple[int, int]:
    """Size and time of modification.

    Raises:
        EnvironmentFailure: It is gone.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise EnvironmentFailure("cannot read", where=path, found=error.strerror) from error
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class Scanned:
    """What one reading of everything tells.

    Attributes:
        files: Digest of each file of ``Statistics.paths``.
        layers: By layer, a digest of the names and values of the tensors its wanted experts use: equal where a change
            of the files does not concern the layer.
    """

    files: tuple[str, ...]
    layers: Mapping[int, str]


class Statistics:
    """Tensors of one kind for every wanted expert; a context manager that keeps its files open. Safe for many threads.

    Args:
        kind: What they are.
        where: File or folder, for messages.
        tensors: All there are.
        wanted: All that must be there.

    Raises:
        DataError: An expert without a tensor of its own or a shared one, a wrong dtype or shape.
    """

    def __init__(self, kind: Kind, where: Path, tensors: Mapping[Key, Located], wanted: Wanted) -> None:
        self._kind, self._where = kind, where
        self._tensors = tensors
        self._wanted = wanted
        self._reader = TensorReader()
        for matrix, channels in wanted.channels.items():
            for layer, experts in wanted.experts.items():
                for tensor in {self._find(layer, expert, matrix) for expert in experts}:
                    self._check_header(tensor, channels)
        self._states = {path: _state(path) for path in self.paths}

    def _find(self, layer: int, expert: int, matrix: str) -> Located:
        tensor = self._tensors.get((layer, expert, matrix)) or self._tensors.get((layer, None, matrix))
        if tensor is None:
            others = [k[1] for k in self._tensors if k[0] == layer and k[2] == matrix]
            own, shared = (self._kind.name(layer, e, matrix) for e in (expert, SHARED))
            raise DataError(
                f"no {self._kind.noun} for layer {layer} expert {expert} {matrix}",
                where=self._where,
                expected=f"a tensor {own} or {shared}",
                found=f"those of {len(others)} other experts" if others else "none for this matrix of this layer",
            )
        return tensor

    def _check_header(self, tensor: Located, channels: int) -> None:
        header, shape = tensor.header, (channels,) * self._kind.rank
        if header.dtype != "F32" or header.shape != shape:
            raise DataError(
                f"{self._kind.noun} of the wrong dtype or shape",
                where=tensor,
                expected=f"F32 {list(shape)}",
                found=f"{header.dtype} {list(header.shape)}",
            )

    @property
    def paths(self) -> tuple[Path, ...]:
        """Files with a wanted tensor, ascending."""
        keys = ((layer, e, m) for m in self._wanted.channels for layer, es in self._wanted.experts.items() for e in es)
        return tuple(sorted({self._find(*key).path for key in keys}))

    def located(self, layer: int, expert: int, matrix: str) -> Located:
        """The tensor an expert uses: equal for all experts that share it, so that work on it can be done once."""
        return self._find(layer, expert, matrix)

    def read(self, layer: int, expert: int, matrix: str) -> F32:
        """Values of a wanted expert, its own or the shared ones.

        Returns:
            f32 [K], or [K, K] of Hessians; the caller's to keep.

        Raises:
            DataError: Values that are not finite, negative where they cannot be, or all zero; the file became shorter.
            EnvironmentFailure: The system could not read.
        """
        return self._read(self._find(layer, expert, matrix))

    def _read(self, tensor: Located) -> F32:
        values = np.empty(tensor.header.shape, np.dtype("<f4"))
        self._reader.read(tensor, values.reshape(-1).view(np.uint8))
        finite = np.isfinite(values)
        if not finite.all():
            at = tuple(int(i) for i in np.unravel_index(int(np.argmin(finite)), values.shape))
            hint = "collect it again, in float32 or better"
            raise DataError(f"a value is not finite at {list(at)}", where=tensor, found=float(values[at]), hint=hint)
        problem = self._kind.problem(values)
        if problem is not None:
            raise DataError(problem[0], where=tensor, hint=problem[1])
        return values

    def _used(self, layer: int) -> set[Located]:
        """Tensors that a layer uses; none where nothing is wanted of it."""
        experts = self._wanted.experts.get(layer, ())
        return {self._find(layer, expert, matrix) for matrix in self._wanted.channels for expert in experts}

    def scan(self) -> Scanned:
        """Read every file once, in order, to find out before the work what ``read`` would refuse, and for its digest.

        One tensor at a time is in memory.

        Raises:
            DataError: As ``read``.
            EnvironmentFailure: Likewise.
        """
        used = {layer: self._used(layer) for layer in self._wanted.experts}
        wanted: dict[Path, list[Located]] = {}
        for tensor in set().union(*used.values()):
            wanted.setdefault(tensor.path, []).append(tensor)
        digests: dict[Located, str] = {}
        files = tuple(self._scan_file(path, wanted[path], digests) for path in self.paths)
        layers = {
            layer: blake3_digest(json.dumps(sorted((t.header.name, digests[t]) for t in tensors)).encode())
            for layer, tensors in used.items()
        }
        return Scanned(files, layers)

    def _scan_file(self, path: Path, tensors: list[Located], digests: dict[Located, str]) -> str:
        """Check these tensors of a file and note their digests; the digest of the whole file."""
        hasher, done = new_hasher(), 0
        for tensor in sorted(tensors, key=lambda t: t.header.begin):
            self._skip(path, done, tensor.header.begin, hasher)
            values = self._read(tensor)
            stored = values.reshape(-1).view(np.uint8)
            hasher.update(stored)
            digests[tensor] = blake3_digest(stored)
            done = tensor.header.end
        self._skip(path, done, self._states[path][0], hasher)
        return finish(hasher)

    def _skip(self, path: Path, begin: int, end: int, hasher: Hasher) -> None:
        """Hash bytes of a file that are no wanted tensor's."""
        for first in range(begin, end, CHUNK_BYTES):
            piece = np.empty(min(CHUNK_BYTES, end - first), np.uint8)
            self._reader.read(Located(path, TensorHeader("bytes", "U8", piece.shape, first, first + len(piece))), piece)
            hasher.update(piece)

    def require_unchanged(self, layer: int) -> None:
        """Hold the files a layer uses against what they were when they were opened: before they were scanned.

        Raises:
            DataError: One was written to since: nothing may be recorded that was made from it.
            EnvironmentFailure: It is gone.
        """
        for path in sorted({tensor.path for tensor in self._used(layer)}):
            if _state(path) != self._states[path]:
                raise DataError(
                    f"the {self._kind.noun} file changed while it was in use",
                    where=path,
                    hint="run again with --resume once nothing writes to it",
                )

    @property
    def notes(self) -> tuple[str, ...]:
        """How many experts use a shared tensor, one line for each matrix where any does."""
        lines = []
        for matrix in self._wanted.channels:
            keys = [(layer, e, matrix) for layer, experts in self._wanted.experts.items() for e in experts]
            shared = sum(key not in self._tensors for key in keys)
            if shared:
                lines.append(
                    f"{shared} of {len(keys)} experts use the {self._kind.noun} their layer shares for {matrix}"
                )
        return tuple(lines)

    def close(self) -> None:
        """Close all files."""
        self._reader.close()

    def __enter__(self) -> Statistics:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
