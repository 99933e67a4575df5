"""The NF3 grid as torch tensors: rounding to it, and the best E4M3 scale of each group of 32, on CPU and CUDA alike.

The search tries every legal scale, yet looks at each weight once. A threshold is a scale times a midpoint of two
levels; between two neighbours among all thresholds, the code of a weight is known under every scale at once. A weight w
of importance h adds ``h * (level * scale)^2 - 2 h w * level * scale`` to the loss of each scale, and these factors are
rows of tables that depend on nothing but the levels: two ``embedding_bag`` sums over the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from hybrid_pack.formats.e4m3 import VALUES
from hybrid_pack.formats.nf3 import GROUP, SCALE_LIMIT
from hybrid_pack.quantize.book import VIRTUAL

FIRST_BYTE = 1
"""E4M3 byte of the smallest positive scale, 2^-9."""

LAST_BYTE = int((VALUES[:0x7F] < SCALE_LIMIT).sum()) - 1
"""E4M3 byte of the largest scale that fits the device scale byte, 30."""

LARGER = tuple(float(value) for value in VALUES[LAST_BYTE + 1 : LAST_BYTE + 1 + VIRTUAL])
"""E4M3 scales that do not fit the device scale byte, as far as the other searches look."""

SEARCH_GROUPS = {"cpu": 1 << 13, "cuda": 1 << 18}
"""Groups searched at a time: on a CPU their losses stay in the cache, on CUDA they take 200 MB."""


@dataclass(frozen=True)
class Grid:
    """Levels, scales, and the tables of the search, all f64 on one device.

    Attributes:
        levels: f64 [8], ascending.
        midpoints: f64 [7], between neighbours.
        scales: f64 [LAST_BYTE + 1], by E4M3 byte; the first is zero.
        thresholds: f64 [T], ascending: every positive scale times every midpoint.
        squares: f64 [T + 1, LAST_BYTE]: (level * scale)^2 by interval of thresholds and scale.
        values: f64 [T + 1, LAST_BYTE]: level * scale, likewise.
    """

    levels: torch.Tensor
    midpoints: torch.Tensor
    scales: torch.Tensor
    thresholds: torch.Tensor
    squares: torch.Tensor
    values: torch.Tensor

    def borders(self, dtype: torch.dtype) -> torch.Tensor:
        """[7]: a value above number i gets a level above number i.

        A value midway gets the level nearer zero, and zero itself the one above it, as in ``book``.
        """
        middles, tiny = self.midpoints.to(dtype), torch.finfo(dtype).tiny
        below = torch.nextafter(middles, torch.full_like(middles, -torch.inf)).clamp(max=-tiny)
        return torch.where(middles > 0, middles, below)

    @property
    def zero_code(self) -> int:
        """Code of a weight of zero by the ordinary rounding; groups with scale zero hold it."""
        return int(torch.bucketize(torch.zeros((), dtype=torch.float64), self.borders(torch.float64).cpu()))


def make_grid(levels: Sequence[float], device: torch.device) -> Grid:
    """Tables for eight levels.

    Args:
        levels: Ascending, finite; code i means ``levels[i] * scale``.
        device: Where the tables shall be.

    Raises:
        ValueError: Not eight finite ascending numbers.
    """
    ladder = torch.tensor([float(level) for level in levels], dtype=torch.float64)
    if len(ladder) != 8 or not ladder.isfinite().all() or any(a >= b for a, b in pairwise(ladder.tolist())):
        raise ValueError(f"levels must be eight finite ascending numbers, not {list(levels)}")
    midpoints = (ladder[1:] + ladder[:-1]) / 2
    scales = torch.tensor(VALUES[: LAST_BYTE + 1], dtype=torch.float64)
    edges = scales[FIRST_BYTE:, None] * midpoints  # [S, 7]
    thresholds = torch.tensor(sorted(set(edges.flatten().tolist())), dtype=torch.float64)
    below = torch.cat([torch.tensor([-torch.inf], dtype=torch.float64), thresholds])  # lower end of each interval
    codes = torch.stack([torch.bucketize(below, edge, right=True) for edge in edges], dim=1)  # [T + 1, S]
    values = ladder[codes] * scales[FIRST_BYTE:]
    tables = (ladder, midpoints, scales, thresholds, values**2, values)
    return Grid(*(table.to(device).contiguous() for table in tables))


def search_scales(weights: torch.Tensor, importance: torch.Tensor | None, grid: Grid) -> torch.Tensor:
    """For each group the scale that minimises ``sum_k importance[k] * (w[k] - nearest(w[k]))^2``, of all legal ones.

    Scale zero is one of them: it loses the whole group, and is taken where no positive scale has a smaller loss, as in
    groups of zeros and in those far below the smallest scale. A group without any importance is searched as if all its
    columns were equal. Of scales with equal loss the smallest is taken.

    Args:
        weights: f32 [N, K] on the grid's device.
        importance: f64 [K], not negative; None for plain mean square error.
        grid: From ``make_grid``.

    Returns:
        u8 [N, K/32] E4M3 bytes, 0..LAST_BYTE.
    """
    n, k = weights.shape
    groups = weights.reshape(-1, GROUP)
    shares = _shares(weights, importance)
    result = torch.empty(len(groups), dtype=torch.uint8, device=weights.device)
    columns = torch.arange(len(groups), device=weights.device) % (k // GROUP)
    step = SEARCH_GROUPS["cuda" if weights.is_cuda else "cpu"]
    for begin in range(0, len(groups), step):
        w = groups[begin : begin + step].double()
        h = shares[columns[begin : begin + step]]
        interval = torch.bucketize(w, grid.thresholds)
        loss = F.embedding_bag(interval, grid.squares, mode="sum", per_sample_weights=h)
        loss -= 2 * F.embedding_bag(interval, grid.values, mode="sum", per_sample_weights=h * w)
        least, best = loss.min(1)  # h * w^2 is left out, so that the loss of scale zero is 0
        result[begin : begin + step] = torch.where(least < 0, best + FIRST_BYTE, 0)
    return result.reshape(n, k // GROUP)


def saturated(weights: torch.Tensor, scales: torch.Tensor, importance: torch.Tensor | None, grid: Grid) -> torch.Tensor:
    """bool [N, K/32]: groups that would have taken a scale of 32 or more, had it been legal.

    Scales up to two octaves above are tried. No such scale can be better where all weights, at the largest legal one,
    lie between the two levels around zero: they stay there, and cost no less at a larger one.

    Args:
        weights: f32 [N, K] on the grid's device.
        scales: u8 [N, K/32], what ``search_scales`` found.
        importance: As it was given.
        grid: From ``make_grid``.
    """
    above, below = grid.levels[grid.levels > 0], grid.levels[grid.levels < 0]
    largest = grid.scales[-1]
    high = above.min() * largest if len(above) else torch.inf
    low = below.max() * largest if len(below) else -torch.inf
    groups = weights.reshape(-1, GROUP)
    result = torch.zeros(len(groups), dtype=torch.bool, device=weights.device)
    at = ((groups > high) | (groups < low)).any(1).nonzero().flatten()
    if len(at):
        h = _shares(weights, importance)[at % (weights.shape[1] // GROUP)]
        w = groups[at].double()

        def cost(scale: torch.Tensor) -> torch.Tensor:
            nearest = torch.full_like(w, torch.inf)
            for level in grid.levels:
                nearest = torch.minimum(nearest, (w - level * scale.reshape(-1, 1)).abs())
            return (h * nearest**2).sum(1)

        chosen = cost(grid.scales[scales.reshape(-1)[at].long()])
        larger = torch.stack([cost(scale) for scale in torch.tensor(LARGER, device=w.device, dtype=w.dtype)])
        result[at] = larger.amin(0) < chosen
    return result.reshape(scales.shape)


def _shares(weights: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """f64 [K/32, 32]: importance of the columns of each group of a row, ones where a group has none."""
    columns = weights.shape[1]
    given = torch.ones(columns, dtype=torch.float64, device=weights.device) if importance is None else importance
    shares = given.reshape(-1, GROUP)
    return torch.where((shares > 0).any(1, keepdim=True), shares, 1.0)


def round_to(weights: torch.Tensor, scales: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Round to nearest: u8 [N, K] codes; groups with scale zero get ``grid.zero_code``.

    Args:
        weights: f32 [N, K].
        scales: u8 [N, K/32].
        grid: From ``make_grid``.
    """
    factor = grid.scales[scales.long()].repeat_interleave(GROUP, dim=1)
    ratio = torch.where(factor > 0, weights / factor, 0.0)
    return torch.bucketize(ratio, grid.borders(torch.float64), out_int32=True).to(torch.uint8)


def decode(codes: torch.Tensor, scales: torch.Tensor, grid: Grid) -> torch.Tensor:
    """f64 [N, K]: ``levels[code] * scale``."""
    return grid.levels[codes.long()] * grid.scales[scales.long()].repeat_interleave(GROUP, dim=1)
