"""Broken files: one line for each rule of the safetensors reader and of the index."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybrid_pack.errors import EnvironmentFailure
from hybrid_pack.io.shards import INDEX
from tests.checkpoints import edit_header, edit_index, first_shard
from tests.io.mutation import Case

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4294967296\n"
EMBED = "model.embed_tokens.weight"
"""First tensor of the first shard, BF16 [16, 128], 4096 bytes."""

FILE = r"model-00001-of-00006\.safetensors: "
TENSOR = rf"{FILE}tensor model\.embed_tokens\.weight: "


def shard(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    """Rewrite the first shard."""
    return lambda root: first_shard(root).write_bytes(change(first_shard(root).read_bytes()))


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Rewrite the header of the first shard."""
    return lambda root: edit_header(first_shard(root), change)


def raw_header(text: bytes) -> Callable[[Path], object]:
    """Put bytes in the place of the header of the first shard."""

    def change(data: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :]

    return shard(change)


def entry(**values: Any) -> Callable[[Path], object]:
    """Change the entry of the first tensor."""
    return header(lambda h: h[EMBED].update(values))


def index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Change the index."""

    def apply(root: Path) -> None:
        with edit_index(root) as document:
            change(document)

    return apply


def file_name(value: Any) -> Callable[[Path], object]:
    """Point the index at another file."""
    return index(lambda d: d["weight_map"].update({EMBED: value}))


def replace_by_folder(root: Path) -> None:
    first_shard(root).unlink()
    (root / "model-00001-of-00006.safetensors").mkdir()


def replace_by_pipe(root: Path) -> None:
    path = first_shard(root)
    path.unlink()
    os.mkfifo(path)


def link_to_itself(root: Path) -> None:
    path = first_shard(root)
    path.unlink()
    path.symlink_to(path.name)


def dangling(name: str) -> Callable[[Path], object]:
    """Replace a file by a link to nothing, as a Hugging Face cache that lost a blob has."""

    def change(root: Path) -> None:
        (root / name).unlink()
        (root / name).symlink_to("../../blobs/0123")

    return change


def shift(header: dict[str, Any], by: int) -> None:
    """Move every tensor but the first."""
    for name, values in header.items():
        if name not in ("__metadata__", EMBED):
            values["data_offsets"] = [offset + by for offset in values["data_offsets"]]


def twice(header: dict[str, Any]) -> str:
    text = json.dumps(header)
    return text[:-1] + f', "{EMBED}": {json.dumps(header[EMBED])}}}'


HEADER_CASES = (
    Case("git-lfs pointer", lambda r: first_shard(r).write_text(LFS),
         rf"{FILE}this is a git-lfs pointer.*git lfs pull"),
    Case("empty", shard(lambda d: b""), rf"{FILE}too short .*found 0"),
    Case("seven bytes", shard(lambda d: d[:7]), rf"{FILE}too short .*found 7"),
    Case("cut inside the header", shard(lambda d: d[:100]),
         rf"{FILE}the header does not fit the file.*at most 92 bytes"),
    Case("web page", shard(lambda d: b"<!doctype html><html>Not found</html>"), rf"{FILE}the header does not fit"),
    Case("header above 100 MB", shard(lambda d: (10**8 + 1).to_bytes(8, "little") + d[8:]),
         rf"{FILE}the header does not fit"),
    Case("truncated by a byte", shard(lambda d: d[:-1]),
         rf"{FILE}the file is truncated \(expected \d+ bytes, found \d+\)"),
    Case("truncated to its header", shard(lambda d: d[: 8 + int.from_bytes(d[:8], "little")]),
         rf"{FILE}the file is truncated"),
    Case("a byte too many", shard(lambda d: d + b"\0"), rf"{FILE}bytes after the last tensor"),
    Case("header of length 0", raw_header(b""), rf"{FILE}not valid JSON"),
    Case("header is no JSON", raw_header(b"{'a': 1}"), rf"{FILE}not valid JSON"),
    Case("header is no UTF-8", raw_header(b'{"\xff": 1}'), rf"{FILE}not valid JSON .*utf-8"),
    Case("header with a byte order mark", raw_header(b"\xef\xbb\xbf{}"), rf"{FILE}not valid JSON"),
    Case("header with half a surrogate pair", raw_header(b'{"\\ud800": 1}'), rf"{FILE}not valid JSON .*surrogates"),
    Case("header nested too deeply", raw_header(b"[" * 200_000), rf"{FILE}not valid JSON"),
    Case("header is a list", raw_header(b"[]"), rf"{FILE}the header is not a JSON object"),
    Case("a tensor twice", header(twice), rf"{FILE}not valid JSON .*model\.embed_tokens\.weight' occurs twice"),
    Case("__metadata__ twice", raw_header(b'{"__metadata__":{},"__metadata__":{}}'), "'__metadata__' occurs twice"),
    Case("entry is a number", header(lambda h: h.update({EMBED: 3})), rf"{TENSOR}its header entry is malformed"),
    Case("entry without a shape", header(lambda h: h[EMBED].pop("shape")), rf"{TENSOR}its header entry is malformed"),
    Case("entry with a stranger", entry(strides=[1, 16]), rf"{TENSOR}its header entry is malformed"),
    Case("unknown dtype", entry(dtype="F8_E5M3"), rf"{TENSOR}unknown dtype \(found F8_E5M3\)"),
    Case("dtype in small letters", entry(dtype="bf16"), rf"{TENSOR}unknown dtype"),
    Case("dtype is a list", entry(dtype=["BF16"]), rf"{TENSOR}unknown dtype"),
    Case("negative size", entry(shape=[-16, -128]), rf"{TENSOR}shape is not a list of sizes"),
    Case("size is a fraction", entry(shape=[16.0, 128]), rf"{TENSOR}shape is not a list of sizes"),
    Case("size is a truth", entry(shape=[True, 2048]), rf"{TENSOR}shape is not a list of sizes"),
    Case("size of 64 bits", entry(shape=[2**63, 0]), rf"{TENSOR}shape is not a list of sizes"),
    Case("shape is a number", entry(shape=2048), rf"{TENSOR}shape is not a list of sizes"),
    Case("shape with 65 dimensions", entry(shape=[1] * 65), rf"{TENSOR}shape is not a list of sizes"),
    Case("sizes that overflow", entry(shape=[2**62, 2**62]),
         rf"{TENSOR}BF16 \[\d+, \d+\] does not match its data_offsets"),
    Case("offsets are text", entry(data_offsets=["0", "4096"]), rf"{TENSOR}data_offsets is not a list of sizes"),
    Case("three offsets", entry(data_offsets=[0, 4096, 4096]), rf"{TENSOR}data_offsets is not \[begin, end\]"),
    Case("offsets reversed", entry(data_offsets=[4096, 0]), rf"{TENSOR}data_offsets is not \[begin, end\]"),
    Case("half a byte", entry(dtype="F4", shape=[3]), rf"{TENSOR}F4 \[3\] does not fill whole bytes"),
    Case("size is not that of the shape", entry(shape=[16, 127]), rf"{TENSOR}.*\(expected 4064 bytes, found 4096\)"),
    Case("a hole", header(lambda h: shift(h, 64)),
         rf"{FILE}tensor .* leaves a hole or overlaps another \(expected offset 4096, found 4160\)"),
    Case("an overlap", header(lambda h: shift(h, -64)), rf"{FILE}tensor .* leaves a hole or overlaps another"),
    Case("a hole at the start", header(lambda h: h.pop(EMBED)),
         rf"{FILE}tensor .* leaves a hole .*\(expected offset 0, found 4096\)"),
)  # fmt: skip

INDEX_CASES = (
    Case("a shard is missing", lambda r: first_shard(r).unlink(), rf"{FILE}no such file"),
    Case("a shard links to nothing", dangling("model-00001-of-00006.safetensors"),
         rf"{FILE}a symbolic link to .*cache lost its blob"),
    Case("a shard is a folder", replace_by_folder,
         rf"{FILE}cannot read \(found no regular file: d", EnvironmentFailure),
    Case("a shard links to itself", link_to_itself, rf"{FILE}cannot read \(found Too many levels", EnvironmentFailure),
    Case("a shard is a pipe", replace_by_pipe,
         rf"{FILE}cannot read \(found no regular file: p", EnvironmentFailure),
    Case("no index", lambda r: (r / INDEX).unlink(),
         r"small: no model\.safetensors\.index\.json .*found 6 safetensors files"),
    Case("no weights", lambda r: [p.unlink() for p in r.glob("model*")],
         r"small: no model\.safetensors\.index\.json .*found no safetensors file"),
    Case("index links to nothing", dangling(INDEX), r"index\.json: a symbolic link to a file that is not there"),
    Case("index is no JSON", lambda r: (r / INDEX).write_text("{"), r"index\.json: not valid JSON"),
    Case("index is a list", lambda r: (r / INDEX).write_text("[]"), r"index\.json: not a JSON object \(found list\)"),
    Case("index is a git-lfs pointer", lambda r: (r / INDEX).write_text(LFS), r"index\.json: not valid JSON"),
    Case("index without a weight_map", index(lambda d: d.pop("weight_map")), r"index\.json: no weight_map"),
    Case("weight_map is empty", index(lambda d: d["weight_map"].clear()), r"index\.json: no weight_map"),
    Case("weight_map is a list", index(lambda d: d.update(weight_map=["a"])), r"index\.json: no weight_map"),
    Case("weight_map of a number", file_name(3),
         r"index\.json: a file name that may lead outside the folder \(found 3\)"),
    Case("file above the folder", file_name("../x.safetensors"), r"outside the folder \(found '\.\./x\.safetensors'\)"),
    Case("file above, inside", file_name("a/../../x"), r"outside the folder \(found 'a/\.\./\.\./x'\)"),
    Case("absolute file", file_name("/etc/passwd"), r"outside the folder \(found '/etc/passwd'\)"),
    Case("file of another drive", file_name("C:x.safetensors"), r"outside the folder \(found 'C:x"),
    Case("file with backslashes", file_name("..\\x"), r"outside the folder \(found"),
    Case("file with a NUL", file_name("a\0b"), r"outside the folder \(found 'a\\x00b'\)"),
    Case("file without a name", file_name(""), r"outside the folder \(found ''\)"),
    Case("file spelt in two ways", file_name("./model-00001-of-00006.safetensors"), r"outside the folder"),
    Case("index lists what no shard has",
         index(lambda d: d["weight_map"].update(ghost="model-00001-of-00006.safetensors")),
         rf"{FILE}the index lists tensor ghost, the shard has it not; download"),
    Case("index is stale",
         file_name("model-00002-of-00006.safetensors"),
         r"model-00002-of-00006\.safetensors: the index lists tensor model\.embed_.*00001.* has it: the index is"),
)  # fmt: skip
