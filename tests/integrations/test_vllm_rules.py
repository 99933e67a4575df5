"""The plugin's own rules, without vLLM: names, options, versions, what is stored how, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_pack.errors import DataError, EnvironmentFailure, UsageError
from hybrid_pack.formats.source import Header
from hybrid_pack.integrations.vllm.base import BaseTensors
from hybrid_pack.integrations.vllm.drafts import Decoder, is_draft
from hybrid_pack.integrations.vllm.kept import why_not_experts
from hybrid_pack.integrations.vllm.options import Options, misplaced, parse_options
from hybrid_pack.integrations.vllm.prefixes import layer_of, stored_names
from hybrid_pack.integrations.vllm.request import require_served
from hybrid_pack.integrations.vllm.source import excludes, fp8_kv_cache, method_name
from hybrid_pack.integrations.vllm.versions import indexer_keys, known_names, why_not_version


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
    each = {"weight": FP8, "weight_scale": ("U8", (64, 2))}
    assert tensors.experts("mtp.layers.0.mlp.experts") == [each, each]
    assert tensors.experts("mtp.layers.0.mlp.expert") == tensors.experts("model.layers.0.self_attn") == []


def test_the_digest_is_of_how_things_are_stored() -> None:
    one = base().digest()
    assert one == BaseTensors(dict(reversed(base()._raw.items()))).digest()
    assert one != base(model__layers__0__norm__weight=("F32", (64,))).digest()
    assert one != base(model__layers__0__norm__weight=("BF16", (65,))).digest()
    assert one != base(model__layers__0__norm__bias=("BF16", (64,))).digest()


@pytest.mark.parametrize(("bias", "name"), [(127, "mxfp4"), (125, "mxfp4 with bias 125")])
def test_the_bias_of_mxfp4_scales_is_the_conversions(bias: int, name: str) -> None:
    at = f"{LAYER}.mlp.experts.0.x"
    headers: dict[str, Header] = {f"{at}.weight_packed": ("U8", (64, 32)), f"{at}.weight_scale": ("U8", (64, 2))}
    tensors = BaseTensors(headers, bias)
    stored = tensors.stored(at, {})
    assert stored is not None and stored.form.scale_bias == bias
    assert tensors.forms(f"{LAYER}.mlp.experts") == {name}
    assert tensors.digest() != BaseTensors(headers, 252 - bias).digest()
    assert (why_not_experts("CompressedTensorsW4A4Mxfp4MoEMethod", {name}) is None) is (bias == 127)


@pytest.mark.parametrize(
    ("headers", "what"),
    [
        ({"weight": ("I8", (64, 64)), "weight_scale": ("F32", (64, 1))}, "8-bit integers"),
        ({"weight_packed": ("I32", (64, 8)), "weight_scale": ("BF16", (64, 2))}, "integers packed in words"),
    ],
)
def test_integers_are_no_plain_weights(headers: dict[str, Header], what: str) -> None:
    gate = f"{LAYER}.mlp.gate"
    tensors = BaseTensors({f"{gate}.{name}": header for name, header in headers.items()})
    tensors.note(f"{LAYER}.mlp.experts")
    with pytest.raises(DataError, match=rf"gate: this vLLM can load it only unquantised.*found {what}"):
        tensors.require_claimed()
    stored = tensors.stored(gate, {})
    assert stored is not None and stored.form.name == what and not stored.plain
    assert tensors.forms(f"{LAYER}.mlp") == {"unknown"}


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
        ({f"{INDEXER}__weight": ("F8_E4M3", (128, 128)), f"{INDEXER}__weight_scale_inv": ("F32", (1, 1))}, None),
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


KEYS: Header = ("F8_E4M3", (128, 256))


@pytest.mark.parametrize(
    ("field", "scale", "codes", "since"),
    [
        ("weight_scale_inv", ("F32", (1, 2)), KEYS, "0.22.1"),
        ("weight_scale", ("F32", (1, 2)), KEYS, "0.25.1"),
        ("scale", ("F32", (1, 2)), KEYS, None),
        ("weight_scale", ("F32", (1, 1, 2, 1)), KEYS, None),
        ("weight_scale_inv", ("F32", (1, 1, 2, 1)), KEYS, None),
        ("weight_scale_inv", ("F32", (2, 2)), ("F8_E4M3", (192, 256)), None),
        ("weight_scale_inv", ("F32", (1, 3)), ("F8_E4M3", (128, 320)), None),
        ("weight_scale_fp8", ("BF16", (128,)), KEYS, "0.27.1"),
        ("weight_scale", ("F32", (128,)), KEYS, "0.27.1"),
        ("weight_scale", ("F32", (128, 1)), KEYS, None),
        ("weight_scale", ("F32", ()), KEYS, None),
    ],
)
@pytest.mark.parametrize("version", ["0.22.1", "0.25.1", "0.27.1"])
def test_which_indexers_a_version_reads(
    version: str, field: str, scale: Header, codes: Header, since: str | None
) -> None:
    key = f"{LAYER}.self_attn.indexer.wk"
    tensors = BaseTensors({f"{key}.weight": codes, f"{key}.{field}": scale})
    tensors.indexer_keys = indexer_keys(version)
    tensors.note(f"{LAYER}.self_attn.indexer.wq_b")
    if since is not None and version >= since:
        tensors.require_claimed()
        return
    with pytest.raises(DataError, match=r"indexer.wk: this vLLM .*found fp8_"):
        tensors.require_claimed()


@pytest.mark.parametrize(("family", "served"), [("deepseek_v3", True), (None, True), ("deepseek_v4", False)])
def test_families_that_vllm_runs_only_with_a_config_of_their_own(family: str | None, served: bool) -> None:
    if served:
        require_served(family, "OUT")
        return
    with pytest.raises(UsageError, match=r"OUT: packs of deepseek_v4 cannot be served with vLLM yet: .*wo_a"):
        require_served(family, "OUT")


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
