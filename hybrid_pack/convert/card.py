"""The model card of a finished pack; what a person wrote is never touched."""

from __future__ import annotations

import json
from pathlib import Path

from hybrid_pack.io.config import CONFIG
from hybrid_pack.io.manifest import README
from hybrid_pack.io.output import write_small
from hybrid_pack.plan import Plan
from hybrid_pack.report.card import is_ours, model_card
from hybrid_pack.report.data import make_view
from hybrid_pack.report.frontmatter import Value, read_front_matter
from hybrid_pack.schemas.manifest import Manifest


def _front(root: Path) -> dict[str, Value]:
    """What the source's card says of itself; nothing where there is none that can be read."""
    path = root / README
    try:
        return read_front_matter(path.read_text("utf-8", errors="replace")) if path.is_file() else {}
    except OSError:
        return {}


def _may_write(path: Path) -> bool:
    """Whether there is no card, or one that was written here and not edited."""
    if path.is_symlink():
        return False
    return not path.exists() or (path.is_file() and is_ours(path.read_bytes()))


def write_card(out: Path, plan: Plan, manifest: Manifest) -> bool:
    """Write README.md, unless a card is there that was not written here or was edited since.

    Args:
        out: The pack.
        plan: What it was made by.
        manifest: Its manifest.

    Returns:
        Whether it was written.
    """
    if not _may_write(out / README):
        return False
    view = make_view(manifest, frozenset(shard.path for shard in manifest.shards))
    card = model_card(view, json.loads(plan.written[CONFIG]), _front(plan.source.root))
    write_small(out / README, card.encode())
    return True
