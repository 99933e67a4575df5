"""Exclude lists of quantization configs, matched by name segments so that ``layers.1*`` does not catch layer 10."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase


def matches(pattern: str, module: str) -> bool:
    """Whether an entry of ``ignore`` or ``exclude_modules`` names a module or one of its parents.

    Known spellings: ``x``, ``x*``, ``x.*``, ``x.``, ``*.x.*``, ``*x.*`` and ``re:...`` (matched from the start, as
    compressed-tensors does). A star at the end of a segment that ends in a digit adds nothing.
    """
    if pattern.startswith("re:"):
        if re.search(r"[+*}]\)+[+*{]", pattern):
            return False  # a repeat of a repeat can take forever, and this is only for a note
        try:
            return re.match(pattern[3:], module) is not None
        except re.error:
            return False
    wanted = [part for part in pattern.split(".") if part]
    while wanted and wanted[-1] == "*":
        wanted.pop()
    wanted = [re.sub(r"(\d)\*$", r"\1", part) for part in wanted]
    parts = module.split(".")
    starts = range(1)
    if wanted and wanted[0] == "*":
        starts, wanted = range(1, len(parts)), wanted[1:]
    elif wanted and wanted[0].startswith("*"):
        starts = range(len(parts))
    if not wanted:
        return False
    return any(len(parts) - start >= len(wanted) and all(map(fnmatchcase, parts[start:], wanted)) for start in starts)
