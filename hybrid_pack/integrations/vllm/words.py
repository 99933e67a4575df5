"""Errors of the runtime in the words of who serves with vLLM. Imports nothing of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybrid_pack.errors import HybridPackError

_HINTS = {
    "max_tokens": "a smaller --max-num-batched-tokens needs less",
    "load fewer layers": "free memory on this GPU, or serve with more ranks, and a pack made for them",
    "host_memory_bytes": "free memory of the host",
    "readers": "raise the limit on threads (ulimit -u)",
    "direct": "move the pack to another file system",
}
"""By a word of hints that are about arguments of the library, which nobody who serves has."""


def hint_for(hint: str | None, root: Path, rank: int) -> str | None:
    """A hint of the runtime, for who serves a pack.

    Args:
        hint: As the runtime gives it.
        root: The pack.
        rank: Whose shards are loaded.
    """
    if hint is None:
        return None
    told = next((words for key, words in _HINTS.items() if key in hint), hint)
    return told.replace("`hybrid-pack verify`", f"`hybrid-pack verify {root} --rank {rank}`")


@contextmanager
def in_words(root: Path, rank: int) -> Iterator[None]:
    """Give errors of the runtime hints that a user of vLLM can follow.

    Args:
        root: The pack.
        rank: Named in front of where it happened, unless that says it already.
    """
    try:
        yield
    except HybridPackError as error:
        where = error.where or str(root)
        raise type(error)(
            error.problem, where=where if f"rank {rank}" in where else f"rank {rank}, {where}",
            expected=error.expected, found=error.found, hint=hint_for(error.hint, root, rank),
        ) from error.__cause__  # fmt: skip
