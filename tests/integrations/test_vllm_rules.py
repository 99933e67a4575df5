"""The plugin's own rules, without vLLM: names, options, versions, what is stored how, what is refused."""

from __future__ import annotations

import ast
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hybrid_pack
from hybrid_pack.errors import DataError, EnvironmentFailure, HybridPackError, UsageError
from hybrid_pack.formats.source import Header, SourceFormat, detect
from hybrid_pack.integrations.vllm import experts, processes
from hybrid_pack.integrations.vllm.advice import command_for
from hybrid_pack.integrations.vllm.base import BaseTensors
from hybrid_pack.integrations.vllm.dequantise import dequantise, rows_of_blocks
from hybrid_pack.integrations.vllm.drafts import Decoder, is_draft
from hybrid_pack.integrations.vllm.kept import why_not_experts
from hybrid_pack.integrations.vllm.options import Options, misplaced, parse_options
from hybrid_pack.integrations.vllm.prefixes import layer_of, stored_names
from hybrid_pack.integrations.vllm.processes import METHOD, spawn_if_needed
from hybrid_pack.integrations.vllm.request import Request, require
from hybrid_pack.integrations.vllm.source import excludes, fp8_kv_cache, method_name
from hybrid_pack.integrations.vllm.versions import indexer_keys, known_names, why_not_version
from hybrid_pack.integrations.vllm.words import hint_for
from hybrid_pack.runtime import backends
from hybrid_pack.runtime.build import layer_geometry
from hybrid_pack.runtime.pack import Pack
from hybrid_pack.runtime.stream.files import AGAIN
from hybrid_pack.schemas.manifest import Requantized
from tests.integrations import checkpoint


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.22.1", True), ("0.22.1+cu130", True), ("0.25.1", True), ("0.27.1", True), ("0.27.9rc1", True),
        ("0.22.0", False), ("0.9.2", False), ("0.28.0", False), ("1.0.0", False), ("dev", False),
    ],
)  # fmt: skip
def test_versions(version: str, supported: bool) -> None:
    why = why_not_version(version)
    assert (why is None) is supported
    assert why is None or version in why


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ImportError("cannot import name 'X'", name="vllm.config"),
            r"vLLM 9.8 is not as hybrid-pack knows it \(cannot",
        ),
        (AttributeError("no attribute 'tp_size'"), r"vLLM 9.8 is not as .* \(no attribute 'tp_size'\); vLLM 0.22.1, "),
        (ModuleNotFoundError("No module named 'numba'", name="numba"), r"cannot be imported \(No module named 'numba'"),
    ],
)
def test_a_name_that_is_gone_is_not_a_bare_error(error: Exception, message: str) -> None:
    with pytest.raises(EnvironmentFailure, match=message), known_names("9.8"):
        raise error


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Options()), (None, Options()), ({"other": {"x": 1}}, Options()), ({"hybrid_pack": {}}, Options()),
        ({"hybrid_pack": {"backend": "b12x", "check": "structure"}}, Options("b12x", "structure")),
    ],
)  # fmt: skip
def test_options(given: Any, expected: Options) -> None:
    assert parse_options(given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "triton"}, r"backend: no such choice \(expected auto or b12x or torch, found 'triton'\)"),
        ({"check": "none"}, r"check: no such choice \(expected structure or digest, found 'none'\)"),
        ({"backends": "b12x"}, r"no such option \(expected backend or check, found 'backends'\)"),
        ("b12x", r"not an object"),
        ({"backend": None}, r"no such choice"),
    ],
)
def test_options_that_are_none(given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_options({"hybrid_pack": given})


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("hybrid_pack", None), ("ascend", None), ("pack", None), ("quantization", None), (3, None),
        ("hybridpack", "did you mean 'hybrid_pack'"), ("hybrid-pack", "did you mean"), ("HYBRID_PACK", "did you mean"),
        ("hybird_pack", "did you mean"), ("hybrid_packs", "did you mean"),
        ("backend", "'backend' is not read here; options go below 'hybrid_pack'"), ("check", "'check' is not read"),
    ],
)  # fmt: skip
def test_keys_that_look_like_ours_are_told(key: Any, said: str | None) -> None:
    told = misplaced({"other": 1, key: {}})
    assert told == [] if said is None else len(told) == 1 and said in told[0]
    assert misplaced(None) == []


@pytest.mark.parametrize(
    ("prefix", "layer"),
    [
        ("model.layers.3.mlp.experts", 3),
        ("language_model.model.layers.12.block_sparse_moe.experts", 12),
        ("model.layers.61.mtp_block.mlp.experts", 61),
        ("model.layers.10.mlp.experts.routed_experts", 10),
        ("layers.0.ffn.experts", 0),
        ("mtp.layers.0.mlp.experts", None),
        ("model.mtp.layers.0.mlp.experts", None),
        ("lm_head", None),
        ("model.mylayers.3.mlp", None),
        ("model.layers.03.mlp", None),
    ],
)
def test_layer_numbers(prefix: str, layer: int | None) -> None:
    assert layer_of(prefix) == layer


