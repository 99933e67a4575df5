"""Rows read from a source: every format and every way to lay out all experts of a layer, against plain indexing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hybrid_pack.errors import DataError
from hybrid_pack.io.checkpoint import Checkpoint, Matrix, open_checkpoint
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.weights import decode_stored, native_rows, pick_rows, read_matrix, second_scale, stored_rows
from hybrid_pack.synthetic import Spec, read_tensor, write_checkpoint
from tests.checkpoints import Editor, Stored, edit_tensors
from tests.reference import source as reference
from tests.reference.stacks import Layout, gate_rows, untwist, up_rows

SPEC = Spec(
    hidden=192, intermediate=160, num_experts=3, kept=1, moe_layers=(1,), dense_layers=(0,), mtp_layer=False, vocab=4
)  # fmt: skip
KINDS = (
    "nvfp4", "mxfp4", "ct_nvfp4", "ct_mxfp4", "mxfp8", "mxfp8_inv", "fp8_block", "fp8_row", "fp8_tensor", "bf16", "f16",
    "f32", "nf3",
)  # fmt: skip
WHERE = "layer 1 expert 0"


def whole(root: Path, name: str) -> NDArray[np.uint8]:
    """All of a tensor as bytes, the last dimension its elements' bytes; scalars as [1, bytes]."""
    _, shape, data = read_tensor(root, name)
    flat = np.frombuffer(data, np.uint8)
    size = len(data) // max(math.prod(shape), 1)
    return flat.reshape(*(shape or (1,)), size)


def slow(kind: str, codes: Any, scales: Any, second: float) -> Any:
    """f64 [N, K] from [N, elements, bytes] of codes and scales, all rows in order."""
    kind = kind.removesuffix("_inv")
    flat = codes.reshape(codes.shape[0], -1)
    if kind.removeprefix("ct_") in ("nvfp4", "mxfp4", "nf3"):
        return reference.dequantize(kind.removeprefix("ct_"), flat, scales[..., 0], second)  # type: ignore[arg-type]
    if kind in ("bf16", "f16", "f32"):
        return reference.dequantize_wide(kind, flat, np.empty((0, 0)))  # type: ignore[arg-type]
    dtype = "F8_E8M0" if kind == "mxfp8" else "F32"
    values = reference.numbers(dtype, scales.reshape(scales.shape[0], -1))
    return reference.dequantize_wide(kind, flat, values)  # type: ignore[arg-type]


def check(found: Any, expected: Any) -> None:
    assert found.dtype == np.float32
    assert np.array_equal(found.view(np.uint32), expected.astype(np.float32).view(np.uint32))


def made(root: Path, spec: Spec) -> Checkpoint:
    write_checkpoint(root, spec)
    return open_checkpoint(root)


def parts(reader: TensorReader, matrix: Matrix, whole: NDArray[np.float32], where: str = WHERE) -> None:
    """Any rows are the same as those of the whole; so are rows picked from bytes that were read once."""
    for first, count in ((0, 1), (3, 5), (matrix.rows - 33, 33), (96, 30), (matrix.rows - 2, None)):
        last = matrix.rows if count is None else first + count
        check(read_matrix(reader, matrix, where, first_row=first, count=count), whole[first:last])
    for first, count in ((-1, 5), (0, 0), (matrix.rows - 1, 2), (matrix.rows, None)):
        with pytest.raises(ValueError, match=f"has {matrix.rows} rows, not {first} to "):
            stored_rows(reader, matrix, first, count)
    buffers: list[Any] = []
    for at in matrix.tensors:
        buffers.append(np.empty(at.header.nbytes, np.uint8))
        reader.read(at, buffers[-1])
    rows = pick_rows(matrix, buffers[0], buffers[1] if len(buffers) > 1 else None, 5, 60)
    out = np.empty((60, matrix.columns), np.float32)
    assert decode_stored(matrix, rows, second_scale(reader, matrix, where), where, out, 5) is out
    check(out, whole[5:65])


