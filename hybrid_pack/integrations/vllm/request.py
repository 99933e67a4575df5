"""What vLLM asks of a layer's experts, held against what the pack holds. Imports nothing of vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybrid_pack.errors import UsageError
from hybrid_pack.integrations.vllm.advice import command_for
from hybrid_pack.runnable import UNSERVED
from hybrid_pack.runtime.activation import Activation, GatedSilu, Relu2, SwigluOai, parse_activation
from hybrid_pack.schemas.manifest import Manifest
from hybrid_pack.sharding import Topology

_NAMES: dict[type, tuple[str, ...]] = {
    GatedSilu: ("silu",),
    SwigluOai: ("swigluoai", "swigluoai_uninterleave"),
    Relu2: ("relu2_no_mul",),
}
"""vLLM's ``MoEActivation`` for ours."""
_GPT_OSS = SwigluOai(alpha=1.702, limit=7.0)
"""Defaults of vLLM's ``swigluoai_and_mul``."""


@dataclass(frozen=True)
class Request:
    """The experts of one layer and rank as vLLM wants them; all sizes in elements.

    Attributes:
        prefix: vLLM's name of the layer.
        layer: Its number.
        tp_size: Ranks that share an expert; 1 under expert parallelism.
        tp_rank: Which of them.
        ep_size: Ranks that share the experts.
        ep_rank: Which of them.
        dp_size: Data-parallel size, times that of prefill context parallelism.
        hidden_size: H.
        intermediate_size: I, over all tp ranks.
        num_experts: E, over all ranks, redundant ones included.
        top_k: Experts a token visits.
        activation: vLLM's name of it.
        limit: Clamp of the activation, if any.
        alpha: Its steepness, if it was given one.
        beta: What is added to up, if it was given.
        dtype: Of the activations, such as ``bfloat16``.
        expert_map: Local index of every global expert, -1 for those of other ranks; None without expert parallelism.
        refused: Features that are on and that packs cannot be served with, in words.
    """

    prefix: str
    layer: int
    tp_size: int
    tp_rank: int
    ep_size: int
    ep_rank: int
    dp_size: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    activation: str
    limit: float | None
    dtype: str
    expert_map: tuple[int, ...] | None
    refused: tuple[str, ...] = ()
    alpha: float | None = None
    beta: float | None = None

    @property
    def rank(self) -> int:
        """Rank in the pack."""
        return self.ep_rank * self.tp_size + self.tp_rank


def require_served(model_type: str | None, model: str) -> None:
    """Refuse a family whose layers outside the experts cannot be run from a pack.

    Args:
        model_type: As config.json has it.
        model: What vLLM serves.

    Raises:
        UsageError: It is one.
    """
    if (reason := UNSERVED.get(model_type or "")) is not None:
        raise UsageError(
            f"packs of {model_type} cannot be served with vLLM yet: {reason}", where=model,
            hint="serve the source itself; `hybrid_pack.open_pack` runs the experts",
        )  # fmt: skip


def require(request: Request, manifest: Manifest, root: Path) -> None:
    """Refuse what the pack was not made for, before anything is loaded.

    Raises:
        UsageError: Which of vLLM's settings or of the model's sizes does not fit, and what to do.
    """
    made = Topology(manifest.topology.tensor_parallel, manifest.topology.expert_parallel)
    for feature in request.refused:
        raise UsageError(f"packs cannot be served with {feature}", where=request.prefix)
    if request.dp_size != 1:
        raise UsageError(
            "packs cannot be served with data parallelism", where=request.prefix, found=f"{request.dp_size} ranks",
            hint="start an engine for each replica instead",
        )  # fmt: skip
    wanted = request.tp_size, request.ep_size
    if made.tensor_parallel > 1 and made.expert_parallel > 1:
        raise UsageError(
            f"this pack splits experts both ways (tp {made.tensor_parallel}, ep {made.expert_parallel}), and vLLM "
            "splits experts one way; make a pack with --tp N or --ep N",
            where=root, found=f"tp {wanted[0]}, ep {wanted[1]}", hint=command_for(manifest, *wanted),
        )  # fmt: skip
    if wanted != (made.tensor_parallel, made.expert_parallel):
        raise UsageError(
            "this pack was made for other ranks", where=root,
            expected=f"{_serve_flags(made)} (tp {made.tensor_parallel}, ep {made.expert_parallel})",
            found=f"tp {wanted[0]}, ep {wanted[1]}", hint=f"serve it so, or {command_for(manifest, *wanted)}",
        )  # fmt: skip
    _require_model(request, manifest, root)
    _require_block(request, made)


def _serve_flags(made: Topology) -> str:
    """Options of ``vllm serve`` a pack is for."""
    if made.expert_parallel == 1:
        return f"--tensor-parallel-size {made.tensor_parallel}"
    return f"--tensor-parallel-size {made.expert_parallel} --enable-expert-parallel"


def _require_model(request: Request, manifest: Manifest, root: Path) -> None:
    geometry = manifest.geometry
    pairs = {
        "hidden size": (geometry.hidden_size, request.hidden_size),
        "intermediate size": (geometry.intermediate_size, request.intermediate_size),
        "number of experts": (geometry.num_experts, request.num_experts),
        "experts a token visits": (geometry.top_k, request.top_k),
        "dtype": ("bfloat16", request.dtype),
    }
    for what, (expected, found) in pairs.items():
        if expected != found:
            raise UsageError(
                f"{what} of {request.prefix} is not what the pack was made for", where=root, expected=expected,
                found=found, hint="config.json is not the pack's, or vLLM was told other sizes",
            )  # fmt: skip
    name = manifest.layout.activation
    activation = parse_activation(name)
    if activation is None:
        raise UsageError("no backend runs this activation", where=root, found=name)
    if request.activation not in _NAMES[type(activation)] or not _same_numbers(request, activation):
        given = {"alpha": request.alpha, "beta": request.beta, "limit": request.limit}
        numbers = ", ".join(f"{key}={value}" for key, value in given.items() if value is not None)
        found = f"{request.activation}({numbers})" if numbers else request.activation
        raise UsageError(f"activation of {request.prefix} is not the pack's", where=root, expected=name, found=found)


def _same_numbers(request: Request, activation: Activation) -> bool:
    """Whether vLLM's clamp, steepness and shift are the activation's; what it leaves out is as its kernels have it."""
    if isinstance(activation, GatedSilu):
        same = request.limit in (activation.limit, activation.limit or 0.0)
        return same and request.alpha in (None, 1.0) and request.beta in (None, 0.0)
    if isinstance(activation, SwigluOai):
        fixed = request.activation == "swigluoai"  # whose kernel has gpt-oss's numbers and takes no others
        limit = _GPT_OSS.limit if fixed and request.limit is None else request.limit
        alpha = _GPT_OSS.alpha if fixed and request.alpha is None else request.alpha
        return (alpha, limit) == (activation.alpha, activation.limit) and request.beta in (None, 1.0)
    return True


def _require_block(request: Request, made: Topology) -> None:
    if request.expert_map is None:
        return
    held = made.experts(request.rank, request.num_experts)
    expected = tuple(e - held.start if e in held else -1 for e in range(request.num_experts))
    if request.expert_map != expected:
        raise UsageError(
            "vLLM placed the experts otherwise than the pack", where=request.prefix,
            expected=f"experts {held.start}..{held.stop - 1} on rank {request.rank}",
            found="another placement", hint="use --expert-placement-strategy linear",
        )  # fmt: skip
