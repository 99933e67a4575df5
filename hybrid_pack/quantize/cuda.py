"""The same quantisers on a GPU, to the same bytes as on the CPU.

One thread has one group: it holds the group's weights in registers, tries scales in the order ``kernels`` describes and
sums each scale's error in float32 from the first column to the last, without fused multiply-add. Every operation on the
way to a byte is one that IEEE 754 rounds in one way only, so codes and scale bytes equal those of the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch

from hybrid_pack.quantize.book import STATS, CodeBook, mxfp4_book, nf3_book, nvfp4_book
from hybrid_pack.quantize.rows import Search, check_second_scale, normal_importance
from hybrid_pack.quantize.stats import QuantStats

Quantized = tuple[torch.Tensor, torch.Tensor, QuantStats]

BLOCK = 32
"""Groups of one program, which is one warp: its threads leave the search together."""


def quantize_nf3_cuda(
    weights: torch.Tensor, levels: Sequence[float], search: Search, importance: torch.Tensor | None
) -> Quantized:
    """``quantize_nf3`` on a GPU.

    Args:
        weights: f32 or bf16 [N, K] on a GPU, contiguous, K a multiple of 32.
        levels: Eight ascending numbers.
        search: As there.
        importance: f32 [K] on any device, for ``weighted`` alone.

    Returns:
        Codes u8 [N, K/8*3] and scales u8 [N, K/32] on the same device, and what it cost.

    Raises:
        ValueError: As ``quantize_nf3``.
    """
    return _quantize(nf3_book(tuple(map(float, levels))), weights, 1.0, search, importance)


def quantize_nvfp4_cuda(
    weights: torch.Tensor, second: float, search: Search, importance: torch.Tensor | None
) -> Quantized:
    """``quantize_nvfp4`` on a GPU: codes u8 [N, K/2], scales u8 [N, K/16]; K a multiple of 16."""
    check_second_scale(second)
    return _quantize(nvfp4_book(), weights, second, search, importance)


def quantize_mxfp4_cuda(weights: torch.Tensor, search: Search, importance: torch.Tensor | None) -> Quantized:
    """``quantize_mxfp4`` on a GPU: codes u8 [N, K/2], scales u8 [N, K/32]."""
    return _quantize(mxfp4_book(), weights, 1.0, search, importance)


def _quantize(
    book: CodeBook, weights: torch.Tensor, second: float, search: Search, importance: torch.Tensor | None
) -> Quantized:
    from hybrid_pack.quantize.triton_kernel import quantize_groups

    if weights.dtype not in (torch.float32, torch.bfloat16) or weights.ndim != 2 or not weights.is_contiguous():
        raise ValueError(f"weights are f32 or bf16 [N, K] without gaps, not {weights.dtype} {list(weights.shape)}")
    n, k = weights.shape
    if n == 0 or k == 0 or k % book.group:
        raise ValueError(f"weights are [N, K] with K a multiple of {book.group}, not [{n}, {k}]")
    host = None if importance is None else importance.detach().to("cpu").numpy()
    normal, unit = normal_importance(search, host, k)
    device = weights.device
    groups = n * (k // book.group)
    programs = math.ceil(groups / BLOCK)
    codes = torch.empty(n, k * book.bits // 8, dtype=torch.uint8, device=device)
    scales = torch.empty(n, k // book.group, dtype=torch.uint8, device=device)
    stats = torch.empty(programs, STATS, dtype=torch.float64, device=device)
    factor = np.float32(1) / np.float32(second)
    scalars = np.array([book.clamp, book.reach, book.useful, factor, second], np.float32)
    tables = (book.values, book.inverses, np.concatenate([book.levels, book.thresholds, book.zones, scalars]))
    values, inverses, numbers = (torch.from_numpy(table).to(device) for table in tables)
    lines = weights if normal is None else torch.from_numpy(normal).to(device)  # never read where unweighted
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # Triton's interpreter has no device
        quantize_groups[(programs,)](
            weights,
            lines,
            values,
            inverses,
            numbers,
            codes.view(-1).view(torch.int32),
            scales,
            stats,
            groups,
            k // book.group,
            book.legal,
            book.limit,
            book.offset,
            book.byte_offset,
            book.halves_from,
            book.subnormal_below,
            COLUMNS=book.group,
            BITS=book.bits,
            KIND=book.kind,
            MANTISSA_BITS=book.mantissa_bits,
            NEAREST=book.nearest,
            BINARY=book.binary,
            WEIGHTED=normal is not None,
            SEARCHING=search != "absmax",
            BLOCK=BLOCK,
            num_warps=1,
            enable_fp_fusion=False,
        )
    signal, error, weighted_error, zero, subnormal, saturated, wrong, _ = stats.sum(dim=0).tolist()
    if wrong:
        row, column = (~torch.isfinite(weights)).nonzero()[0].tolist()
        raise ValueError(f"row {row}, column {column} is {float(weights[row, column])}, not a finite number")
    weighted_error = error if normal is None else weighted_error * unit
    return (
        codes,
        scales,
        QuantStats(signal, error, weighted_error, groups, int(zero), int(subnormal), int(saturated)),
    )
