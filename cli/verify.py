"""``hybrid-pack verify``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hybrid_pack.cli.options import LAYERS
from hybrid_pack.cli.progress import ByteProgress, size
from hybrid_pack.cli.source import local_source
from hybrid_pack.cli.streams import put
from hybrid_pack.errors import plain


@click.command()
@click.argument("pack", type=click.Path(path_type=Path))
@click.option("--source", help="The checkpoint it was made from, folder or Hub id: decode every expert and compare.")
@click.option(
    "--bit-map",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON file with the bit map, as given to convert.",
)
@click.option("--quick", is_flag=True, help="Structure only: no payload is read, of the pack or of the source.")
@click.option("--rank", type=int, help="Only this rank's shards.")
@click.option("--layers", type=LAYERS, help="Only these layers' shards, such as 3-5,78.")
@click.option("--workers", type=int, help="Threads; by default one a core.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_context
def command(
    ctx: click.Context,
    pack: Path,
    source: str | None,
    bit_map: Path | None,
    quick: bool,
    rank: int | None,
    layers: tuple[int, ...] | None,
    workers: int | None,
    as_json: bool,
) -> int:
    """Prove a pack: structure, every digest and, with --source, every expert against the checkpoint.

    Exit code 0 if nothing is wrong, 1 if something is, 3 if nothing is but files could not be read.
    """
    from hybrid_pack.verify import verify_pack

    if bit_map is not None and source is None:
        raise click.UsageError("--bit-map is the source's: give --source too", ctx)
    checkpoint = None if source is None else local_source(source, headers_only=quick)[0]
    with ByteProgress("verify", quiet=as_json) as progress:
        report = verify_pack(
            pack,
            source=checkpoint,
            bit_map_file=bit_map,
            quick=quick,
            rank=rank,
            layers=layers,
            workers=workers,
            progress=progress,
        )
    if as_json:
        put(json.dumps(report.as_dict(), indent=1))
    else:
        for check in report.checks:
            read = f", {size(check.nbytes)} in {check.seconds:.1f} s" if check.nbytes else ""
            put(f"  checked      {check.name}: {check.count:,} {check.unit}{read}")
        for left in report.not_checked:
            put(f"  not checked  {left.what}: {left.why}")
        for line in report.declared:
            put(f"  by the report: {line}")
        for unread in report.unread:
            put(f"  UNREAD       {unread}")
        for finding in report.findings:
            put(f"  WRONG        {finding}")
        if report.findings_total > len(report.findings):
            put(f"  ... and {report.findings_total - len(report.findings)} more")
    if not report.ok:
        parts = []
        if report.findings:
            parts.append(f"{report.findings_total} finding(s); first: {report.findings[0]}")
        if report.unread:
            parts.append(f"{len(report.unread)} file(s) could not be read; first: {report.unread[0]}")
        click.echo(plain(f"hybrid-pack: {pack}: {'; '.join(parts)}"), err=True)
        return report.exit_code
    if not as_json:
        put(f"{pack}: nothing wrong found in {report.seconds:.1f} s")
    return 0