@pytest.mark.parametrize(
    ("number", "prefix", "draft", "message"),
    [
        (0, "model.layers.0.transformer_layer.block_sparse_moe.experts", True, "number of a decoder layer"),
        (59, "draft.model.layers.59.mlp.experts", True, "expected layer 60 or one after it, found layer 59"),
        (60, "model.layers.60.mtp_block.mlp.experts", True, None),
        (3, "model.layers.3.mlp.experts", False, None),
        (3, "model.layers.3.transformer_layer.mlp.experts", False, "two modules ask for the experts of one layer"),
    ],
)
def test_drafts_have_layers_of_their_own(number: int, prefix: str, draft: bool, message: str | None) -> None:
    decoder = Decoder(60)
    decoder.require_own(3, "model.layers.3.mlp.experts", False)
    if message is None:
        decoder.require_own(number, prefix, draft)
        return
    with pytest.raises(DataError, match=message):
        decoder.require_own(number, prefix, draft)


def test_a_draft_with_a_folder_of_its_own_has_decoder_layers() -> None:
    Decoder(None).require_own(0, "draft_model.model.layers.0.mlp.experts", True)


def test_tags_of_drafts() -> None:
    drafts = ("eagle_head", "dspark_head", "dflash_head", "medusa_head", "draft_model")
    assert all(map(is_draft, drafts))
    assert not any(map(is_draft, ("backbone", "self_decoder", "cross_decoder")))


def test_parts_of_fused_modules() -> None:
    m3 = ["a.b.index_q_proj", "a.b.index_k_proj"]
    assert stored_names("a.b.qkv_proj", {}) == ["a.b.q_proj", "a.b.k_proj", "a.b.v_proj", *m3]
    assert stored_names("a.b.qkv_proj", {"qkv_proj": ["x", "y"]}) == ["a.b.x", "a.b.y", *m3]
    assert stored_names("a.b.o_proj", {}) == ["a.b.o_proj"]
    assert stored_names("gate_up_proj", {}) == ["gate_proj", "up_proj"]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ({}, None),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt_fp4"),
        ({"quant_method": "modelopt", "quant_algo": "mxfp8"}, "modelopt_mxfp8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "modelopt_mixed"),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}, "modelopt_fp4"),
        ({"quant_method": "FP8"}, "fp8"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": 3}, None),
    ],
)
def test_the_sources_method(source: dict[str, Any], name: str | None) -> None:
    assert method_name(source) == name


def test_exclude_lists_of_every_name() -> None:
    nested = {"ignore": ["a"], "quantization": {"exclude_modules": ["b", 3], "ignored_layers": None}}
    assert excludes(nested) == ("a", "b")
    assert excludes({"ignore": "lm_head"}) == ("lm_head",)


@pytest.mark.parametrize(
    ("source", "fp8"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, True),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, False),
        ({"kv_cache_scheme": None}, False),
        ({"kv_cache_quant_algo": "FP8"}, True),
        ({"quantization": {"kv_cache_quant_algo": "fp8"}}, True),
        ({"kv_cache_quant_algo": "NVFP4", "quantization": None}, False),
        ({}, False),
    ],
)
def test_the_sources_kv_cache(source: dict[str, Any], fp8: bool) -> None:
    assert fp8_kv_cache(source) is fp8


PLAIN: Header = ("BF16", (64, 64))
FP8: Header = ("F8_E4M3", (64, 64))


class Renaming:
    """As vLLM's ``WeightsMapper``: puts a prefix before every name, and drops one."""

    def apply_dict(self, values: dict[str, Any]) -> dict[str, Any]:
        return {f"language_model.{name}": value for name, value in values.items() if "rotary" not in name}


def base(**more: Header) -> BaseTensors:
    at = "model.layers.0.self_attn."
    headers = {f"{at}{part}_proj.weight": PLAIN for part in "qkvo"}
    headers |= {"model.layers.0.norm.weight": ("BF16", (64,)), "model.layers.0.rotary.weight": PLAIN}
    return BaseTensors(headers | {name.replace("__", "."): header for name, header in more.items()})


