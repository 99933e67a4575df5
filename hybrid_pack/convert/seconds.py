"""Second-level scales of experts that are to be packed: read, and refused before anything is written.

They are a few numbers an expert, so a dry run reads them too; no other payload is read before the work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from hybrid_pack.convert.scales import OnScaleMismatch, check_second, power_of_two_ratio
from hybrid_pack.errors import DataError
from hybrid_pack.io.checkpoint import Layer, Matrix
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.shards import Located
from hybrid_pack.io.weights import second_scale
from hybrid_pack.plan import Plan

Seconds = Mapping[int, list[float]]
"""Of the matrices of each expert; 1.0 where there is none."""


@dataclass
class _Pairs:
    """Gates and ups, both NVFP4 and kept so.

    Attributes:
        number: All of them.
        apart: (layer, expert, gate, its scale, up's) of those that are no power of two apart.
    """

    number: int = 0
    apart: list[tuple[int, int, Matrix, float, float]] = field(default_factory=list)

    def require_equal(self) -> None:
        """Gate and up share one global scale: refuse what block scales cannot make up for exactly.

        Raises:
            DataError: The first pair, and how many there are.
        """
        if not self.apart:
            return
        layer, expert, gate, own, up = self.apart[0]
        layers = len({pair[0] for pair in self.apart})
        share = f"{len(self.apart):,} of {self.number:,} kept experts with NVFP4 pairs, in {layers:,} layers"
        raise DataError(
            f"layer {layer} expert {expert}: gate and up have second-level scales that are no power of two apart",
            where=gate.second,
            expected=f"up's {up!r} times a power of two",
            found=f"{own!r}; so it is in {share.removesuffix('s') if layers == 1 else share}",
            hint="--on-scale-mismatch requantize rescales the block scales to the larger one and reports the error",
        )


def wanted_experts(plan: Plan, done: Collection[str]) -> dict[int, list[int]]:
    """Experts of every layer with a file that is not done, both ascending."""
    found: dict[int, set[int]] = {}
    for shard in plan.shards:
        if shard.path not in done:
            found.setdefault(shard.layer, set()).update(shard.kept, shard.tail)
    return {layer: sorted(found[layer]) for layer in sorted(found)}


def second_tensors(plan: Plan, layers: Iterable[int]) -> list[Located]:
    """The tensors they are stored in, of all experts of these layers."""
    matrices = (m for i in layers for expert in plan.source.layers[i].experts.values() for m in expert.matrices)
    return [m.second for m in matrices if m.second is not None]


def second_scales(
    plan: Plan, wanted: Mapping[int, list[int]], reader: TensorReader, on_mismatch: OnScaleMismatch
) -> dict[int, Seconds]:
    """Second-level scales of these experts by layer, checked.

    Raises:
        DataError: One that is not finite and positive or too large for the device; with ``refuse``, gate and up that
            are no power of two apart.
    """
    pairs = _Pairs()
    found = {index: _of_layer(plan.source.layers[index], wanted[index], reader, pairs) for index in wanted}
    if on_mismatch == "refuse":
        pairs.require_equal()
    return found


def _of_layer(layer: Layer, wanted: list[int], reader: TensorReader, pairs: _Pairs) -> Seconds:
    seconds: dict[int, list[float]] = {}
    for expert in wanted:
        matrices = layer.experts[expert]
        where = f"layer {layer.index} expert {expert}"
        seconds[expert] = [second_scale(reader, matrix, where) for matrix in matrices.matrices]
        if expert not in layer.kept or layer.kept_format != "nvfp4":
            continue
        for matrix, value in zip(matrices.matrices, seconds[expert], strict=True):
            if matrix.format.name == "nvfp4":
                check_second(matrix, value, where)
        gate, up = matrices.gate, matrices.up
        if gate is not None and gate.format.name == up.format.name == "nvfp4":
            pairs.number += 1
            if not power_of_two_ratio(seconds[expert][0], seconds[expert][1]):
                pairs.apart.append((layer.index, expert, gate, seconds[expert][0], seconds[expert][1]))
    return seconds
