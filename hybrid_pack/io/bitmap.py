"""The bit map: per layer, four bits (kept) or three (tail) for each expert."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hybrid_pack.errors import DataError

KEY = "hybrid_bit_map"
MAP_HOLDERS = ("text_config", "quantization", "quantization_config")
"""Where a map may lie, besides the top of a document."""
KEPT_BITS = 4
TAIL_BITS = 3

BitMap = Mapping[int, tuple[int, ...]]
"""Layer to one entry, 3 or 4, for each expert."""


def parse_bit_map(raw: Any, where: object) -> BitMap:
    """Check a map as found in JSON; keys may be strings or integers, with leading zeros.

    Args:
        raw: Object of lists.
        where: Named in errors.

    Raises:
        DataError: Not such an object, a key that is no layer, a layer twice, an entry that is not 3 or 4.
    """
    if not isinstance(raw, Mapping) or not raw:
        raise DataError(
            "the bit map is not an object of layers", where=where, found=type(raw).__name__ if raw else "nothing"
        )
    layers: dict[int, tuple[int, ...]] = {}
    for key, entries in raw.items():
        text = str(key)
        if isinstance(key, bool) or not (text.isascii() and text.isdigit() and len(text) <= 6):
            raise DataError("a key of the bit map is not a layer number", where=where, found=repr(key))
        layer = int(text)
        if layer in layers:
            raise DataError(f"layer {layer} occurs twice in the bit map", where=where, found=repr(key))
        if not isinstance(entries, (list, tuple)) or not entries:
            raise DataError(f"layer {layer} of the bit map is not a list", where=where, found=repr(entries)[:60])
        for expert, bits in enumerate(entries):
            if type(bits) is not int or bits not in (KEPT_BITS, TAIL_BITS):
                raise DataError(
                    f"layer {layer} expert {expert} of the bit map",
                    where=where,
                    expected="4 (kept) or 3 (tail)",
                    found=repr(bits),
                )
        layers[layer] = tuple(entries)
    return dict(sorted(layers.items()))


def find_bit_map(document: Any) -> Any:
    """The raw map inside a JSON document, or None.

    It is looked for at the top, under ``quantization_config`` and ``quantization``, and so inside ``text_config``.
    """
    for part in (document, document.get("text_config") if isinstance(document, Mapping) else None):
        if isinstance(part, Mapping):
            for holder in (part, part.get("quantization_config"), part.get("quantization")):
                if isinstance(holder, Mapping) and holder.get(KEY) is not None:
                    return holder[KEY]
    return None


def spans(numbers: Iterable[int]) -> str:
    """Ascending layer numbers in words: ``3-77, 80``."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