def test_a_fused_module_is_stored_as_its_parts() -> None:
    stored = base().stored("model.layers.0.self_attn.qkv_proj", {})
    assert stored is not None and stored.plain
    assert stored.names == tuple(f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
    assert base().stored("model.layers.1.self_attn.qkv_proj", {}) is None


def test_what_any_part_has_and_what_all_have() -> None:
    at = "model__layers__0__self_attn__"
    scales = {f"{at}{part}_proj__weight": FP8 for part in "qkv"} | {
        f"{at}{part}_proj__weight_scale": ("F32", ()) for part in "qkv"
    }
    for part in "qkv":
        lacking = base(**scales, **{f"{at}{part}_proj__input_scale": ("F32", ()), f"{at}k_proj__k_scale": ("F32", ())})
        stored = lacking.stored("model.layers.0.self_attn.qkv_proj", {})
        assert stored is not None
        assert stored.fields.keys() == {"weight", "weight_scale", "input_scale"}
        assert stored.every == {"weight", "weight_scale"}


def test_names_follow_the_models_renaming_once() -> None:
    tensors, mappers = base(), [Renaming()]
    tensors.rename(mappers)
    tensors.rename(mappers)
    assert tensors.stored("language_model.model.layers.0.self_attn.o_proj", {}) is not None
    assert tensors.stored("model.layers.0.self_attn.o_proj", {}) is None
    assert tensors.names("language_model.model.layers.0.rotary") == []


@pytest.mark.parametrize(
    ("method", "forms", "why_not"),
    [
        ("ModelOptMxFp8FusedMoE", {"mxfp8"}, None),
        ("NoneType", {"mxfp8"}, "ModelOptMxFp8FusedMoE or CompressedTensorsW8A8Mxfp8MoEMethod for mxfp8"),
        ("ModelOptNvFp4FusedMoE", {"mxfp8"}, "ModelOptMxFp8FusedMoE or"),
        ("UnquantizedFusedMoEMethod", {"fp8_row"}, "for fp8_row"),
        ("Fp8MoEMethod", {"fp8_block", "bf16"}, "one format, not bf16 and fp8_block"),
        ("NoneType", {"unknown"}, "a method for quantised experts"),
        ("Mxfp4MoEMethod", {"unknown"}, None),
        ("NoneType", {"nf3"}, "a method for nf3"),
    ],
)
def test_kept_experts_need_a_method_of_vllms(method: str, forms: set[str], why_not: str | None) -> None:
    found = why_not_experts(method, forms)
    assert found is None if why_not is None else found is not None and why_not in found


def test_formats_below_a_module() -> None:
    at = "mtp__layers__0__mlp__experts__"
    tensors = base(
        **{f"{at}{e}__up_proj__weight": FP8 for e in (0, 1)},
        **{f"{at}{e}__up_proj__weight_scale": ("U8", (64, 2)) for e in (0, 1)},
    )
    assert tensors.forms("mtp.layers.0.mlp.experts") == {"mxfp8"}
    assert tensors.forms("mtp.layers.0.mlp.expert") == set()
    assert tensors.forms("model.layers.0.self_attn") == {"bf16"}


def test_the_digest_is_of_how_things_are_stored() -> None:
    one = base().digest()
    assert one == BaseTensors(dict(reversed(base()._raw.items()))).digest()
    assert one != base(model__layers__0__norm__weight=("F32", (64,))).digest()
    assert one != base(model__layers__0__norm__weight=("BF16", (65,))).digest()
    assert one != base(model__layers__0__norm__bias=("BF16", (64,))).digest()


def test_parts_stored_differently_are_refused() -> None:
    tensors = base(
        model__layers__0__self_attn__k_proj__weight=FP8,
        model__layers__0__self_attn__k_proj__weight_scale=("U8", (64, 2)),
    )
    with pytest.raises(DataError, match=r"qkv_proj: stored in different ways.*q_proj is bf16, .*k_proj is mxfp8"):
        tensors.stored("model.layers.0.self_attn.qkv_proj", {})


def test_an_unreadable_module_is_refused() -> None:
    tensors = base(model__layers__0__self_attn__o_proj__weight=FP8)
    with pytest.raises(DataError, match=r"o_proj: stored in a way that cannot be read: .* no weight_scale"):
        tensors.stored("model.layers.0.self_attn.o_proj", {})


SCALE: Header = ("U8", (64, 2))
EXPERT = "model__layers__0__experts__1__x"
INDEXER = "model__layers__0__self_attn__indexer__wk"


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ({}, None),
        ({f"{INDEXER}__weight": PLAIN}, None),
        ({f"{INDEXER}__weight": FP8, f"{INDEXER}__weight_scale": ("U8", (64, 2))}, "mxfp8"),
        ({f"{INDEXER}__weight": FP8, f"{INDEXER}__weight_scale_inv": ("F32", (1, 1))}, None),
        ({"model__layers__9__x__weight": FP8, "model__layers__9__x__weight_scale": ("U8", (64, 2))}, None),
        ({f"{EXPERT}__weight": FP8, f"{EXPERT}__weight_scale": SCALE}, None),
    ],
)  # fmt: skip
def test_quantised_modules_no_layer_was_made_for(more: dict[str, Header], refused: str | None) -> None:
    tensors = base(**more)
    tensors.stored("model.layers.0.self_attn.qkv_proj", {})
    tensors.note("model.layers.0.self_attn.indexer.wq_b")
    if refused is None:
        tensors.require_claimed()
        return
    with pytest.raises(DataError, match=rf"indexer.wk: this vLLM can load it only unquantised.*found {refused}"):
        tensors.require_claimed()


def quantised(*names: str, scale: str = "weight_scale", header: Header = ("U8", (64, 2))) -> dict[str, Header]:
    return {f"{n}.weight": FP8 for n in names} | {f"{n}.{scale}": header for n in names}