@pytest.mark.parametrize("kind", KINDS)
def test_single_matrices(tmp_path: Path, kind: str) -> None:
    source = made(tmp_path, replace(SPEC, stored=(kind,), kept=0 if kind == "nf3" else 1, second_scale="unequal"))
    with TensorReader() as reader:
        for expert in source.layers[1].experts.values():
            for matrix in expert.matrices:
                codes = whole(tmp_path, matrix.codes.header.name)
                scales = None if matrix.scales is None else whole(tmp_path, matrix.scales.header.name)
                second = 1.0
                if matrix.second is not None:
                    second = float(whole(tmp_path, matrix.second.header.name).reshape(-1).view("<f4")[0])
                if kind == "ct_nvfp4":
                    second = float(np.float32(1) / np.float32(second))
                expected = slow(kind, codes, scales, second)
                assert expected.shape == (matrix.rows, matrix.columns)
                found = read_matrix(reader, matrix, WHERE)
                check(found, expected)
                parts(reader, matrix, found)


STACKS: tuple[tuple[str, Spec, Layout], ...] = (
    ("gpt-oss", replace(SPEC, family=11), "alternate"),
    ("gpt-oss in BF16", replace(SPEC, family=11, stored=("bf16",)), "alternate_turned"),
    ("gpt-oss by ModelOpt", replace(SPEC, family=11, stored=("nvfp4",)), "alternate_turned"),
    ("Qwen3", replace(SPEC, variant="qwen3_moe"), "halves"),
    ("Qwen3.5", replace(SPEC, family=12), "halves"),
    ("Qwen3.5 in F16", replace(SPEC, family=12, stored=("f16",)), "halves"),
    ("Qwen3.5 in FP8", replace(SPEC, family=12, stored=("fp8_block",)), "halves"),
    ("Qwen3.5 in FP8, whole blocks", replace(SPEC, family=12, stored=("fp8_block",), intermediate=256), "halves"),
    ("Qwen3.5 in MXFP8", replace(SPEC, family=12, stored=("mxfp8",)), "halves"),
    ("Qwen3.5 in NVFP4", replace(SPEC, family=12, stored=("nvfp4",), scalar_shape=(1,)), "halves"),
    ("Qwen3.5 in MXFP4", replace(SPEC, family=12, stored=("mxfp4",)), "halves"),
    ("Qwen3-VL", replace(SPEC, variant="qwen3_vl_moe"), "halves_turned"),
    ("Qwen3-VL, H = 2I", replace(SPEC, variant="qwen3_vl_moe", hidden=256, intermediate=128), "halves_turned"),
    ("Qwen3-VL, H = I", replace(SPEC, variant="qwen3_vl_moe", hidden=256, intermediate=256), "halves_turned"),
    ("Qwen3.5, H = 2I", replace(SPEC, family=12, hidden=256, intermediate=128), "halves"),
    ("Qwen3.5, H = I", replace(SPEC, family=12, hidden=256, intermediate=256), "halves"),
    ("Gemma-4", replace(SPEC, family=13), "halves"),
    ("Llama-4", replace(SPEC, family=14), "halves_turned"),
    ("Llama-4 in NVFP4", replace(SPEC, family=14, stored=("nvfp4",)), "halves_turned"),
    ("Llama-4 in NVFP4, H = 4I", replace(SPEC, family=14, stored=("nvfp4",), hidden=512, intermediate=128),
     "halves_turned"),
    ("Llama-4 in FP8", replace(SPEC, family=14, stored=("fp8_tensor",)), "halves_turned"),
    ("Llama-4 in FP8 rows", replace(SPEC, family=14, stored=("fp8_row",)), "halves_turned"),
    ("Llama-4 in FP8 blocks", replace(SPEC, family=14, stored=("fp8_block",)), "halves_turned"),
    ("Llama-4 in MXFP8", replace(SPEC, family=14, stored=("mxfp8",)), "halves_turned"),
)  # fmt: skip


