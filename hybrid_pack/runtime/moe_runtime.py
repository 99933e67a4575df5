"""``MoERuntime``: the scratch memory, compiled launches and result buffers that all layers of one geometry share."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hybrid_pack.errors import UsageError
from hybrid_pack.io.config import is_gated
from hybrid_pack.runtime.b12x_activation import kernel_activation
from hybrid_pack.runtime.b12x_probe import kernels
from hybrid_pack.runtime.layer import PackedMoELayer
from hybrid_pack.runtime.outputs import OutputPool
from hybrid_pack.sharding import Tiles

DECODE_TOKENS = 8
"""Most tokens of the decode kernels, b12x's ``_TC_DECODE_MAX_M``."""

DECODE_BLOCK = 8
"""Rows of a route block in the decode kernels."""

ROUTE_BLOCKS: tuple[tuple[int, int], ...] = ((128, 8), (512, 32), (1 << 30, 64))
"""(up to so many tokens, rows of a route block) of the prefill launches; each block size is compiled for itself."""

LARGEST_CHUNK = 8192
"""Tokens run in one go; more are run one chunk after the other, so that scratch does not grow with ``max_tokens``."""

_INDEX_LIMIT = 2**31
"""The kernels index their intermediate tensors with 32-bit integers (``_zero_fc2_output``)."""

_SCRATCH_WIDTH = 4 * 256
"""``packed_gemm_scratch_elements`` is at most SMs * 4 * block * 256, and twice that for blocks of 8."""


def _power_of_two(value: int) -> int:
    """The smallest one that is not below a value."""
    return 1 << (value - 1).bit_length()


@dataclass(frozen=True)
class RuntimeKey:
    """What layers must have in common to share a runtime; ``max_tokens`` may be less than the runtime's."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    tiles: Tiles
    activation: str
    device: torch.device

    @staticmethod
    def of(layer: PackedMoELayer, top_k: int) -> RuntimeKey:
        """The key of a layer."""
        geometry = layer.geometry
        return RuntimeKey(
            geometry.hidden_size, geometry.intermediate_size, geometry.num_experts, top_k, layer.tiles,
            geometry.activation, layer.device,
        )  # fmt: skip

    @property
    def gated(self) -> bool:
        """Whether experts have a gate."""
        return is_gated(self.activation)

    @property
    def w13_rows(self) -> int:
        """Rows of w13, b12x's ``fc1_cols``: 2 I, or I without a gate."""
        return (2 if self.gated else 1) * self.intermediate_size


@dataclass
class Scratch:
    """Memory every launch writes; contents mean nothing between launches, but for ``workspace``, which stays zero."""

    cache13: torch.Tensor
    cache2: torch.Tensor
    fc1_c_tmp: torch.Tensor
    fc2_c_tmp: torch.Tensor
    workspace: torch.Tensor
    ids: torch.Tensor
    second: torch.Tensor | None = None

    @property
    def gemm(self) -> dict[str, torch.Tensor]:
        """By the names of b12x's arguments."""
        return {
            "intermediate_cache13": self.cache13,
            "intermediate_cache2": self.cache2,
            "fc1_c_tmp": self.fc1_c_tmp,
            "fc2_c_tmp": self.fc2_c_tmp,
        }


