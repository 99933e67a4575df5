"""Wrong contents: one line for each rule of the bit map, the config and what ties them to the stored tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybrid_pack.errors import EnvironmentFailure, UsageError
from hybrid_pack.io.bitmap import KEY
from hybrid_pack.io.config import CONFIG, HF_QUANT_CONFIG
from tests.checkpoints import (
    BITS,
    KEPT,
    KEPT_GATE,
    LAYER,
    MTP_GATE,
    TAIL,
    TAIL_GATE,
    Editor,
    Stored,
    edit_config,
    edit_tensors,
    quantization,
)
from tests.io.file_mutations import dangling
from tests.io.mutation import MAP_FILE, Case

NAN = float("nan")
STACK = "model.layers.6.mlp.experts"
KEPT_AT = f"layer 3 expert {KEPT}"
TAIL_AT = f"layer 3 expert {TAIL}"


def config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Change config.json."""

    def apply(root: Path) -> None:
        with edit_config(root) as document:
            change(document)

    return apply


def block(**values: Any) -> Callable[[Path], object]:
    """Change quantization_config."""
    return config(lambda d: quantization(d).update(values))


def bits(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    """Change the bit map."""
    return config(lambda d: change(quantization(d)[KEY]))


def bit(value: Any) -> Callable[[Path], object]:
    """Change the entry of expert 1 of layer 3."""
    return bits(lambda m: m["3"].__setitem__(1, value))


def tensors(change: Callable[[Editor], object]) -> Callable[[Path], object]:
    """Change tensors."""

    def apply(root: Path) -> None:
        with edit_tensors(root) as editor:
            change(editor)

    return apply


def all_of(*changes: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda root: [change(root) for change in changes]


def drop(prefix: str) -> Callable[[Path], object]:
    """Drop every tensor under a name."""
    return tensors(lambda t: [t.__delitem__(name) for name in t.matching(prefix)])


def rename(old: str, new: str) -> Callable[[Path], object]:
    """Rename every tensor that contains ``old``."""
    return tensors(lambda t: [t.rename(n, n.replace(old, new)) for n in list(t.weight_map) if old in n])


def zeros(dtype: str, *shape: int) -> Stored:
    """A tensor of zero bytes, of a dtype of one or two bytes, or of four."""
    count = 1
    for size in shape:
        count *= size
    return Stored(dtype, shape, bytes(count * {"BF16": 2, "F32": 4, "I32": 4}.get(dtype, 1)))


def put(name: str, dtype: str, *shape: int) -> Callable[[Path], object]:
    return tensors(lambda t: t.__setitem__(name, zeros(dtype, *shape)))


def store(t: Editor, name: str, kind: str, rows: int = 128, columns: int = 128) -> None:
    """Store a matrix anew in another format."""
    for old in t.matching(f"{name}."):
        del t[old]
    fields = {
        "nvfp4": {"weight": ("U8", columns // 2), "weight_scale": ("F8_E4M3", columns // 16)},
        "mxfp4": {"weight": ("U8", columns // 2), "weight_scale": ("U8", columns // 32)},
        "nf3": {"weight_packed": ("U8", columns // 8 * 3), "weight_scale": ("F8_E4M3", columns // 32)},
        "bf16": {"weight": ("BF16", columns)},
        "compressed": {"weight_packed": ("U8", columns // 2), "weight_scale": ("F8_E4M3", columns // 16)},
        "e5m2": {"weight": ("F8_E5M2", columns)},
        "unscaled": {"weight": ("F8_E4M3", columns)},
    }[kind]
    for field, (dtype, width) in fields.items():
        t[f"{name}.{field}"] = zeros(dtype, rows, width)
    if kind == "nvfp4":
        t[f"{name}.weight_scale_2"] = zeros("F32")


def stored(prefix: str, kind: str) -> Callable[[Path], object]:
    """Store all matrices under a name anew."""

    def change(t: Editor) -> None:
        for name in sorted({name.rsplit(".", 1)[0] for name in t.matching(prefix)}):
            store(t, name, kind)

    return tensors(change)


def given_map(value: Any) -> Callable[[Path], object]:
    """A map as ``--bit-map`` gives it."""
    return lambda root: (root / MAP_FILE).write_text(json.dumps(value))


def hf_quant(**values: Any) -> Callable[[Path], object]:
    """Write hf_quant_config.json."""
    return lambda root: (root / HF_QUANT_CONFIG).write_text(json.dumps({"quantization": values}))


def levels(*values: Any) -> Callable[[Path], object]:
    return block(nf3_levels=list(values))


MAP_CASES = (
    Case("no bit map", config(lambda d: quantization(d).pop(KEY)), r"config\.json: no hybrid_bit_map.*--bit-map"),
    Case("map is null", block(**{KEY: None}), r"config\.json: no hybrid_bit_map"),
    Case("map is a list", block(**{KEY: [[4, 3]]}),
         r"config\.json: the bit map is not an object of layers \(found list\)"),
    Case("map is empty", block(**{KEY: {}}), r"config\.json: the bit map is not an object of layers \(found nothing\)"),
    Case("key is a word", bits(lambda m: m.update(default=BITS)),
         r"a key of the bit map is not a layer number \(found 'default'\)"),
    Case("key is negative", bits(lambda m: m.update({"-3": BITS})), r"not a layer number \(found '-3'\)"),
    Case("key is a fraction", bits(lambda m: m.update({"3.0": BITS})), r"not a layer number \(found '3\.0'\)"),
    Case("key has other digits", bits(lambda m: m.update({"٣": BITS})), r"not a layer number"),
    Case("key is too long", bits(lambda m: m.update({"0000003": BITS})), r"not a layer number"),
    Case("key 03 beside 3", bits(lambda m: m.update({"03": BITS})),
         r"layer 3 occurs twice in the bit map \(found '03'\)"),
    Case("key 3 twice",
         lambda r: (r / CONFIG).write_text((r / CONFIG).read_text().replace('"3": [', '"3": [4], "3": [')),
         r"config\.json: not valid JSON .*'3' occurs twice"),
    Case("entries are a number", bits(lambda m: m.update({"3": 4})),
         r"layer 3 of the bit map is not a list \(found 4\)"),
    Case("entries are none", bits(lambda m: m.update({"3": []})), r"layer 3 of the bit map is not a list"),
    Case("entry is 2", bit(2), r"layer 3 expert 1 of the bit map \(expected 4 \(kept\) or 3 \(tail\), found 2\)"),
    Case("entry is text", bit("4"), r"layer 3 expert 1 of the bit map .*found '4'"),
    Case("entry is a fraction", bit(4.0), r"layer 3 expert 1 of the bit map .*found 4\.0"),
    Case("entry is a truth", bit(True), r"layer 3 expert 1 of the bit map .*found True"),
    Case("an entry too few", bits(lambda m: m["3"].pop()),
         r"config\.json: layer 3 of the bit map \(expected 4 entries, the experts by config\.json, found 3\)"),
    Case("896 entries", bits(lambda m: m.update({"3": [3] * 896})),
         r"layer 3 of the bit map \(expected 4 entries, .*found 896\)"),
    Case("a layer too many", bits(lambda m: m.update({"9": BITS})),
         r"layer 9 is in the bit map but has no experts .*layers 3-5"),
    Case("a dense layer in the map", bits(lambda m: m.update({"0": BITS})),
         r"layer 0 is in the bit map but has no experts"),
    Case("a layer too few", bits(lambda m: m.pop("4")),
         r"layer 4 expert \d.*disagree .*not named by the bit map, so kept, found NF3"),
    Case("map says tail, kept is stored",
         bits(lambda m: m.update({"3": [3] * 4})),
         rf"{KEPT_GATE}\.weight: {KEPT_AT}: .* disagree .*expected NF3: .* tail \(3\), found NVFP4\).*--bit-map"),
    Case("map says kept, tail is stored", bits(lambda m: m.update({"3": [4] * 4})),
         rf"{TAIL_GATE}\.weight_packed: {TAIL_AT}: .*disagree .*expected NVFP4 or MXFP4: .* kept \(4\), found NF3"),
    Case("map names the MTP layer tail", bits(lambda m: m.update({"5": [3] * 4})),
         r"layer 5 expert 0: .*disagree .*found NVFP4"),
    Case("two maps that differ", hf_quant(**{KEY: {"3": [4] * 4}}),
         r"hf_quant_config\.json: .*disagrees with that of config\.json in layer 3"),
    Case("given map is not there", lambda r: (r / MAP_FILE).symlink_to("gone.json"),
         rf"{MAP_FILE}: a symbolic link to a file"),
    Case("given map is wrong", given_map({"3": [4, 3, 5, 4]}),
         rf"{MAP_FILE}: layer 3 expert 2 of the bit map .*found 5"),
    Case("given map disagrees", given_map({"3": [4] * 4, "4": [4] * 4}),
         rf"{TAIL_AT}: the bit map and the stored format disagree"),
)  # fmt: skip

CONFIG_CASES = (
    Case("no config", lambda r: (r / CONFIG).unlink(),
         r"config\.json: no such file; SRC must be a checkpoint folder or a Hub id"),
    Case("config links to nothing", dangling(CONFIG), r"config\.json: a symbolic link to a file that is not there"),
    Case("config is a folder", lambda r: [(r / CONFIG).unlink(), (r / CONFIG).mkdir()],
         r"config\.json: cannot read \(found no regular file: d", EnvironmentFailure),
    Case("config is a pipe", lambda r: [(r / CONFIG).unlink(), os.mkfifo(r / CONFIG)],
         r"config\.json: cannot read \(found no regular file: p", EnvironmentFailure),
    Case("config links to itself", lambda r: [(r / CONFIG).unlink(), (r / CONFIG).symlink_to(CONFIG)],
         r"config\.json: cannot read \(found Too many levels", EnvironmentFailure),
    Case("config is huge", lambda r: os.truncate(r / CONFIG, 3 << 30),
         r"config\.json: too large for a JSON document \(expected at most 268435456 bytes, found 3221225472\)"),
    Case("config is no JSON", lambda r: (r / CONFIG).write_text("{"), r"config\.json: not valid JSON"),
    Case("config is text", lambda r: (r / CONFIG).write_text('"x"'), r"config\.json: not a JSON object \(found str\)"),
    Case("hf_quant_config is a list", lambda r: (r / HF_QUANT_CONFIG).write_text("[]"),
         r"hf_quant_config\.json: not a JSON object"),
    Case("hf_quant_config links to nothing", lambda r: (r / HF_QUANT_CONFIG).symlink_to("gone"),
         r"hf_quant_config\.json: a symbolic link"),
    Case("no hidden_size", config(lambda d: d.pop("hidden_size")), r"config\.json: none of hidden_size is given"),
    Case("no intermediate size", config(lambda d: d.pop("moe_intermediate_size")),
         r"config\.json: none of intermediate_size is given"),
    Case("no experts", config(lambda d: [d.pop("num_experts"), d.pop("n_routed_experts")]),
         r"none of num_experts, n_routed_experts.* mixture-of-experts"),
    Case("no top_k", config(lambda d: d.pop("num_experts_per_tok")), r"config\.json: none of num_experts_per_tok"),
    Case("hidden_size is text", config(lambda d: d.update(hidden_size="128")),
         r"hidden_size is not a positive integer \(found '128'\)"),
    Case("hidden_size is 0", config(lambda d: d.update(hidden_size=0)), r"hidden_size is not a positive integer"),
    Case("num_experts is a truth", config(lambda d: d.update(num_experts=True)),
         r"num_experts is not a positive integer"),
    Case("expert counts differ", config(lambda d: d.update(num_experts=5)),
         r"keys that mean the same differ \(found num_experts=5, n_routed_experts=4\)"),
    Case("top_k is above the experts", config(lambda d: d.update(num_experts_per_tok=9)),
         r"config\.json: num_experts_per_tok is above num_experts \(expected at most 4, found 9\)"),
    Case("the activation is a list", config(lambda d: d.update(hidden_act=["silu"])),
         r"config\.json: hidden_act is not a name \(expected a string, found \['silu'\]\)"),
    Case("the activation is false", config(lambda d: d.update(hidden_act=False)), r"hidden_act is not a name"),
    Case("a second activation is a number", config(lambda d: d.update(mlp_hidden_act="silu", hidden_activation=1)),
         r"hidden_activation is not a name"),
    Case("swiglu_limit is text", config(lambda d: d.update(swiglu_limit="x")),
         r"config\.json: swiglu_limit is not a finite number \(found 'x'\)"),
    Case("swiglu_limit is a truth", config(lambda d: d.update(swiglu_limit=True)), r"swiglu_limit is not a finite"),
    Case("swiglu_limit is enormous", config(lambda d: d.update(swiglu_limit=10**400)), r"swiglu_limit is not a finite"),
    Case("swiglu_alpha is a list", config(lambda d: d.update(swiglu_alpha=[1.7])), r"swiglu_alpha is not a finite"),
    Case("activation_situ_beta is NaN", config(lambda d: d.update(activation_situ_beta=NAN)),
         r"activation_situ_beta is not a finite number"),
    Case("model_type is a list", config(lambda d: d.update(model_type=["glm"])),
         r"config\.json: model_type is not a name \(expected a string, found \['glm'\]\)"),
    Case("text_config is text", config(lambda d: d.update(text_config="x")),
         r"config\.json: text_config is not a JSON object \(found 'x'\)"),
    Case("quantization_config is a list",
         config(lambda d: d.update(quantization_config=[4], hybrid_bit_map={"3": BITS})),
         r"config\.json: quantization_config is not a JSON object \(found \[4\]\)"),
    Case("quantization of hf_quant_config is text",
         lambda root: (root / HF_QUANT_CONFIG).write_text('{"quantization": "fp8"}'),
         r"hf_quant_config\.json: quantization is not a JSON object \(found 'fp8'\)"),
    Case("layers are text", config(lambda d: d.update(num_hidden_layers="5")),
         r"num_hidden_layers is not a positive integer"),
    Case("seven levels", levels(-1, -0.6, -0.3, 0.1, 0.3, 0.6, 1),
         r"config\.json: nf3_levels is not eight finite ascending numbers"),
    Case("levels do not ascend", levels(-1, -0.6, -0.3, -0.1, -0.1, 0.3, 0.6, 1), r"nf3_levels is not eight"),
    Case("level is NaN", levels(-1, -0.6, -0.3, NAN, 0.1, 0.3, 0.6, 1), r"nf3_levels is not eight"),
    Case("level is text", levels(-1, -0.6, -0.3, "-0.1", 0.1, 0.3, 0.6, 1), r"nf3_levels is not eight"),
    Case("level is enormous", levels(-1, -0.6, -0.3, -0.1, 0.1, 0.3, 0.6, 10**400), r"nf3_levels is not eight"),
    Case("levels are an object", block(nf3_levels={"0": -1}), r"nf3_levels is not eight"),
    Case("two sets of levels",
         all_of(levels(-8, -3, -2, -1, 1, 2, 3, 8), hf_quant(nf3_levels=[-9, -3, -2, -1, 1, 2, 3, 8])),
         r"nf3_levels differs between config\.json and hf_quant_config\.json"),
    Case("another tail codec", block(demoted_format="iq3_xxs"),
         r"the tail is stored as 'iq3_xxs', another codec \(expected nf3_2p1\)"),
    Case("another tail codec in hf_quant_config", hf_quant(demoted_format="iq3_xxs"),
         r"the tail is stored as 'iq3_xxs'"),
    Case("unknown kept_format", block(kept_format="int4_k128"),
         r"unknown kept_format \(expected mxfp4_e8m0k32 or none \(NVFP4\), found 'int4_k128'\)"),
    Case("kept_format is a list", block(kept_format=["mxfp4_e8m0k32"]), r"unknown kept_format"),
    Case("kept_format is not what is stored",
         block(kept_format="mxfp4_e8m0k32"),
         rf"{KEPT_GATE}\.weight: {KEPT_AT}: config and stored format disagree .*MXFP4 by kept_format, found NVFP4\)"),
    Case("swiglu_limits are text", config(lambda d: d.update(swiglu_limits=["7.0"])),
         r"config\.json: swiglu_limits is not a number for each layer \(found \['7\.0'\]\)"),
    Case("swiglu_limits are one number", config(lambda d: d.update(swiglu_limits=7.0)),
         r"swiglu_limits is not a number"),
    Case("the activation has no gate", config(lambda d: d.update(hidden_act="relu2")),
         r"0\.gate_proj\.\w+: layer 3: its experts have a gate \(expected no gate for the activation 'relu2'"),
    Case("a bias no scale can have", lambda r: None, r"the bias of MXFP4 scales \(expected 127 or 125, found 126\)",
         UsageError, {"mx_bias": 126}),
    Case("a bias for scales that are not there", lambda r: None,
         r"a bias of 125 for the scales of MXFP4 \(expected MXFP4 experts as compressed-tensors stores them",
         UsageError, {"mx_bias": 125}),
    Case("config is of a wider model",
         config(lambda d: d.update(hidden_size=256)),
         r"0\.gate_proj\.\w+: layer 3 expert 0: .*disagree on its size .*\[128, 256\] by the config, found .*; "
         r"the width of experts is the first there is of routed_expert_hidden_size, moe_latent_size, hidden_size"),
    Case("config has a latent width that experts lack", config(lambda d: d.update(moe_latent_size=64)),
         r"expert 0: .*disagree on its size .*\[128, 64\] by the config, found .*first there is of routed_expert"),
    Case("config is of a larger intermediate size", config(lambda d: d.update(moe_intermediate_size=256)),
         r"layer 3 expert 0: .*\[256, 128\] by the config"),
    Case("config names more experts", config(lambda d: d.update(num_experts=8, n_routed_experts=8)),
         r"layer 3: expert 4 is missing \(expected 8 experts by config.json, found 4\)"),
    Case("config names billions of experts",
         config(lambda d: d.update(num_experts=2**31 - 1, n_routed_experts=2**31 - 1)),
         r"layer 3: expert 4 is missing"),
    Case("config names fewer experts", config(lambda d: d.update(num_experts=3, n_routed_experts=3)),
         r"layer 3: expert 3 is one too many \(expected 3"),
)  # fmt: skip

TENSOR_CASES = (
    Case("names of no known family", rename(".experts.", ".specialists."),
         r"small: no routed expert found under any known name \(found \d+ tensors\)"),
    Case("two families in a layer", rename(f"{LAYER}.2.", "model.language_model.layers.3.mlp.experts.2."),
         r"layer 3 names its experts in two ways \(found model\.layers.*and model\.language_model"),
    Case("an expert is missing", drop(f"{LAYER}.2."),
         r"layer 3: expert 2 is missing \(expected 4 experts by config.json, found 3\)"),
    Case("an expert of the MTP layer is missing", drop("model.layers.5.mlp.experts.3."),
         r"layer 5: expert 3 is missing"),
    Case("a matrix is missing", drop(f"{LAYER}.{TAIL}.up_proj."),
         rf"model-.*safetensors: {TAIL_AT} has no up matrix \(found only (gate, down|down, gate)\)"),
    Case("the codes are missing", drop(f"{KEPT_GATE}.weight"),
         rf"{KEPT_AT} is kept by the bit map; .*{KEPT_GATE}: neither weight nor weight_packed"),
    Case("the block scales are missing", drop(f"{TAIL_GATE}.weight_scale"),
         rf"{TAIL_AT} is tail by the bit map; .*weight_packed has no weight_scale"),
    Case("weight_scale_2 is missing", tensors(lambda t: t.__delitem__(f"{KEPT_GATE}.weight_scale_2")),
         rf"safetensors: {KEPT_AT}: {KEPT_GATE}\.weight_scale_2 is missing \(expected the F32 second-level scale"),
    Case("weight_scale_2 of the MTP layer is missing", tensors(lambda t: t.__delitem__(f"{MTP_GATE}.weight_scale_2")),
         rf"layer 5 expert 0: {MTP_GATE}\.weight_scale_2 is missing"),
    Case("weight_scale_2 is BF16",
         put(f"{KEPT_GATE}.weight_scale_2", "BF16"),
         rf"{KEPT_GATE}\.weight_scale_2: {KEPT_AT}: not a second-level scale .*F32 \[\] or \[1\], found BF16 \[\]\)"),
    Case("weight_scale_2 per row", put(f"{KEPT_GATE}.weight_scale_2", "F32", 128),
         r"not a second-level scale .*found F32 \[128\]"),
    Case("a field NVFP4 has not",
         put(f"{KEPT_GATE}.weight_zero_point", "U8", 128, 8),
         rf"{KEPT_GATE}\.weight_zero_point: {KEPT_AT} has a field that nvfp4 has not .*weight_scale_2, found"),
    Case("NF3 with a second scale", put(f"{TAIL_GATE}.weight_scale_2", "F32"),
         rf"{TAIL_AT} has a field that nf3 has not"),
    Case("NF3 beside a BF16 weight", put(f"{TAIL_GATE}.weight", "BF16", 128, 128),
         rf"{TAIL_AT} has a field that nf3 has not .*found weight\)"),
    Case("block scales of too few rows", put(f"{KEPT_GATE}.weight_scale", "F8_E4M3", 64, 8),
         rf"{KEPT_AT} .*weight_scale \[64, 8\] does not fit weight"),
    Case("block scales per 128 columns", put(f"{KEPT_GATE}.weight_scale", "F8_E4M3", 128, 1),
         r"one scale for 128 codes is neither NVFP4 nor MXFP4"),
    Case("block scales swizzled", put(f"{KEPT_GATE}.weight_scale", "U8", 1024),
         rf"{KEPT_AT} .*weight_scale \[1024\] does not fit"),
    Case("block scales FP32", put(f"{KEPT_GATE}.weight_scale", "F32", 128, 8),
         rf"{KEPT_AT} .*weight_scale F32 .*neither NVFP4 nor MXFP4"),
    Case("NF3 codes of a width no codes fill", put(f"{TAIL_GATE}.weight_packed", "U8", 128, 50),
         rf"{TAIL_AT} .*weight_scale \[128, 4\] does not fit weight_packed \[128, 50\]"),
    Case("an E5M2 expert in a mapped layer", stored(f"{LAYER}.{KEPT}.", "e5m2"),
         rf"{KEPT_AT} is kept by the bit map; its stored format cannot be packed .*weight is F8_E5M2, which"),
    Case("an FP8 tail expert without scales", stored(f"{LAYER}.{TAIL}.", "unscaled"),
         rf"{TAIL_AT} is tail by the bit map; .*weight F8_E4M3 has no weight_scale beside it"),
    Case("weight_global_scale is missing", stored(f"{LAYER}.{KEPT}.", "compressed"),
         rf"{KEPT_AT}: {LAYER}\.{KEPT}\.gate_proj\.weight_global_scale is missing"),
    Case("compressed-tensors' integers in the MTP layer",
         tensors(lambda t: [t.__delitem__(f"{MTP_GATE}.weight"), t.__setitem__(f"{MTP_GATE}.weight_packed",
                 zeros("I32", 128, 16))]),
         r"layer 5 expert 0 is not in the bit map; .*cannot be packed .*weight_packed is I32"),
    Case("NF3 in the MTP layer", stored("model.layers.5.mlp.experts.2.", "nf3"),
         r"layer 5 expert 2: .*disagree .*not named by the bit map, so kept, found NF3"),
    Case("one BF16 expert in the MTP layer", stored("model.layers.5.mlp.experts.2.", "bf16"),
         r"layer 5, not in the bit map, mixes packed and wide experts .*expert 0 nvfp4, expert 2: .*weight is BF16"),
    Case("a kept expert with a matrix of three bits", tensors(lambda t: store(t, KEPT_GATE, "nf3")),
         rf"{KEPT_GATE}\.weight_packed: {KEPT_AT}: .*disagree .*kept \(4\), found NF3\+NVFP4"),
    Case("a tail expert with a matrix of four bits", tensors(lambda t: store(t, TAIL_GATE, "mxfp4")),
         rf"{TAIL_GATE}\.weight: {TAIL_AT}: .*disagree .*tail \(3\), found MXFP4\+NF3"),
    Case("a wide matrix in the MTP layer", tensors(lambda t: store(t, MTP_GATE, "bf16")),
         r"layer 5, not in the bit map, mixes .*expert 0 bf16\+nvfp4, expert 0: .*gate_proj: weight is BF16"),
    Case("a tensor of all experts that has too few",
         all_of(put(f"{STACK}.gate_up_proj", "BF16", 3, 256, 128), put(f"{STACK}.down_proj", "BF16", 4, 128, 128)),
         rf"{STACK}\.gate_up_proj: a tensor of all experts .*expected 4 experts by config.json, found \[3, 256,"),
    Case("a tensor of all experts with odd rows",
         all_of(put(f"{STACK}.gate_up_proj", "BF16", 4, 255, 128), put(f"{STACK}.down_proj", "BF16", 4, 128, 128)),
         r"gate_up_proj\[0\]: layer 6 expert 0: gate and up together \(expected even rows, found 255\)"),
    Case("a tensor of all experts of another size",
         all_of(put(f"{STACK}.gate_up_proj", "BF16", 4, 256, 64), put(f"{STACK}.down_proj", "BF16", 4, 128, 128)),
         r"gate_up_proj\[0\]\[0:128\]: layer 6 expert 0: .*expected \[128, 128\] by the config, found \[128, 64\]"),
    Case("a tensor of all experts without down", put(f"{STACK}.gate_up_proj", "BF16", 4, 256, 128),
         r"layer 6 expert 0 has no down matrix \(found only gate_up\)"),
    Case("a tensor of all experts beside single ones", put(f"{LAYER}.down_proj", "BF16", 4, 128, 128),
         r"layer 3 names its experts in two ways"),
    Case("an expert of another size", tensors(lambda t: store(t, KEPT_GATE, "nvfp4", 64)),
         rf"{KEPT_GATE}\.weight: {KEPT_AT}: .*found \[64, 128\] \(nvfp4\)"),
    Case("gate and down exchanged", tensors(lambda t: store(t, f"{LAYER}.{TAIL}.down_proj", "nf3", 128, 64)),
         rf"{TAIL_AT}: .*found \[128, 64\] \(nf3\)"),
)  # fmt: skip
