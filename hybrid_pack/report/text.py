"""Words, numbers and strings from elsewhere, as they are shown."""

from __future__ import annotations

import html
import unicodedata


def size(nbytes: float) -> str:
    """Bytes in decimal units, as disks and networks count them."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


def counted(number: int, what: str) -> str:
    """``1 file``, ``2,000 files``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def plain(text: str) -> str:
    """Text in which nothing is invisible: control characters, and those that turn the direction, become escapes."""
    return "".join(f"\\u{ord(c):04x}" if unicodedata.category(c) in ("Cc", "Cf", "Cs") else c for c in text)


def escaped(text: object) -> str:
    """Text as HTML content or attribute value."""
    return html.escape(plain(str(text)))
