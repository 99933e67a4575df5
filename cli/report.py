"""``hybrid-pack report``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from hybrid_pack.cli.progress import ByteProgress


@click.command()
@click.argument("pack", type=click.Path(path_type=Path))
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write the page there.")
@click.option(
    "--png",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write pictures into this folder; needs hybrid-pack[report].",
)
@click.option("--quick", is_flag=True, help="Read no payload: no histograms of scales.")
@click.option("--full", is_flag=True, help="Read the scales of every expert, not of a sample.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object with everything shown on stdout.")
@click.pass_context
def command(
    ctx: click.Context, pack: Path, html: Path | None, png: Path | None, quick: bool, full: bool, as_json: bool
) -> None:
    """Show a pack in pictures: tiers, bytes of ranks, errors of quantised experts, scales.

    Without --html, --png and --json the page is written to report.html. Folders of other ranks need not be there.
    """
    from hybrid_pack.io.manifest import read_manifest
    from hybrid_pack.report.data import make_view, shards_here
    from hybrid_pack.report.files import require_outside, write_page
    from hybrid_pack.report.scales import read_scales

    if quick and full:
        raise click.UsageError("--quick reads no scales, --full all: give one of them", ctx)
    if html is None and png is None and not as_json:
        html = Path("report.html")
    for target in filter(None, (html, png)):
        require_outside(target, pack)
    if png is not None:
        from hybrid_pack.report.plots import require_matplotlib, write_pictures

        require_matplotlib()
    manifest = read_manifest(pack)
    view = make_view(manifest, shards_here(pack, manifest))
    with ByteProgress("report", quiet=as_json) as progress:
        scales = None if quick else read_scales(pack, manifest, full=full, progress=progress)
    written = [] if html is None else [write_page(html, view, scales)]
    if png is not None:
        written += write_pictures(png, view, scales)
    if as_json:
        shown = {"pack": asdict(view), "scales": None if scales is None else asdict(scales)}
        click.echo(json.dumps({**shown, "written": [str(path) for path in written]}, indent=1))
        return
    for path in written:
        click.echo(f"wrote {path}")