LAYER = "model.layers.4"


@pytest.mark.parametrize(
    ("left", "made"),
    [
        (["mtp.fc", "mtp.layers.0.self_attn.o_proj", "model.mtp.layers.0.mlp.gate"], ["lm_head"]),
        (["model.layers.61.self_attn.o_proj", "model.layers.61.eh_proj"], ["lm_head"]),
        (["model.layers.7.self_attn.o_proj"], ["vision_model.encoder.layers.7.self_attn.fc1"]),
        ([f"{LAYER}.self_attn.indexer.wq_b", f"{LAYER}.self_attn.indexer.wk"], []),
        (["visual.blocks.3.attn.proj"], []),
    ],
)
def test_what_vllm_leaves_out_on_purpose_is_not_refused(left: list[str], made: list[str]) -> None:
    headers = quantised(f"{LAYER}.self_attn.o_proj", *left) | {"lm_head.weight": PLAIN}
    tensors = BaseTensors(headers)
    for name in (f"{LAYER}.self_attn.o_proj", *made):
        tensors.stored(name, {})
    tensors.require_claimed()
    for name in left:  # but where vLLM has what it is in, it is
        other = BaseTensors(headers)
        other.note(f"{name.rpartition('.')[0]}.another")
        with pytest.raises(DataError, match=f"{name}: this vLLM can load it only unquantised"):
            other.require_claimed((name,))


def test_minimax_m3_fuses_its_index_projections_too() -> None:
    at = f"{LAYER}.self_attn"
    names = [f"{at}.{part}" for part in ("q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj")]
    tensors = BaseTensors(quantised(*names))
    stored = tensors.stored(f"{at}.qkv_proj", {"qkv_proj": ["q_proj", "k_proj", "v_proj"]})
    assert stored is not None and list(stored.names) == names
    tensors.require_claimed()


@pytest.mark.parametrize(
    ("version", "shape", "refused"), [("0.25.1", (64,), True), ("0.27.1", (64,), False), ("0.27.1", (64, 1), True)]
)
def test_which_indexers_a_version_reads(version: str, shape: tuple[int, ...], refused: bool) -> None:
    key = f"{LAYER}.self_attn.indexer.wk"
    tensors = BaseTensors(quantised(key, scale="weight_scale_fp8", header=("BF16", shape)))
    tensors.indexer_keys = indexer_keys(version)
    tensors.note(f"{LAYER}.self_attn.indexer.wq_b")
    if not refused:
        tensors.require_claimed()
        return
    with pytest.raises(DataError, match=r"indexer.wk: this vLLM .*found fp8_row"):
        tensors.require_claimed()


def gates(*layers: int, at: str = "model.layers") -> BaseTensors:
    """Layers 0 to 2, and routers of some of them that are quantised."""
    headers: dict[str, Header] = {f"model.layers.{n}.self_attn.o_proj.weight": PLAIN for n in range(3)}
    for n in layers:
        headers |= {f"{at}.{n}.mlp.gate.weight": FP8, f"{at}.{n}.mlp.gate.weight_scale": SCALE}
    return BaseTensors(headers)


@pytest.mark.parametrize(
    ("tensors", "seen"),
    [(gates(), None), (gates(0, 1, 2), 1), (gates(0), 1), (gates(1, 2), 2), (gates(2), 3), (gates(7), None)],
)
def test_modules_no_layer_was_made_for_are_seen_while_the_model_is_made(tensors: BaseTensors, seen: int | None) -> None:
    """In vLLM's order: attention, experts, layer by layer, then the head; a layer's own router may come after both."""
    step = None
    for n in range(4):
        prefix = f"model.layers.{n}.mlp.experts" if n < 3 else "lm_head"
        if n < 3:
            tensors.stored(f"model.layers.{n}.self_attn.o_proj", {})
        try:
            tensors.require_built(prefix)
        except DataError as error:
            step = n
            assert "this vLLM can load it only unquantised" in str(error)
            break
    assert step == seen


def test_nothing_is_seen_too_early() -> None:
    other = gates(0, at="vision_tower.encoder.layers")  # made after the language model
    for n in range(3):
        other.stored(f"model.layers.{n}.self_attn.o_proj", {})
        other.require_built(f"model.layers.{n}.mlp.experts")
    other.require_built("lm_head")
    other.require_claimed()
    other.note("vision_tower.encoder.layers.0.mlp.fc1")
    with pytest.raises(DataError, match="vision_tower"):
        other.require_claimed()
    early = gates(0, 1)
    early.stored("model.layers.0.self_attn.o_proj", {})
    early.require_built("lm_head")  # made before any layer
    early.require_built("model.layers.0.shared_head.head")  # a layer of multi-token prediction begins with its head
    early.require_built("model.layers.0.mlp.experts")
    with pytest.raises(DataError, match=r"layers\.0\.mlp\.gate"):
        early.require_built("model.layers.1.mlp.experts")


