"""``hybrid-pack inspect``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybrid_pack.cli.options import BYTES
from hybrid_pack.cli.source import local_source
from hybrid_pack.cli.streams import put
from hybrid_pack.errors import UsageError

if TYPE_CHECKING:
    from hybrid_pack.io.checkpoint import Checkpoint
    from hybrid_pack.schemas.manifest import Manifest
    from hybrid_pack.tiers.cards import Fit
    from hybrid_pack.tiers.needs import Needs


def _given(options: Mapping[str, Any]) -> list[str]:
    """Names of options that were given; 0 is given too, and refused later."""
    return [name for name, value in options.items() if value is not None and value is not False]


def _fits(
    opened: Checkpoint | Manifest, root: Path, cards: str, room: int | None, **sizes: Any
) -> tuple[Needs, tuple[Fit, ...]]:
    """What is needed of ranks, and whether the cards have it."""
    from hybrid_pack.io.checkpoint import Checkpoint
    from hybrid_pack.io.manifest import topology_of
    from hybrid_pack.tiers.cards import fits, ranks_for
    from hybrid_pack.tiers.decided import checkpoint_needs, pack_needs

    if isinstance(opened, Checkpoint):
        topology, names = ranks_for(cards, sizes["tp"], 1 if sizes["ep"] is None else sizes["ep"])
        needs = checkpoint_needs(opened, topology, pad=sizes["pad"])
    else:
        for name in _given(sizes):
            raise UsageError("a pack has its own sizes", where=f"--{name}", found=f"the pack {root}")
        own = topology_of(opened)
        topology, names = ranks_for(cards, own.tensor_parallel, own.expert_parallel)
        needs = pack_needs(root, opened)
    return needs, fits(needs.largest.total, topology.ranks, needs.kv, room, names)


@click.command()
@click.argument("path")
@click.option(
    "--bit-map",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON file with the bit map, for a checkpoint without one.",
)
@click.option("--cards", metavar="NxGB", help="Show also what fits these cards, such as 4x96GB, one for each rank.")
@click.option("--working-room", type=BYTES, help="With --cards: left free by weights and KV cache; by default 4GiB.")
@click.option("--tp", type=int, help="With --cards: tensor-parallel size of a checkpoint; by default what they leave.")
@click.option("--ep", type=int, help="With --cards: expert-parallel size of a checkpoint; by default 1.")
@click.option("--pad", is_flag=True, help="With --cards: count a checkpoint padded, as convert --pad.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(
    path: str, bit_map: Path | None, cards: str | None, working_room: int | None, as_json: bool, **sizes: Any
) -> None:
    """Show a checkpoint or a pack from its headers: model, tiers, formats, sizes, oddities.

    PATH is a folder or a Hub id (org/name[@revision]).
    """
    if cards is None and _given({**sizes, "working_room": working_room}):
        raise click.UsageError("--working-room, --tp, --ep and --pad go with --cards")
    from hybrid_pack.cli.tables import inspection_text
    from hybrid_pack.cli.tier_tables import needs_json, needs_text
    from hybrid_pack.inspection import inspect_opened, open_path
    from hybrid_pack.tiers.cards import parse_cards

    if cards is not None:
        parse_cards(cards)  # what cannot be is said before anything is fetched
    root, name = local_source(path, headers_only=True)
    opened = open_path(root, bit_map=bit_map, name=name)
    view = inspect_opened(opened, root, bit_map=bit_map, name=name)
    found = None if cards is None else _fits(opened, root, cards, working_room, **sizes)
    if found is not None:
        view = replace(view, intermediate_padded=found[0].intermediate)
    if as_json:
        put(json.dumps({**view.as_dict(), **({"fit": needs_json(*found)} if found else {})}, indent=1))
        return
    put("\n\n".join([inspection_text(view), *(needs_text(*found, view.intermediate) if found else [])]))
