"""``hybrid-pack doctor``."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("pack", required=False, type=click.Path(path_type=Path))
@click.option("--require", type=click.Choice(["b12x", "torch"]), help="Exit with 3 unless this backend can run.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(pack: Path | None, require: str | None, as_json: bool) -> None:
    """Show what this machine can run experts with, why not with the rest, and what to install.

    With PACK, say whether its layers can be run; they are not loaded. Exit code 0 if some backend can run.
    """
    from hybrid_pack.cli.runtime_tables import diagnosis_text
    from hybrid_pack.errors import EnvironmentFailure
    from hybrid_pack.runtime import open_pack
    from hybrid_pack.runtime.doctor import diagnose

    found = diagnose(None if pack is None else open_pack(pack))
    click.echo(json.dumps(found.as_dict(), indent=1) if as_json else diagnosis_text(found))
    where = "this machine" if pack is None else pack
    if require is not None and (reason := found.rejected(require)) is not None:
        raise EnvironmentFailure(f"the backend {require} cannot run: {reason}", where=where)
    if not found.ok:
        reasons = "; ".join(f"{choice.backend}: {found.rejected(choice.backend)}" for choice in found.backends)
        raise EnvironmentFailure(f"no backend can run: {reasons}", where=where)