def header(tensor: torch.Tensor) -> Header:
    names = {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32", torch.bfloat16: "BF16"}
    return names[tensor.dtype], tuple(tensor.shape)


def form_of(fields: dict[str, torch.Tensor]) -> SourceFormat:
    found = detect({name: header(tensor) for name, tensor in fields.items()})
    assert isinstance(found, tuple), found
    return found[0]


@pytest.mark.parametrize("dialect", ["mxfp8", "fp8_row", "fp8_tensor", "nvfp4"])
@pytest.mark.parametrize("rows", [[96], [64, 32, 2048]])
def test_dequantised_is_what_is_meant(dialect: str, rows: list[int]) -> None:
    generator = torch.Generator().manual_seed(len(rows))
    parts = [checkpoint.matrix(dialect, n, 128, generator) for n in rows]
    fields = {}
    for name, tensor in parts[0].fields.items():
        stacked = [part.fields[name] for part in parts]
        fields[name] = torch.stack(stacked) if tensor.dim() == 0 else torch.cat(stacked)
    found = dequantise(form_of(parts[0].fields), fields, rows, torch.bfloat16)
    assert torch.equal(found, torch.cat([part.meaning for part in parts]).to(torch.bfloat16))


@pytest.mark.parametrize("rows", [[1], [128], [300], [64, 32, 2048], [200, 72]])
@pytest.mark.parametrize("columns", [128, 320])
@pytest.mark.parametrize("cut", [False, True])
def test_blocks_of_scales_whose_parts_begin_anywhere(rows: list[int], columns: int, cut: bool) -> None:
    generator = torch.Generator().manual_seed(len(rows))
    parts = [checkpoint.matrix("fp8_block", n, columns, generator) for n in rows]
    scales = [rows_of_blocks(part.fields["weight_scale_inv"], n) for part, n in zip(parts, rows, strict=True)]
    kept = rows_of_blocks(parts[0].fields["weight_scale_inv"][:, None, :, None], rows[0])
    assert torch.equal(kept, scales[0]), "ModelOpt keeps the blocks' own dimensions"
    begins = [n // 3 if cut else 0 for n in rows]  # as a rank cuts each part
    at = list(zip(parts, scales, begins, strict=True))
    fields = {
        "weight": torch.cat([part.fields["weight"][b:] for part, _, b in at]),
        "weight_scale_inv": torch.cat([scale[b:] for _, scale, b in at]),
    }
    widths = [n - b for n, b in zip(rows, begins, strict=True)]
    found = dequantise(form_of(parts[0].fields), fields, widths, torch.bfloat16)
    assert torch.equal(found, torch.cat([part.meaning[b:] for part, _, b in at]).to(torch.bfloat16))


def test_one_scale_for_matrices_stored_as_one() -> None:
    made = checkpoint.matrix("fp8_tensor", 64, 32, torch.Generator().manual_seed(0))
    scale = torch.stack((made.fields["weight_scale"], torch.tensor(float("nan"))))
    fields = {"weight": made.fields["weight"], "weight_scale": scale}
    found = dequantise(form_of(made.fields), fields, [32, 32], torch.bfloat16)
    assert torch.equal(found, made.meaning.to(torch.bfloat16))


def test_compressed_tensors_second_scale_is_a_reciprocal() -> None:
    made = checkpoint.matrix("nvfp4", 64, 32, torch.Generator().manual_seed(0))
    form = SourceFormat("nvfp4", "weight_packed", "weight_scale", "weight_global_scale", 16, second_reciprocal=True)
    fields = {
        "weight_packed": made.fields["weight"],
        "weight_scale": made.fields["weight_scale"],
        "weight_global_scale": 1 / made.fields["weight_scale_2"][None],
    }
    assert torch.equal(dequantise(form, fields, [64], torch.bfloat16), made.meaning.to(torch.bfloat16))


GOOD = Request(
    prefix="model.layers.3.mlp.experts", layer=3, tp_size=2, tp_rank=1, ep_size=1, ep_rank=0, dp_size=1,
    hidden_size=256, intermediate_size=256, num_experts=8, top_k=2, activation="silu", limit=None, dtype="bfloat16",
    expert_map=None,
)  # fmt: skip


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Pack]:
    from tests.convert.support import pack, small

    folder = tmp_path_factory.mktemp("packs")
    from hybrid_pack.synthetic import write_checkpoint

    write_checkpoint(folder / "source", small())
    made = {}
    for tp, ep in ((2, 1), (1, 2), (2, 2)):
        pack(folder / "source", folder / f"{tp}-{ep}", tp, ep)
        made[tp, ep] = hybrid_pack.open_pack(folder / f"{tp}-{ep}")
    return made


def good(pack: Pack, **changes: Any) -> Request:
    sizes = pack.manifest.geometry
    request = replace(
        GOOD, hidden_size=sizes.hidden_size, intermediate_size=sizes.intermediate_size, num_experts=sizes.num_experts,
        top_k=sizes.top_k,
    )  # fmt: skip
    return replace(request, **changes)


def test_what_fits_is_let_through(packs: dict[tuple[int, int], Pack]) -> None:
    pack = packs[2, 1]
    require(good(pack), pack.manifest, pack.root)
    assert good(pack).rank == 1
    pack = packs[1, 2]
    experts_ = pack.manifest.geometry.num_experts
    half = experts_ // 2
    second = tuple(e - half if e >= half else -1 for e in range(experts_))
    request = good(pack, tp_size=1, tp_rank=0, ep_size=2, ep_rank=1, expert_map=second)
    require(request, pack.manifest, pack.root)
    with pytest.raises(UsageError, match=r"placed the experts otherwise.*--expert-placement-strategy linear"):
        require(replace(request, ep_rank=0), pack.manifest, pack.root)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tp_size": 4},
            r"made for other ranks \(expected --tensor-parallel-size 2 \(tp 2, ep 1\), found tp 4, ep 1\)",
        ),
        (
            {"tp_size": 1, "ep_size": 2},
            r"serve it so, or make one for these: `hybrid-pack convert SRC --out OUT --tp 1 --ep 2` \(SRC is source;",
        ),
        ({"tp_size": 4}, r"--tp 4 --ep 1 --pad` .*; --pad makes the intermediate size 256, and tp 1, 2 need none\)$"),
        ({"tp_size": 3}, r"or no pack can be for tp 3: .*not divisible by 3; legal sizes: 1, 2$"),
        ({"tp_size": 1, "ep_size": 3}, r"or no pack can be for ep 3: 4 experts .*; legal sizes: 1, 2, 4$"),
        ({"dp_size": 2}, r"data parallelism"),
        ({"hidden_size": 64}, r"hidden size of model.layers.3.mlp.experts"),
        ({"intermediate_size": 64}, r"intermediate size"),
        ({"num_experts": 16}, r"number of experts"),
        ({"top_k": 4}, r"experts a token visits"),
        ({"dtype": "float16"}, r"dtype .* \(expected bfloat16, found float16\)"),
        ({"activation": "gelu"}, r"activation .* is not the pack's \(expected silu, found gelu\)"),
        ({"limit": 7.0}, r"expected silu, found silu\(limit=7.0\)"),
        ({"refused": ("biases of experts",)}, r"cannot be served with biases of experts"),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], message: str, packs: dict[tuple[int, int], Pack]
) -> None:
    pack = packs[2, 1]
    with pytest.raises(UsageError, match=message):
        require(good(pack, **changes), pack.manifest, pack.root)