@pytest.mark.parametrize(("spec", "layout"), [case[1:] for case in STACKS], ids=[case[0] for case in STACKS])
def test_tensors_of_all_experts(tmp_path: Path, spec: Spec, layout: Layout) -> None:
    source = made(tmp_path, spec)
    (kind,) = spec.published
    prefix = spec.names.prefix.format(L=1)
    with TensorReader() as reader:
        for e, expert in source.layers[1].experts.items():
            assert expert.gate is not None
            for projection, matrices in (("gate_up_proj", (expert.gate, expert.up)), ("down_proj", (expert.down,))):
                fields = {
                    name.removeprefix(f"{prefix}.{projection}").lstrip("_"): name
                    for name in source.shards.tensors
                    if name.startswith(f"{prefix}.{projection}")
                }
                second = 1.0
                if "weight_scale_2" in fields:
                    values = whole(tmp_path, fields["weight_scale_2"]).reshape(-1).view("<f4")
                    second = float(values[e if len(values) > 1 else 0])
                codes_of = next(fields[f] for f in ("", "blocks") if f in fields)
                scales_of = next((fields[f] for f in fields if f.startswith(("weight_scale", "scales"))), None)
                stored = whole(tmp_path, codes_of)
                size = stored.shape[-1]
                dtype = {1: np.uint8, 2: np.uint16, 4: np.uint32}
                codes = untwist(stored.view(dtype[size])[..., 0], e, layout)
                codes = codes.view(np.uint8).reshape(codes.shape[0], -1, size)
                scales = None
                if scales_of is not None:
                    stored = whole(tmp_path, scales_of)
                    size = stored.shape[-1]
                    values = untwist(stored.view(dtype[size])[..., 0], e, layout)
                    scales = np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape, size)
                expected = slow(kind, codes, scales, second)
                rows = [list(range(len(expected)))]
                if projection == "gate_up_proj":
                    rows = [gate_rows(len(expected), layout), up_rows(len(expected), layout)]
                for matrix, mine in zip(matrices, rows, strict=True):
                    assert (matrix.rows, matrix.columns) == (len(mine), expected.shape[1])
                    found = read_matrix(reader, matrix, WHERE)
                    check(found, expected[mine])
                    parts(reader, matrix, found)


def test_gate_and_up_that_alternate_have_the_same_tensors(tmp_path: Path) -> None:
    expert = made(tmp_path, replace(SPEC, family=11)).layers[1].experts[2]
    assert expert.gate is not None and expert.gate.codes == expert.up.codes and expert.gate.scales == expert.up.scales
    assert expert.gate.codes.header.name == "model.layers.1.mlp.experts.gate_up_proj_blocks[2]"
    assert len(expert.tensors) == 4


def test_halves_are_tensors_of_their_own(tmp_path: Path) -> None:
    """So that nothing is read twice."""
    expert = made(tmp_path, replace(SPEC, family=12)).layers[1].experts[2]
    assert expert.gate is not None and expert.gate.plain and expert.up.plain
    gate, up = expert.gate.codes.header, expert.up.codes.header
    assert (gate.name[-8:], up.name[-10:]) == ("2][0:160]"[-8:], "[2][160:320]"[-10:])
    assert gate.end == up.begin and up.end - gate.begin == 320 * 192 * 2


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "ct_nvfp4", "ct_mxfp4", "nf3"])
def test_native_rows_are_the_stored_bytes(tmp_path: Path, kind: str) -> None:
    source = made(tmp_path, replace(SPEC, stored=(kind,), kept=0 if kind == "nf3" else 1))
    matrix = source.layers[1].experts[1].down
    assert matrix.native_to(kind.removeprefix("ct_")) and not matrix.native_to("f32") and matrix.scales is not None
    assert matrix.plain == (kind != "ct_nvfp4")
    with TensorReader() as reader:
        rows = native_rows(reader, matrix, WHERE, 7, 20)
    assert rows.scales is not None
    assert np.array_equal(rows.codes, whole(tmp_path, matrix.codes.header.name)[7:27, :, 0])
    assert np.array_equal(rows.scales, whole(tmp_path, matrix.scales.header.name)[7:27, :, 0])


