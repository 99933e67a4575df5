"""``hybrid-pack plan``."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hybrid_pack.cli.options import BYTES, FRACTION
from hybrid_pack.cli.source import local_source
from hybrid_pack.cli.streams import put

if TYPE_CHECKING:
    from hybrid_pack.tiers import Rule

FILE = click.Path(path_type=Path)


def _rule(keep: int | None, keep_fraction: Any, budget: int | None, floor: int | None, rank_by: str | None) -> Rule:
    """The one rule that was given."""
    from hybrid_pack.tiers import Budget, Keep, KeepFraction

    if sum(given is not None for given in (keep, keep_fraction, budget)) != 1:
        raise click.UsageError("give one of --keep, --keep-fraction and --budget")
    if budget is not None:
        return Budget(budget, floor, "raw" if rank_by == "raw" else "share")
    if floor is not None or rank_by is not None:
        raise click.UsageError("--floor and --rank-by go with --budget")
    return KeepFraction(keep_fraction) if keep is None else Keep(keep)


@click.command()
@click.argument("src")
@click.option("--saliency", type=FILE, help="JSON or safetensors file: a number for each layer and expert.")
@click.option(
    "--from-weights", is_flag=True, help="No data: guess saliency from NF3's error; knows nothing of routing."
)
@click.option("--keep", type=int, metavar="K", help="Keep K experts of each layer.")
@click.option("--keep-fraction", type=FRACTION, help="Keep this fraction of each layer, such as 0.25 or 1/4.")
@click.option("--budget", type=BYTES, help="Keep what fits this many bytes of weights on a rank, such as 82GiB.")
@click.option("--tp", type=int, help="Tensor-parallel size; by default what --cards leaves, else 1.")
@click.option("--ep", default=1, show_default=True, help="Expert-parallel size.")
@click.option("--floor", type=int, metavar="K", help="With --budget: least kept experts of a layer; by default top-k.")
@click.option(
    "--rank-by",
    type=click.Choice(["share", "raw"]),
    help="With --budget: compare layers by an expert's share of its layer's saliency (the default) or by the numbers.",
)
@click.option("--kept-format", type=click.Choice(["nvfp4", "mxfp4"]), help="By default as stored, else nvfp4.")
@click.option("--include-mtp", is_flag=True, help="Choose in MTP layers too, instead of keeping all their experts.")
@click.option("--pad", is_flag=True, help="Count with the intermediate size padded, as convert --pad.")
@click.option("--cards", metavar="NxGB", help="Show only these cards, such as 4x96GB.")
@click.option("--working-room", type=BYTES, help="Left free by weights and KV cache; by default 4GiB.")
@click.option("--out", type=FILE, help="JSON file to write the map to, for convert --bit-map; else nothing is written.")
@click.option("--overwrite", is_flag=True, help="Replace the file that is there.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of tables.")
def command(
    src: str, saliency: Path | None, from_weights: bool, tp: int | None, ep: int, out: Path | None, **options: Any
) -> None:
    """Choose which experts are kept and which go to the NF3 tail, and show what that costs.

    SRC is a checkpoint folder or a Hub id (org/name[@revision]); only its headers are read, but for --from-weights.
    """
    if (saliency is None) != from_weights:
        raise click.UsageError("give one of --saliency and --from-weights")
    rule = _rule(*(options[name] for name in ("keep", "keep_fraction", "budget", "floor", "rank_by")))
    from hybrid_pack.cli import tier_tables
    from hybrid_pack.io.checkpoint import open_checkpoint
    from hybrid_pack.tiers import plan_tiers, read_model, read_saliency
    from hybrid_pack.tiers.cards import fits, ranks_for
    from hybrid_pack.tiers.mapfile import require_free, write_map
    from hybrid_pack.tiers.source import weights_saliency

    topology, sizes = ranks_for(options["cards"], tp, ep)
    root, name = local_source(src, headers_only=not from_weights)
    if out is not None:
        require_free(out, options["overwrite"], root, (saliency,) if saliency else ())
    source = open_checkpoint(root, name=name, require_map=False)
    model = read_model(source)
    chosen = {name: options[name] for name in ("kept_format", "include_mtp")}
    pad = options["pad"]
    found = read_saliency(saliency) if saliency else weights_saliency(source, model, **chosen)
    plan = plan_tiers(model, found, rule, topology, pad=pad, **chosen)
    cards = fits(plan.largest.total, topology.ranks, plan.kv, options["working_room"], sizes)
    document = tier_tables.tiers_json(plan, cards, out) if options["as_json"] else None
    if out is not None:
        write_map(out, plan.bit_map)
    with suppress(*[BrokenPipeError] * (out is not None)):  # the map is written, whether or not anybody reads about it
        put(json.dumps(document, indent=1) if document else tier_tables.tiers_text(plan, cards, out, src))
