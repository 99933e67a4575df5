"""What quantising cost: sums that add up over blocks of rows, matrices and experts."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class QuantStats:
    """Sums over weights w and the values q they became, in float64, and counts of groups.

    Counts do not depend on how a matrix was cut into blocks; the sums do in their last bits, as any float sum.

    Attributes:
        signal: Sum of w^2.
        error: Sum of (w - q)^2, unweighted whatever the search.
        weighted_error: Sum of importance * (w - q)^2; equal to ``error`` without an importance.
        groups: Groups of columns that share a scale.
        zero: Groups whose weights all became zero, by scale zero (E4M3) or by their codes (E8M0). A manifest counts the
            former alone.
        subnormal: Groups with an E4M3 scale below 2^-6.
        saturated: Groups that would have taken a scale above the largest legal one.
        small: Groups that want a smaller scale than can be had: zero though their weights are not, or lifted
            (``small``, ``lift``; the quantisers leave it at 0).
        small_signal: Sum of w^2 over these.
        small_error: Sum of (w - q)^2 over these.
    """

    signal: float = 0.0
    error: float = 0.0
    weighted_error: float = 0.0
    groups: int = 0
    zero: int = 0
    subnormal: int = 0
    saturated: int = 0
    small: int = 0
    small_signal: float = 0.0
    small_error: float = 0.0

    def add(self, other: QuantStats) -> None:
        """Take in what another part cost."""
        self.signal += other.signal
        self.error += other.error
        self.weighted_error += other.weighted_error
        self.groups += other.groups
        self.zero += other.zero
        self.subnormal += other.subnormal
        self.saturated += other.saturated
        self.small += other.small
        self.small_signal += other.small_signal
        self.small_error += other.small_error

    @property
    def sqnr_db(self) -> float:
        """10 log10(signal / error); infinite where there is no error, minus infinite where there is nothing else."""
        if self.error == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.error) if self.signal > 0 else -math.inf