SILU, SWIGLU = "silu(limit=10.0)", "swigluoai(alpha=1.702, limit=7.0)"
PACKED_OAI = "swigluoai_uninterleave"


@pytest.mark.parametrize(
    ("pack", "activation", "numbers", "fits"),
    [
        ("silu", "silu", {}, True),
        ("silu", "silu", {"limit": 0.0, "alpha": 1.0, "beta": 0.0}, True),
        ("silu", "silu", {"alpha": 1.702}, False),
        ("silu", "silu", {"beta": 1.0}, False),
        (SILU, "silu", {"limit": 10.0}, True),
        (SILU, "silu", {}, False),
        (SWIGLU, PACKED_OAI, {"limit": 7.0, "alpha": 1.702, "beta": 1.0}, True),
        (SWIGLU, PACKED_OAI, {"limit": 7.0, "alpha": 1.702}, True),
        (SWIGLU, PACKED_OAI, {"limit": 5.0, "alpha": 1.702}, False),
        (SWIGLU, PACKED_OAI, {"limit": 7.0, "alpha": 1.5}, False),
        (SWIGLU, PACKED_OAI, {"limit": 7.0, "alpha": 1.702, "beta": 0.0}, False),
        (SWIGLU, PACKED_OAI, {}, False),
        (SWIGLU, "swigluoai", {}, True),
        (SWIGLU, "swigluoai", {"limit": 5.0}, False),
        ("swigluoai(alpha=1.5, limit=7.0)", "swigluoai", {}, False),
        ("relu2", "relu2_no_mul", {}, True),
    ],
)  # fmt: skip
def test_the_numbers_of_an_activation_are_compared(
    pack: str, activation: str, numbers: dict[str, float], fits: bool, packs: dict[tuple[int, int], Pack]
) -> None:
    made = packs[2, 1]
    manifest = made.manifest.model_copy(update={"layout": made.manifest.layout.model_copy(update={"activation": pack})})
    request = good(made, activation=activation, **numbers)
    if fits:
        require(request, manifest, made.root)
        return
    with pytest.raises(UsageError, match=r"activation of model.layers.3.mlp.experts is not the pack's") as error:
        require(request, manifest, made.root)
    assert all(f"{key}={value}" in str(error.value) for key, value in numbers.items())


