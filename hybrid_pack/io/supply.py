"""How the files of a source come to be there: a folder has them, a repository brings them when they are needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from hybrid_pack.io.shards import Located

A = TypeVar("A")
Task = Callable[[A], int]
"""Work on one expert or base file; returns the source bytes it read."""


@dataclass(frozen=True)
class Group(Generic[A]):
    """Tasks that read the same files: those of a layer, or of a base file.

    Attributes:
        files: Of the source, whole.
        tasks: In any order, by any thread.
    """

    files: frozenset[Path]
    tasks: Sequence[Task[A]]


class Supply(Protocol):
    """Told what a conversion is going to read."""

    def fetch(self, tensors: Iterable[Located]) -> None:
        """See to it that some small tensors can be read now, whatever else of their files is there."""

    def schedule(self, groups: Sequence[Group[A]], stopped: threading.Event) -> Iterator[Task[A]]:
        """All tasks, each when its files are there.

        Args:
            groups: Everything that is left to do; another order may suit better.
            stopped: Set when the conversion ends early; no more tasks are needed then.
        """


class Here:
    """A folder: everything is there."""

    def fetch(self, tensors: Iterable[Located]) -> None:
        """Nothing to do."""

    def schedule(self, groups: Sequence[Group[A]], stopped: threading.Event) -> Iterator[Task[A]]:
        """In the order given."""
        return (task for group in groups for task in group.tasks)
