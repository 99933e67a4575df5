"""Headers held against the official library, and headers written by ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_pack.errors import DataError
from hybrid_pack.io.safetensors import ALIGNMENT, DTYPE_BITS, build_header, nbytes_of, read_header
from tests.checkpoints import first_shard

FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
OFFICIAL = (
    "BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "U16", "I16", "F16", "BF16", "U32", "I32", "F32", "U64", "I64",
    "F64", "F4",
)  # fmt: skip


def official(data: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    return {name: (e["dtype"], list(e["shape"]), bytes(e["data"])) for name, e in safetensors.deserialize(data)}


BYTES = st.sampled_from(b'0123456789{}[]:,". \\eE-+tfn') | st.integers(0, 255)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(lambda sizes: (*sizes, 2))
TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(OFFICIAL), SHAPES),
    max_size=6,
)


@FUZZ
@given(tensors=TENSORS)
def test_built_headers_are_read_by_both(tmp_path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    header, placed = build_header((name, dtype, shape) for name, (dtype, shape) in tensors.items())
    assert len(header) % ALIGNMENT == 0
    payload = bytes(i % 251 for i in range(sum(t.nbytes for t in placed)))
    path = tmp_path / "x.safetensors"
    path.write_bytes(header + payload)
    ours = read_header(path)
    assert ours.data_begin == len(header)
    assert dict(ours.tensors) == {t.name: t for t in placed}
    data = header + payload
    assert official(data) == {t.name: (t.dtype, list(t.shape), data[t.begin : t.end]) for t in placed}


@FUZZ
@given(data=st.data())
def test_what_we_read_the_official_library_reads(small_checkpoint: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Never more lenient: a header with flipped bytes that opens here opens there, with the same tensors."""
    content = bytearray(first_shard(small_checkpoint).read_bytes())
    length = int.from_bytes(content[:8], "little")
    used = len(bytes(content[8 : 8 + length]).rstrip())
    for _ in range(data.draw(st.integers(1, 2))):
        content[data.draw(st.integers(0, 8 + used))] = data.draw(BYTES)
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    try:
        ours = read_header(path)
    except DataError:
        return
    theirs = official(bytes(content))
    assert {n: (t.dtype, list(t.shape), t.nbytes) for n, t in ours.tensors.items()} == {
        n: (dtype, shape, len(raw)) for n, (dtype, shape, raw) in theirs.items()
    }


def test_bits_of_every_dtype(tmp_path: Path) -> None:
    for dtype, bits in DTYPE_BITS.items():
        assert nbytes_of(dtype, (8, 3)) == bits * 3
        header, _ = build_header([("x", dtype, (8, 3))])
        (tmp_path / dtype).write_bytes(header + bytes(bits * 3))
        assert read_header(tmp_path / dtype).tensors["x"].dtype == dtype
    with pytest.raises(ValueError, match=r"F4 \[3\] does not fill whole bytes"):
        nbytes_of("F4", (3,))


def test_golden_header() -> None:
    """Byte for byte: key order, separators, padding with spaces."""
    header, _ = build_header([("b", "F32", (2,)), ("a", "U8", ())])
    text = (
        b'{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"a":{"dtype":"U8","shape":[],"data_offsets":[8,9]}}'
    )
    assert header == (4088).to_bytes(8, "little") + text + b" " * (4088 - len(text))


def test_empty_file_with_a_header(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert read_header(tmp_path / "x").tensors == {}


def test_tensors_come_in_file_order(tmp_path: Path) -> None:
    entries = {
        "z": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "empty": {"dtype": "U8", "shape": [0], "data_offsets": [1, 1]},
        "a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]},
    }
    text = json.dumps(dict(reversed(entries.items()))).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + b"abc")
    assert list(read_header(tmp_path / "x").tensors) == ["z", "empty", "a"]


def test_digest_is_that_of_the_bytes_before_the_data(tmp_path: Path) -> None:
    header, _ = build_header([("a", "U8", (3,))])
    (tmp_path / "x").write_bytes(header + b"abc")
    (tmp_path / "y").write_bytes(header + b"abd")
    (tmp_path / "z").write_bytes(build_header([("b", "U8", (3,))])[0] + b"abc")
    digests = [read_header(tmp_path / name).digest for name in "xyz"]
    assert digests[0] == digests[1] != digests[2]