@pytest.mark.parametrize(("tp", "ep"), [(4, 1), (1, 4), (2, 1)])
def test_a_pack_split_both_ways_is_for_no_vllm(tp: int, ep: int, packs: dict[tuple[int, int], Pack]) -> None:
    pack = packs[2, 2]
    with pytest.raises(UsageError, match="vLLM splits experts one way; make a pack with --tp N or --ep N") as error:
        require(good(pack, tp_size=tp, ep_size=ep), pack.manifest, pack.root)
    assert "serve it so" not in str(error.value)


def test_the_command_has_the_options_the_pack_was_made_with(packs: dict[tuple[int, int], Pack]) -> None:
    manifest = packs[1, 2].manifest
    plain = command_for(manifest, 2, 1)
    assert plain.startswith("make one for these: `hybrid-pack convert SRC --out OUT --tp 2 --ep 1` (SRC is source; and")
    assert "--bit-map it was made with, if it was given one" in plain
    changed = {
        "kept_format": "mxfp4", "requantize": True, "mx_bias": 125, "search": "weighted",
        "importance": "blake3:" + "0" * 64, "hessians": "blake3:" + "1" * 64,
    }  # fmt: skip
    expected = {
        "kept_format": "--kept-format mxfp4", "requantize": "--requantize", "mx_bias": "--mx-bias 125",
        "search": "--search weighted", "importance": "--importance FILE", "hessians": "--hessians FOLDER",
    }  # fmt: skip
    assert set(changed) == set(type(manifest.report.options).model_fields), "an option is not told"
    for name, value in changed.items():
        options = manifest.report.options.model_copy(update={name: value})
        report = manifest.report.model_copy(update={"options": options})
        told = command_for(manifest.model_copy(update={"report": report}), 2, 1)
        assert told == plain.replace("--ep 1`", f"--ep 1 {expected[name]}`")
    sizes = manifest.geometry.model_copy(update={"intermediate_size_padded": 256})
    padded = manifest.model_copy(update={"geometry": sizes})
    assert "--ep 1 --pad`" in command_for(padded, 2, 1)
    worst = Requantized(layer=1, expert=0, worst_relative_error=0.1)
    report = manifest.report.model_copy(update={"experts_requantized": (worst,)})
    told = command_for(manifest.model_copy(update={"report": report}), 2, 1)
    assert "--ep 1 --on-scale-mismatch requantize`" in told


def test_the_command_pads_where_only_that_makes_the_size_legal(packs: dict[tuple[int, int], Pack]) -> None:
    manifest = packs[2, 1].manifest
    sizes = manifest.geometry.model_copy(update={"intermediate_size": 192, "intermediate_size_padded": 192})
    uneven = manifest.model_copy(update={"geometry": sizes})
    assert "--tp 2 --ep 1 --pad`" in command_for(uneven, 2, 1), "96 rows a rank are no multiple of 64"
    assert "no pack can be for tp 5: intermediate size 192 is not divisible by 5" in command_for(uneven, 5, 1)


def rank_experts(pack: Pack, rank: int = 1) -> experts.RankExperts:
    log = logging.getLogger("test_vllm_rules")
    return experts.RankExperts(pack, rank, torch.device("cpu"), Options(), 8, True, log)


def test_layers_announced_together_come_together(
    packs: dict[tuple[int, int], Pack], caplog: pytest.LogCaptureFixture
) -> None:
    pack = packs[2, 1]
    rank = rank_experts(pack)
    first, *_, last = pack.layers
    for layer in pack.layers[:-1]:
        rank.announce(layer)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it loads
    try:
        with caplog.at_level(logging.INFO):
            moe, report = rank.take(first)
            assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(before)
    assert report.layers == pack.layers[:-1]
    assert (moe.layer.layer, moe.layer.rank, moe.backend, moe.max_tokens) == (first, 1, "torch", 8)
    rank.announce(last)
    assert rank.take(last)[1].layers == (last,)
    count = len(pack.layers) - 1
    expected = f"hybrid_pack: loading {count} layer{'s' * (count != 1)} of rank 1 from"
    assert caplog.records[0].getMessage().startswith(expected)
    assert any("not b12x: " in record.getMessage() for record in caplog.records), "why it is the slow one is said"


