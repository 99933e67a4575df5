"""How a long job tells how far it is."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told how a conversion or verification goes on; called from several threads."""

    def start(self, total_bytes: int, done_bytes: int) -> None:
        """Bytes to read in all, and those that were done before."""

    def advance(self, nbytes: int) -> None:
        """Bytes read and done since the last call."""

    def note(self, text: str) -> None:
        """Something worth a line."""


class Silent:
    """Progress that nobody sees."""

    def start(self, total_bytes: int, done_bytes: int) -> None:
        """Nothing."""

    def advance(self, nbytes: int) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""
