"""GPTQ for NF3: codes that take the correlation of inputs into account, within fixed E4M3 scales of groups of 32.

The scales are chosen before the first column is quantised ("static groups") and never change. Three sets are tried: of
least square error; weighted with the Hessian's diagonal; weighted with what remains of the diagonal when later columns
make up for a column's error. The first two are rounded to nearest, all three are run through GPTQ, the error of each
row is measured with the given Hessian, and each row keeps the best. So no row, and no matrix, is worse than the better
of two round-to-nearest results, by measurement; where GPTQ is of no help (an identity Hessian), they are the result.

Rows do not know each other: matrices with the same inputs (gate and up, or experts with a Hessian in common) may be put
below each other and quantised in one call. ``gptq_hessian`` names the literature.

Numbers: rounding to nearest, scale search, Cholesky decomposition and every error are float64; the pass is float64 on
the CPU and float32 on CUDA. Equal inputs give equal bytes on the same machine with the same number of threads.

On a CPU, let torch use one thread (``torch.set_num_threads(1)``) and quantise several matrices side by side: a pass is
thousands of small steps that gain nothing from threads, and on a busy machine they wait for each other at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch

from hybrid_pack.errors import DataError
from hybrid_pack.formats.nf3 import GROUP
from hybrid_pack.quantize.gptq_grid import LAST_BYTE, Grid, decode, make_grid, round_to, saturated, search_scales
from hybrid_pack.quantize.gptq_hessian import PreparedHessian, prepare_hessian

BLOCK = 128
"""Columns whose feedback from all earlier columns is one matrix product (GPTQ's lazy batches)."""

ROWS = {"cpu": 512, "cuda": 4096}
"""Rows worked on at a time. They bound memory; CUDA takes many because a column is a handful of small launches."""


@dataclass(frozen=True)
class GptqResult:
    """A quantised matrix; tensors are on the device the weights came from.

    Attributes:
        codes: u8 [N, K], 0..7.
        scales: u8 [N, K/32], E4M3 bytes below 32; 0 where all 32 weights are zero, or no positive scale serves better.
        error: ``trace((W - Q) H (W - Q)^T)``, undamped Hessian, f64.
        rtn_error: The same for rounding to nearest with, row by row, the better of plain and weighted scales.
        method: ``gptq`` if any row is better with it, else ``rtn``.
        gptq_rows: How many rows are.
        saturated: Groups that would have taken a scale above the largest legal one, by the search their row's scales
            are from; 0 where scales were given.
        damping: Used, in parts of the mean diagonal.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    error: float
    rtn_error: float
    method: Literal["gptq", "rtn"]
    gptq_rows: int
    saturated: int
    damping: float


@dataclass(frozen=True)
class _Rows:
    """Some rows, quantised.

    Attributes:
        codes: u8 [n, K].
        scales: u8 [n, K/32].
        error: f64 [n].
        rtn_error: f64 [n], best of those rounded to nearest.
        by_gptq: bool [n].
        saturated: i64 [n], groups that would have taken a larger scale.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    error: torch.Tensor
    rtn_error: torch.Tensor
    by_gptq: torch.Tensor
    saturated: torch.Tensor

    def better(self, other: _Rows) -> _Rows:
        """Row by row the better one, this one if equal; an error that is not a number is never better."""
        take = other.error < self.error
        return _Rows(
            torch.where(take[:, None], other.codes, self.codes),
            torch.where(take[:, None], other.scales, self.scales),
            torch.where(take, other.error, self.error),
            torch.minimum(self.rtn_error, other.rtn_error),
            torch.where(take, other.by_gptq, self.by_gptq),
            torch.where(take, other.saturated, self.saturated),
        )


def _row_errors(
    weights: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, grid: Grid, h: torch.Tensor
) -> torch.Tensor:
    """f64 [N]: diagonal of ``(W - Q) H (W - Q)^T``, Q decoded from what would be stored."""
    difference = weights.double() - decode(codes, scales, grid)
    return ((difference @ h) * difference).sum(1)


def _pass(weights: torch.Tensor, scales: torch.Tensor, grid: Grid, hessian: PreparedHessian) -> torch.Tensor:
    """u8 [N, K]: codes with error feedback.

    The columns of a group with scale zero become zero; pruned and padded weights have to. What earlier columns would
    have them make up for is left to the columns after them, as with any other rounding error.

    Args:
        weights: f32 [N, K].
        scales: u8 [N, K/32].
        grid: Levels.
        hessian: Feedback and order.
    """
    work, order, k = hessian.feedback.dtype, hessian.order, weights.shape[1]
    steps = torch.tensor(order, device=weights.device)
    w = weights.T[steps].to(work)  # [K, N]: what is quantised together is contiguous
    scale = grid.scales[scales.T.long()].to(work)  # [K/32, N]
    divisor = torch.where(scale > 0, scale, 1.0)
    levels, borders = grid.levels.to(work), grid.borders(work)
    codes = torch.empty(w.shape, dtype=torch.int32, device=w.device)
    errors = torch.empty_like(w)  # original weight minus quantised one
    for begin in range(0, k, BLOCK):
        end = min(begin + BLOCK, k)
        wanted = torch.addmm(w[begin:end], hessian.feedback[:begin, begin:end].T, errors[:begin])
        inside = hessian.feedback[begin:end, begin:end].T.contiguous()
        done = errors[begin:end]
        for i in range(end - begin):
            group, code = order[begin + i] // GROUP, codes[begin + i]
            target = torch.addmv(wanted[i], done[:i].T, inside[i, :i])
            torch.bucketize(target.div_(divisor[group]), borders, out_int32=True, out=code)
            torch.sub(w[begin + i], levels[code].mul_(scale[group]), out=done[i])
    result = torch.empty_like(codes, dtype=torch.uint8)
    result[steps] = codes.to(torch.uint8)
    return torch.where(scales.repeat_interleave(GROUP, dim=1) > 0, result.T, grid.zero_code).contiguous()


def _quantize_rows(weights: torch.Tensor, scales: torch.Tensor | None, grid: Grid, hessian: PreparedHessian) -> _Rows:
    """The best of everything tried for f32 [n, K] rows on the grid's device."""
    if scales is not None:
        tried, nearest = [scales], 1
        wanting = [torch.zeros(len(weights), dtype=torch.int64, device=weights.device)]
    else:
        weightings, nearest = (None, hessian.importance, hessian.remaining), 2
        tried = [search_scales(weights, weighting, grid) for weighting in weightings]
        wanting = [
            saturated(weights, chosen, weighting, grid).sum(1)
            for chosen, weighting in zip(tried, weightings, strict=True)
        ]

    def measured(codes: torch.Tensor, at: int, by_gptq: bool) -> _Rows:
        error = _row_errors(weights, codes, tried[at], grid, hessian.matrix)
        rtn_error = torch.full_like(error, torch.inf) if by_gptq else error
        return _Rows(codes, tried[at], error, rtn_error, torch.full_like(error, by_gptq, dtype=torch.bool), wanting[at])

    rows = [measured(round_to(weights, tried[at], grid), at, False) for at in range(nearest)]
    passed = _pass(weights.repeat(len(tried), 1), torch.cat(tried), grid, hessian)  # one pass over more rows
    rows += [measured(codes, at, True) for at, codes in enumerate(torch.split(passed, len(weights)))]
    return reduce(_Rows.better, rows)


def _check_weights(weights: torch.Tensor, where: str) -> None:
    if weights.dim() != 2 or 0 in weights.shape or weights.shape[1] % GROUP:
        expected = f"[N, K], K a multiple of {GROUP}"
        raise DataError("weights of a wrong shape", where=where, expected=expected, found=list(weights.shape))
    if not weights.is_floating_point() or weights.dtype == torch.float64:
        raise ValueError(f"weights must be float32 or narrower, not {weights.dtype}")
    if not weights.isfinite().all():
        row, column = (~weights.isfinite()).nonzero()[0].tolist()
        raise DataError(f"a weight is not finite, row {row} column {column}", where=where)


def _check_scales(scales: torch.Tensor, weights: torch.Tensor) -> None:
    n, k = weights.shape
    if scales.dtype != torch.uint8 or list(scales.shape) != [n, k // GROUP]:
        raise ValueError(f"scales must be uint8 [{n}, {k // GROUP}], not {scales.dtype} {list(scales.shape)}")
    if int(scales.max()) > LAST_BYTE:
        raise ValueError(f"scales must be E4M3 bytes of at most {LAST_BYTE}, not {int(scales.max())}")
    occupied = (weights.reshape(n, -1, GROUP) != 0).any(2)
    if ((scales > 0) & ~occupied).any():
        row, group = ((scales > 0) & ~occupied).nonzero()[0].tolist()
        raise ValueError(f"groups of zeros have scale zero: not row {row} group {group}")


def quantize_prepared(
    weights: torch.Tensor,
    hessian: PreparedHessian,
    levels: Sequence[float],
    *,
    scales: torch.Tensor | None = None,
    where: str = "weights",
) -> GptqResult:
    """Quantise a matrix, or matrices put below each other, with a Hessian that is already factored.

    Args:
        weights: f32 [N, K] (or narrower floats), finite, on any device.
        hessian: From ``prepare_hessian``; its device is where the work is done.
        levels: Eight, ascending.
        scales: u8 [N, K/32]: stay within these, and measure against rounding to nearest with these; chosen if None.
            Zero is legal for any group, and a group of zeros must have it.
        where: Named in errors.

    Raises:
        DataError: Weights of a wrong shape, or not finite.
        ValueError: Levels or scales that cannot be.
    """
    _check_weights(weights, where)
    k, device = weights.shape[1], hessian.matrix.device
    if hessian.matrix.shape[0] != k:
        raise DataError(
            "not a Hessian of these weights", where=where, expected=f"[{k}, {k}]", found=list(hessian.matrix.shape)
        )
    if scales is not None:
        _check_scales(scales.to(weights.device), weights)
    grid = make_grid(levels, device)
    step = ROWS["cuda" if device.type == "cuda" else "cpu"]
    with torch.no_grad():
        pieces = [
            _quantize_rows(
                weights[begin : begin + step].to(device, torch.float32),
                None if scales is None else scales[begin : begin + step].to(device),
                grid,
                hessian,
            )
            for begin in range(0, len(weights), step)
        ]
    gptq_rows = sum(int(piece.by_gptq.sum()) for piece in pieces)
    return GptqResult(
        torch.cat([piece.codes for piece in pieces]).to(weights.device),
        torch.cat([piece.scales for piece in pieces]).to(weights.device),
        sum(float(piece.error.sum()) for piece in pieces),
        sum(float(piece.rtn_error.sum()) for piece in pieces),
        "gptq" if gptq_rows else "rtn",
        gptq_rows,
        sum(int(piece.saturated.sum()) for piece in pieces),
        hessian.damping,
    )


def gptq_nf3(
    weights: torch.Tensor,
    hessian: torch.Tensor,
    levels: Sequence[float],
    *,
    damping: float = 0.01,
    order: str = "activation",
    scales: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    where: str = "weights",
) -> GptqResult:
    """Quantise one matrix to NF3 with its Hessian; ``prepare_hessian`` and ``quantize_prepared`` in one call.

    Args:
        weights: f32 [N, K] (or narrower floats), finite.
        hessian: f32 or f64 [K, K].
        levels: Eight, ascending.
        damping: In parts of the mean diagonal.
        order: ``activation`` or ``natural``.
        scales: u8 [N, K/32] to stay within, or None.
        device: Where to work.
        dtype: Of the pass; float64 on the CPU and float32 on CUDA by default.
        where: Named in errors.

    Raises:
        DataError: Weights or Hessian are wrong.
        ValueError: An argument is.
    """
    _check_weights(weights, where)
    prepared = prepare_hessian(
        hessian, columns=weights.shape[1], damping=damping, order=order, device=device, dtype=dtype, where=where
    )
    return quantize_prepared(weights, prepared, levels, scales=scales, where=where)