class MoERuntime:
    """What many layers share, on one device.

    Scratch belongs to the runtime, so its layers run one after the other. A call on another stream than the last one's
    first waits for that stream. That does not see into CUDA graphs: graphs that may run at the same time need layers
    with a runtime each.

    Attributes:
        key: What its layers have in common.
        max_tokens: Most tokens of a call.
        chunk: Tokens run in one go, a power of two.
        nbytes: Device memory it holds.
    """

    def __init__(
        self,
        key: RuntimeKey,
        max_tokens: int,
        *,
        outputs: int = 2,
        largest_chunk: int | None = None,
        route_blocks: tuple[tuple[int, int], ...] = ROUTE_BLOCKS,
    ) -> None:
        """Allocate scratch and compile route packing; launches are compiled when a layer first needs them.

        Args:
            key: From ``RuntimeKey.of``.
            max_tokens: Most tokens of a call.
            outputs: Result buffers for calls without ``out``; 0 if all calls give one.
            largest_chunk: Most tokens run in one go, by default ``LARGEST_CHUNK``; fewer need less scratch.
            route_blocks: See ``ROUTE_BLOCKS``; ascending, the last one for any number of tokens.
        """
        self.key, self.max_tokens, self.route_blocks = key, max_tokens, route_blocks
        self.kernel, self.prepare = kernels()
        activation = kernel_activation(key.activation)
        assert activation is not None, "why_not was asked before"
        self.activation = activation
        properties = torch.cuda.get_device_properties(key.device)
        self.sms = int(properties.multi_processor_count)
        # The same default as b12x's, since these must be the numbers it finds itself when it runs a launch.
        self.shared_memory = int(
            getattr(properties, "shared_memory_per_block_optin", self.kernel._DEFAULT_MAX_SHARED_MEM)
        )
        self.chunk = self._chunk(LARGEST_CHUNK if largest_chunk is None else largest_chunk)
        if self.has_prefill and (not route_blocks or route_blocks[-1][0] < self.chunk):
            raise UsageError("route_blocks must end with any number of tokens", where="MoERuntime", found=route_blocks)
        self._launches: dict[tuple[object, ...], Any] = {}
        with torch.cuda.device(key.device), torch.inference_mode(False):
            before = torch.cuda.memory_allocated(key.device)
            self.scratch = self._allocate()
            self.routes = self._allocate_routes() if self.has_prefill else {}
            self.outputs = OutputPool(outputs, max_tokens, key.hidden_size, key.device)
            self._allocated_bytes = torch.cuda.memory_allocated(key.device) - before
            if self.has_prefill:
                self._compile_route_packing()
            self._stream = torch.cuda.current_stream(key.device)

    @property
    def has_decode(self) -> bool:
        """Whether calls of few tokens have kernels of their own; experts without a gate have none (``b12x_tier``)."""
        return self.key.gated

    @property
    def has_prefill(self) -> bool:
        """Whether calls can come to the route-packed launches: those of more tokens than the decode kernels take."""
        return self.max_tokens > DECODE_TOKENS or not self.has_decode

    @property
    def nbytes(self) -> int:
        """Device memory of scratch and result buffers."""
        return self._allocated_bytes

    def _chunk(self, largest: int) -> int:
        """Tokens run in one go, and what prefill launches are planned for.

        A power of two, because b12x packs routes for the next power of two of a call's tokens, and would compile its
        route packing anew for each number of tokens between the largest power of two within a launch's capacity and
        that capacity (``route_pack_capacity(bucket_tokens=False)``). At least 16, also because a launch compiled for
        one token takes one row of each expert, and drops an expert named twice (``single_token_route_fast_path``).
        """
        widest = self.key.top_k * max(self.key.hidden_size, self.key.w13_rows)
        chunk = _power_of_two(max(min(self.max_tokens, largest), 16))
        while chunk > 16 and chunk * widest >= _INDEX_LIMIT:
            chunk //= 2
        return chunk

    def _allocate(self) -> Scratch:
        key, device = self.key, self.key.device
        rows = (self.chunk if self.has_prefill else DECODE_TOKENS) * key.top_k
        block = max((block for _, block in self.route_blocks), default=0) if self.has_prefill else 0
        elements = self.sms * _SCRATCH_WIDTH * max(block, 2 * DECODE_BLOCK)
        bf16, f32, i32 = torch.bfloat16, torch.float32, torch.int32
        return Scratch(
            cache13=torch.empty(rows * max(key.w13_rows, key.hidden_size), dtype=bf16, device=device),
            cache2=torch.empty(rows * key.intermediate_size, dtype=bf16, device=device),
            fc1_c_tmp=torch.empty(elements, dtype=f32, device=device),
            fc2_c_tmp=torch.empty(elements, dtype=f32, device=device),
            # Locks and a grid barrier: every launch finds and leaves the locks zero (``_make_workspace``).
            workspace=torch.zeros(self.sms * 4 + 2, dtype=i32, device=device),
            ids=torch.full((rows,), -1, dtype=i32, device=device),
        )

    def _capacity(self, tokens: int, block: int) -> tuple[int, int]:
        """(route slots, route blocks) of a launch, as ``run_w4a16_moe`` computes them."""
        slots = int(self.kernel.max_packed_route_slots(tokens * self.key.top_k, block, self.key.num_experts))
        return slots, -(-slots // block)

    def prefill_sizes(self) -> list[tuple[int, int]]:
        """(tokens, block) of each prefill launch, ascending; the last one takes a whole chunk."""
        sizes = []
        for upto, block in self.route_blocks:
            sizes.append((min(_power_of_two(upto), self.chunk), block))
            if upto >= self.chunk:
                break
        return sizes

    def prefill_of(self, tokens: int) -> int:
        """Which prefill launch a number of tokens takes."""
        return next(i for i, (upto, _) in enumerate(self.route_blocks) if tokens <= upto)

    def _allocate_routes(self) -> dict[str, torch.Tensor]:
        """What route packing writes, by the names of b12x's arguments."""
        capacities = [self._capacity(tokens, block) for tokens, block in self.prefill_sizes()]
        experts = self.key.num_experts
        sizes = {
            "packed_route_indices": max(slots for slots, _ in capacities),
            "block_expert_ids": max(blocks for _, blocks in capacities),
            "packed_route_count": 1,
            "expert_offsets": experts + 1,
            "expert_counts": experts,
        }
        return {name: torch.empty(size, dtype=torch.int32, device=self.key.device) for name, size in sizes.items()}

    def _compile_route_packing(self) -> None:
        """Let Triton compile b12x's route packing for every call there can be.

        A kernel is compiled for each power of two of tokens and each block size, and by Triton itself anew where the
        number of routes is or is not a multiple of 16, or is 1; that must not happen while a graph is captured.
        """
        key, ids = self.key, self.scratch.ids
        expert_map = torch.full((key.num_experts,), -1, dtype=torch.int32, device=key.device)

        def pack(tokens: int, block: int) -> None:
            self.kernel.pack_topk_routes_by_expert(
                ids[: tokens * key.top_k].view(tokens, key.top_k), block, key.num_experts, expert_map=expert_map,
                **self.routes,
            )  # fmt: skip

        if not self.has_decode:
            for tokens in range(1, min(DECODE_TOKENS, self.max_tokens) + 1):
                pack(tokens, self.route_blocks[self.prefill_of(tokens)][1])
        smallest = 1
        for capacity, block in self.prefill_sizes():
            bucket = max(2 * DECODE_TOKENS, _power_of_two(smallest))
            while bucket <= capacity:
                for tokens in (bucket, bucket - 1):
                    pack(tokens, block)
                bucket *= 2
            smallest = capacity // 2 + 1  # a call just above the last bound falls into the same bucket as that bound

    def require_second_output(self) -> None:
        """Allocate the buffer that the second of two launches writes, if no layer needed it before."""
        if self.scratch.second is None:
            tokens = self.chunk if self.has_prefill else DECODE_TOKENS
            with torch.inference_mode(False):
                self.scratch.second = torch.empty(
                    min(tokens, self.max_tokens), self.key.hidden_size, dtype=torch.bfloat16, device=self.key.device
                )
            self._allocated_bytes += self.scratch.second.nbytes

    def compiled(self, key: tuple[object, ...], make: Callable[[], Any]) -> Any:
        """A launch, compiled when it is first asked for.

        b12x keeps compiled code itself, in memory and on disk; what is kept here is the resolved launch.
        """
        if key not in self._launches:
            self._launches[key] = make()
        return self._launches[key]

    def tier_launch(self, name: str, experts: int, scale_format: str, *, tokens: int, block: int, decode: bool) -> Any:
        """A launch of one tier.

        Args:
            name: Weight layout, ``packed`` or ``nf3_2p1``.
            experts: Experts of the tier. Code for ``packed`` serves any number; for ``nf3_2p1`` each is compiled.
            scale_format: ``e4m3_k16``, ``e8m0_k32`` or ``e4m3_k32``.
            tokens: Most tokens.
            block: Rows of a route block.
            decode: The decode kernel, which reads ids through the expert map itself and sums a token's routes with
                atomic additions in BF16; else the route-packed one, which is followed by a sum in a fixed order.
        """
        slots_blocks = (0, tokens * self.key.top_k) if decode else self._capacity(tokens, block)

        def make() -> Any:
            return self.kernel.compile_w4a16_fused_moe(
                size_m=tokens,
                hidden_size=self.key.hidden_size,
                intermediate_size=self.key.intermediate_size,
                num_experts=experts,
                top_k=self.key.top_k,
                **self.activation.arguments,
                apply_router_weight_on_input=False,
                zero_fc2_output=not decode,  # what run_w4a16_moe asks of a launch with an expert map
                moe_block_size=block,
                max_m_blocks=slots_blocks[1],
                element_dtype="bf16",
                fast_math=True,
                sms=self.sms,
                max_shared_mem=self.shared_memory,
                weight_layout=name,
                scale_format=scale_format,
                w13_layout="packed",
                direct_topk_routes=decode,
                use_expert_map=decode,
                tc_decode_fused_sum=decode,
                force_tile_config=self.key.tiles,
            )

        return self.compiled((name, experts, scale_format, tokens, block, decode), make)

    def sum_launch(self) -> Any:
        """The launch that sums a token's places in a fixed order, after any of the route-packed ones."""
        key = self.key
        return self.compiled(
            ("sum",),
            lambda: self.kernel.compile_w4a16_topk_sum(m=1, topk=key.top_k, hidden_size=key.hidden_size),
        )

    def enter(self) -> int:
        """Make the current stream wait for the last one used, if that is another; returns the stream's handle."""
        stream = torch.cuda.current_stream(self.key.device)
        if stream != self._stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_stream(self._stream)
            self._stream = stream
        return int(stream.cuda_stream)


_SHARED: weakref.WeakValueDictionary[tuple[RuntimeKey, int], MoERuntime] = weakref.WeakValueDictionary()


def shared_runtime(key: RuntimeKey, max_tokens: int) -> MoERuntime:
    """The runtime that layers use which were not given one; it goes with the last of them."""
    runtime = _SHARED.get((key, max_tokens))
    if runtime is None:
        runtime = _SHARED[key, max_tokens] = MoERuntime(key, max_tokens)
    return runtime


def require_fitting(runtime: MoERuntime, key: RuntimeKey, max_tokens: int) -> None:
    """Check that a layer can use a runtime.

    Raises:
        UsageError: It was made for other layers, or for fewer tokens.
    """
    for name in RuntimeKey.__dataclass_fields__:
        if getattr(runtime.key, name) != getattr(key, name):
            raise UsageError(
                f"the runtime was made for another {name}", where="MoERuntime",
                expected=getattr(key, name), found=getattr(runtime.key, name),
            )  # fmt: skip
    if max_tokens > runtime.max_tokens:
        raise UsageError(
            "the runtime is too small", where="MoERuntime", expected=f"max_tokens of at least {max_tokens}",
            found=runtime.max_tokens,
        )  # fmt: skip
