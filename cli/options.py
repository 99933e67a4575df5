"""Option types."""

from __future__ import annotations

import re
from fractions import Fraction

import click

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class Bytes(click.ParamType):  # type: ignore[type-arg]  # generic only since click 8.4
    """A size such as ``500MB``, ``1.5GiB`` or plain bytes."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Bytes of a size."""
        match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([kmgt]?i?)b?", str(value).strip().lower(), re.ASCII)
        if match is None or match[2] not in UNITS:
            self.fail(f"{value!r} is not a size such as 1GiB or 500MB", param, ctx)
        return int(float(match[1]) * UNITS[match[2]])


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """Numbers and ranges such as ``3-5,78``."""

    name = "numbers"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """All numbers, ascending."""
        found: set[int] = set()
        for part in str(value).split(","):
            match = re.fullmatch(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*", part, re.ASCII)
            if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
                self.fail(f"{value!r} is not a list such as 3-5,78", param, ctx)
            found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
        return tuple(sorted(found))


class Share(click.ParamType):  # type: ignore[type-arg]
    """An exact fraction such as ``0.25`` or ``1/4``."""

    name = "fraction"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Fraction:
        """The fraction, 0 to 1."""
        text = str(value).strip()
        plain = re.fullmatch(r"\d{1,9}(\.\d{0,9})?|\.\d{1,9}|\d{1,9}/0*[1-9]\d{0,8}", text, re.ASCII)
        if plain is None or Fraction(text) > 1:
            self.fail(f"{value!r} is not a fraction from 0 to 1, such as 0.25 or 1/4", param, ctx)
        return Fraction(text)


BYTES = Bytes()
FRACTION = Share()
LAYERS = Numbers()
