"""The saliency file: what is read, and a line for everything that is refused."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.errors import DataError, EnvironmentFailure, HybridPackError
from hybrid_pack.io.safetensors import build_header
from hybrid_pack.tiers.saliency import Saliency, for_layers, read_saliency

GOOD: dict[str, Any] = {"3": [0.5, 1.25, 0.0, 2.0], "4": [1, 2, 3, 4], "10": [4.0, 3.0, 2.0, 1.0]}
LAYERS = {3: (0.5, 1.25, 0.0, 2.0), 4: (1.0, 2.0, 3.0, 4.0), 10: (4.0, 3.0, 2.0, 1.0)}
EXPERTS = 4
CODES = {"F32": "f", "F64": "d", "F16": "e", "I32": "i"}


def put_json(path: Path, document: Any) -> Path:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def packed(dtype: str, values: list[float]) -> bytes:
    if dtype == "BF16":
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    return struct.pack(f"<{len(values)}{CODES[dtype]}", *values)


def put_tensors(path: Path, tensors: dict[str, tuple[str, list[float]]], shape: tuple[int, ...] | None = None) -> Path:
    header, _ = build_header((n, dtype, shape or (len(v),)) for n, (dtype, v) in tensors.items())
    path.write_bytes(header + b"".join(packed(dtype, values) for dtype, values in tensors.values()))
    return path


def planned(saliency: Saliency) -> Any:
    return for_layers(saliency, LAYERS, LAYERS, EXPERTS)


@pytest.mark.parametrize("name", ["s.json", "s.txt", "s"])
@pytest.mark.parametrize(
    ("document", "metric"),
    [
        (GOOD, None),
        ({"saliency": GOOD}, None),
        ({"saliency": GOOD, "metric": "reap", "tokens": 12}, "reap"),
        (dict(reversed(GOOD.items())), None),
    ],
    ids=["bare", "wrapped", "metric", "other_order"],
)
def test_json(tmp_path: Path, name: str, document: Any, metric: str | None) -> None:
    saliency = read_saliency(put_json(tmp_path / name, document))
    assert (saliency.layers, saliency.metric) == (LAYERS, metric)
    assert list(saliency.layers) == sorted(LAYERS)
    assert planned(saliency) == (LAYERS, ())


@pytest.mark.parametrize("dtype", ["F32", "F64", "BF16"])
@pytest.mark.parametrize("prefix", ["", "layer."])
def test_safetensors(tmp_path: Path, dtype: str, prefix: str) -> None:
    tensors = {f"{prefix}{layer}": (dtype, list(values)) for layer, values in LAYERS.items()}
    saliency = read_saliency(put_tensors(tmp_path / "s.safetensors", tensors))
    assert saliency.layers == LAYERS
    assert list(saliency.layers) == sorted(LAYERS)


def test_bf16_is_the_upper_half_of_f32(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    header, _ = build_header([("7", "BF16", (3,))])
    path.write_bytes(header + bytes.fromhex("803f494080ff"))
    with pytest.raises(DataError, match=r"layer 7 expert 2 of the saliency \(expected a finite number.*found -inf"):
        read_saliency(path)
    path.write_bytes(header + bytes.fromhex("803f49400100"))
    assert read_saliency(path).layers[7] == (1.0, 3.140625, 2.0**-133)


def test_written_by_the_official_library(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    path = tmp_path / "s.safetensors"
    save_file({f"layer.{i}": torch.tensor(v, dtype=torch.bfloat16) for i, v in LAYERS.items()}, path)
    assert read_saliency(path).layers == LAYERS


def test_layers_that_are_not_planned(tmp_path: Path) -> None:
    """An MTP layer, say: it has experts, so that it may be there."""
    saliency = read_saliency(put_json(tmp_path / "s.json", {**GOOD, "11": [0, 0, 0, 1]}))
    layers, notes = for_layers(saliency, LAYERS, [*LAYERS, 11], EXPERTS)
    assert layers == LAYERS
    assert notes == ("the saliency of layer 11 is not used: its experts are not chosen here",)


def test_all_zero_is_taken_and_said(tmp_path: Path) -> None:
    saliency = read_saliency(put_json(tmp_path / "s.json", {**GOOD, "4": [0, 0, 0, 0.0]}))
    layers, notes = planned(saliency)
    assert layers[4] == (0.0,) * 4
    assert notes == ("the saliency of layer 4 is all zero: its experts are chosen by their ids alone",)


@dataclass(frozen=True)
class Case:
    """A file made in a folder, and the message it gives."""

    make: Callable[[Path], object]
    message: str
    error: type[HybridPackError] = DataError
    name: str = "s.json"


def j(document: Any, message: str) -> Case:
    return Case(lambda folder: put_json(folder / "s.json", document), message)


def t(tensors: dict[str, tuple[str, list[float]]], message: str, shape: tuple[int, ...] | None = None) -> Case:
    return Case(lambda f: put_tensors(f / "s.safetensors", tensors, shape), message, name="s.safetensors")


def value(text: str, found: str) -> Case:
    """Expert 1 of layer 3."""
    document = json.dumps(GOOD).replace("1.25", text)
    return j(
        document,
        rf"s\.json: layer 3 expert 1 of the saliency \(expected a finite number, 0 or more, at most 1e\+300, {found}",
    )


def key(name: str, found: str) -> Case:
    return j({**GOOD, name: [1, 2, 3, 4]}, rf"a key of the saliency is not a layer number \(expected .*, {found}")


def sparse(name: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        (folder / name).touch()
        os.truncate(folder / name, (256 << 20) + 1)

    return make


REST = {f"{i}": ("F32", list(v)) for i, v in LAYERS.items() if i != 3}
F32 = {**REST, "3": ("F32", [0.5, 1.25, 0.0, 2.0])}

CASES = {
    # the file
    "missing": Case(lambda _: None, r"s\.json: no such file"),
    "missing_tensors": Case(lambda _: None, r"s\.safetensors: no such file", name="s.safetensors"),
    "too_large": Case(sparse("s.json"), r"too large for a JSON document \(expected at most 268435456 bytes, found"),
    "too_large_tensors": Case(
        sparse("s.safetensors"), r"too large for saliency \(expected at most 268435456", name="s.safetensors"
    ),
    "folder": Case(lambda f: (f / "s.json").mkdir(), r"cannot read \(found no regular file", EnvironmentFailure),
    "torch_by_name": Case(
        lambda f: (f / "s.pt").touch(), r"torch\.save or pickle is not read.*docs/planning\.md", name="s.pt"
    ),
    "torch_by_content": Case(
        lambda f: (f / "s.json").write_bytes(b"PK\x03\x04rest"), r"not read.*expected JSON or safetensors"
    ),
    "pickle_by_content": Case(lambda f: (f / "s.json").write_bytes(b"\x80\x02}q"), r"opening one may run code"),
    "truncated": Case(lambda f: (f / "s.json").write_text('{"3": ['), r"s\.json: not valid JSON"),
    "not_safetensors": Case(
        lambda f: put_json(f / "s.safetensors", GOOD), r"the header does not fit the file", name="s.safetensors"
    ),
    # its shape
    "a_list": j([[1.0]], r"not a JSON object \(found list\)"),
    "empty": j({}, r"the saliency is not an object of layers \(found nothing\)"),
    "empty_inside": j({"saliency": {}}, r"not an object of layers \(found nothing\)"),
    "null_inside": j({"saliency": None}, r"not an object of layers \(found nothing\)"),
    "list_inside": j({"saliency": [[1, 2]]}, r"not an object of layers \(found list\)"),
    "metric_number": j({"saliency": GOOD, "metric": 3}, r"metric is not a name \(expected a line of text, found 3"),
    "metric_escape": j({"saliency": GOOD, "metric": "\x1b[2J"}, r"metric is not a name .*found '\\x1b\[2J'"),
    "metric_long": j({"saliency": GOOD, "metric": "x" * 201}, r"metric is not a name"),
    "key_twice": j('{"3": [1], "3": [2]}', r"not valid JSON \(found the key '3' occurs twice"),
    # keys
    "key_word": key("three", "found 'three'"),
    "key_zeros": key("03", "found '03'\\); write \"3\""),
    "key_fraction": key("3.0", "found '3.0'"),
    "key_negative": key("-1", "found '-1'"),
    "key_empty": key("", "found ''"),
    "key_digit_of_another_script": key("٣", "found '٣'"),
    "key_huge": key("1234567", "found '1234567'"),
    "key_tensor_name": key("layer.3", "found 'layer.3'"),
    "metric_beside_bare_layers": key("metric", "found 'metric'"),
    # values
    "nan": value("NaN", "found nan"),
    "infinity": value("Infinity", "found inf"),
    "too_large_value": value("1e301", "found 1e\\+301"),
    "huge_integer": value("1" + "0" * 400, "found 1000"),
    "negative": value("-0.5", "found -0.5\\); saliency is a magnitude"),
    "minus_infinity": value("-Infinity", "found -inf"),
    "text": value('"0.5"', "found '0.5'"),
    "null": value("null", "found None"),
    "true": value("true", "found True"),
    "nested": value("[1]", "found \\[1\\]"),
    "layer_object": j({**GOOD, "4": {"0": 1}}, r"layer 4 of the saliency \(expected a list"),
    "layer_number": j({**GOOD, "4": 1.0}, r"layer 4 of the saliency \(expected a list .*, found 1.0"),
    # against the model
    "missing_layer": j(
        {k: v for k, v in GOOD.items() if k != "4"},
        r"the saliency has no layer 4 \(expected layers 3-4, 10, found 3, 10\)",
    ),
    "extra_layer": j(
        {**GOOD, "2": [1, 2, 3, 4]},
        r"has layer 2, which has no routed experts \(expected layers of 3-4, 10, found 2-4, 10\); layers are counted",
    ),
    "short": j({**GOOD, "4": [1, 2, 3]}, r"layer 4 of the saliency \(expected 4 numbers.*, found 3\); is it of a"),
    "long": j({**GOOD, "4": [1, 2, 3, 4, 5]}, r"layer 4 of the saliency \(expected 4 numbers.*, found 5\)"),
    "no_expert": j({**GOOD, "4": []}, r"layer 4 of the saliency \(expected 4 numbers.*, found 0\)"),
    "pruned_model": j({k: v[:2] for k, v in GOOD.items()}, r"layer 3 of the saliency \(expected 4 .*, found 2\)"),
    # tensors
    "no_tensor": t({}, r"the saliency has no layer \(found no tensor"),
    "tensor_name": t({**F32, "model.layers.3": ("F32", [1.0])}, r"a tensor that is no layer .*found model\.layers\.3"),
    "tensor_zeros": t({**F32, "layer.03": ("F32", [1.0] * 4)}, r"a tensor that is no layer .*found layer\.03"),
    "tensor_twice": t({**F32, "layer.3": ("F32", [1.0] * 4)}, r"layer 3 occurs twice in the saliency"),
    "tensor_dtype": t({**REST, "3": ("I32", [1, 2, 3, 4])}, r"layer 3 .*expected F32, F64, BF16 \[.*found I32 \[4\]"),
    "tensor_f16": t({**REST, "3": ("F16", [1, 2, 3, 4])}, r"layer 3 .*found F16 \[4\]"),
    "tensor_rank": t({"3": ("F32", [1.0] * 4)}, r"layer 3 of the saliency .*found F32 \[2, 2\]", (2, 2)),
    "tensor_scalar": t({"3": ("F32", [1.0])}, r"layer 3 of the saliency .*found F32 \[1, 1\]", (1, 1)),
    "tensor_nan": t({**REST, "3": ("F64", [1.0, float("nan"), 1, 1])}, r"layer 3 expert 1 of the saliency.*found nan"),
    "tensor_negative": t({**REST, "3": ("BF16", [1.0, 1, 1, -2.0])}, r"layer 3 expert 3 .*found -2.0\); saliency is"),
    "tensor_short": t({**REST, "3": ("F32", [1.0, 2.0])}, r"layer 3 of the saliency \(expected 4 numbers.*found 2"),
    "tensor_missing": t(REST, r"the saliency has no layer 3"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(tmp_path: Path, case: str) -> None:
    made = CASES[case]
    made.make(tmp_path)
    with pytest.raises(HybridPackError, match=made.message) as caught:
        planned(read_saliency(tmp_path / made.name))
    assert type(caught.value) is made.error
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("tensors", [GOOD, F32], ids=["json", "safetensors"])
def test_every_case_breaks_a_good_file(tmp_path: Path, tensors: Any) -> None:
    good = put_json(tmp_path / "s.json", GOOD) if tensors is GOOD else put_tensors(tmp_path / "s.safetensors", F32)
    assert planned(read_saliency(good)) == (LAYERS, ())
