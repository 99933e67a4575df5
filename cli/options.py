"""Option types."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

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

_QUANTIZE = (
    click.option(
        "--kept-format",
        type=click.Choice(["nvfp4", "mxfp4"]),
        help="Format of the kept tier; by default what its experts are stored in, NVFP4 where that is neither.",
    ),
    click.option(
        "--search",
        type=click.Choice(["absmax", "mse", "weighted"]),
        default="mse",
        show_default=True,
        help="How scales of quantised experts are found; weighted needs --importance.",
    ),
    click.option(
        "--importance",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Safetensors file with the mean square of every input channel.",
    ),
    click.option(
        "--hessians",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Folder of Hessians, layer-<L>.safetensors: the tail is quantised by GPTQ.",
    ),
    click.option(
        "--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Quantise there."
    ),
    click.option(
        "--requantize", is_flag=True, help="Let 4-bit experts become tail though the checkpoint has a stored tail."
    ),
    click.option(
        "--mx-bias",
        type=click.Choice(["127", "125"]),
        default="127",
        show_default=True,
        callback=lambda context, option, value: int(value),
        help="Exponent bias of compressed-tensors' MXFP4 scales; 125 for exports from before 2026.",
    ),
    click.option("--pad", is_flag=True, help="Pad the intermediate size with zeros where --tp cannot split it."),
)


def quantize_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of experts that are not stored in their tier's format."""
    for option in reversed(_QUANTIZE):
        command = option(command)
    return command
