"""What the GPU tests share: arguments, distances, and a file of measured properties."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from hybrid_pack.runtime import HybridMoE, PackedMoELayer
from hybrid_pack.runtime.torch_backend import TorchBackend

LIMIT = 1e-2
"""Largest relative L2 distance to the float32 product of the dequantised weights."""

TOKENS = (1, 2, 3, 4, 8, 9, 33, 256, 4096)

Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

FINDINGS = Path(os.environ.get("OUT", tempfile.gettempdir())) / "gpu_findings.jsonl"
"""Measured properties, one JSON object a line; not part of passing or failing."""


def note(what: str, **values: Any) -> None:
    """Write down a measured property."""
    with FINDINGS.open("a") as file:
        file.write(json.dumps({"what": what, **values}) + "\n")
    print(what, values)


def given(tokens: int, hidden: int, experts: int, top_k: int, seed: int = 0, lowest: int = -1) -> Arguments:
    """Random arguments on the GPU; ids from lowest, repeated ones among them."""
    generator = torch.Generator("cuda").manual_seed(seed + 7919 * tokens)
    x = torch.randn(tokens, hidden, generator=generator, device="cuda").to(torch.bfloat16)
    weights = torch.rand(tokens, top_k, generator=generator, device="cuda")
    size = (tokens, top_k)
    ids = torch.randint(lowest, experts, size, generator=generator, device="cuda", dtype=torch.int32)
    return x, weights, ids


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 distance."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300))


def expected_of(layer: PackedMoELayer, arguments: Arguments) -> torch.Tensor:
    """f32 [M, H] from dequantised weights."""
    assert not torch.backends.cuda.matmul.allow_tf32
    return TorchBackend(layer).accumulate(*arguments)


def check(moe: HybridMoE, arguments: Arguments, what: str = "") -> float:
    """Run a layer, and hold it against the reference; returns the distance."""
    assert moe.backend == "b12x", moe.choices
    found, expected = moe(*arguments), expected_of(moe.layer, arguments)
    assert found.shape == expected.shape and found.dtype == torch.bfloat16
    assert not found[(expected == 0).all(1)].any(), f"{what}: tokens without an active place must be exactly zero"
    distance = relative(found, expected)
    assert distance <= LIMIT, f"{what}: {len(arguments[0])} tokens, relative distance {distance:.2e}"
    return distance