@pytest.mark.parametrize(
    ("backend", "device", "eager", "message"),
    [
        ("auto", "cpu", False, None), ("torch", "cpu", False, None), ("auto", "cuda", True, None),
        ("torch", "cuda", True, None),
        ("b12x", "cpu", True, r"layer 1 rank 1: the backend 'b12x' cannot run this layer: .*no CUDA device"),
        ("torch", "cuda", False, r"waits for the device.* \(found as asked for\).*--enforce-eager"),
        ("auto", "cuda", False, r"waits for the device.* \(found not b12x: no CUDA device"),
    ],
)  # fmt: skip
def test_what_no_backend_will_run_is_refused_when_it_is_announced(
    backend: str, device: str, eager: bool, message: str | None, packs: dict[tuple[int, int], Pack],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    log, options = logging.getLogger("test_vllm_rules"), Options(backend)
    rank = experts.RankExperts(packs[2, 1], 1, torch.device(device), options, 8, eager, log)
    if message is None:
        rank.announce(1)
        return
    with pytest.raises(EnvironmentFailure, match=message):
        rank.announce(1)


def test_an_activation_nobody_runs_is_refused_when_it_is_announced(packs: dict[tuple[int, int], Pack]) -> None:
    pack = packs[2, 1]
    layout = pack.manifest.layout.model_copy(update={"activation": "gelu"})
    other = Pack(pack.root, pack.manifest.model_copy(update={"layout": layout}))
    with pytest.raises(
        EnvironmentFailure, match=r"no backend can run this layer: b12x: .*torch: the activation 'gelu'"
    ):
        rank_experts(other).announce(1)


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (1, 2)])
def test_what_backends_say_of_a_manifest_they_say_of_the_layer(
    tp: int, ep: int, packs: dict[tuple[int, int], Pack]
) -> None:
    pack = packs[tp, ep]
    for number in pack.layers:
        layer = pack.load_layer(number, 1)
        tiers = {"kept": layer.kept is not None, "tail": layer.tail is not None}
        assert layer_geometry(pack.manifest, number) == layer.geometry
        assert backends.foresee(layer.geometry, layer.tiles, layer.device, **tiers) == backends.consider(layer)


def test_a_damaged_shard_stops_it_by_name(packs: dict[tuple[int, int], Pack], tmp_path: Path) -> None:
    import shutil

    root = Path(shutil.copytree(packs[2, 1].root, tmp_path / "pack"))
    shard = min(root.glob("experts/*/rank-1/*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    pack = hybrid_pack.open_pack(root)
    with pytest.raises(HybridPackError) as error:
        rank_experts(pack).take(pack.layers[0])
    assert str(error.value).startswith(f"rank 1, {shard}: the file is truncated (expected ")
    assert str(error.value).endswith(f"; `hybrid-pack verify {root} --rank 1` checks every byte")


def hints_of_the_runtime() -> list[str]:
    """Every hint that loading a rank and choosing its backend can give."""
    folder = Path(hybrid_pack.__file__).parent / "runtime"
    files = [*folder.glob("stream/*.py"), folder / "load.py", folder / "backends.py"]
    found = []
    for node in (n for file in files for n in ast.walk(ast.parse(file.read_text()))):
        value = node.value if isinstance(node, ast.keyword) and node.arg == "hint" else None
        found += [value.value] if isinstance(value, ast.Constant) and isinstance(value.value, str) else []
    return [*found, AGAIN]


def test_hints_name_nothing_that_only_the_library_has() -> None:
    hints = hints_of_the_runtime()
    assert len(hints) >= 6 and any("max_tokens" in hint for hint in hints)
    for hint in hints:
        told = hint_for(hint, Path("/pack"), 3)
        assert told is not None
        for word in (
            "max_tokens",
            "MoERuntime",
            "host_memory_bytes",
            "readers",
            "fewer layers",
            "leave out",
            "verify`",
        ):
            assert word not in told, hint


def test_scratch_that_does_not_fit_names_vllms_option(
    packs: dict[tuple[int, int], Pack], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr(backends, "consider", lambda layer: [backends.Accepted("b12x")])
    monkeypatch.setattr(backends.b12x_backend, "B12xBackend", full)
    pack = packs[2, 1]
    with pytest.raises(EnvironmentFailure, match=r"not enough for the scratch of b12x") as error:
        rank_experts(pack).take(pack.layers[0])
    assert str(error.value).endswith("(found no room); a smaller --max-num-batched-tokens needs less")


def test_registering_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    import sys

    from hybrid_pack.integrations.vllm import register

    monkeypatch.setitem(sys.modules, "hybrid_pack.integrations.vllm.registration", SimpleNamespace())
    with caplog.at_level(logging.WARNING):
        register()
    assert "cannot be registered" in caplog.text


@pytest.mark.parametrize("before", ["fork", None, "spawn"])
@pytest.mark.parametrize("in_use", [False, True])
def test_engines_are_spawned_where_the_driver_is_in_use(
    before: str | None, in_use: bool, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {} if before is None else {METHOD: before}
    caplog.set_level(logging.INFO)
    spawn_if_needed(logging.getLogger("test"), environment, lambda: in_use)
    assert environment.get(METHOD) == ("spawn" if in_use else before)
    assert ("spawned, not forked" in caplog.text) == (in_use and before != "spawn")


def test_a_driver_that_is_not_there_is_not_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(processes.ctypes, "CDLL", missing)
    assert not processes.driver_in_use()
    monkeypatch.setattr(processes.ctypes, "CDLL", lambda name: SimpleNamespace(cuDeviceGetCount=lambda at: 3))
    assert not processes.driver_in_use()
    monkeypatch.setattr(processes.ctypes, "CDLL", lambda name: SimpleNamespace(cuDeviceGetCount=lambda at: 0))
    assert processes.driver_in_use()
