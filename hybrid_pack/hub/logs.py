"""What is said of waits, and what huggingface_hub says on stderr itself, without anything that gives access."""

from __future__ import annotations

import logging

from hybrid_pack.errors import hide_tokens

_LOGGER = logging.getLogger("hybrid_pack.hub")
_NO_NEWS = ("No files have been modified since last commit",)


def announce(text: str) -> None:
    """A line for whoever listens; where nobody set up logging, Python puts it on stderr."""
    _LOGGER.warning("%s", text)


class _Hide(logging.Filter):
    """Takes tokens and queries of URLs out of a record; drops what a push says better itself."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is shown."""
        text = record.getMessage()
        record.msg, record.args = hide_tokens(text), None
        return not text.startswith(_NO_NEWS)


_HIDE = _Hide()


def hide_in_logs() -> None:
    """Put the filter in front of every handler of huggingface_hub; nothing if it is there."""
    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(_HIDE)  # which adds it once
