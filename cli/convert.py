"""``hybrid-pack convert``."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybrid_pack.cli.options import BYTES, LAYERS, quantize_options
from hybrid_pack.cli.progress import ByteProgress, size
from hybrid_pack.cli.source import local_source, streamed_source
from hybrid_pack.cli.streams import put
from hybrid_pack.errors import UsageError

if TYPE_CHECKING:
    from hybrid_pack.hub import HubSupply
    from hybrid_pack.plan import Plan


@click.command()
@click.argument("src")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder of the pack.")
@click.option("--tp", default=1, show_default=True, help="Tensor-parallel size.")
@click.option("--ep", default=1, show_default=True, help="Expert-parallel size.")
@click.option(
    "--bit-map",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON file with the bit map, if SRC's own is absent or wrong.",
)
@quantize_options
@click.option("--layers", type=LAYERS, help="Pack only these layers, such as 3-5,78.")
@click.option("--workers", type=int, help="Threads; by default two a core, with --hessians one.")
@click.option("--max-ram", type=BYTES, help="Limit on memory, such as 1GiB; fewer workers are used to keep it.")
@click.option(
    "--resume", is_flag=True, help="Go on with an unfinished conversion, or repair a pack; good files are kept."
)
@click.option("--overwrite", is_flag=True, help="Replace the pack or unfinished conversion that is there.")
@click.option(
    "--no-keep",
    is_flag=True,
    help="SRC on the Hub: fetch each shard when it is needed and drop it after use, so that the disk holds one copy.",
)
@click.option(
    "--on-scale-mismatch",
    type=click.Choice(["refuse", "requantize"]),
    default="refuse",
    show_default=True,
    help="Gate and up with second-level scales that are no power of two apart.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the plan, and what would be refused as far as headers, importances, Hessians and (of a folder) "
    "second-level scales tell; write nothing.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of tables.")
def command(
    src: str, out: Path, tp: int, ep: int, layers: tuple[int, ...] | None, dry_run: bool, as_json: bool, **options: Any
) -> None:
    """Write a pack from a checkpoint and its bit map.

    Experts stored in their tier's format are moved bit for bit; others are quantised. SRC is a checkpoint folder or a
    Hub id (org/name[@revision]).
    """
    if options["resume"] and options["overwrite"]:
        raise click.UsageError("--resume goes on with what is there, --overwrite removes it: give one of them")
    from hybrid_pack.cli import tables
    from hybrid_pack.cli.room import source_room
    from hybrid_pack.convert import Conversion, check, convert, require_disk
    from hybrid_pack.io.checkpoint import open_checkpoint
    from hybrid_pack.io.manifest import STATE
    from hybrid_pack.io.quantization import QuantizeOptions
    from hybrid_pack.plan import make_plan
    from hybrid_pack.sharding import Topology

    opened = {key: options.pop(key) for key in ("kept_format", "requantize", "mx_bias")}
    opened["bit_map_file"] = options.pop("bit_map")
    quantize = QuantizeOptions(**{key: options.pop(key) for key in ("search", "importance", "hessians", "device")})
    pad, no_keep = options.pop("pad"), options.pop("no_keep")
    supply: HubSupply | None = None

    def planned(root: Path, name: str | None) -> Plan:
        source = open_checkpoint(root, name=name, **opened)
        return make_plan(source, Topology(tp, ep), layers, pad=pad, options=quantize)

    def show(done: Conversion, plan: Plan) -> None:
        document = tables.conversion_json(done, out) if as_json else None
        text = tables.conversion_text(done, plan, out, src)
        if supply is not None and done.files_written:
            text += f"  # fetches the whole source, {size(plan.source_bytes)}; verify without --source fetches nothing"
        with suppress(BrokenPipeError):  # the pack is finished, whether or not anybody reads about it
            put(json.dumps(document, indent=1) if document else text)

    root, name = local_source(src, headers_only=True)
    plan, on_hub = planned(root, name), name is not None
    if no_keep and not on_hub:
        raise UsageError("--no-keep is for a checkpoint on the Hub; a folder is never changed", where=src)
    if on_hub or dry_run:  # whatever would be refused is refused before hundreds of gigabytes are fetched
        needs, found = check(plan, out, headers_only=on_hub, **options)
        room = source_room(src, out, plan, found.done, no_keep=no_keep) if on_hub and not found.complete else None
        if dry_run:
            document = tables.plan_json(plan, needs, found) if as_json else None
            if document is not None and room is not None:
                document["source_room"] = room.as_dict()
            text = tables.plan_text(plan, needs, found, out) + (f"\n{room.line(found.space)}" if room else "")
            put(json.dumps(document, indent=1) if document else text)
        require_disk(found.space, out, kept=bool(found.done))
        if room is not None:
            room.require(found.space)
        if dry_run:
            return
        if found.complete and found.manifest is not None and not (out / STATE).exists():  # nothing need be fetched
            files = len(found.manifest.paths()) + 1
            show(Conversion(found.manifest, 0, files, 0, 0.0, needs.workers), plan)
            return
        if not no_keep:
            plan = planned(*local_source(src))
    with ByteProgress("convert", lines=as_json) as progress:
        if no_keep:
            root, name, supply = streamed_source(src, out, progress)
            plan = planned(root, name)
        for note in plan.announcements:
            progress.note(f"note: {note}")
        try:
            done = convert(plan, out, progress=progress, supply=supply, **options)
        except BaseException:
            if supply is not None:
                (supply.release if supply.holds_work else supply.close)()
            raise
    if supply is not None:
        supply.close()
    show(done, plan)
