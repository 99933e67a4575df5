"""Tensor names: every family, and what must not be taken for an expert."""

from __future__ import annotations

import pytest

from hybrid_pack.io.names import FAMILIES, Family, likeliest_expert, looks_like_expert, parse


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.models)
def test_every_family_and_no_other(family: Family) -> None:
    for role, projection in family.projections:
        name = parse(f"{family.prefix.format(L=77, E=255)}.{projection}.weight_scale_2")
        assert name is not None
        assert (name.family, name.layer, name.expert, name.role, name.field) == (
            family,
            77,
            None if family.fused else 255,
            role,
            "weight_scale_2",
        )


def test_no_two_families_share_a_name() -> None:
    assert len({(family.prefix, family.projections) for family in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.shared_experts.gate_proj.weight",
        "model.layers.3.mlp.gate.weight",
        "model.layers.3.mlp.gate_proj.weight",
        "lm_head.weight",
        "",
        "experts",
    ],
)
def test_others_are_no_experts(name: str) -> None:
    assert parse(name) is None
    assert not looks_like_expert(name)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.mlp.experts.gate_up_proj-blocks",
        "model.layers.3.mlp.experts.gate_up.weight",
        "model.layers.3.mlp.experts.0.w1.weight",
        "model.layers.3.mlp.experts.01.gate_proj.weight",
        "model.layers.03.mlp.experts.1.gate_proj.weight",
        "model.layers.3.mlp.experts.-1.gate_proj.weight",
        "model.layers.3.mlp.experts.1٣.gate_proj.weight",
        "model.layers.3.mlp.experts.1234567.gate_proj.weight",
        "model.layers.3.mlp.experts.0.gate_proj.weight.more",
        "model.layers.3.mlp.experts.0.gate_proj",
        "model.layers.3.mlp.experts.0.gate_proj.weight\n",
        "xmodel.layers.3.mlp.experts.0.gate_proj.weight",
        "mtp.layers.0.mlp.experts.0.gate_proj.weight",
        "backbone.layers.1.mixer.experts.0.gate_proj.weight",
        "language_model.model.layers.0.feed_forward.experts.w13_weight",
        "model.layers.45.transformer.moe.gate_proj.weight",
    ],
)
def test_names_no_family_has_are_noticed(name: str) -> None:
    assert parse(name) is None
    assert looks_like_expert(name)


@pytest.mark.parametrize(
    ("name", "role", "field"),
    [
        ("model.layers.3.mlp.experts.gate_up_proj", "gate_up", "weight"),
        ("model.layers.3.mlp.experts.gate_up_proj_blocks", "gate_up", "blocks"),
        ("model.layers.3.mlp.experts.down_proj_scales", "down", "scales"),
        ("model.layers.3.mlp.experts.down_proj_bias", "down", "bias"),
        ("model.layers.3.mlp.experts.gate_up_proj_scale_inv", "gate_up", "scale_inv"),
        ("language_model.model.layers.3.feed_forward.experts.down_proj_weight_scale_2", "down", "weight_scale_2"),
        ("model.layers.3.moe.up_proj.weight_scale_inv", "up", "weight_scale_inv"),
    ],
)
def test_fields_of_tensors_of_all_experts(name: str, role: str, field: str) -> None:
    found = parse(name)
    assert found is not None
    assert (found.layer, found.expert, found.role, found.field) == (3, None, role, field)


def test_the_router_of_step_is_no_expert() -> None:
    for name in ("model.layers.3.moe.gate.weight", "model.layers.3.moe.router_bias"):
        assert parse(name) is None and not looks_like_expert(name)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ([], None),
        (["lm_head.weight", "model.layers.3.mlp.shared_experts.gate_proj.weight"], None),
        (["a.shared_expert.w", "decoder.3.ffn_expert_bank.w1"], "decoder.3.ffn_expert_bank.w1"),
        (["decoder.3.expert_bank.w1", "mtp.layers.0.mlp.experts.0.w1.weight"], "mtp.layers.0.mlp.experts.0.w1.weight"),
    ],
)
def test_the_likeliest_expert(names: list[str], found: str | None) -> None:
    assert likeliest_expert(iter(names)) == found
