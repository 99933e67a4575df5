"""Pages in every state a report can be in."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from hybrid_pack.io.manifest import read_manifest
from hybrid_pack.report.data import PackView, Tier, make_view, shards_here
from hybrid_pack.report.html import page
from hybrid_pack.report.scales import Histogram, Scales, read_scales
from hybrid_pack.sharding import Topology
from tests.report.manifests import GLM, Tiers, errors, manifest, random_tiers

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\"&amp;\u202e\x00]]>" + "w" * 300
K3: Tiers = {
    layer: (kept, "e8m0_k32" if layer % 3 else "e4m3_k16")
    for layer, (kept, _) in random_tiers(range(1, 93), 896, 224).items()
}
FEW = random_tiers(range(3, 6), 64, 13)
ONE: Tiers = {0: ([], None)}


def bell(tier: Tier, kind: str, matrix: str, first: int, bins: int) -> Histogram:
    counts = tuple(int(4e6 * math.exp(-(((i - bins / 2) / (bins / 5)) ** 2))) for i in range(bins))
    per_octave = 1 if kind == "MXFP4" else 2
    return Histogram(tier, kind, matrix, per_octave, first, counts, 8880, sum(counts) + 8880, 256, 19456)


BELLS = Scales(
    (
        bell("kept", "NVFP4", "w13", -22, 14), bell("kept", "NVFP4", "w2", -21, 13),
        bell("tail", "NF3", "w13", -14, 9), bell("tail", "NF3", "w2", -13, 9),
    ),
    (),
    False,
)  # fmt: skip
ZEROS = Scales((Histogram("tail", "NF3", "w13", 2, 0, (), 4096, 4096, 1, 1),), ("a shard is not here",), True)


def glm() -> str:
    made = manifest(GLM, 256, quantized=errors(GLM, 256), notes=["not copied: assets"])
    return page(make_view(made, [shard.path for shard in made.shards]), BELLS)


def one_rank() -> str:
    made = manifest(GLM, 256)
    return page(make_view(made, [shard.path for shard in made.shards if shard.rank == 1]), None)


def sixteen() -> str:
    made = manifest(GLM, 256, topology=Topology(16))
    return page(make_view(made, [shard.path for shard in made.shards]), BELLS)


def kimi() -> str:
    scales = Scales((*BELLS.histograms, bell("kept", "MXFP4", "w13", -9, 6)), (), True)
    made = manifest(K3, 896, hidden=3584, intermediate=3072, topology=Topology(16))
    return page(make_view(made, []), scales)


def hostile() -> str:
    """Every string a manifest may have, many ranks, one tier quantised, an expert requantised."""
    tail = [entry for entry in errors(FEW, 64, exact=0.2) if entry["tier"] == "tail"]
    for entry in tail:
        entry["sources"] = [HOSTILE]
    made = manifest(
        FEW, 64, topology=Topology(2, 32), hidden=2048, intermediate=512, quantized=tail, name=HOSTILE,
        requantized=[{"layer": 3, "expert": FEW[3][0][0], "worst_relative_error": 0.03}], notes=[HOSTILE] * 3,
        activation=HOSTILE, created_by=HOSTILE,
    )  # fmt: skip
    return page(make_view(made, []), Scales((), (HOSTILE,), False))


def single() -> str:
    """One layer of one expert, all exact, all scales zero."""
    exact = errors(ONE, 1, exact=1.0)
    return page(make_view(manifest(ONE, 1, quantized=exact, topology=Topology(1)), []), ZEROS)


STATES: dict[str, Callable[[], str]] = {
    "glm": glm, "one rank": one_rank, "tp16": sixteen, "kimi": kimi, "hostile": hostile, "single": single,
}  # fmt: skip


def of_pack(root: Path) -> tuple[str, PackView]:
    made = read_manifest(root)
    view = make_view(made, shards_here(root, made))
    return page(view, read_scales(root, made)), view
