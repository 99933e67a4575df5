"""The YAML at the top of a model card: what is taken over from the source's, and how ours is written.

Cards are read with a small part of YAML, in which nearly all of them are written: ``key: scalar``, ``key: [a, b]`` and
``key:`` with ``- item`` lines. A key whose value is null or anything else is left out; nothing in a card is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

Value = str | tuple[str, ...]

TAKEN = ("license", "license_name", "license_link", "language", "pipeline_tag", "tags", "base_model")
MAX_CHARS = 100_000
MAX_ITEMS = 100

_KEY = re.compile(r"([A-Za-z_][\w-]*):(?:[ \t]+(.*))?")
_ITEM = re.compile(r"[ \t]*-(?:[ \t]+(.*))?")
_SAFE = re.compile(r"[A-Za-z][A-Za-z0-9._/+-]*")
_NULLS = frozenset(("~", "null", "Null", "NULL"))
_RESERVED = frozenset(("y", "n", "yes", "no", "true", "false", "on", "off", "null"))


def _scalar(text: str) -> str | None:
    """A plain or quoted scalar, empty for null, or None where it is none that is read here."""
    text = text.strip()
    if text[:1] in ('"', "'"):
        quote = text[0]
        end = text.find(quote, 1)
        rest = text[end + 1 :].strip()
        if end < 0 or (rest and not rest.startswith("#")) or "\\" in text[:end]:
            return None
        return text[1:end]
    text = re.split(r"\s#", text, maxsplit=1)[0].strip()
    if not text or text[0] in "#&*!|>{}[]%@`-?:," or re.search(r":\s", text):
        return None
    return "" if text in _NULLS else text


def _flow(text: str) -> tuple[str, ...] | None:
    """``[a, "b"]``."""
    match = re.fullmatch(r"\[([^\[\]]*)\]\s*(?:#.*)?", text.strip())
    if match is None:
        return None
    found = [_scalar(part) for part in match[1].split(",") if part.strip()]
    return None if None in found else tuple(filter(None, found))


def read_front_matter(card: str) -> dict[str, Value]:
    """The keys of ``TAKEN`` that a card has.

    Args:
        card: Text of a README.md.

    Returns:
        A string, or for lists a tuple of strings. Empty where there is no front matter.
    """
    lines = card[:MAX_CHARS].removeprefix("\ufeff").splitlines()
    if not lines or lines[0].rstrip() != "---":
        return {}
    end = next((i for i, line in enumerate(lines[1:], 1) if line.rstrip() in ("---", "...")), None)
    if end is None:
        return {}
    blocks: dict[str, tuple[str, list[str]]] = {}
    below: list[str] = []
    for line in lines[1:end]:
        match = _KEY.fullmatch(line)
        if match:
            below = []
            blocks[match[1]] = (match[2] or "", below)
        elif line.strip() and not line.lstrip().startswith("#"):
            below.append(line)
    found: dict[str, Value] = {}
    for key in TAKEN:
        if key in blocks:
            value = _value(*blocks[key])
            if value:
                found[key] = value
    return found


def _item(text: str) -> str | None:
    """An item of a list: a dash with nothing behind it is null."""
    return "" if not text.strip() or text.startswith("#") else _scalar(text)


def _value(text: str, below: list[str]) -> Value | None:
    if below:
        if _scalar(text) is not None or text.strip().startswith(("[", "|", ">", "{")):
            return None
        matches = [_ITEM.fullmatch(line) for line in below]
        items = [_item(match[1] or "") if match else None for match in matches]
        return None if None in items else tuple(filter(None, items))[:MAX_ITEMS]
    return _scalar(text) or _flow(text)


def as_list(value: Value | None) -> tuple[str, ...]:
    """A value that may be one or several."""
    return () if value is None else (value,) if isinstance(value, str) else value


def _written(text: str) -> str:
    """A scalar that every reader of YAML takes for this string."""
    if _SAFE.fullmatch(text) and text.lower() not in _RESERVED:
        return text
    return json.dumps(text, ensure_ascii=False)


def write_front_matter(values: Mapping[str, str | Sequence[str]]) -> str:
    """Front matter with its two lines of dashes; what is empty is left out.

    Args:
        values: A string or several by key, in the order wanted; printable.
    """
    lines = ["---"]
    for key, value in values.items():
        if isinstance(value, str):
            if value:
                lines.append(f"{key}: {_written(value)}")
        elif value:
            lines += [f"{key}:", *(f"- {_written(item)}" for item in value)]
    return "\n".join([*lines, "---", ""])
