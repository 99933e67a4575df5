"""Every kind of fault in every stored format: each pair gives its message, or is taken for what it is."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from hybrid_pack.errors import DataError
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.io.config import CONFIG
from hybrid_pack.io.shards import INDEX
from hybrid_pack.synthetic import Spec, read_tensor, write_checkpoint
from tests.checkpoints import Editor, Stored, edit_config, edit_index, edit_tensors, shard_of
from tests.io.content_mutations import zeros

SPEC = Spec(
    hidden=192, intermediate=160, num_experts=3, kept=1, moe_layers=(1,), dense_layers=(0,), mtp_layer=False, vocab=4
)  # fmt: skip
SINGLE = "model.layers.1.mlp.experts.1.up_proj"


@dataclass(frozen=True)
class Kind:
    """A stored format.

    Attributes:
        id: Name of the test.
        spec: Of a checkpoint stored so.
        codes: Tensor of the codes of a matrix, or of all experts.
        scales: Of the scales; "" where there are none.
        second: Of the second-level scale; "" where there is none.
    """

    id: str
    spec: Spec
    codes: str
    scales: str = ""
    second: str = ""

    @property
    def fused(self) -> bool:
        return self.spec.names.fused


def single(kind: str, codes: str, scales: str = "", second: str = "") -> Kind:
    spec = replace(SPEC, stored=(kind,))  # type: ignore[arg-type]
    names = (f"{SINGLE}.{field}" if field else "" for field in (codes, scales, second))
    return Kind(kind, spec, *names)


OSS, LLAMA = "model.layers.1.mlp.experts", "language_model.model.layers.1.feed_forward.experts"
QWEN, STEP = "model.language_model.layers.1.mlp.experts", "model.layers.1.moe"
KINDS = (
    single("nvfp4", "weight", "weight_scale", "weight_scale_2"),
    single("mxfp4", "weight", "weight_scale"),
    single("ct_nvfp4", "weight_packed", "weight_scale", "weight_global_scale"),
    single("ct_mxfp4", "weight_packed", "weight_scale"),
    single("mxfp8", "weight", "weight_scale"),
    single("mxfp8_inv", "weight", "weight_scale_inv"),
    single("fp8_block", "weight", "weight_scale_inv"),
    single("fp8_row", "weight", "weight_scale"),
    single("fp8_tensor", "weight", "weight_scale"),
    single("bf16", "weight"),
    single("f16", "weight"),
    single("f32", "weight"),
    Kind("DeepSeek-V4", replace(SPEC, family=1, stored=("mxfp4",)), "layers.1.ffn.experts.1.w3.weight",
         "layers.1.ffn.experts.1.w3.scale"),
    Kind("Nemotron", replace(SPEC, family=8, stored=("nvfp4",)), "backbone.layers.1.mixer.experts.1.up_proj.weight",
         "backbone.layers.1.mixer.experts.1.up_proj.weight_scale",
         "backbone.layers.1.mixer.experts.1.up_proj.weight_scale_2"),
    Kind("gpt-oss", replace(SPEC, family=11), f"{OSS}.gate_up_proj_blocks", f"{OSS}.gate_up_proj_scales"),
    Kind("Qwen3.5", replace(SPEC, family=12), f"{QWEN}.gate_up_proj"),
    Kind("Llama-4", replace(SPEC, family=14), f"{LLAMA}.down_proj"),
    Kind("Llama-4 in NVFP4", replace(SPEC, family=14, stored=("nvfp4",)), f"{LLAMA}.gate_up_proj",
         f"{LLAMA}.gate_up_proj_weight_scale", f"{LLAMA}.gate_up_proj_weight_scale_2"),
    Kind("Step in FP8", replace(SPEC, family=15, stored=("fp8_block",)), f"{STEP}.up_proj.weight",
         f"{STEP}.up_proj.weight_scale_inv"),
)  # fmt: skip
SCALED = [kind for kind in KINDS if kind.scales]
SECOND = [kind for kind in KINDS if kind.second]


def faulty(root: Path, kind: Kind, change: Callable[[Editor], object]) -> str:
    """Message of what opening a checkpoint gives after a change of its tensors."""
    write_checkpoint(root, kind.spec)
    with edit_tensors(root) as tensors:
        change(tensors)
    with pytest.raises(DataError) as caught:
        open_checkpoint(root)
    assert re.search(r"layer 1\b", str(caught.value)) or kind.fused, str(caught.value)
    return str(caught.value)


def shrunk(stored: Stored, axis: int) -> Stored:
    """A tensor with one less along an axis."""
    shape = list(stored.shape)
    shape[axis] -= 1
    size = len(stored.data) // math.prod(stored.shape)
    return Stored(stored.dtype, tuple(shape), bytes(math.prod(shape) * size))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.id)
def test_the_good_ones_open(tmp_path: Path, kind: Kind) -> None:
    write_checkpoint(tmp_path, kind.spec)
    source = open_checkpoint(tmp_path)
    assert list(source.layers) == [1]
    assert {kind.codes, kind.scales, kind.second} - {""} <= set(source.shards.tensors)


@pytest.mark.parametrize("kind", SCALED, ids=lambda kind: kind.id)
def test_missing_scales(tmp_path: Path, kind: Kind) -> None:
    message = faulty(tmp_path, kind, lambda t: t.__delitem__(kind.scales))
    assert "beside it" in message and "layer 1 expert" in message
    assert ("(its shapes turned to [N, K])" in message) == kind.spec.model.transposed or kind.id == "gpt-oss"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.id)
def test_missing_codes(tmp_path: Path, kind: Kind) -> None:
    message = faulty(tmp_path, kind, lambda t: t.__delitem__(kind.codes))
    assert re.search(r"neither weight nor weight_packed is stored|has no (gate_up|up|down) matrix", message)


@pytest.mark.parametrize("kind", SECOND, ids=lambda kind: kind.id)
def test_missing_second_scale(tmp_path: Path, kind: Kind) -> None:
    field = "weight_global_scale" if "global" in kind.second else "weight_scale_2"
    message = faulty(tmp_path, kind, lambda t: t.__delitem__(kind.second))
    assert f"{field} is missing (expected the F32 second-level scale of NVFP4)" in message


@pytest.mark.parametrize("kind", SECOND, ids=lambda kind: kind.id)
@pytest.mark.parametrize(("dtype", "shape"), [("BF16", ()), ("F32", (3, 160)), ("F32", (3, 2))])
def test_wrong_second_scale(tmp_path: Path, kind: Kind, dtype: str, shape: tuple[int, ...]) -> None:
    message = faulty(tmp_path, kind, lambda t: t.__setitem__(kind.second, zeros(dtype, *shape)))
    assert "not a second-level scale (expected F32 [] or [1], found" in message


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.id)
@pytest.mark.parametrize("axis", [-1, -2])
def test_codes_of_another_shape(tmp_path: Path, kind: Kind, axis: int) -> None:
    message = faulty(tmp_path, kind, lambda t: t.__setitem__(kind.codes, shrunk(t[kind.codes], axis)))
    expected = "does not fit|disagree on its size|gate and up together|neither|not MXFP4's|not packed"
    assert re.search(expected, message), message


@pytest.mark.parametrize("kind", [k for k in SCALED if k.id != "fp8_tensor"], ids=lambda kind: kind.id)
@pytest.mark.parametrize("axis", [-1, -2])
def test_scales_of_another_shape(tmp_path: Path, kind: Kind, axis: int) -> None:
    message = faulty(tmp_path, kind, lambda t: t.__setitem__(kind.scales, shrunk(t[kind.scales], axis)))
    assert re.search("does not fit|neither|not MXFP4's|gate and up together", message), message


@pytest.mark.parametrize("kind", [k for k in SCALED if not k.fused], ids=lambda kind: kind.id)
def test_swizzled_scales(tmp_path: Path, kind: Kind) -> None:
    """One dimension, as some kernels want them."""
    message = faulty(tmp_path, kind, lambda t: t.__setitem__(kind.scales, zeros("U8", 160 * 192)))
    assert "[30720]" in message
    wide = kind.id.startswith(("fp8", "mxfp8"))
    assert ("a 1-D scale is swizzled for one kernel" in message) != wide


@pytest.mark.parametrize("kind", SCALED, ids=lambda kind: kind.id)
def test_scales_of_another_dtype(tmp_path: Path, kind: Kind) -> None:
    def change(t: Editor) -> None:
        old = t[kind.scales]
        t[kind.scales] = Stored("I64", old.shape, bytes(8 * math.prod(old.shape)))

    message = faulty(tmp_path, kind, change)
    assert "I64" in message and ("neither" in message or "does not fit" in message)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.id)
def test_a_field_too_many(tmp_path: Path, kind: Kind) -> None:
    base = kind.codes.removesuffix("_blocks").removesuffix(".weight").removesuffix(".weight_packed")
    dot = "." if not kind.fused or base.startswith(STEP) else "_"

    def change(t: Editor) -> None:
        t[f"{base}{dot}weight_zero_point"] = zeros("U8", 3, 4)

    message = faulty(tmp_path, kind, change)
    assert "has a field that" in message and message.endswith("found weight_zero_point)")


@pytest.mark.parametrize("kind", [k for k in KINDS if k.fused], ids=lambda kind: kind.id)
@pytest.mark.parametrize("what", ["codes", "scales", "second"])
def test_tensors_of_another_number_of_experts(tmp_path: Path, kind: Kind, what: str) -> None:
    name = {"codes": kind.codes, "scales": kind.scales, "second": kind.second}[what]
    if not name:
        name = kind.codes

    def change(t: Editor) -> None:
        old = t[name]
        rest = old.shape[1:]
        size = len(old.data) // max(math.prod(old.shape), 1)
        t[name] = Stored(old.dtype, (2, *rest), bytes(2 * math.prod(rest) * size))

    message = faulty(tmp_path, kind, change)
    assert f"{name}: a tensor of all experts of a layer (expected 3 experts by config.json, found [2" in message


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.id)
def test_the_config_names_another_number_of_experts(tmp_path: Path, kind: Kind) -> None:
    write_checkpoint(tmp_path, replace(kind.spec, map_in="none"))
    text = (tmp_path / CONFIG).read_text()
    for key in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"):
        text = text.replace(f'"{key}": 3', f'"{key}": 4')
    (tmp_path / CONFIG).write_text(text)
    message = "expected 4 experts by config.json, found (3|\\[3,)"
    with pytest.raises(DataError, match=message):
        open_checkpoint(tmp_path, require_map=False)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.id)
def test_the_config_is_of_another_size(tmp_path: Path, kind: Kind) -> None:
    write_checkpoint(tmp_path, kind.spec)
    text = (tmp_path / CONFIG).read_text()
    for key in ("moe_intermediate_size", "intermediate_size"):
        text = text.replace(f'"{key}": 160', f'"{key}": 96')
    (tmp_path / CONFIG).write_text(text)
    with pytest.raises(DataError, match=r"disagree on its size .*by the config|does not fit|neither"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.id)
def test_names_of_no_family(tmp_path: Path, kind: Kind) -> None:
    """Zero experts matched is an error, never a checkpoint without experts."""
    write_checkpoint(tmp_path, kind.spec)
    with edit_tensors(tmp_path) as tensors:
        for name in list(tensors.weight_map):
            if ".experts" in name or ".moe." in name:
                tensors.rename(name, name.replace(".experts", ".specialists").replace(".moe.", ".mob."))
    with pytest.raises(DataError, match=r"no routed expert found under any known name \(found \d+ tensors\)"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["mtp.layers.0.mlp.experts.0.gate_proj.weight", "decoder.3.expert_bank.w1"])
def test_a_name_of_no_family_that_looks_like_an_expert_is_shown(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, Spec(num_experts=4, kept=2, moe_layers=(1,), dense_layers=(0,), mtp_layer=False))
    with edit_tensors(tmp_path) as tensors:
        for n, old in enumerate([n for n in tensors.weight_map if ".experts." in n]):
            tensors.rename(old, f"other.{n}" if n else name)
    with pytest.raises(DataError, match=rf"under any known name \(found \d+ tensors, such as {re.escape(name)}\)"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.id)
def test_a_shard_cut_by_a_byte(tmp_path: Path, kind: Kind) -> None:
    write_checkpoint(tmp_path, kind.spec)
    shard = shard_of(tmp_path, kind.codes)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DataError, match=rf"{shard.name}: the file is truncated"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", SCALED, ids=lambda kind: kind.id)
def test_the_index_lists_a_tensor_no_shard_has(tmp_path: Path, kind: Kind) -> None:
    write_checkpoint(tmp_path, kind.spec)
    document = json.loads((tmp_path / INDEX).read_text())
    with edit_tensors(tmp_path) as tensors:
        del tensors[kind.scales]
    with edit_index(tmp_path) as index:
        index["weight_map"] = document["weight_map"]
    with pytest.raises(DataError, match=rf"the index lists tensor {re.escape(kind.scales)}, the shard has it not"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", SCALED, ids=lambda kind: kind.id)
def test_activation_scales_are_not_needed_and_not_minded(tmp_path: Path, kind: Kind) -> None:
    write_checkpoint(tmp_path, replace(kind.spec, input_scale=False))
    with_none = open_checkpoint(tmp_path).layers[1]
    base = kind.codes.removesuffix("_blocks").removesuffix(".weight").removesuffix(".weight_packed")
    dot = "." if not kind.fused or base.startswith(STEP) else "_"
    with edit_tensors(tmp_path) as tensors:
        tensors[f"{base}{dot}input_scale"] = zeros("F32")
        tensors[f"{base}{dot}input_global_scale"] = zeros("F32", 1)
    with_some = open_checkpoint(tmp_path)
    assert with_some.layers[1].stored == with_none.stored
    assert not [t for t in with_some.base if "input" in t.header.name and "scale" in t.header.name]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.id)
def test_every_exclude_list_is_read(tmp_path: Path, kind: Kind) -> None:
    """What the config lists is only reported; headers decide."""
    write_checkpoint(tmp_path, kind.spec)
    before = open_checkpoint(tmp_path)
    module = kind.codes.removesuffix("_blocks").removesuffix(".weight").removesuffix(".weight_packed")
    layer = module.partition("layers.1")[0] + "layers.1"
    with edit_config(tmp_path) as config:
        block = config.setdefault("quantization_config", {"quant_method": "modelopt"})
        block["ignore"], block["modules_to_not_convert"] = [f"{layer}.*"], None
    after = open_checkpoint(tmp_path)
    assert after.layers[1].stored == before.layers[1].stored
    told = [note for note in after.notes if note.startswith("the config excludes ")]
    assert len(told) == (1 if kind.scales else 0)


def test_alternating_rows_are_no_halves(tmp_path: Path) -> None:
    """gpt-oss's and Qwen's tensors have the same shape; only what they are called, or the model, tells."""
    for folder, spec in (
        ("oss", replace(SPEC, family=11, stored=("bf16",))),
        ("qwen", replace(SPEC, variant="qwen3_moe")),
    ):
        write_checkpoint(tmp_path / folder, spec)
    oss, qwen = (open_checkpoint(tmp_path / folder).layers[1].experts[0] for folder in ("oss", "qwen"))
    assert oss.gate is not None and qwen.gate is not None
    assert (oss.gate.view.row_step, oss.gate.view.transposed) == (2, True)
    assert (qwen.gate.view.row_step, qwen.gate.view.transposed) == (1, False)
    assert read_tensor(tmp_path / "oss", f"{OSS}.gate_up_proj")[1] == (3, 192, 320)
    assert read_tensor(tmp_path / "qwen", f"{OSS}.gate_up_proj")[1] == (3, 320, 192)


def test_codes_of_four_bits_that_share_a_byte_across_rows(tmp_path: Path) -> None:
    """F4 with columns first puts two rows into a byte; nobody is known to store that."""
    write_checkpoint(tmp_path, replace(SPEC, family=14, stored=("nvfp4",)))
    with edit_tensors(tmp_path) as tensors:
        for projection, k, n in (("gate_up_proj", 192, 320), ("down_proj", 160, 192)):
            tensors[f"{LLAMA}.{projection}"] = Stored("F4", (3, k, n), bytes(3 * k * n // 2))
    with pytest.raises(DataError, match="F4 codes of two rows share a byte where columns come first"):
        open_checkpoint(tmp_path)