@pytest.mark.parametrize("spec", [replace(SPEC, family=11), replace(SPEC, family=14, stored=("nvfp4",))])
def test_native_rows_of_all_experts_mean_what_is_read(tmp_path: Path, spec: Spec) -> None:
    """Alternating and transposed codes in row order are a plain NVFP4 or MXFP4 matrix."""
    source = made(tmp_path, spec)
    expert = source.layers[1].experts[1]
    with TensorReader() as reader:
        for matrix in expert.matrices:
            rows = native_rows(reader, matrix, WHERE)
            name: Any = matrix.format.name
            second = second_scale(reader, matrix, WHERE)
            assert rows.scales is not None
            expected = reference.dequantize(name, rows.codes, rows.scales, second)
            check(read_matrix(reader, matrix, WHERE), expected)


def test_the_old_bias(tmp_path: Path) -> None:
    """Four times the weights, and bytes of bias 127 that say so."""
    write_checkpoint(tmp_path, replace(SPEC, stored=("ct_mxfp4",)))
    new, old = (open_checkpoint(tmp_path, mx_bias=bias).layers[1].experts[0].up for bias in (127, 125))
    assert new.plain and not old.plain and old.native_to("mxfp4")
    with TensorReader() as reader:
        check(read_matrix(reader, old, WHERE), 4.0 * read_matrix(reader, new, WHERE).astype(np.float64))
        a, b = native_rows(reader, new, WHERE), native_rows(reader, old, WHERE)
        assert a.scales is not None and b.scales is not None
        assert np.array_equal(a.scales + 2, b.scales) and np.array_equal(a.codes, b.codes)


def poke(root: Path, name: str, at: int, data: bytes) -> None:
    """Put bytes into a tensor."""

    def change(t: Editor) -> None:
        old = t[name]
        t[name] = Stored(old.dtype, old.shape, old.data[:at] + data + old.data[at + len(data) :])

    with edit_tensors(root) as editor:
        change(editor)


NAME = "model.layers.1.mlp.experts.1.up_proj"
F32 = {"nan": "0000c07f", "inf": "0000807f", "negative": "000080bf", "zero": "00000000", "negative zero": "00000080"}


