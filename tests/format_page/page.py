"""FORMAT.md as data: its sections, tables, fenced blocks and formulas."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import hybrid_pack

PATH = Path(hybrid_pack.__file__).with_name("FORMAT.md")
TEXT = PATH.read_text(encoding="utf-8")

Row = dict[str, str]


def section(number: int) -> str:
    """Text below one numbered heading."""
    parts = re.split(r"^## (\d+)\. .*$", TEXT, flags=re.M)
    return parts[parts.index(str(number)) + 1]


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def tables() -> list[list[Row]]:
    """Every table, a dict for each row."""
    found = []
    for lines in re.findall(r"(?:^\|.*\n)+", TEXT, flags=re.M):
        head, rule, *rows = lines.splitlines()
        assert set(rule) <= set("|- "), f"not a table: {head}"
        names = _cells(head)
        for row in rows:
            assert len(_cells(row)) == len(names), f"{len(names)} cells, not: {row}"
        found.append([dict(zip(names, _cells(row), strict=True)) for row in rows])
    return found


def table(*columns: str) -> list[Row]:
    """The one table that has these columns in this order."""
    (found,) = (rows for rows in tables() if tuple(rows[0]) == columns)
    return found


def ticked(cell: str) -> list[str]:
    """What a cell or a text has between backticks; fenced blocks are left out."""
    return re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```$", "", cell, flags=re.M | re.S))


def only(cell: str) -> str:
    """The one backticked part of a cell."""
    (found,) = ticked(cell)
    return found


def block(info: str) -> str:
    """The fenced block with this info string, without its last line feed."""
    (found,) = re.findall(rf"^```{re.escape(info)}\n(.*?)^```$", TEXT, flags=re.M | re.S)
    return found.removesuffix("\n")


def formula(name: str, **values: Any) -> dict[str, Any]:
    """Carry out a formula block; gives all its names. Works on numbers and on arrays alike."""
    names: dict[str, Any] = {"__builtins__": {}, **values}
    exec(block(f"formula {name}"), names)  # the page's own text
    return names


def evaluate(expression: str, **values: Any) -> Any:
    """An expression of the page."""
    return eval(expression, {"__builtins__": {"min": min, "max": max}, **values})


def defined(text: str, name: str) -> list[str]:
    """The right sides of every backticked ``name = ...`` in a text, in order."""
    return [part.removeprefix(f"{name} = ") for part in ticked(text) if part.startswith(f"{name} = ")]


def quoted(expression: str, text: str) -> str:
    """The expression, if the text has it between backticks."""
    assert expression in ticked(text), f"the page no longer says `{expression}`"
    return expression


def hexadecimal(cell: str) -> bytes:
    """Bytes of a cell such as ```00 01```; an empty cell is no bytes."""
    return bytes.fromhex(only(cell)) if cell else b""


KEYS = table("key", "type", "presence", "meaning", "rule")
TENSORS = table("name", "dtype", "shape", "section")
TILES = table("condition", "fc1_k", "fc1_n", "fc2_k", "fc2_n")
WEIGHTS = table("tier", "scale format", "group", "weight", "bytes in use")
ATTACKS = table("attack", "what", "check")
CHECKS = table("check", "of")
CONFIG_KEYS = table("key", "value")
ALGORITHMS = table("algorithm", "is BLAKE3 of", "used for")
E2M1 = [float(value) for code, value in table("code", *map(str, range(16)))[0].items() if code != "code"]


def rule(key: str) -> str:
    """The rule of a manifest key."""
    (row,) = (row for row in KEYS if only(row["key"]) == key)
    return row["rule"]
