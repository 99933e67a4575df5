"""``hybrid-pack bench``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from hybrid_pack.cli.progress import counted

CPU_SECONDS = 5.0
"""On the CPU, larger batches are left out after a call that took longer."""


@click.command()
@click.argument("pack", type=click.Path(path_type=Path))
@click.option("--rank", default=0, show_default=True, help="Rank to load.")
@click.option(
    "--layers", "count", type=click.IntRange(min=1), metavar="N", default=8, show_default=True, help="Layers to load."
)
@click.option("--device", help="Such as cuda:0 or cpu; by default a GPU, if there is one.")
@click.option(
    "--backend", type=click.Choice(["auto", "b12x", "torch"]), default="auto", show_default=True, help="What to run it."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(pack: Path, rank: int, count: int, device: str | None, backend: str, as_json: bool) -> None:
    """Time loading a rank and running a layer of it.

    The first --layers layers of PACK are loaded; the first one that has both tiers is run, with random tokens.
    """
    import torch

    from hybrid_pack.cli.runtime_tables import timings_text
    from hybrid_pack.runtime import HybridMoE, open_pack
    from hybrid_pack.runtime.timing import SIZES, time_moe

    opened = open_pack(pack)
    target = device or ("cuda" if torch.cuda.is_available() else "cpu")
    loaded = opened.load_rank(rank, target, opened.layers[:count])
    layers = list(loaded.values())
    layer = next((layer for layer in layers if layer.kept and layer.tail), layers[0])
    moe = HybridMoE(layer, layer.geometry.top_k, max(SIZES), backend)
    on_gpu = layer.device.type == "cuda"
    timings = list(time_moe(moe, SIZES, most_seconds=None if on_gpu else CPU_SECONDS))
    if as_json:
        result = {
            "pack": str(pack),
            "device": torch.cuda.get_device_name(layer.device) if on_gpu else "cpu",
            "load": {**asdict(loaded.report), "gb_per_s": loaded.report.gb_per_s},
            "layer": layer.layer,
            "backend": moe.backend,
            "moe": [asdict(timing) for timing in timings],
        }
        click.echo(json.dumps(result, indent=1))
        return
    click.echo(f"loaded {loaded.report}")
    experts = f"{counted(len(layer.expert_ids), 'expert')}, top {moe.top_k}"
    click.echo(f"layer {layer.layer} of rank {rank} on {layer.device}: {experts}, backend {moe.backend}")
    click.echo(timings_text(timings))
