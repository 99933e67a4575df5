"""Tensor names: every family, and what must not be taken for an expert."""

from __future__ import annotations

import pytest

from hybrid_pack.io.names import FAMILIES, PROJECTION_ROLES, Family, looks_like_expert, parse


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.models)
def test_every_family_and_no_other(family: Family) -> None:
    for projection, role in zip(family.projections, PROJECTION_ROLES, strict=True):
        name = parse(f"{family.prefix.format(L=77, E=255)}.{projection}.weight_scale_2")
        assert name is not None
        assert (name.family, name.layer, name.expert, name.role, name.field) == (
            family,
            77,
            255,
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
        "model.layers.3.mlp.experts.gate_up_proj",
        "model.layers.3.mlp.experts.gate_up_proj_blocks",
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
        "backbone.layers.1.mixer.experts.0.up_proj.weight",
        "language_model.model.layers.0.feed_forward.experts.gate_up_proj",
    ],
)
def test_names_no_family_has_are_noticed(name: str) -> None:
    assert parse(name) is None
    assert looks_like_expert(name)
