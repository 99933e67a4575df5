"""The bit map as it comes out of JSON; what is refused is in the mutation tables."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_pack.io.bitmap import find_bit_map, parse_bit_map

BITS = [4, 3, 3]


@pytest.mark.parametrize(
    "raw", [{"3": BITS, "10": BITS}, {3: BITS, 10: BITS}, {"0010": BITS, "03": tuple(BITS)}], ids=str
)
def test_spellings(raw: dict[Any, Any]) -> None:
    parsed = parse_bit_map(raw, "here")
    assert parsed == {3: (4, 3, 3), 10: (4, 3, 3)}
    assert list(parsed) == [3, 10]


@pytest.mark.parametrize("holder", [None, "quantization_config", "quantization"])
@pytest.mark.parametrize("outer", [None, "text_config"])
def test_places(holder: str | None, outer: str | None) -> None:
    document: Any = {"hybrid_bit_map": {"3": BITS}}
    for key in (holder, outer):
        document = document if key is None else {key: document}
    assert find_bit_map(document) == {"3": BITS}


@pytest.mark.parametrize(
    "document", [None, 3, [], {}, {"quantization": None}, {"text_config": []}, {"a": {"hybrid_bit_map": {}}}], ids=str
)
def test_no_place(document: Any) -> None:
    assert find_bit_map(document) is None
