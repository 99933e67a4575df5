"""The model card of a finished pack; what a person wrote is never touched."""

from __future__ import annotations

import json
from pathlib import Path

from hybrid_pack.io.config import CONFIG
from hybrid_pack.io.manifest import README
from hybrid_pack.io.output import write_small
from hybrid_pack.plan import Plan
from hybrid_pack.report.card import described, is_ours, model_card
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


def _kept(path: Path, manifest: Manifest) -> str | None:
    """Why the card that is there stays, or None where there is none, or one that was written here and not edited."""
    if not path.is_symlink():
        if not path.exists():
            return None
        card = path.read_bytes() if path.is_file() else b""
        if is_ours(card):
            return None
        if described(card) not in (None, manifest.self_digest):
            return (
                f"{README} was edited, so it is kept, but it describes another pack: the manifest it names is not this "
                f"one's, {manifest.self_digest}. Delete it and convert again with --overwrite for a new one"
            )
    return f"{README} is not the one written here, so it is kept"


def write_card(out: Path, plan: Plan, manifest: Manifest) -> str | None:
    """Write README.md, unless a card is there that was not written here or was edited since.

    Args:
        out: The pack.
        plan: What it was made by.
        manifest: Its manifest.

    Returns:
        None where it was written, or why it was not.
    """
    kept = _kept(out / README, manifest)
    if kept is not None:
        return kept
    view = make_view(manifest, frozenset(shard.path for shard in manifest.shards))
    card = model_card(view, json.loads(plan.written[CONFIG]), _front(plan.source.root))
    write_small(out / README, card.encode())
    return None
