"""Tiers of every kind of source: what the map, the stored formats and the options make of each expert."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.errors import DataError
from hybrid_pack.io.bitmap import KEY
from hybrid_pack.io.checkpoint import Checkpoint, open_checkpoint
from hybrid_pack.io.config import NO_ACTIVATION
from hybrid_pack.io.experts import BIAS
from hybrid_pack.io.names import FAMILIES, parse
from hybrid_pack.synthetic import Spec, bit_map, write_checkpoint
from tests.checkpoints import SMALL, edit_config, edit_tensors, quantization
from tests.io.content_mutations import store, stored, zeros

TINY = replace(SMALL, moe_layers=(1,), dense_layers=(0,), mtp_layer=False)
BITS = bit_map(TINY)["1"]
KEPT = tuple(e for e, bit in enumerate(BITS) if bit == 4)
TAIL = tuple(e for e, bit in enumerate(BITS) if bit == 3)
LABELS = {
    "ct_nvfp4": "nvfp4", "ct_mxfp4": "mxfp4", "mxfp8_inv": "mxfp8",
}  # fmt: skip
KINDS = (
    "nvfp4", "mxfp4", "ct_nvfp4", "ct_mxfp4", "mxfp8", "mxfp8_inv", "fp8_block", "fp8_row", "fp8_tensor", "bf16", "f16",
    "f32",
)  # fmt: skip


def opened(root: Path, spec: Spec, **options: Any) -> Checkpoint:
    write_checkpoint(root, spec)
    return open_checkpoint(root, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_takes_either_tier(tmp_path: Path, kind: str) -> None:
    """Without NF3 anywhere, the map says what is wanted."""
    source = opened(tmp_path, replace(TINY, stored=(kind,)))
    layer = source.layers[1]
    label = LABELS.get(kind, kind)
    assert (layer.kept, layer.tail) == (KEPT, TAIL)
    assert layer.stored == dict.fromkeys(range(4), label)
    assert layer.kept_format == ("mxfp4" if label == "mxfp4" else "nvfp4")
    assert layer.mapped and len(source.notes) == (kind == "ct_mxfp4")
    for expert in layer.experts.values():
        for matrix in expert.matrices:
            assert matrix.format.native == (label in ("nvfp4", "mxfp4"))
            assert matrix.native_to(str(layer.kept_format)) == matrix.format.native
            assert (matrix.scales is None) == (label in ("bf16", "f16", "f32"))
            assert (matrix.second is None) == (label != "nvfp4")


@pytest.mark.parametrize("target", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "bf16"])
def test_the_kept_format_may_be_given(tmp_path: Path, kind: str, target: str) -> None:
    layer = opened(tmp_path, replace(TINY, stored=(kind,)), kept_format=target).layers[1]
    assert layer.kept_format == target
    assert layer.experts[0].up.native_to(target) == (kind == target)


def test_no_kept_expert_has_no_kept_format(tmp_path: Path) -> None:
    assert opened(tmp_path, replace(TINY, kept=0, stored=("bf16",)), kept_format="mxfp4").layers[1].kept_format is None


@pytest.mark.parametrize(
    ("kinds", "target"),
    [
        (("nvfp4", "mxfp4"), "nvfp4"),
        (("mxfp4", "ct_mxfp4"), "mxfp4"),
        (("mxfp4", "bf16"), "nvfp4"),
        (("bf16", "fp8_block", "f16"), "nvfp4"),
    ],
)
def test_experts_of_a_layer_may_differ(tmp_path: Path, kinds: tuple[Any, ...], target: str) -> None:
    layer = opened(tmp_path, replace(TINY, kept=4, stored=kinds)).layers[1]
    labels = [LABELS.get(kind, kind) for kind in kinds]
    assert layer.stored == {e: labels[e % len(labels)] for e in range(4)}
    assert layer.kept_format == target


def test_matrices_of_an_expert_may_differ(tmp_path: Path) -> None:
    layer = opened(tmp_path, replace(TINY, stored=("mxfp4", "bf16", "bf16"), mix_matrices=True)).layers[1]
    assert layer.stored == {0: "mxfp4+bf16", 1: "bf16+mxfp4", 2: "bf16+mxfp4", 3: "mxfp4+bf16"}
    assert [m.format.name for m in layer.experts[1].matrices] == ["bf16", "bf16", "mxfp4"]


def test_wide_experts_in_a_hybrid_checkpoint(tmp_path: Path) -> None:
    """Beside NF3: a tail expert and a kept one that are still to be quantised."""
    write_checkpoint(tmp_path, TINY)
    prefix = "model.layers.1.mlp.experts"
    stored(f"{prefix}.{KEPT[0]}.", "bf16")(tmp_path)
    stored(f"{prefix}.{TAIL[0]}.", "bf16")(tmp_path)
    layer = open_checkpoint(tmp_path).layers[1]
    assert (layer.kept, layer.tail, layer.kept_format) == (KEPT, TAIL, "nvfp4")
    assert layer.stored[KEPT[0]] == layer.stored[TAIL[0]] == "bf16" and layer.stored[TAIL[1]] == "nf3"


def test_a_tail_matrix_of_a_wide_format_beside_nf3(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY)
    with edit_tensors(tmp_path) as tensors:
        store(tensors, f"model.layers.1.mlp.experts.{TAIL[0]}.up_proj", "bf16")
    assert open_checkpoint(tmp_path).layers[1].stored[TAIL[0]] == "nf3+bf16"


def test_four_bits_called_tail_beside_nf3(tmp_path: Path) -> None:
    """A wrong map, unless requantising was asked for; NF3 called kept is always one."""
    write_checkpoint(tmp_path, TINY)
    with edit_config(tmp_path) as config:
        quantization(config)[KEY]["1"][KEPT[0]] = 3
    with pytest.raises(DataError, match=rf"layer 1 expert {KEPT[0]}: .*disagree .*tail \(3\), found NVFP4"):
        open_checkpoint(tmp_path)
    layer = open_checkpoint(tmp_path, requantize=True).layers[1]
    assert KEPT[0] in layer.tail and layer.stored[KEPT[0]] == "nvfp4"
    with edit_config(tmp_path) as config:
        quantization(config)[KEY]["1"][TAIL[0]] = 4
    with pytest.raises(DataError, match=rf"layer 1 expert {TAIL[0]}: .*disagree .*kept \(4\), found NF3"):
        open_checkpoint(tmp_path, requantize=True)


@pytest.mark.parametrize("kind", ["mxfp4", "ct_mxfp4", "ct_nvfp4"])
def test_what_bias_is_taken_is_said_where_nothing_tells_it(tmp_path: Path, kind: str) -> None:
    """Once, of compressed-tensors' MXFP4 alone, and not where the bias was given."""
    source = opened(tmp_path, replace(TINY, stored=(kind, "bf16")))
    found = [note for note in source.notes if "--mx-bias" in note]
    assert len(found) == (kind == "ct_mxfp4")
    if found:
        assert "exports from before 2026-01 have scales with a bias of 125 and need --mx-bias 125" in found[0]
        assert not [note for note in open_checkpoint(tmp_path, mx_bias=125).notes if "--mx-bias" in note]


