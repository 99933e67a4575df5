"""``hybrid-pack inspect``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hybrid_pack.cli.source import local_source
from hybrid_pack.cli.streams import put


@click.command()
@click.argument("path")
@click.option(
    "--bit-map",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON file with the bit map, for a checkpoint without one.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(path: str, bit_map: Path | None, as_json: bool) -> None:
    """Show a checkpoint or a pack from its headers: model, tiers, formats, sizes, oddities.

    PATH is a folder or a Hub id (org/name[@revision]).
    """
    from hybrid_pack.cli.tables import inspection_text
    from hybrid_pack.inspection import inspect_path

    root, name = local_source(path, headers_only=True)
    view = inspect_path(root, bit_map_file=bit_map, name=name)
    put(json.dumps(view.as_dict(), indent=1) if as_json else inspection_text(view))
