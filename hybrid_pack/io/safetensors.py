"""Headers of safetensors files, read strictly and written deterministically.

Payloads are raw bytes at offsets: this module knows F8_E8M0, F4 and every other dtype by its size alone. The official
library is not used for it because it opens tensors through a framework (its numpy side has no F8, F4 or BF16) and its
writer neither aligns tensors nor writes a file in pieces.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_pack.errors import DataError, EnvironmentFailure
from hybrid_pack.io.digest import blake3_digest

DTYPE_BITS: Mapping[str, int] = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of one element of every dtype of the safetensors format."""

MAX_HEADER_BYTES = 100_000_000
ALIGNMENT = 4096
MAX_RANK = 64
LFS_PREFIX = b"version https://git-lfs"
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class TensorHeader:
    """Where a tensor lies: ``begin`` and ``end`` are absolute byte offsets in its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.end - self.begin


@dataclass(frozen=True)
class FileHeader:
    """The header of one safetensors file.

    Attributes:
        path: The file.
        nbytes: Size of the whole file.
        data_begin: Absolute offset of the first payload byte.
        tensors: By name, in offset order.
        digest: Digest of the bytes before ``data_begin``.
    """

    path: Path
    nbytes: int
    data_begin: int
    tensors: Mapping[str, TensorHeader]
    digest: str


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} occurs twice")
        result[key] = value
    return result


def parse_json(text: bytes, where: object) -> Any:
    """JSON with duplicate keys refused.

    Raises:
        DataError: Not UTF-8, not JSON, half a surrogate pair, a key twice, or nested too deeply.
    """
    try:
        document = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        if _SURROGATE.search(text):
            json.dumps(document, ensure_ascii=False).encode("utf-8")
        return document
    except (ValueError, RecursionError) as error:
        raise DataError("not valid JSON", where=where, found=error) from None


def nbytes_of(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor.

    Raises:
        ValueError: The elements do not fill whole bytes.
    """
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8:
        raise ValueError(f"{dtype} {list(shape)} does not fill whole bytes")
    return bits // 8


def _tensor(name: str, entry: Any, data_begin: int, where: object) -> TensorHeader:
    def bad(problem: str, **details: object) -> DataError:
        return DataError(f"tensor {name}: {problem}", where=where, **details)  # type: ignore[arg-type]

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise bad("its header entry is malformed", expected="dtype, shape and data_offsets", found=entry)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise bad("unknown dtype", found=dtype)
    for key, numbers in (("shape", shape), ("data_offsets", offsets)):
        if (
            not isinstance(numbers, list)
            or len(numbers) > MAX_RANK
            or any(type(n) is not int or not 0 <= n < 2**63 for n in numbers)
        ):
            raise bad(f"{key} is not a list of sizes", found=numbers)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise bad("data_offsets is not [begin, end]", found=offsets)
    try:
        size = nbytes_of(dtype, shape)
    except ValueError as error:
        raise bad(str(error)) from None
    if offsets[1] - offsets[0] != size:
        raise bad(
            f"{dtype} {shape} does not match its data_offsets", expected=f"{size} bytes", found=offsets[1] - offsets[0]
        )
    return TensorHeader(name, dtype, tuple(shape), data_begin + offsets[0], data_begin + offsets[1])


def _prefix(path: Path) -> tuple[int, bytes]:
    """(file size, bytes of the header with its 8-byte length)."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            found = f"no regular file: {stat.filemode(path.stat().st_mode)}"
            raise EnvironmentFailure("cannot read", where=path, found=found)
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            head = file.read(8)
            if size < 200 and head == LFS_PREFIX[:8] and (head + file.read()).startswith(LFS_PREFIX):
                raise DataError(
                    "this is a git-lfs pointer, not the file itself",
                    where=path,
                    found=f"{size} bytes",
                    hint="fetch the real file with `git lfs pull`, or download the repository with huggingface_hub",
                )
            if len(head) < 8:
                raise DataError("too short for a safetensors file", where=path, expected="8 bytes or more", found=size)
            length = int.from_bytes(head, "little")
            if length > MAX_HEADER_BYTES or 8 + length > size:
                raise DataError(
                    "the header does not fit the file; not a safetensors file, or truncated",
                    where=path,
                    expected=f"a header of at most {min(size - 8, MAX_HEADER_BYTES)} bytes",
                    found=length,
                    hint="download the file again",
                )
            return size, head + file.read(length)
    except FileNotFoundError:
        if path.is_symlink():
            raise DataError(
                "a symbolic link to a file that is not there", where=path, found=path.readlink(),
                hint="the Hugging Face cache lost its blob: download it again",
            ) from None  # fmt: skip
        raise DataError("no such file", where=path) from None
    except OSError as error:
        raise EnvironmentFailure("cannot read", where=path, found=error.strerror) from error


def read_header(path: Path) -> FileHeader:
    """Read and check the header of a safetensors file; no payload is read.

    Raises:
        DataError: Not a safetensors file, truncated, trailing bytes, holes, overlaps, wrong sizes, a git-lfs pointer.
        EnvironmentFailure: The file cannot be read.
    """
    size, prefix = _prefix(path)
    entries = parse_json(prefix[8:], path)
    if not isinstance(entries, dict):
        raise DataError("the header is not a JSON object", where=path)
    entries.pop("__metadata__", None)
    data_begin = len(prefix)
    tensors = sorted(
        (_tensor(n, e, data_begin, path) for n, e in entries.items()), key=lambda t: (t.begin, t.end, t.name)
    )
    at = data_begin
    for tensor in tensors:
        if tensor.begin != at:
            raise DataError(
                f"tensor {tensor.name} leaves a hole or overlaps another",
                where=path,
                expected=f"offset {at - data_begin}",
                found=tensor.begin - data_begin,
            )
        at = tensor.end
    if at != size:
        problem = "the file is truncated" if at > size else "bytes after the last tensor"
        raise DataError(problem, where=path, expected=f"{at} bytes", found=size, hint="download the file again")
    return FileHeader(path, size, data_begin, {t.name: t for t in tensors}, blake3_digest(prefix))


def build_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[TensorHeader]]:
    """Header bytes of a new file, padded with spaces so that the data starts on a 4096-byte boundary.

    Args:
        tensors: (name, dtype, shape) in file order; the first payload byte of each follows the last of the one before.

    Returns:
        (bytes before the data, the tensors with absolute offsets).
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    placed: list[tuple[str, str, tuple[int, ...], int, int]] = []
    at = 0
    for name, dtype, shape in tensors:
        end = at + nbytes_of(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        placed.append((name, dtype, shape, at, end))
        at = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    data_begin = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT
    header = (data_begin - 8).to_bytes(8, "little") + text + b" " * (data_begin - 8 - len(text))
    return header, [TensorHeader(n, d, s, data_begin + b, data_begin + e) for n, d, s, b, e in placed]
