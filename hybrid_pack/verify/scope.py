"""Which shards a verification covers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hybrid_pack.errors import UsageError
from hybrid_pack.io.manifest import topology_of
from hybrid_pack.schemas.manifest import FileEntry, Manifest, ShardEntry


@dataclass(frozen=True)
class Scope:
    """A choice of shards.

    Attributes:
        rank: Only this rank, or None for all.
        layers: Only these layers, or None for all.
        base: The base tensors' files too.
    """

    rank: int | None = None
    layers: frozenset[int] | None = None
    base: bool = True

    def covers(self, shard: ShardEntry) -> bool:
        """Whether a shard is looked at."""
        return self.rank in (None, shard.rank) and (self.layers is None or shard.layer in self.layers)

    @property
    def whole(self) -> bool:
        """Whether nothing is left out."""
        return self.rank is None and self.layers is None and self.base

    def plain(self, manifest: Manifest) -> list[FileEntry]:
        """The other files that are looked at."""
        return [*(manifest.base.files if self.base else ()), *manifest.files]

    def shards(self, manifest: Manifest) -> list[ShardEntry]:
        """The shards that are looked at."""
        return [shard for shard in manifest.shards if self.covers(shard)]


def make_scope(manifest: Manifest, rank: int | None, layers: Iterable[int] | None, *, base: bool = True) -> Scope:
    """A checked choice.

    Raises:
        UsageError: A rank or layer the pack does not have.
    """
    ranks = topology_of(manifest).ranks
    if rank is not None and not 0 <= rank < ranks:
        raise UsageError("the pack has no such rank", where="--rank", expected=f"0..{ranks - 1}", found=rank)
    if layers is None:
        return Scope(rank, base=base)
    wanted = frozenset(layers)
    unknown = sorted(layer for layer in wanted if str(layer) not in manifest.layers)
    if unknown or not wanted:
        have = ", ".join(manifest.layers)
        raise UsageError(
            "the pack has no such layer",
            where="--layers",
            expected=f"of {have}",
            found=unknown[0] if unknown else "none",
        )
    return Scope(rank, wanted, base)
