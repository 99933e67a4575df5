"""``hybrid-pack verify``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hybrid_pack.cli.options import LAYERS
from hybrid_pack.cli.progress import ByteProgress, counted, size
from hybrid_pack.cli.source import hub_id, local_source
from hybrid_pack.cli.streams import put
from hybrid_pack.errors import DataError, plain

if TYPE_CHECKING:
    from hybrid_pack.verify import VerifyReport


@click.command()
@click.argument("pack", required=False, type=click.Path(path_type=Path))
@click.option("--source", help="The checkpoint it was made from, folder or Hub id: decode every expert and compare.")
@click.option(
    "--bit-map",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON file with the bit map, as given to convert.",
)
@click.option("--quick", is_flag=True, help="Structure only: no payload is read, of the pack or of the source.")
@click.option("--rank", "ranks", type=int, multiple=True, help="Only this rank's shards; may be repeated.")
@click.option("--layers", type=LAYERS, help="Only these layers' shards, such as 3-5,78.")
@click.option("--experts-only", is_flag=True, help="Not the base tensors; their files may be missing.")
@click.option("--remote", help="Instead of PACK: org/name[@revision] on the Hub, by names, sizes and hashes.")
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    help="With --remote: a local copy whose bytes the Hub's hashes must fit.",
)
@click.option("--workers", type=int, help="Threads; by default one a core.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_context
def command(
    ctx: click.Context,
    pack: Path | None,
    source: str | None,
    bit_map: Path | None,
    quick: bool,
    ranks: tuple[int, ...],
    layers: tuple[int, ...] | None,
    experts_only: bool,
    remote: str | None,
    against: Path | None,
    workers: int | None,
    as_json: bool,
) -> int:
    """Prove a pack: structure, every digest and, with --source, every expert against the checkpoint.

    With --remote a pack on the Hub: nothing of its payload is fetched.
    Exit code 0 if nothing is wrong, 1 if something is, 3 if nothing is but files could not be read.
    """
    from hybrid_pack.verify import verify_pack

    if (pack is None) == (remote is None):
        raise click.UsageError("give the folder of a pack, or --remote org/name", ctx)
    if remote is not None:
        if source is not None or bit_map is not None or quick or ranks or layers or experts_only:
            raise click.UsageError("--remote takes --against, --workers and --json only", ctx)
        return _shown(_remote(remote, against, workers, as_json), remote, as_json)
    if against is not None:
        raise click.UsageError("--against goes with --remote", ctx)
    assert pack is not None
    if bit_map is not None and source is None:
        raise click.UsageError("--bit-map is the source's: give --source too", ctx)
    checkpoint = None if source is None else local_source(source, headers_only=quick)[0]
    with ByteProgress("verify", quiet=as_json) as progress:
        report = verify_pack(
            pack,
            source=checkpoint,
            bit_map_file=bit_map,
            quick=quick,
            rank=ranks or None,
            layers=layers,
            experts_only=experts_only,
            workers=workers,
            progress=progress,
        )
    return _shown(report, str(pack), as_json)


def _remote(text: str, against: Path | None, workers: int | None, as_json: bool) -> VerifyReport:
    """The report about a pack on the Hub."""
    from hybrid_pack import hub
    from hybrid_pack.verify import verify_remote

    remote = hub.open_remote(*hub_id(text))
    files = hub.list_files(remote)
    manifest: bytes | DataError
    try:
        manifest = hub.fetch_manifest(remote)
    except DataError as error:
        manifest = error
    with ByteProgress("verify", quiet=as_json) as progress:
        return verify_remote(remote.name, files, manifest, against=against, workers=workers, progress=progress)


def _shown(report: VerifyReport, pack: str, as_json: bool) -> int:
    """Print a report; the exit code."""
    if as_json:
        put(json.dumps(report.as_dict(), indent=1))
    else:
        for check in report.checks:
            read = f", {size(check.nbytes)} in {check.seconds:.1f} s" if check.nbytes else ""
            put(f"  checked      {check.name}: {counted(check.count, check.unit.removesuffix('s'))}{read}")
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
            parts.append(f"{counted(report.findings_total, 'finding')}; first: {report.findings[0]}")
        if report.unread:
            parts.append(f"{counted(len(report.unread), 'file')} could not be read; first: {report.unread[0]}")
        click.echo(plain(f"hybrid-pack: {pack}: {'; '.join(parts)}"), err=True)
        return report.exit_code
    if not as_json:
        put(f"{pack}: nothing wrong found in {report.seconds:.1f} s")
    return 0
