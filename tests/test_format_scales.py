"""FORMAT.md, sections 12 and 13, against the code: what scale bytes mean and how they are chosen."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from hybrid_pack.convert.scales import check_second, choose, refused_bytes
from hybrid_pack.errors import DataError
from hybrid_pack.formats import e4m3
from hybrid_pack.formats.source import SourceFormat
from hybrid_pack.layouts import scale_bytes
from tests.format_page import page, weights
from tests.format_page.verifier import SCALE_BYTES

FORMS = {
    "NVFP4": SourceFormat("nvfp4", "weight", "weight_scale", "weight_scale_2", 16),
    "MXFP4": SourceFormat("mxfp4", "weight", "weight_scale", None, 32),
    "NF3": SourceFormat("nf3", "weight_packed", "weight_scale", None, 32),
}


def test_value_of_every_byte_in_use() -> None:
    for byte in range(248):
        assert weights.value_of(byte) == scale_bytes.DEVICE_VALUES[byte]
        assert weights.value_of(byte) == np.uint16(byte << 7).view(np.float16)


def test_weight_formulas_have_the_constants_of_the_code() -> None:
    nvfp4, mxfp4, tail = (page.only(row["weight"]) for row in page.WEIGHTS)
    assert nvfp4 == f"e2m1 * value * global_scale * 2**{scale_bytes.NVFP4_VALUE_EXPONENT}"
    assert page.evaluate(mxfp4, e2m1=1.0, byte=np.arange(256.0), global_scale=1.0).tolist() == (
        scale_bytes.E8M0_VALUES.tolist()
    )
    assert tail == f"level * value * global_scale * 2**{scale_bytes.NF3_VALUE_EXPONENT}"
    assert [int(row["group"]) for row in page.WEIGHTS] == [FORMS[name].group for name in FORMS]


def test_bytes_in_use_are_those_the_code_can_give() -> None:
    positive = e4m3.VALUES[:0x7F]
    used: dict[str, set[int]] = {form: set() for form in SCALE_BYTES}
    for largest in range(0x7F):
        table = scale_bytes.nvfp4_table(e4m3.VALUES, scale_bytes.nvfp4_factor(float(positive[largest])))
        used["e4m3_k16"] |= set(table.device[: largest + 1].tolist())
    for largest in range(255):
        table = scale_bytes.mxfp4_table(scale_bytes.mxfp4_shift(largest))
        used["e8m0_k32"] |= set(table.device[: largest + 1].tolist())
    for scales in (positive[positive < 32], positive / 16):  # both ways a source stores them
        used["e4m3_k32"] |= set(scale_bytes.nf3_table(scales).device.tolist())
    for form, found in used.items():
        assert found <= SCALE_BYTES[form]
        ends = [(min(numbers - {0}), max(numbers), 0 in numbers) for numbers in (found, SCALE_BYTES[form])]
        assert ends[0] == ends[1], form


def test_weight_examples() -> None:
    rows = page.table(
        "format", "code", "stored scale", "second scale", "largest stored", "byte", "global (binary32)", "weight"
    )
    for row in rows:
        form, stored, byte = FORMS[row["format"]], *(int(page.only(row[c]), 16) for c in ("stored scale", "byte"))
        largest = int(page.only(row["largest stored"]), 16) if row["largest stored"] else stored
        counts = np.bincount([stored, largest], minlength=256)
        second = float(Fraction(row["second scale"])) if row["second scale"] else 1.0
        chosen = choose([form], [counts], [second])
        assert chosen.tables[0].device[stored] == byte
        assert np.float32(chosen.global_scale).view(np.uint32) == int(page.only(row["global (binary32)"]), 16)
        key = next(r["scale format"].split("`")[1] for r in page.WEIGHTS if f"({row['format']})" in r["scale format"])
        code = np.array([[int(row["code"])] * form.group])
        levels = [-1.0, -0.6047, -0.3563, -0.1275, 0.1275, 0.3563, 0.6047, 1.0]
        found = weights.weights_of(key, code, np.array([[byte]], np.uint8), chosen.global_scale, levels)
        assert (found == float(row["weight"])).all()
        meaning = row["stored scale"].partition("= ")[2]
        value = 2.0 ** (stored - 127) if row["format"] == "MXFP4" else e4m3.VALUES[stored]
        assert float(Fraction(meaning)) == value


def test_nvfp4_rules() -> None:
    text = page.section(13)
    (row,) = (rows[0] for rows in page.tables() if next(iter(rows[0])) == "m")
    for largest, factor in list(row.items())[1:]:
        assert scale_bytes.nvfp4_factor(float(Fraction(largest))) == float(factor)
    rule = page.quoted("f * m <= 448", text)
    for largest in e4m3.VALUES[1:0x7F].tolist():
        factor = scale_bytes.nvfp4_factor(largest)
        assert page.evaluate(rule, f=factor, m=largest) and not page.evaluate(rule, f=2 * factor, m=largest)
    scaled = page.quoted("s * f * 128", text)
    assert "is below 2 there becomes 0" in text
    for factor in (1.0, 4.0, 256.0):
        table = scale_bytes.nvfp4_table(e4m3.VALUES, factor)
        for byte, stored in enumerate(e4m3.VALUES[:0x7F].tolist()):
            wanted = page.evaluate(scaled, s=stored, f=factor)
            if stored * factor <= 448:
                assert weights.value_of(int(table.device[byte])) == (wanted if wanted >= 2 else 0.0)
                assert table.flushed[byte] == (0 < wanted < 2)
    rule = page.defined(text, "global_scale")[0]
    for second in (1.0, 0.75, 2.0**-20):
        assert page.evaluate(rule, second=second, f=8.0) == scale_bytes.nvfp4_global_scale(second, 8.0)


@pytest.mark.parametrize(("gate", "up"), [(1.0, 0.25), (0.5, 4.0), (1.0, 0.73), (0.37, 0.11)])
def test_gate_and_up_share_a_global_scale(gate: float, up: float) -> None:
    """Both second-level scales go into one, exactly or by the rounding of section 13."""
    text = " ".join(page.section(13).split())
    assert "`second` is the larger of their second-level scales" in text
    assert "`s * f * 128` is rounded to binary16 and then to a byte, ties to even" in text
    stored = np.arange(0x7F)
    counts = [np.bincount(stored, minlength=256)] * 2
    chosen = choose([FORMS["NVFP4"]] * 2, counts, [gate, up])
    second = max(gate, up)
    assert chosen.global_scale == np.float32(page.evaluate(page.defined(text, "global_scale")[0], second=second, f=1))
    values = [weights.value_of(byte) for byte in range(247)]
    for table, own in zip(chosen.tables, (gate, up), strict=True):
        for byte in stored.tolist():
            wanted = float(e4m3.VALUES[byte]) * (own / second) * 128
            half = float(np.float16(wanted))
            distance = [(abs(value - half), device % 2, device) for device, value in enumerate(values)]
            assert table.device[byte] == (min(distance)[2] if wanted >= 2 else 0)


def test_mxfp4_and_nf3_rules() -> None:
    text = page.section(13)
    _, mxfp4, tail = page.defined(text, "global_scale")
    (shift,), device = page.defined(text, "shift"), page.quoted("min(byte + shift, 247)", text)
    for largest in range(255):
        found = page.evaluate(shift, m=largest)
        assert found == scale_bytes.mxfp4_shift(largest)
        assert page.evaluate(mxfp4, shift=found) == scale_bytes.mxfp4_global_scale(found)
    for found in range(127):
        table = scale_bytes.mxfp4_table(found)
        assert table.device[:255].tolist() == [page.evaluate(device, byte=byte, shift=found) for byte in range(255)]
    assert "Only bytes above 247 change" in text
    assert page.evaluate(tail) == scale_bytes.NF3_GLOBAL_SCALE
    table, rule = scale_bytes.nf3_table(e4m3.VALUES), page.quoted("s / 16", text)
    for byte in np.flatnonzero(e4m3.VALUES[:0x7F] < 32).tolist():
        assert weights.value_of(int(table.device[byte])) == page.evaluate(rule, s=float(e4m3.VALUES[byte]))


def test_refusals() -> None:
    text = " ".join(page.section(13).split())
    assert "E4M3 NaN (`7f`, `ff`) and negative scales (`81` to `fe`); NF3 scales of 32 or more; E8M0 `ff`" in text
    negative = {0x7F, 0xFF, *range(0x81, 0xFF)}
    refused = {name: set(np.flatnonzero(refused_bytes(form)).tolist()) for name, form in FORMS.items()}
    assert refused["NVFP4"] == negative
    assert refused["MXFP4"] == {0xFF}
    assert refused["NF3"] == negative | set(np.flatnonzero(e4m3.VALUES >= 32).tolist())
    assert "is not finite, positive and below 512" in text
    matrix: Any = type("Matrix", (), {"second": None})
    check_second(matrix, float(np.nextafter(np.float32(512), np.float32(0))), "")
    for value in (512.0, 0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(DataError):
            check_second(matrix, value, "")
