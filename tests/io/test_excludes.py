"""Exclude lists in every spelling seen in public configs."""

from __future__ import annotations

import pytest

from hybrid_pack.io.excludes import matches

GLM = "model.layers.{}.mlp.experts.7.gate_proj"
V4 = "layers.{}.ffn.experts.7.w1"


@pytest.mark.parametrize(
    ("pattern", "module"),
    [
        (GLM.format(3), GLM.format(3)),
        ("model.layers.3.mlp.experts.7", GLM.format(3)),
        ("model.layers.3.mlp", GLM.format(3)),
        ("model.layers.3", GLM.format(3)),
        ("model", GLM.format(3)),
        ("model.layers.3.mlp.experts*", GLM.format(3)),
        ("model.layers.3.mlp.exp*", GLM.format(3)),
        ("model.layers.3.mlp.*", GLM.format(3)),
        ("model.layers.3.*", GLM.format(3)),
        ("model.layers.3.", GLM.format(3)),
        ("model.layers.3*", GLM.format(3)),
        ("model.layers.1*", GLM.format(1)),
        ("model.layers.*.mlp.experts", GLM.format(3)),
        ("*.mlp.experts.*", GLM.format(3)),
        ("*.mlp.experts*", GLM.format(3)),
        ("*.experts.7.*", GLM.format(3)),
        ("*.gate_proj", GLM.format(3)),
        ("*mlp.experts.*", GLM.format(3)),
        ("*gate_proj*", GLM.format(3)),
        ("*.ffn.experts.*", V4.format(0)),
        ("layers.0", V4.format(0)),
        (r"re:.*mlp\.experts.*", GLM.format(3)),
        (r"re:.*experts\.\d+\.gate_proj$", GLM.format(3)),
        ("lm_head", "lm_head"),
        ("mm_projector*", "mm_projector.linear_1"),
        ("mtp*", "mtp.layers.0.mlp.experts.0.gate_proj"),
    ],
)
def test_names_the_module(pattern: str, module: str) -> None:
    assert matches(pattern, module)


@pytest.mark.parametrize(
    ("pattern", "module"),
    [
        ("model.layers.1", GLM.format(10)),
        ("model.layers.1*", GLM.format(10)),
        ("model.layers.1*", GLM.format(17)),
        ("model.layers.1.*", GLM.format(10)),
        ("model.layers.1.", GLM.format(10)),
        ("model.layers.3", GLM.format(33)),
        ("model.layers.3.mlp.experts.7", "model.layers.3.mlp.experts.77.gate_proj"),
        ("model.layers.3.mlp.experts.7*", "model.layers.3.mlp.experts.77.gate_proj"),
        ("model.layers.3.mlp.shared_experts*", GLM.format(3)),
        ("model.layers.3.self_attn*", GLM.format(3)),
        ("*.mlp.shared_experts.*", GLM.format(3)),
        ("*.mlp.gate.*", GLM.format(3)),
        ("*mlp.gate.*", GLM.format(3)),
        ("*.attn.*", V4.format(0)),
        ("mtp.*", V4.format(0)),
        ("layers.3.mlp", GLM.format(3)),
        ("mlp.experts", GLM.format(3)),
        (GLM.format(3) + ".weight", GLM.format(3)),
        (r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", GLM.format(3)),
        (r"re:mlp\.experts", GLM.format(3)),
        ("re:(", GLM.format(3)),
        ("", GLM.format(3)),
        ("*", GLM.format(3)),
        (".", GLM.format(3)),
        ("lm_head", GLM.format(3)),
    ],
)
def test_names_another(pattern: str, module: str) -> None:
    assert not matches(pattern, module)
