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
        ranks: Only these ranks, or None for all.
        layers: Only these layers, or None for all.
        base: The base tensors' files too.
    """

    ranks: frozenset[int] | None = None
    layers: frozenset[int] | None = None
    base: bool = True

    def covers(self, shard: ShardEntry) -> bool:
        """Whether a shard is looked at."""
        ranked = self.ranks is None or shard.rank in self.ranks
        return ranked and (self.layers is None or shard.layer in self.layers)

    @property
    def whole(self) -> bool:
        """Whether nothing is left out."""
        return self.ranks is None and self.layers is None and self.base

    def plain(self, manifest: Manifest) -> list[FileEntry]:
        """The other files that are looked at."""
        return [*(manifest.base.files if self.base else ()), *manifest.files]

    def shards(self, manifest: Manifest) -> list[ShardEntry]:
        """The shards that are looked at."""
        return [shard for shard in manifest.shards if self.covers(shard)]


def make_scope(
    manifest: Manifest, rank: int | Iterable[int] | None, layers: Iterable[int] | None, *, base: bool = True
) -> Scope:
    """A checked choice.

    Raises:
        UsageError: A rank or layer the pack does not have.
    """
    count = topology_of(manifest).ranks
    ranks = None if rank is None else frozenset((rank,) if isinstance(rank, int) else rank)
    strange = sorted(r for r in ranks or () if not 0 <= r < count)
    if strange or (ranks is not None and not ranks):
        found = strange[0] if strange else "none"
        raise UsageError("the pack has no such rank", where="--rank", expected=f"0..{count - 1}", found=found)
    if layers is None:
        return Scope(ranks, base=base)
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
    return Scope(ranks, wanted, base)
