"""A layer run as someone without hybrid-pack would write it: b12x's own functions, everything prepared before.

What ours is timed against, and, in tests, what ours must hand to the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hybrid_pack.runtime.b12x_backend import B12xBackend
from hybrid_pack.runtime.moe_runtime import DECODE_TOKENS
from hybrid_pack.runtime.timing import Arguments


def plain_call(backend: B12xBackend, arguments: Arguments, out: torch.Tensor) -> Callable[[], object]:
    """A call with the tensors, launches and buffers of a backend of two tiers, for up to a chunk of tokens.

    Few tokens need a backend that has one grid, or none of its own for few tokens (``MoERuntime.has_decode``).
    """
    runtime, (x, weights, ids) = backend.runtime, arguments
    kernel, scratch, tokens = runtime.kernel, runtime.scratch, arguments[0].shape[0]
    kept, tail = backend.tiers
    if tokens <= DECODE_TOKENS and runtime.has_decode:
        assert backend.one_grid is not None
        table = backend.one_grid.tier_map

        def one_grid() -> None:
            kernel.run_w4a16_moe_hybrid(
                x, kept.bundle, tail.bundle, weights, ids, table, activation=runtime.activation.name, output=out,
                force_tile_config=runtime.key.tiles, size_m=DECODE_TOKENS, **scratch.gemm,
            )  # fmt: skip

        return one_grid
    assert scratch.second is not None
    second, buffers = scratch.second[:tokens], {**scratch.gemm, **runtime.routes}
    index = runtime.prefill_of(tokens)

    def two_launches() -> None:
        for tier, output in ((kept, out), (tail, second)):
            kernel.run_w4a16_moe(
                x, tier.bundle, weights, ids, output=output, expert_map=tier.expert_map,
                fused_launch=tier.prefill[index], **runtime.activation.arguments, **buffers,
            )  # fmt: skip
        out.add_(second)

    return two_launches