@pytest.mark.parametrize(
    ("kind", "field", "at", "data", "message"),
    [
        ("nvfp4", "weight_scale", 12 * 9 + 3, "7f", r"scale \[9, 3\] of NVFP4 .*byte 0x7F = nan"),
        ("nvfp4", "weight_scale", 12 * 9 + 3, "b8", r"scale \[9, 3\] of NVFP4 .*byte 0xB8 = -1"),
        ("ct_nvfp4", "weight_scale", 5, "ff", r"scale \[0, 5\] of NVFP4 .*byte 0xFF = nan"),
        ("mxfp4", "weight_scale", 6 * 9 + 3, "ff", r"scale \[9, 3\] of MXFP4 .*byte 0xFF = nan"),
        ("ct_mxfp4", "weight_scale", 6 * 9 + 3, "ff", r"scale \[9, 3\] of MXFP4 .*byte 0xFF = nan"),
        ("mxfp8", "weight_scale", 6 * 9 + 3, "ff", r"scale \[9, 3\] of MXFP8 .*byte 0xFF = nan"),
        ("mxfp8_inv", "weight_scale_inv", 6 * 9 + 3, "ff", r"scale \[9, 3\] of MXFP8 .*byte 0xFF = nan"),
        ("nf3", "weight_scale", 6 * 9 + 3, "60", r"scale \[9, 3\] of NF3 .*below 32, found byte 0x60 = 32"),
        ("fp8_block", "weight_scale_inv", 12, F32["nan"], r"scale \[1, 1\] of FP8_BLOCK .*found nan"),
        ("fp8_block", "weight_scale_inv", 4, F32["inf"], r"scale \[0, 1\] of FP8_BLOCK .*found inf"),
        ("fp8_block", "weight_scale_inv", 4, F32["negative"], r"scale \[0, 1\] of FP8_BLOCK .*found -1"),
        ("fp8_row", "weight_scale", 36, F32["nan"], r"scale \[9, 0\] of FP8_ROW .*found nan"),
        ("fp8_tensor", "weight_scale", 0, F32["inf"], r"scale \[0, 0\] of FP8_TENSOR .*found inf"),
        ("mxfp8", "weight", 192 * 9 + 3, "7f", r"weight \[9, 3\] \(expected a finite weight, found nan"),
        ("fp8_block", "weight", 192 * 9 + 3, "ff", r"weight \[9, 3\] .*found nan"),
        ("bf16", "weight", 2 * (192 * 9 + 3), "c07f", r"weight \[9, 3\] .*found nan"),
        ("bf16", "weight", 2 * (192 * 9 + 3), "807f", r"weight \[9, 3\] .*found inf"),
        ("f16", "weight", 2 * (192 * 9 + 3), "007c", r"weight \[9, 3\] .*found inf"),
        ("f32", "weight", 4 * (192 * 9 + 3), F32["nan"], r"weight \[9, 3\] .*found nan"),
        *(("nvfp4", "weight_scale_2", 0, F32[what], r"second-level scale \(expected a finite positive number, found")
          for what in F32),
        *(("ct_nvfp4", "weight_global_scale", 0, F32[what],
           r"second-level scale \(expected a finite positive number, as is one over it, found") for what in F32),
        ("ct_nvfp4", "weight_global_scale", 0, "01000000", r"second-level scale .*one over it, found 1\.4013e-45"),
    ],
)  # fmt: skip
def test_payloads_that_mean_nothing(
    tmp_path: Path, kind: str, field: str, at: int, data: str, message: str
) -> None:  # fmt: skip
    spec = replace(SPEC, stored=(kind,), kept=0 if kind == "nf3" else 1)
    write_checkpoint(tmp_path, replace(spec, single_file=False))
    poke(tmp_path, f"{NAME}.{field}", at, bytes.fromhex(data))
    matrix = open_checkpoint(tmp_path).layers[1].experts[1].up
    with TensorReader() as reader:
        with pytest.raises(DataError, match=rf"{NAME}\.{field}: layer 1 expert 1: {message}"):
            read_matrix(reader, matrix, "layer 1 expert 1")
        with pytest.raises(DataError, match=message):  # the index is of the matrix, not of the part read
            read_matrix(reader, matrix, "layer 1 expert 1", first_row=0, count=129)
        if "scale [" in message and field != "weight" and matrix.format.native:
            with pytest.raises(DataError, match=message):
                native_rows(reader, matrix, "layer 1 expert 1", 8, 4) if "9, 3" in message else native_rows(
                    reader, matrix, "layer 1 expert 1"
                )
        if "[9, 3]" in message:
            with pytest.raises(DataError, match=message):
                read_matrix(reader, matrix, "layer 1 expert 1", first_row=8, count=3)
            read_matrix(reader, matrix, "layer 1 expert 1", first_row=10, count=3)


def test_a_zero_block_stays_zero(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, replace(SPEC, stored=("fp8_block",)))
    poke(tmp_path, f"{NAME}.weight_scale_inv", 8, bytes(4))
    with TensorReader() as reader:
        found = read_matrix(reader, open_checkpoint(tmp_path).layers[1].experts[1].up, WHERE)
    assert not found[128:, :128].any()
    assert found[:128, :128].any() and found[128:, 128:].any()


def test_a_file_cut_off_while_it_is_read(tmp_path: Path) -> None:
    source = made(tmp_path, replace(SPEC, stored=("bf16",)))
    matrix = source.layers[1].experts[2].down
    with TensorReader() as reader:
        stored_rows(reader, matrix)
        with matrix.codes.path.open("r+b") as file:
            file.truncate(matrix.codes.header.begin + 100)
        with pytest.raises(DataError, match="the file became shorter while it was read"):
            stored_rows(reader, matrix)
