"""What a line of a mutation table is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybrid_pack.errors import DataError, HybridPackError

MAP_FILE = "given-map.json"
"""Where a mutation puts a map that stands for ``--bit-map``."""


@dataclass(frozen=True)
class Case:
    """One way to break a good checkpoint.

    Attributes:
        id: Name of the test.
        change: Breaks the checkpoint in a folder.
        message: Regular expression the message must contain; it names the place.
        error: Exact class of the error.
        options: Of ``open_checkpoint``.
    """

    id: str
    change: Callable[[Path], object]
    message: str
    error: type[HybridPackError] = DataError
    options: Mapping[str, Any] = field(default_factory=dict)
