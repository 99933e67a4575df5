"""What two engines answered, held against each other: greedy tokens, and log-probabilities.

A log-probability here is noisy by what BF16 rounds away. ``ROUNDING`` is that noise for these models, measured without
vLLM (``tests/integrations/test_vllm_models.py`` measures it again: transformers in BF16 against float32). Two engines
that are both right differ by the noise of each. The allowance is the larger of twice that and three times the spread
that BF16's own batch sizes and modes showed in the same run; a wrong expert, scale or tier is 10 to 100 times it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ROUNDING = 0.033
"""Root mean square, in nats, of what BF16 arithmetic does to the five best log-probabilities of these models."""

PEAK = 10
"""Largest difference in allowances; of ten thousand values on the CPU the largest were 7 to 10 times the rms."""

Answers = Mapping[str, Sequence[Mapping[str, Any]]]
"""By phase: for each prompt ``tokens``, ``top`` and perhaps ``scored``; see ``vllm_run``."""


@dataclass
class Comparison:
    """What was found.

    Attributes:
        decided: Places at which the reference's best token leads by so much that rounding cannot change it.
        same: Places with the same token.
        near_ties: Prompts that went another way at a place that was not decided; not compared any further.
        wrong: Decided places with another token.
        differences: Of all log-probabilities of tokens that both name.
    """

    decided: int = 0
    same: int = 0
    near_ties: int = 0
    wrong: list[str] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)

    @property
    def rms(self) -> float:
        """Root mean square of the differences."""
        return float((sum(d * d for d in self.differences) / max(len(self.differences), 1)) ** 0.5)

    @property
    def peak(self) -> float:
        """The largest difference."""
        return max(map(abs, self.differences), default=0.0)

    def summary(self) -> dict[str, Any]:
        """In numbers."""
        counts = {"decided": self.decided, "same": self.same, "near_ties": self.near_ties, "wrong": len(self.wrong)}
        return counts | {"compared": len(self.differences), "rms": round(self.rms, 5), "peak": round(self.peak, 4)}


def same_prompts(phase: str) -> str:
    """The reference's phase with a phase's prompts: smaller batches are the first prompts of the largest."""
    return "batch 64" if phase.startswith("batch") else phase


def compare(reference: Answers, found: Answers, margin: float) -> Comparison:
    """Hold answers against a reference, phase by phase and prompt by prompt.

    Args:
        reference: Answers of the reference, with all phases of ``found`` or the batch they are part of.
        found: Answers to judge.
        margin: Lead, in nats, from which on a token counts as decided.
    """
    result = Comparison()
    for phase, answers in found.items():
        expected = reference[same_prompts(phase)]
        if len(answers) > len(expected) or not answers:
            result.wrong.append(f"{phase}: {len(answers)} answers for {len(expected)} prompts")
        for number, (one, other) in enumerate(zip(expected, answers, strict=False)):
            _tokens(result, f"{phase}, prompt {number}", one, other, margin)
            for left, right in zip(one.get("scored", ()), other.get("scored", ()), strict=True):
                _values(result, left, right)
    return result


def _tokens(result: Comparison, where: str, one: Mapping[str, Any], other: Mapping[str, Any], margin: float) -> None:
    """One prompt's tokens, as far as both have the same before them."""
    if len(one["tokens"]) != len(other["tokens"]):
        result.wrong.append(f"{where}: {len(other['tokens'])} tokens instead of {len(one['tokens'])}")
    for place, (token, given) in enumerate(zip(one["tokens"], other["tokens"], strict=False)):
        best = one["top"][place]
        decided = best[0][1] - best[1][1] >= margin
        result.decided += decided
        _values(result, best, other["top"][place])
        if token == given:
            result.same += 1
        elif decided:
            result.wrong.append(
                f"{where}, token {place}: {given} instead of {token}, which leads by {best[0][1] - best[1][1]:.2f}"
            )
            return
        else:
            result.near_ties += 1
            return


def _values(result: Comparison, left: Iterable[Sequence[Any]], right: Iterable[Sequence[Any]]) -> None:
    values = {int(token): float(value) for token, value in right}
    result.differences += [values[token] - value for token, value in left if token in values]


def allowance(spreads: Iterable[Comparison]) -> float:
    """Root mean square that is allowed, from what the reference's own modes and batch sizes showed."""
    return max([2 * ROUNDING, *(3 * spread.rms for spread in spreads)])


MARGIN = PEAK * ROUNDING
"""A lead that both logits' noise together does not turn over."""


def complaints(result: Comparison, allowed: float) -> list[str]:
    """What is wrong; empty where nothing is."""
    found = list(result.wrong)
    if result.rms > allowed:
        found.append(f"log-probabilities differ by {result.rms:.4f} (rms), allowed {allowed:.4f}")
    if result.peak > PEAK * allowed:
        found.append(f"a log-probability differs by {result.peak:.3f}, allowed {PEAK * allowed:.3f}")
    if result.decided < result.near_ties or result.decided == 0:
        found.append(f"hardly anything was decided: {result.summary()}")
    return found