@pytest.mark.parametrize("kind", ["mxfp4", "ct_nvfp4", "bf16", "fp8_block"])
def test_layers_the_map_does_not_name(tmp_path: Path, kind: str) -> None:
    """Four bits: kept; wide: in the base."""
    source = opened(tmp_path, replace(TINY, mtp_layer=True, stored=(kind,)))
    wide = kind in ("bf16", "fp8_block")
    assert list(source.layers) == ([1] if wide else [1, 2])
    if wide:
        assert {t.header.name.split(".")[2] for t in source.base if ".experts." in t.header.name} == {"2"}
        assert "layer 2 is not in the bit map and not packed" in source.notes[0]
    else:
        assert source.layers[2].kept == tuple(range(4)) and not source.layers[2].mapped


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_map_every_layer_is_one(tmp_path: Path, kind: str) -> None:
    spec = replace(TINY, mtp_layer=True, stored=(kind,), map_in="none")
    source = opened(tmp_path, spec, require_map=False)
    assert list(source.layers) == [1, 2]
    assert all(layer.kept == tuple(range(4)) and not layer.tail for layer in source.layers.values())
    assert not [t for t in source.base if ".experts." in t.header.name]


@pytest.mark.parametrize("fault", ["e5m2", "unscaled"])
def test_wide_experts_that_cannot_be_read_stay_in_the_base(tmp_path: Path, fault: str) -> None:
    write_checkpoint(tmp_path, SMALL)
    stored("model.layers.5.mlp.experts.", fault)(tmp_path)
    source = open_checkpoint(tmp_path)
    assert list(source.layers) == [3, 4]
    assert len([t for t in source.base if ".layers.5.mlp.experts." in t.header.name]) == 12


