"""``hybrid-pack pull``."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import click

from hybrid_pack.cli.progress import ByteProgress, counted, size
from hybrid_pack.cli.source import hub_id
from hybrid_pack.cli.streams import put


@click.command()
@click.argument("repository")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for it; may hold an earlier pull.")
@click.option(
    "--rank", "ranks", type=int, multiple=True, help="Only this rank's files; may be repeated. All by default."
)
@click.option("--revision", help="Branch, tag or commit; main by default.")
@click.option("--experts-only", is_flag=True, help="Leave out the base tensors.")
@click.option("--workers", type=int, help="Files fetched at a time; 4 by default.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(
    repository: str,
    out: Path,
    ranks: tuple[int, ...],
    revision: str | None,
    experts_only: bool,
    workers: int | None,
    as_json: bool,
) -> None:
    """Bring a pack, or some ranks of it, from the Hub; every byte is checked before a file gets its name.

    REPOSITORY is org/name or org/name@revision. Interrupted, the same command goes on where it stopped.
    """
    from hybrid_pack.hub import pull

    repo_id, at = hub_id(repository, revision)
    with ByteProgress("pull", lines=as_json) as progress:
        done = pull(
            repo_id, out, ranks=ranks or None, revision=at, experts_only=experts_only, workers=workers,
            progress=progress,
        )  # fmt: skip
    scope = " ".join(f"--rank {rank}" for rank in ranks) + (" --experts-only" if experts_only else "")
    verify = f"hybrid-pack verify {out} {scope.strip()}".rstrip()
    if as_json:
        document = {
            "repository": repo_id,
            "commit": done.commit,
            "out": str(out),
            "ranks": list(done.ranks),
            "experts_only": experts_only,
            "files_fetched": done.files_fetched,
            "bytes_fetched": done.bytes_fetched,
            "files_kept": done.files_kept,
            "bytes_kept": done.bytes_kept,
            "replaced": list(done.replaced),
        }
        text = json.dumps(document, indent=1)
    else:
        which = f"rank{'s' if len(done.ranks) > 1 else ''} {', '.join(map(str, done.ranks))}"
        lines = [
            f"pulled {which} of {repo_id} into {out}, every digest checked",
            f"  commit   {done.commit}",
            f"  fetched  {counted(done.files_fetched, 'file')}, {size(done.bytes_fetched)}",
            f"  kept     {counted(done.files_kept, 'file')}, {size(done.bytes_kept)}",
        ]
        lines += [f"  replaced {path}: it was there with other bytes" for path in done.replaced]
        lines.append(f"next: {verify}")
        text = "\n".join(lines)
    with suppress(BrokenPipeError):  # the files are there, whether or not anybody reads about it
        put(text)
