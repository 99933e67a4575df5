"""The committed JSON Schema is the models', and means what they mean to another validator."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from hybrid_pack.convert import convert
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.plan import make_plan
from hybrid_pack.schemas.generate import SCHEMA_FILE, schema_text
from hybrid_pack.schemas.manifest import Manifest
from hybrid_pack.sharding import Topology
from tests.checkpoints import SMALL

SCHEMA = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
DIGEST = "blake3:" + "0" * 64
Document = dict[str, Any]


@pytest.fixture(scope="module")
def manifest(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Document:
    """A real one, with an entry in each of its lists."""
    assert SMALL.mtp_layer
    out = tmp_path_factory.mktemp("pack") / "out"
    convert(make_plan(open_checkpoint(small_checkpoint), Topology(2)), out)
    document: Document = json.loads((out / "hybrid_pack.json").read_bytes())
    document["report"]["experts_requantized"] = [{"layer": 3, "expert": 0, "worst_relative_error": 0.01}]
    return document


def models_accept(document: Document) -> bool:
    try:
        Manifest.model_validate_json(json.dumps(document))
    except ValidationError:
        return False
    return True


def objects(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Path of every object in a document; of alike elements of a list only the first."""
    if isinstance(value, dict):
        yield path
        for key, inner in value.items():
            yield from objects(inner, (*path, key))
    elif isinstance(value, list) and value:
        yield from objects(value[0], (*path, 0))


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        document = document[part]
    return document


def test_committed_file_is_generated_from_the_models() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), "run python -m hybrid_pack.schemas.generate"


def test_it_is_a_schema_of_draft_2020_12() -> None:
    assert SCHEMA["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$id"]
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_a_real_manifest_is_accepted(manifest: Document) -> None:
    assert list(VALIDATOR.iter_errors(manifest)) == []
    assert models_accept(manifest)


def test_unknown_keys_are_refused_in_every_object(manifest: Document) -> None:
    paths = list(objects(manifest))
    assert len({tuple(p for p in path if isinstance(p, str)) for path in paths}) > 15
    for path in paths:
        changed = copy.deepcopy(manifest)
        at(changed, path)["unknown"] = 1
        assert not models_accept(changed), path
        if path != ("layers",):
            assert not VALIDATOR.is_valid(changed), path


@pytest.mark.parametrize("key", ["unknown", "03", "-1", "1000000"])
def test_layers_are_numbers_to_both(key: str, manifest: Document) -> None:
    changed = copy.deepcopy(manifest)
    changed["layers"][key] = changed["layers"]["3"]
    assert not models_accept(changed)
    assert not VALIDATOR.is_valid(changed)


def test_missing_keys_are_refused_in_every_object(manifest: Document) -> None:
    for path in objects(manifest):
        if path in (("layers",), ("shards", 0, "tensors")):
            continue  # their keys are layers and tensors: the rules of io.manifest say which
        for key in at(manifest, path):
            changed = copy.deepcopy(manifest)
            del at(changed, path)[key]
            assert not VALIDATOR.is_valid(changed), (*path, key)
            assert not models_accept(changed), (*path, key)


BAD: dict[str, Callable[[Document], object]] = {
    "another format": lambda m: m.update(format="other"),
    "another version": lambda m: m.update(format_version=2),
    "version as text": lambda m: m.update(format_version="1"),
    "count zero": lambda m: m["topology"].update(tensor_parallel=0),
    "count too large": lambda m: m["geometry"].update(top_k=2**31),
    "negative size": lambda m: m["shards"][0].update(bytes=-1),
    "size too large": lambda m: m["shards"][0].update(bytes=2**63),
    "fraction": lambda m: m["geometry"].update(hidden_size=128.5),
    "true for a number": lambda m: m["geometry"].update(top_k=True),
    "three tiles": lambda m: m["layout"]["tiles"].pop(),
    "five tiles": lambda m: m["layout"]["tiles"].append(64),
    "seven levels": lambda m: m["layout"]["nf3_levels"].pop(),
    "nine levels": lambda m: m["layout"]["nf3_levels"].append(2.0),
    "another weight layout": lambda m: m["layout"].update(tail_weight_layout="nf3"),
    "another scale format": lambda m: m["layers"]["3"].update(kept_scale_format="e4m3_k32"),
    "another dtype": lambda m: m["shards"][0]["tensors"]["kept.w13"].update(dtype="U32"),
    "upper-case digest": lambda m: m.update(self_digest=DIGEST.replace("0", "A")),
    "short digest": lambda m: m.update(self_digest=DIGEST[:-1]),
    "another algorithm": lambda m: m["files"][0].update(digest=DIGEST.replace("blake3", "sha256")),
    "empty path": lambda m: m["files"][0].update(path=""),
    "long path": lambda m: m["files"][0].update(path="a" * 1025),
    "negative error": lambda m: m["report"]["experts_requantized"][0].update(worst_relative_error=-0.1),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values_are_refused_by_both(name: str, manifest: Document) -> None:
    changed = copy.deepcopy(manifest)
    BAD[name](changed)
    assert not models_accept(changed)
    assert not VALIDATOR.is_valid(changed)
