"""What a report's warnings say: which experts are lost and why, and Hessians that look like a triumph."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hybrid_pack.io.declared import quantized_lines
from tests.report.manifests import errors, manifest, random_tiers

TIERS = random_tiers(range(3, 6), 16, 5)


def warnings(entries: list[dict[str, Any]]) -> list[str]:
    lines = quantized_lines(manifest(TIERS, 16, quantized=entries).report)
    return [line.removeprefix("WARNING: ") for line in lines if line.startswith("WARNING")]


def tail(entries: list[dict[str, Any]], layer: int) -> dict[str, Any]:
    return next(entry for entry in entries if (entry["layer"], entry["tier"]) == (layer, "tail"))


def test_the_first_of_the_lost_are_named_worst_first() -> None:
    made = errors(TIERS, 16, exact=0)
    assert warnings(made) == []
    bad = [(3, 0, 9.99), (3, 4, -2.5), (4, 1, 3.0), (5, 0, 4.0), (5, 2, 5.0), (5, 3, 6.0)]
    for layer, place, sqnr in bad:
        tail(made, layer)["sqnr_db"][place] = sqnr
    (line,) = warnings(made)
    named = [f"layer {i} expert {tail(made, i)['experts'][n]} ({db:.2f})" for i, n, db in bad[1:5]]
    assert line.startswith(
        f"6 tail experts below 10 dB, far from the source's weights: {', '.join(named)} and 2 more; "
    )
    tail(made, 4)["sqnr_db"][1] = 15.0
    for layer, place, _ in (bad[0], *bad[3:]):
        tail(made, layer)["sqnr_db"][place] = 15.0
    (line,) = warnings(made)
    assert line.startswith(f"1 tail expert below 10 dB, far from the source's weights: {named[0]}; ")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("scales_saturated", "saturated (weights too large"),
        ("scales_subnormal", "subnormal (weights so small"),
        ("groups_zero_scale", "zero (weights all zero, or too small"),
    ],
)
def test_the_reason_is_what_their_scales_say(key: str, words: str) -> None:
    made = errors(TIERS, 16, exact=0)
    entry = tail(made, 4)
    entry["sqnr_db"][0] = 2.0
    tail(made, 5)[key] = 999_999
    (line,) = warnings(made)
    apart = "the weights of a group differ too much in size for the format"
    assert line.endswith(f"; nearly all scales are within range: {apart}"), "the handful of others is no reason"
    entry["groups_zero_scale"] = entry["scales_subnormal"] = 0
    assert warnings(made)[0].endswith(f"; scales are within range: {apart}")
    entry[key] = entry["groups"] // len(entry["experts"])  # all of one expert
    (line,) = warnings(made)
    share = 100 / len(entry["experts"])
    text = f"{share:.0f}" if share >= 10 else f"{share:.2g}"
    assert f"; of the tail scales of layer 4 are {text} % {words}" in line
    assert len(re.findall(r" % ", line)) == 1


@pytest.mark.parametrize("gptq", [False, True])
def test_one_group_that_is_too_large_can_be_the_reason(gptq: bool) -> None:
    made = errors(TIERS, 16, exact=0, ratios=dict.fromkeys(TIERS, 0.3) if gptq else None)
    entry = tail(made, 4)
    entry["sqnr_db"][0] = 0.02
    entry["scales_saturated"] = 1
    (line,) = warnings(made)
    single = "below 0.01 % saturated (weights too large for the largest scale), and one such group can be all"
    other = "GPTQ minimises the error" if gptq else "the weights of a group differ too much in size for the format"
    assert f"; of the tail scales of layer 4 are {single} of the error; or else {other}" in line
    assert "within range" not in line
    entry["groups_zero_scale"] = entry["groups"]
    (line,) = warnings(made)
    assert "layer 4 are 100 % zero (weights all zero, or too small for the smallest scale), below 0.01 % sat" in line
    assert "or else" not in line


def test_of_kept_experts_not_every_scale_is_counted() -> None:
    """MXFP4's are not, nor are those of NVFP4 that would be subnormal."""
    made = errors(TIERS, 16, exact=0)
    entry = next(entry for entry in made if entry["tier"] == "kept")
    entry["sqnr_db"][0] = 2.0
    (line,) = warnings(made)
    assert line.endswith("differ too much in size for the format, or are too small for its smallest scale")
    assert "within range" not in line


def test_hessians_that_look_like_a_triumph() -> None:
    assert warnings(errors(TIERS, 16, exact=0, ratios={3: 0.03, 4: 0.24, 5: 1.0})) == []
    made = errors(TIERS, 16, exact=0, ratios={3: 0.0, 4: 0.24, 5: 0.0299})
    (line,) = warnings(made)
    assert line.startswith("GPTQ of layers 3, 5: below 0.03 times the error of rounding to nearest is no success")
    assert "fewer tokens were seen than there are channels" in line
    tail(made, 4)["sqnr_db"][0] = 9.0
    assert warnings(made)[1].endswith("GPTQ minimises the error on the Hessians, which may be of too few tokens")
