"""What a pack says of its errors, in words."""

from __future__ import annotations

import pytest

from hybrid_pack.io.declared import differences
from tests.report.manifests import manifest

TIERS: dict[int, tuple[list[int], str | None]] = {layer: ([0], "e4m3_k16") for layer in (1, 2, 3)}


def line(sqnr: list[float | None], ratios: list[float] | None = None) -> list[str]:
    """Of a pack whose tail has these errors, layer by layer."""
    entries = [
        {
            "layer": layer, "tier": "tail", "method": "gptq" if ratios else "mse", "sources": ["bf16"], "experts": [1],
            "sqnr_db": [value], "tier_sqnr_db": value, "gptq_to_rtn": ratios[layer - 1] if ratios else None,
            "groups": 1000, "groups_zero_scale": 0, "scales_subnormal": 0, "scales_saturated": 0,
        }
        for layer, value in enumerate(sqnr, 1)
    ]  # fmt: skip
    made = manifest({i: TIERS[i] for i in range(1, len(sqnr) + 1)}, 2, quantized=entries)
    return list(differences(made.report))


@pytest.mark.parametrize(
    ("sqnr", "words"),
    [
        ([16.0, 12.0], "SQNR of a layer 12.00 (layer 2) to 16.00, median 14.00 dB; worst expert 12.00 dB, layer 2"),
        ([16.0, 12.0, 13.0], "SQNR of a layer 12.00 (layer 2) to 16.00, median 13.00 dB; worst"),
        ([None, 12.0, 13.0], "SQNR of a layer 12.00 (layer 2) to exact, median 13.00 dB; worst"),
        ([None, 12.0, None], "SQNR of a layer 12.00 (layer 2) to exact, median exact; worst"),
        ([None, None], "quantised from BF16 (mse): exactly, in every layer"),
    ],
)
def test_errors_of_layers(sqnr: list[float | None], words: str) -> None:
    (found,) = line(sqnr)
    assert words in found and "inf" not in found


def test_the_median_of_two_ratios_is_between_them() -> None:
    found = line([15.0, 15.0], [0.25, 0.75])
    assert any("0.50 times the error of rounding to nearest" in text for text in found), found
