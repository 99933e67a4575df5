"""``hybrid-pack push``."""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hybrid_pack.cli.progress import ByteProgress, counted, size
from hybrid_pack.cli.source import hub_id
from hybrid_pack.cli.streams import put
from hybrid_pack.errors import DataError, EnvironmentFailure, UsageError

if TYPE_CHECKING:
    from hybrid_pack.hub import Pushed, PushPlan
    from hybrid_pack.verify import VerifyReport


def _require_good(out: Path, report: VerifyReport) -> None:
    """Refuse what ``verify`` would refuse."""
    if report.findings:
        raise DataError(
            f"not pushed: verify finds {report.findings_total} thing(s) wrong, first: {report.findings[0]}", where=out
        )
    if report.unread:
        raise EnvironmentFailure(f"not pushed: a file could not be read: {report.unread[0]}", where=out)


def _plan_text(plan: PushPlan, repo_id: str) -> str:
    made = ["would make the repository"] * plan.new_repository + ["would make the branch"] * plan.new_branch
    lines = [f"dry run: nothing was sent to {repo_id}", *(f"  {line}" for line in made)]
    lines.append(f"  to send    {counted(len(plan.send), 'file')}, {size(sum(plan.send.values()))}")
    lines += [f"    {path}  {size(nbytes)}" for path, nbytes in sorted(plan.send.items())]
    lines.append(f"  there      {counted(len(plan.there), 'file')}, {size(sum(plan.there.values()))}, byte for byte")
    lines += [f"  to remove  {path}: of another pack" for path in plan.stale]
    lines += [f"  overwrites {path}: of another pack" for path in plan.overwritten]
    lines += ["  keeps      README.md: it was edited on the Hub (--replace sends this one)"] * plan.keeps_card
    lines += [f"  left alone {path}: not of a pack" for path in plan.foreign]
    return "\n".join(lines)


def _moved(done: Pushed) -> str:
    """What of it did not have to go out again."""
    if done.bytes_moved is None or done.bytes_moved >= done.bytes_large:
        return ""
    return f"; {size(done.bytes_moved)} went over the network, the Hub had stored the rest before"


def _done_text(done: Pushed, out: Path, repo_id: str, branch: str | None) -> str:
    lines = [
        f"pushed {out} to {repo_id}{' (private)' if done.private else ''}",
        f"  commit     {done.commit_url}",
        *([f"  request    {done.pr_url}"] if done.pr_url else []),
        f"  sent       {counted(done.files_sent, 'file')}, {size(done.bytes_sent)}{_moved(done)}",
        f"  there      {counted(done.files_there, 'file')}, {size(done.bytes_there)}",
    ]
    lines += [f"  removed    {path}: of another pack" for path in done.removed]
    lines += ["  kept       README.md: it was edited on the Hub (--replace sends this one)"] * done.card_kept
    lines += [f"  left alone {path}: not of a pack" for path in done.foreign]
    at = f"@{branch}" if branch else ""
    lines.append(f"proof: hybrid-pack verify --remote {repo_id}{at} --against {out}")
    lines.append(f"get a rank: hybrid-pack pull {repo_id}{at} --rank 0 --out DIR")
    return "\n".join(lines)


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("repository")
@click.option("--private", is_flag=True, help="Make the repository private; one that is there must be.")
@click.option("--revision", help="Branch, made if it is not there; main by default.")
@click.option("--create-pr", is_flag=True, help="On a new pull request.")
@click.option("--replace", is_flag=True, help="Remove another pack that is there, and a README.md edited on the Hub.")
@click.option("--full", is_flag=True, help="Check every digest first, not only the structure.")
@click.option("--dry-run", is_flag=True, help="Print what would be sent and what is there already; change nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(
    out: Path,
    repository: str,
    private: bool,
    revision: str | None,
    create_pr: bool,
    replace: bool,
    full: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Put a pack on the Hub, into REPOSITORY (org/name); what verify would refuse is not sent.

    Exactly the pack's files go, the manifest last. Interrupted, the same command sends what is missing. Weights that
    are there and not this pack's are removed by --replace only.
    """
    from hybrid_pack.hub import plan_push, push
    from hybrid_pack.verify import verify_pack

    repo_id, branch = hub_id(repository, revision)
    refused: str | None = None
    with ByteProgress("verify", quiet=as_json) as progress:
        report = verify_pack(out, quick=not full, progress=progress)
    _require_good(out, report)
    with ByteProgress("push", lines=as_json) as progress:
        kinds = ", ".join(check.name for check in report.checks)
        progress.note(f"checked: {kinds}" + ("" if full else "; payload digests were not (--full checks them)"))
        if dry_run:
            plan = plan_push(out, repo_id, revision=branch, replace=replace, progress=progress)
            document, text = dataclasses.asdict(plan), _plan_text(plan, repo_id)
            refused = plan.refused
        else:
            bars = not as_json and sys.stderr.isatty()
            done = push(
                out, repo_id, private=private, revision=branch, create_pr=create_pr, replace=replace, bars=bars,
                progress=progress,
            )  # fmt: skip
            document = {"repository": repo_id, **dataclasses.asdict(done)}
            text = _done_text(done, out, repo_id, done.revision if done.revision != "main" else None)
    with suppress(BrokenPipeError):  # it was sent, whether or not anybody reads about it
        put(json.dumps(document, indent=1) if as_json else text)
    if refused is not None:
        raise UsageError(f"would be refused: {refused}")
