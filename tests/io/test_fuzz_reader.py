"""Whatever is done to a file, the reader answers with a checkpoint or with an error made for people."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybrid_pack.errors import HybridPackError
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.io.config import CONFIG
from hybrid_pack.io.safetensors import read_header
from hybrid_pack.io.shards import INDEX
from hybrid_pack.plan import make_plan
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec, write_checkpoint

FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
SPEC = Spec(hidden=128, intermediate=64, num_experts=2, kept=1, top_k=1, moe_layers=(1,), dense_layers=(0,), vocab=4)

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-4, 300), st.sampled_from([2**31, 2**62, 2**63, 10**400, -(2**63)]),
    st.floats(), st.text(max_size=6), st.sampled_from(["U8", "F32", "F4", "3", "weight", "..", "/", "mxfp4_e8m0k32"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


SPECS = {
    "hybrid": SPEC,
    "gpt-oss": replace(SPEC, family=11),
    "wide": replace(SPEC, family=8, stored=("fp8_block", "bf16", "ct_nvfp4"), mix_matrices=True, mtp_layer=False),
}


@pytest.fixture(scope="module", params=SPECS)
def victim(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fuzz") / "victim"
    write_checkpoint(root, SPECS[request.param])
    return root


@pytest.fixture(scope="module")
def scratch(victim: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fuzz") / "scratch"
    shutil.copytree(victim, root)
    return root


def open_and_plan(root: Path) -> None:
    try:
        plan = make_plan(open_checkpoint(root), Topology())
        assert plan.nbytes >= sum(len(file.header) for file in plan.base)
    except HybridPackError as error:
        assert str(error) and "\n" not in str(error)


def places(document: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value."""
    entries = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in list(entries):
        yield document, key
        yield from places(value)


def edit(document: Any, data: st.DataObject) -> None:
    """Drop, replace, or exchange a few values."""
    for _ in range(data.draw(st.integers(1, 3))):
        found = list(places(document))
        if not found:
            return
        container, key = found[data.draw(st.integers(0, len(found) - 1))]
        kind = data.draw(st.sampled_from(["drop", "replace", "exchange"]))
        if kind == "drop":
            del container[key]
        elif kind == "replace":
            container[key] = data.draw(VALUES)
        else:
            other, other_key = found[data.draw(st.integers(0, len(found) - 1))]
            container[key] = json.loads(json.dumps(other[other_key]))


@FUZZ
@given(data=st.data())
def test_bytes_of_a_header(victim: Path, scratch: Path, data: st.DataObject) -> None:
    shard = next(victim.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, 16) | st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.none() | st.integers(0, end + 10) | st.integers(0, len(content)))
    path = scratch / "flipped.bin"
    path.write_bytes(content if cut is None else content[:cut])
    try:
        header = read_header(path)
    except HybridPackError as error:
        assert str(path) in str(error)
    else:
        assert sum(t.nbytes for t in header.tensors.values()) == header.nbytes - header.data_begin


@FUZZ
@given(content=st.binary(max_size=300), length=st.none() | st.integers(0, 300))
def test_any_bytes(scratch: Path, content: bytes, length: int | None) -> None:
    path = scratch / "any.bin"
    path.write_bytes(content if length is None else length.to_bytes(8, "little") + content)
    try:
        read_header(path)
    except HybridPackError as error:
        assert str(path) in str(error)


@FUZZ
@given(data=st.data())
def test_json_of_a_header(victim: Path, scratch: Path, data: st.DataObject) -> None:
    shard = next(victim.glob("*.safetensors"))
    content = shard.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    edit(header, data)
    text = json.dumps(header).encode()
    (scratch / shard.name).write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    try:
        open_and_plan(scratch)
    finally:
        shutil.copy(shard, scratch / shard.name)


@FUZZ
@given(data=st.data(), name=st.sampled_from([CONFIG, INDEX]))
def test_json_of_config_and_index(victim: Path, scratch: Path, data: st.DataObject, name: str) -> None:
    document = json.loads((victim / name).read_text())
    edit(document, data)
    (scratch / name).write_text(json.dumps(document))
    try:
        open_and_plan(scratch)
    finally:
        shutil.copy(victim / name, scratch / name)
