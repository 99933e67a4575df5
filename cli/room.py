"""Room on the disk that a source on the Hub takes besides the pack."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hybrid_pack.cli.source import hub_id, stream_folder
from hybrid_pack.convert.resources import Space, existing, free_bytes
from hybrid_pack.errors import EnvironmentFailure
from hybrid_pack.report.text import size

if TYPE_CHECKING:
    from hybrid_pack.plan import Plan


@dataclass(frozen=True)
class SourceRoom:
    """What of the source comes to the disk.

    Attributes:
        where: The folder it comes to.
        nbytes: Bytes that will be added there, at most at one time.
        free: Bytes free there.
        shared: It is on the pack's file system.
        streamed: Shards come and go (``--no-keep``); else a whole copy stays in the Hugging Face cache.
    """

    where: Path
    nbytes: int
    free: int
    shared: bool
    streamed: bool

    @property
    def _what(self) -> str:
        return "shards of the source that are in use" if self.streamed else "the source in the Hugging Face cache"

    def enough(self, space: Space) -> bool:
        """Whether it fits, beside the pack if that goes to the same file system."""
        pack = space.needed - space.reclaimed if self.shared else 0
        return self.nbytes + pack <= self.free

    def line(self, space: Space) -> str:
        """For a dry run."""
        beside = f" beside the {size(space.needed)} of the pack" if self.shared else ""
        verdict = "enough" if self.enough(space) else "NOT ENOUGH"
        most = "at most " if self.streamed else ""
        return f"for {self._what}: {most}{size(self.nbytes)}{beside}, {size(self.free)} free at {self.where}: {verdict}"

    def require(self, space: Space) -> None:
        """Refuse before anything is fetched.

        Raises:
            EnvironmentFailure: Too little is free.
        """
        if self.enough(space):
            return
        pack = f" and {space.needed:,} for the pack" if self.shared else ""
        other = "choose another --out" if self.streamed else "set HF_HOME to another disk, or keep no copy: --no-keep"
        raise EnvironmentFailure(
            f"not enough disk space for {self._what}", where=self.where, expected=f"{self.nbytes:,} bytes{pack}",
            found=f"{self.free:,} free", hint=f"free some; or {other}",
        )  # fmt: skip

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "where": str(self.where), "bytes": self.nbytes, "free_bytes": self.free,
            "same_file_system_as_pack": self.shared, "kept": not self.streamed,
        }  # fmt: skip


def source_room(src: str, out: Path, plan: Plan, done: Collection[str], *, no_keep: bool) -> SourceRoom | None:
    """What a Hub source will take, or None where it is whole in the cache.

    Args:
        src: A Hub id.
        out: Folder of the pack.
        plan: From the headers.
        done: Files of the pack that are finished.
        no_keep: As given to ``convert``.
    """
    from hybrid_pack import hub

    repo_id, revision = hub_id(src)
    cache, missing = hub.cache_need(repo_id, revision)
    if not missing:
        return None
    where = stream_folder(out) if no_keep else cache
    if no_keep:
        held = sum(path.lstat().st_blocks * 512 for path in where.glob("*.safetensors"))  # of a run that stopped
        missing = max(0, hub.window_bytes(plan, done) - held)
    shared = os.stat(existing(where)).st_dev == os.stat(existing(out.absolute())).st_dev  # noqa: PTH116
    return SourceRoom(where, missing, free_bytes(where), shared, no_keep)
