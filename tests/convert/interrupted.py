"""A conversion that ends before its time."""

from __future__ import annotations

from typing import Any

import pytest

from hybrid_pack.convert.journal import Journal


class Stop(Exception):
    """The conversion ends here."""


def stop_after(patch: pytest.MonkeyPatch, files: int) -> None:
    """Fail when the next file after so many is to be recorded."""
    real, left = Journal.add, [files]

    def add(self: Journal, record: dict[str, Any]) -> None:
        if not left[0]:
            raise Stop
        left[0] -= 1
        real(self, record)

    patch.setattr(Journal, "add", add)
