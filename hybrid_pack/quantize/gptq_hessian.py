"""Hessians of GPTQ: checked, damped, ordered and factored once for all matrices that share their inputs.

What is taken from where:

- Frantar, Ashkboos, Hoefler, Alistarh 2022 (GPTQ, arXiv:2210.17323): columns are quantised in one order for all rows;
  damping of 1 % of the mean diagonal; a Cholesky factor in place of successive inverses; updates in blocks of 128
  columns.
- Their code (github.com/IST-DASLab/gptq): ``act-order``, columns by descending diagonal; ``static-groups``, the scales
  of all groups fixed before the first column, because that order takes a group's columns apart; diagonal one for
  channels that never had an input.
- Chee, Cai, Kuleshov, De Sa 2023 (QuIP, arXiv:2307.13304): GPTQ is the same as rounding with linear feedback from
  ``H = (U + I) D (U + I)^T``, U strictly upper: ``q_k = nearest(w_k + sum_{j<k} (w_j - q_j) U[j, k])``. That form needs
  neither the inverse nor updated weights, so one Cholesky decomposition of the reversed matrix is all there is to do.

A Hessian is used as it is given, whatever its factor: ``X^T X``, its mean over tokens, or twice that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hybrid_pack.errors import DataError
from hybrid_pack.formats.nf3 import GROUP

ORDERS = ("activation", "natural")
MAX_DAMPING = 1.0
"""Damping is raised up to here: with the mean of the diagonal added, what is not positive definite is no Hessian."""

SYMMETRY = 1e-4
"""Largest difference of a Hessian and its transpose, in parts of the largest entry: above the rounding of FP32 sums."""


@dataclass(frozen=True)
class PreparedHessian:
    """A Hessian ready for any number of weight matrices with the same inputs.

    Attributes:
        matrix: f64 [K, K], symmetric, undamped: what errors are measured with.
        importance: f64 [K], its diagonal: the weight of a column's error by itself.
        remaining: f64 [K], D in parts of the mean diagonal: the weight of a column's error once later columns have made
            up for what they can of it.
        feedback: f32 or f64 [K, K], in quantisation order, strictly upper: U above.
        order: The column quantised at each step.
        damping: What was added to the diagonal, in parts of its mean over channels that have inputs.
        dead: Channels without input (diagonal zero); weights there are rounded to nearest.
    """

    matrix: torch.Tensor
    importance: torch.Tensor
    remaining: torch.Tensor
    feedback: torch.Tensor
    order: tuple[int, ...]
    damping: float
    dead: int


def _checked(hessian: torch.Tensor, columns: int | None, device: torch.device, where: str) -> torch.Tensor:
    """f64 [K, K], exactly symmetric, on the device."""
    shape = list(hessian.shape)
    size = columns if columns is not None else shape[0] if shape else 0
    if shape != [size, size] or size == 0 or size % GROUP:
        expected = f"[{size}, {size}]" if size and size % GROUP == 0 else f"square, a multiple of {GROUP}"
        raise DataError("not a Hessian of these weights", where=where, expected=expected, found=shape)
    if not hessian.is_floating_point():
        raise DataError("a Hessian that is not floating point", where=where, found=hessian.dtype)
    matrix = hessian.detach().to(device, torch.float64)
    if not matrix.isfinite().all():
        row, column = (~matrix.isfinite()).nonzero()[0].tolist()
        raise DataError(
            f"the Hessian is not finite at [{row}, {column}]", where=where, found=float(matrix[row, column])
        )
    diagonal = matrix.diagonal()
    if (diagonal < 0).any():
        channel = int((diagonal < 0).nonzero()[0])
        raise DataError(
            f"the Hessian's diagonal is negative at channel {channel}", where=where, found=float(diagonal[channel])
        )
    largest = float(matrix.abs().max())
    difference = float((matrix - matrix.T).abs().max())
    if difference > SYMMETRY * largest:
        raise DataError(
            "the Hessian is not symmetric",
            where=where,
            expected=f"differences of at most {SYMMETRY} of the largest entry",
            found=f"{difference / largest:.3g}",
        )
    dead = (diagonal == 0).nonzero().flatten()
    if len(dead) and (most := matrix[dead].abs().amax(1)).max() > SYMMETRY * largest:
        channel = int(dead[most.argmax()])
        raise DataError(
            f"channel {channel} of the Hessian has products with others, but a zero on the diagonal",
            where=where,
            expected="a row of zeros, as of an input that is always zero",
            found=float(most.max()),
        )
    return (matrix + matrix.T) / 2


def _dampings(first: float) -> Iterator[float]:
    """First, then ten times as much, up to the limit."""
    while first < MAX_DAMPING:
        yield first
        first *= 10
    yield MAX_DAMPING


def prepare_hessian(
    hessian: torch.Tensor,
    *,
    columns: int | None = None,
    damping: float = 0.01,
    order: str = "activation",
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    where: str = "Hessian",
) -> PreparedHessian:
    """Check, damp, order and factor a Hessian. The Cholesky decomposition is in float64 on the device.

    Args:
        hessian: f32 or f64 [K, K] on any device; symmetric, positive semidefinite up to rounding; any scale.
        columns: K of the weights, to be checked.
        damping: In parts of the mean diagonal, above 0 and at most ``MAX_DAMPING``; raised tenfold, up to that limit,
            until the sum is positive definite.
        order: ``activation`` (columns by descending diagonal) or ``natural``.
        device: Where to work.
        dtype: Of the feedback; float64 on the CPU and float32 on CUDA by default.
        where: Named in errors.

    Raises:
        DataError: Not square or of another size, not finite, not symmetric, a negative diagonal, not positive definite
            even at the largest damping.
        ValueError: Unknown order, or a damping out of range.
    """
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}, not {order!r}")
    if not 0 < damping <= MAX_DAMPING:
        raise ValueError(f"damping must be above 0 and at most {MAX_DAMPING}, not {damping}")
    device = torch.device(device)
    matrix = _checked(hessian, columns, device, where)
    diagonal = matrix.diagonal().clone()
    live = diagonal > 0
    key = -diagonal if order == "activation" else torch.zeros_like(diagonal)
    steps = key.argsort(stable=True)
    backwards = steps.flip(0)
    reverse = matrix[backwards][:, backwards]
    reverse /= diagonal.sum() / max(int(live.sum()), 1) if live.any() else 1.0
    gone = (~live[backwards]).nonzero().flatten()
    reverse[gone] = 0
    reverse[:, gone] = 0
    reverse[gone, gone] = 1  # in units of the mean diagonal
    added = 0.0
    for used in _dampings(damping):
        reverse.diagonal().add_(used - added)
        added = used
        lower, status = torch.linalg.cholesky_ex(reverse)
        if int(status) == 0:
            break
    else:
        raise DataError(
            f"the Hessian is not positive definite, even with damping {MAX_DAMPING}",
            where=where,
            expected="sums of products of inputs, X^T X",
            hint="collect it again, in float32 or better",
        )
    del reverse
    upper = lower.flip(0, 1)  # H = R R^T = (U + I) D (U + I)^T
    del lower
    root = upper.diagonal().clone()
    remaining = torch.empty_like(diagonal)
    remaining[steps] = root**2
    remaining[~live] = 0
    work = dtype or (torch.float32 if device.type == "cuda" else torch.float64)
    feedback = upper.div_(root).triu_(1).to(work)
    return PreparedHessian(matrix, diagonal, remaining, feedback, tuple(steps.tolist()), used, int((~live).sum()))