def test_the_config_of_a_source_without_nf3_is_not_held_against_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, replace(TINY, stored=("nvfp4",)))
    with edit_config(tmp_path) as config:
        quantization(config)["kept_format"] = "mxfp4_e8m0k32"
    assert open_checkpoint(tmp_path).layers[1].kept_format == "nvfp4"


FUSED = [i for i, family in enumerate(FAMILIES) if family.fused]


@pytest.mark.parametrize("family", FUSED, ids=lambda i: FAMILIES[i].models)
def test_tensors_of_all_experts(tmp_path: Path, family: int) -> None:
    spec = replace(TINY, family=family, mtp_layer=True)
    source = opened(tmp_path, spec)
    (kind,) = spec.published
    layer = source.layers[1]
    assert (layer.kept, layer.tail) == (KEPT, TAIL)
    assert set(layer.stored.values()) == {kind}
    assert list(source.layers) == ([1, 2] if kind == "mxfp4" else [1])
    kept_in_base = {n for n in source.shards.tensors if (p := parse(n)) is None or p.field == BIAS}
    if kind != "mxfp4":
        kept_in_base |= {n for n in source.shards.tensors if (p := parse(n)) is not None and p.layer == 2}
    names = [t.header.name for t in source.base]
    assert set(names) == kept_in_base and len(set(names)) == len(names)
    assert source.expert_biases == spec.model.biased
    for expert in layer.experts.values():
        assert [(m.rows, m.columns) for m in expert.matrices] == [(128, 128)] * 3
        assert len(expert.biases) == (2 if spec.model.biased else 0)


def test_biases_stay_in_the_base_and_mark_the_pack(tmp_path: Path) -> None:
    """Of single matrices too: no runtime knows the activation by that name."""
    write_checkpoint(tmp_path, TINY)
    with edit_tensors(tmp_path) as tensors:
        tensors["model.layers.1.mlp.experts.0.down_proj.bias"] = zeros("BF16", 128)
    source = open_checkpoint(tmp_path)
    assert source.expert_biases
    assert "model.layers.1.mlp.experts.0.down_proj.bias" in {t.header.name for t in source.base}
    assert [b.header.shape for b in source.layers[1].experts[0].biases] == [(128,)]
    assert "experts have biases" in source.notes[0]


def test_biases_of_alternating_rows_are_known_of_gpt_oss_alone(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, replace(TINY, family=11, stored=("bf16",)))
    assert open_checkpoint(tmp_path).layers[1].experts[0].up.view.row_step == 2
    with edit_config(tmp_path) as config:
        config["model_type"] = "gpt_oss_next"
    with pytest.raises(DataError, match="whether its gate and up rows alternate is known of gpt_oss alone"):
        open_checkpoint(tmp_path)


def test_a_config_that_says_otherwise_is_reported(tmp_path: Path) -> None:
    """Listed yet quantised, and quantised by the config yet BF16."""
    write_checkpoint(tmp_path, replace(TINY, stored=("fp8_block",)))
    with edit_config(tmp_path) as config:
        quantization(config)["modules_to_not_convert"] = ["model.layers.1.mlp"]
    (note,) = open_checkpoint(tmp_path).notes
    assert "excludes model.layers.1.mlp.experts.0.gate_proj" in note and "stored as FP8_BLOCK" in note
    write_checkpoint(tmp_path / "b", replace(TINY, stored=("bf16", "fp8_block")))
    (note,) = open_checkpoint(tmp_path / "b").notes
    assert "the config quantises model.layers.1.mlp.experts.0.gate_proj (layer 1 expert 0), yet it is" in note
    with edit_config(tmp_path / "b") as config:
        quantization(config)["ignore"].append("re:.*experts\\.0\\..*")
    assert open_checkpoint(tmp_path / "b").notes == ()


def test_step_has_no_activation_in_its_config(tmp_path: Path) -> None:
    source = opened(tmp_path, replace(TINY, family=15))
    assert source.notes == (NO_ACTIVATION,) and source.config.activation == "silu"
    with edit_config(tmp_path) as config:
        config["swiglu_limits"] = [0.0, 7.0]
    assert open_checkpoint(tmp_path).config.activation == "swiglustep(1=7.0)"
