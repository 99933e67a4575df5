"""What is said of experts that nothing runs: before the work, in the pack, and on its card, as the runtime says it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_pack.convert import convert
from hybrid_pack.formats.nf3 import DEFAULT_LEVELS
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.plan import make_plan
from hybrid_pack.runnable import levels_problem, parse_formula, why_not_run
from hybrid_pack.runtime import b12x_probe
from hybrid_pack.runtime.activation import parse_activation
from hybrid_pack.runtime.backends import Accepted, foresee
from hybrid_pack.runtime.layer import LayerGeometry
from hybrid_pack.sharding import Topology, tiles_for
from hybrid_pack.synthetic import Spec, write_checkpoint
from tests.checkpoints import SMALL, edit_config, quantization

OTHER_LEVELS = (-1.0, -0.5, -0.3, -0.1, 0.1, 0.3, 0.5, 1.0)

NUMBERS = st.sampled_from(["7.0", "1e-3", "0", "-1", "inf", "nan", "e", "", "1e999", "+2"])
NAMES = st.one_of(
    st.sampled_from(["silu", "relu2", "SiLU", "gelu_pytorch_tanh", "silu(router_weight=input)", "swiglustep(1=7.0)"]),
    st.builds("silu(limit={})".format, NUMBERS),
    st.builds("swigluoai(alpha={}, limit={})".format, NUMBERS, NUMBERS),
    st.text(max_size=12),
)


def geometry(activation: str, gated: bool, biases: bool, levels: tuple[float, ...] = DEFAULT_LEVELS) -> LayerGeometry:
    return LayerGeometry(
        hidden_size=256, intermediate_size=256, num_experts=8, top_k=2, kept_scale_format="e4m3_k16", nf3_levels=levels,
        activation=activation, gated=gated, expert_biases=biases,
    )  # fmt: skip


@given(NAMES, st.booleans(), st.booleans())
def test_the_runtime_says_the_same(activation: str, gated: bool, biases: bool) -> None:
    """Where something is said beforehand no backend takes the layer; where nothing is, the reference does."""
    said = why_not_run(activation, gated=gated, biases=biases)
    tiles = tiles_for(256, 256, gated)
    assert tiles is not None
    layer = geometry(activation, gated, biases)
    choices = foresee(layer, tiles, torch.device("cpu"), kept=True, tail=True)
    assert any(isinstance(choice, Accepted) for choice in choices) == (said is None)
    assert bool(b12x_probe.layer_problems(layer, tiles, kept=True, tail=True)) == (said is not None)
    assert (parse_formula(activation) is None) == (parse_activation(activation) is None)


@given(st.lists(st.floats(-1, 1), min_size=8, max_size=8, unique=True).map(sorted).map(tuple))
def test_levels_that_only_the_reference_runs(levels: tuple[float, ...]) -> None:
    tiles = tiles_for(256, 256)
    assert tiles is not None
    for given_levels in (levels, DEFAULT_LEVELS):
        found = b12x_probe.layer_problems(geometry("silu", True, False, given_levels), tiles, kept=True, tail=True)
        assert (levels_problem(given_levels) is None) == (found == []) == (given_levels == DEFAULT_LEVELS)


SPEC = replace(SMALL, hidden=256, intermediate=256, mtp_layer=False)
"""Sizes that tiles exist for without and with a gate."""

NOT_RUN: tuple[tuple[str, Spec, dict[str, object], str], ...] = (
    ("gpt-oss", replace(SPEC, family=11), {}, "its experts have biases"),
    ("Llama-4", replace(SPEC, family=14), {}, "silu(router_weight=input)"),
    ("Step-3.5", replace(SPEC, family=15), {"swiglu_limits": [0, 7, 7, 7]}, "swiglustep(1=7.0, 2=7.0, 3=7.0)"),
    ("Gemma-4", replace(SPEC, family=7), {}, "gelu_pytorch_tanh"),
    ("Kimi-K3", replace(SPEC, family=5), {"hidden_act": "situ", "activation_situ_beta": 4.0}, "situ(beta=4.0)"),
)


def wanted_map(source: Path) -> None:
    """A map that keeps expert 0, where the family is stored in one format and has none."""
    checkpoint = open_checkpoint(source, require_map=False)
    if checkpoint.config.bit_map is None:
        with edit_config(source) as config:
            number = checkpoint.config.num_experts
            config["hybrid_bit_map"] = {str(i): [4] + [3] * (number - 1) for i in checkpoint.layers}


@pytest.mark.parametrize(("spec", "keys", "reason"), [case[1:] for case in NOT_RUN], ids=[case[0] for case in NOT_RUN])
def test_what_nothing_runs_is_said_before_the_work_and_on_the_card(
    tmp_path: Path, spec: Spec, keys: dict[str, object], reason: str
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    write_checkpoint(source, spec)
    with edit_config(source) as config:
        (config.get("text_config") or config).update(keys)
    wanted_map(source)
    plan = make_plan(open_checkpoint(source), Topology(1))
    (note,) = [note for note in plan.announcements if "no runtime of this version runs these experts" in note]
    assert reason in note and "is marked so" in note
    manifest = convert(plan, out, workers=1).manifest
    assert note in manifest.report.notes
    text = (out / "README.md").read_text()
    how = text.partition("## How to load it\n")[2].partition("## What was measured")[0]
    assert "**No runtime of this version runs these experts**" in how
    assert "vllm" not in how.lower() and "HybridMoE" not in how and "run as above" not in how and "[b12x]" not in how


def test_nothing_is_said_of_experts_that_run(small_checkpoint: Path) -> None:
    assert not [note for note in open_checkpoint(small_checkpoint).notes if "runtime" in note or "backend" in note]


def test_levels_of_ones_own_are_for_the_reference_alone(checkpoint: Path, tmp_path: Path) -> None:
    with edit_config(checkpoint) as config:
        quantization(config)["nf3_levels"] = list(OTHER_LEVELS)
    plan = make_plan(open_checkpoint(checkpoint), Topology(1))
    (note,) = [note for note in plan.notes if note.startswith("only the backend torch, a slow reference, runs")]
    assert "NF3 levels" in note
    convert(plan, tmp_path / "out", workers=1)
    how = (tmp_path / "out" / "README.md").read_text().partition("## How to load it\n")[2]
    assert "vllm serve pack --enforce-eager\n" in how and "reference backend" in how and "hybrid-pack[b12x]" not in how
