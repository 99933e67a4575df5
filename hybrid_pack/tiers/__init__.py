"""Choosing the tiers: which experts are kept and which go to the NF3 tail (``hybrid-pack plan``)."""

from hybrid_pack.tiers.planner import Budget, Keep, KeepFraction, Rule, TierPlan, plan_tiers
from hybrid_pack.tiers.saliency import Saliency, read_saliency
from hybrid_pack.tiers.source import Model, read_model

__all__ = [
    "Budget",
    "Keep",
    "KeepFraction",
    "Model",
    "Rule",
    "Saliency",
    "TierPlan",
    "plan_tiers",
    "read_model",
    "read_saliency",
]
