"""A stand-in for saliency made from the weights alone. It knows nothing of routing or of any text: a fallback.

The score of an expert estimates the norm of the error in its output that keeping it would avoid, for inputs of no
preferred direction. With W the matrices gate, up and down, E3 and E4 the squared Frobenius norms of W - NF3(W) and
W - kept(W), and S those of W itself:

    score = sqrt(S_gate * S_up * S_down) * sqrt(max(0, sum over the three of (E3 - E4) / S))

The first factor stands for the norm of the expert's output, which passes through all three matrices. The second is the
relative error that three matrices of independent errors make together, less what the kept format makes itself (nothing
where the source stores that format). An expert that no token visits scores like one that every token visits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hybrid_pack.errors import DataError
from hybrid_pack.tiers.saliency import LARGEST, Saliency

METRIC = "weights only: NF3 error times the norms of the matrices, no data, no routing"


@dataclass(frozen=True)
class MatrixError:
    """Sums over one expert matrix W.

    Attributes:
        signal: Of W squared.
        tail: Of (W - NF3(W)) squared.
        kept: Of (W - kept(W)) squared; 0 where W is stored in the kept format.
    """

    signal: float
    tail: float
    kept: float


Measure = Callable[[int, int], Sequence[MatrixError]]
"""(layer, expert) to the sums of its gate, up and down matrix."""


def score(matrices: Sequence[MatrixError]) -> float:
    """The score of one expert; 0 for one with a matrix of zeros, whose output is zero."""
    if any(matrix.signal == 0 for matrix in matrices):
        return 0.0
    relative = math.fsum((matrix.tail - matrix.kept) / matrix.signal for matrix in matrices)
    norm = math.prod(math.sqrt(matrix.signal) for matrix in matrices)
    return norm * math.sqrt(max(0.0, relative))


def _broken(matrix: MatrixError) -> bool:
    return not all(0 <= value <= LARGEST for value in (matrix.signal, matrix.tail, matrix.kept))


def saliency_from_weights(layers: Iterable[int], num_experts: int, measure: Measure, where: str) -> Saliency:
    """Score every expert.

    Args:
        layers: Which ones.
        num_experts: Experts in each.
        measure: What reads and quantises an expert; called once for each, layer by layer, ids ascending.
        where: Named in errors.

    Raises:
        DataError: Sums that are not finite: the weights hold NaN or infinity, or no sensible number.
    """
    found: dict[int, tuple[float, ...]] = {}
    for layer in layers:
        values = []
        for expert in range(num_experts):
            matrices = measure(layer, expert)
            value = math.nan if any(map(_broken, matrices)) else score(matrices)
            if not value <= LARGEST:
                raise DataError(
                    f"layer {layer} expert {expert}: its weights cannot be measured",
                    where=where,
                    expected="finite weights",
                    found=", ".join(f"sum of squares {matrix.signal:g}" for matrix in matrices),
                )
            values.append(value)
        found[layer] = tuple(values)
    return Saliency(found, METRIC, where)
