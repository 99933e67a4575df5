"""b12x's host code, unchanged, over emulated GPU kernels: what a CPU can test of the b12x backend.

Tensors claim to be on ``cuda:0`` and live on the CPU. b12x plans, checks contracts and passes arguments as on a GPU;
only compiled CuTe kernels, Triton kernels and the functions of ``torch.cuda`` are replaced. A compiled kernel becomes a
``Compiled``, which reads its operands through the pointers it is given and computes what b12x's source says the kernel
computes, with the weights of ``PackedMoELayer.dequantize``.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from hybrid_pack.runtime import PackedMoELayer, TierWeights, b12x_backend, b12x_probe, moe_runtime
from hybrid_pack.runtime.activation import GatedSilu, Relu2, SwigluOai
from hybrid_pack.runtime.b12x_launch import check_tensors

CUDA = torch.device("cuda", 0)
SMS = 4
SHARED_MEMORY = 232_448


FUSED_ARGUMENTS = (
    "a a_up raw w13 w2 fc1 activated fc2 w13s w2s w13g w2g routes blocks count amax layer weights fc1_tmp fc2_tmp "
    "workspace rot suh_gate suh_up map experts route_experts m grid stream"
)
"""Of ``W4A16FusedMoeKernel.__call__``, in short."""


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    is_cuda = property(lambda self: True)
    device = property(lambda self: CUDA)


def to_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, said to be on the GPU."""
    return tensor.as_subclass(OnGpu)


class _Factories(TorchFunctionMode):
    """Makes tensors on the "GPU" where that device is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cpu:
            return args[0].as_subclass(torch.Tensor)
        if func is torch.Tensor.to and len(args) > 1 and args[1] == CUDA:
            return to_gpu(func(args[0].as_subclass(torch.Tensor), *args[2:], **kwargs))
        wanted = kwargs.get("device")
        if wanted is not None and torch.device(wanted).type == "cuda":
            return to_gpu(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)


def at(pointer: Any, dtype: torch.dtype, count: int) -> torch.Tensor:
    """The memory behind a pointer of b12x's ``make_ptr``."""
    address = int(pointer._pointer)
    assert address % pointer._assumed_align == 0
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count)


class Stream:
    """A CUDA stream."""

    def __init__(self, number: int) -> None:
        self.cuda_stream, self.waited = number, []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other.cuda_stream)


class Gpu:
    """What the emulated GPU was asked to do.

    Attributes:
        launches: Kind of each kernel launched: ``one grid``, ``decode``, ``prefill``, ``sum``.
        calls: Each of them with its arguments.
        compiled: Keys of CuTe kernels compiled.
        triton: Signatures Triton compiled a kernel for: name, constants, and what it specialises arguments on.
        capturing: Whether a graph is captured.
        stream: The current one.
        capability: Compute capability.
        bend: Factor on all results, to make them wrong.
    """

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.calls: list[tuple[Compiled, tuple[Any, ...]]] = []
        self.compiled: list[Any] = []
        self.triton: set[tuple[Any, ...]] = set()
        self.capturing = False
        self.stream = Stream(0)
        self.capability = (9, 0)
        self.bend = 1.0
        self.fails: Exception | None = None
        self._layers: list[tuple[PackedMoELayer, TierWeights]] = []
        self._weights: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def place(self, layer: PackedMoELayer) -> PackedMoELayer:
        """The layer on the GPU, by the same memory."""
        tiers = {}
        for name in ("kept", "tail"):
            tier = getattr(layer, name)
            if tier is not None:
                tier = TierWeights(**{field: to_gpu(tensor) for field, tensor in vars(tier).items()})
            tiers[name] = tier
        return PackedMoELayer(layer.layer, layer.rank, geometry=layer.geometry, tiles=layer.tiles, **tiers)

    def know(self, layer: PackedMoELayer) -> None:
        """Let kernels find a layer's weights by their pointers; called when a backend is made of it."""
        self._layers += [(layer, tier) for tier in (layer.kept, layer.tail) if tier is not None]
        self._weights.clear()  # memory may be another layer's by now

    def weights(self, w13: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """f32 weights of row of the tier whose w13 is at an address."""
        if (w13, row) not in self._weights:
            layer, tier = next(pair for pair in reversed(self._layers) if pair[1].w13.data_ptr() == w13)
            assert 0 <= row < tier.expert_ids.numel()
            pair = layer.dequantize(int(tier.expert_ids[row]))
            self._weights[w13, row] = tuple(matrix.as_subclass(torch.Tensor) for matrix in pair)  # type: ignore[assignment]
        return self._weights[w13, row]

    def expert(self, kernel: Any, w13: int, row: int, x: torch.Tensor) -> torch.Tensor:
        """f32 [H] of one token x f32 [H]."""
        gate_up, down = self.weights(w13, row)
        assert len(gate_up) == kernel.fc1_cols == kernel.fc1.size_n
        inner = gate_up @ x
        if kernel.activation == "relu2":
            assert not kernel.activation_is_gated and kernel.fc1.epilogue_relu2
            return down @ Relu2()(inner) * self.bend
        assert kernel.activation_is_gated and not kernel.fc1.epilogue_relu2
        activation: GatedSilu | SwigluOai
        if kernel.activation == "swigluoai_uninterleave":
            assert kernel.swiglu_beta == 1 and kernel.has_swiglu_limit
            activation = SwigluOai(kernel.swiglu_alpha, kernel.swiglu_limit)
        else:
            assert kernel.activation == "silu"
            activation = GatedSilu(kernel.swiglu_limit if kernel.has_swiglu_limit else None)
        return down @ activation(*inner.chunk(2)) * self.bend


class Compiled:
    """A compiled CuTe kernel."""

    def __init__(self, gpu: Gpu, kernel: Any) -> None:
        self.gpu, self.kernel = gpu, kernel

    def __call__(self, *arguments: Any) -> None:
        self.gpu.calls.append((self, arguments))
        if self.gpu.fails is not None:
            raise self.gpu.fails
        name = type(self.kernel).__name__
        if name == "W4A16FusedMoeHybridKernel":
            self._one_grid(*arguments)
        elif name == "W4A16TopKSumKernel":
            self._sum(*arguments)
        elif self.kernel.direct_topk_routes:
            self._decode(*arguments)
        else:
            self._prefill(*arguments)

    def _one_grid(
        self, a: Any, t0_w13: Any, t0_w2: Any, t0_w13s: Any, t0_w2s: Any, t0_w13g: Any, t0_w2g: Any, t1_w13: Any,
        t1_w2: Any, t1_w13s: Any, t1_w2s: Any, t1_w13g: Any, t1_w2g: Any, ids: Any, table: Any, fc1: Any,
        activated: Any, out: Any, weights: Any, fc1_tmp: Any, fc2_tmp: Any, workspace: Any, m: int, grid: int,
        stream: Any,
    ) -> None:  # fmt: skip
        kernel = self.kernel
        self.gpu.launches.append("one grid")
        assert 1 <= m <= 8 and grid >= 1 and int(stream) == self.gpu.stream.cuda_stream
        assert ids.numel() == m * kernel.top_k and out.numel() == m * kernel.hidden_size
        x = at(a, torch.bfloat16, m * kernel.hidden_size).view(m, -1).float()
        w = at(weights, torch.float32, m * kernel.top_k)
        y = torch.zeros(m, kernel.hidden_size)
        for route, expert in enumerate(ids.tolist()):
            if not 0 <= expert < kernel.map_slots or (descriptor := int(table[expert])) < 0:
                continue
            tier, row = descriptor >> 8, descriptor & 255
            if row >= (kernel.tier0, kernel.tier1)[tier].num_experts:
                continue
            address = (t0_w13, t1_w13)[tier].data_ptr()
            y[route // kernel.top_k] += self.gpu.expert(kernel.tier0, address, row, x[route // kernel.top_k]) * w[route]
        out.as_subclass(torch.Tensor).copy_(y.view(-1))

    def _operands(self, arguments: tuple[Any, ...]) -> SimpleNamespace:
        given = SimpleNamespace(**dict(zip(FUSED_ARGUMENTS.split(), arguments, strict=True)))
        kernel = self.kernel
        given.x = at(given.a, torch.bfloat16, given.m * kernel.hidden_size).view(given.m, -1).float()
        given.w = at(given.weights, torch.float32, given.m * kernel.top_k)
        given.address = int(given.w13._pointer)
        assert int(given.stream) == self.gpu.stream.cuda_stream
        rows, rest = divmod(given.activated.numel(), kernel.intermediate_size)
        assert rest == 0 and rows >= given.m * kernel.top_k and given.fc1.numel() == rows * kernel.fc1_cols
        return given

    def _decode(self, *arguments: Any) -> None:
        self.gpu.launches.append("decode")
        given, kernel = self._operands(arguments), self.kernel
        assert kernel.use_expert_map and kernel.tc_decode_fused_sum and given.m <= 8
        assert kernel.activation_is_gated, "without a gate FC1 writes elsewhere than FC2 reads"
        table = at(given.map, torch.int32, int(given.route_experts.value))
        y = torch.zeros(given.m, kernel.hidden_size)
        for route, expert in enumerate(given.routes.tolist()):
            row = int(table[expert]) if 0 <= expert < len(table) else -1
            if 0 <= row < int(given.experts.value):
                token = route // kernel.top_k
                y[token] += self.gpu.expert(kernel, given.address, row, given.x[token]) * given.w[route]
        given.fc2.as_subclass(torch.Tensor).copy_(y.view(-1))

    def _prefill(self, *arguments: Any) -> None:
        self.gpu.launches.append("prefill")
        given, kernel = self._operands(arguments), self.kernel
        block, live = kernel.moe_block_size, given.m * kernel.top_k
        for scratch, columns in ((given.fc1_tmp, kernel.fc1_cols), (given.fc2_tmp, kernel.hidden_size)):
            tiles = min(columns * given.routes.numel(), SMS * 4 * block * 256)
            assert scratch.numel() == tiles * (2 if block == 8 else 1)
        assert kernel.zero_fc2_output and kernel.size_m >= given.m
        assert not kernel.fc1.single_token_route_fast_path
        fc2 = given.fc2.as_subclass(torch.Tensor)
        fc2[: live * kernel.hidden_size] = 0
        for i in range(int(given.count) // block):
            row = int(given.blocks[i])
            for route in given.routes[i * block : (i + 1) * block].tolist():
                if row >= 0 and route < live:
                    y = self.gpu.expert(kernel, given.address, row, given.x[route // kernel.top_k])
                    fc2[route * kernel.hidden_size : (route + 1) * kernel.hidden_size] = y * given.w[route]

    def _sum(self, fc2: Any, out: Any, *others: Any) -> None:
        self.gpu.launches.append("sum")
        m, kernel = others[-2], self.kernel
        rows = at(fc2, torch.bfloat16, m * kernel.topk * kernel.hidden_size).view(m, kernel.topk, -1)
        at(out, torch.bfloat16, m * kernel.hidden_size).copy_(rows.float().sum(1).view(-1))


class _Triton:
    """A Triton kernel: ``kernel[grid](...)``, compiled for each signature."""

    def __init__(self, gpu: Gpu, name: str, run: Any) -> None:
        self._gpu, self._name, self._run = gpu, name, run

    def __getitem__(self, grid: Any) -> Any:
        return self._launch

    def _launch(self, *arguments: Any, **constants: Any) -> None:
        special = tuple(
            argument.data_ptr() % 16 == 0 if isinstance(argument, torch.Tensor) else (argument % 16 == 0, argument == 1)
            for argument in arguments
        )
        self._gpu.triton.add((self._name, tuple(sorted(constants.items())), special))
        self._run(arguments, constants)


def _mapped(ids: torch.Tensor, expert_map: torch.Tensor, experts: int, live: int) -> list[int]:
    """Local expert of each route, or -1."""
    table, found = expert_map.tolist(), []
    for expert in ids.reshape(-1).tolist()[:live]:
        local = table[expert] if 0 <= expert < experts else -1
        found.append(local if 0 <= local < experts else -1)
    return found


def _count(a: Any, k: Any) -> None:
    ids, expert_map, counts, live = a
    for expert in _mapped(ids, expert_map, k["NUM_EXPERTS"], live):
        if expert >= 0:
            counts[expert] += 1


def _prefix(a: Any, k: Any) -> None:
    counts, total, offsets = a
    padded = (counts + k["BLOCK_SIZE"] - 1) // k["BLOCK_SIZE"] * k["BLOCK_SIZE"]
    offsets[0] = 0
    offsets[1:] = padded.cumsum(0)
    total[0] = int(padded.sum())


def _post(a: Any, k: Any) -> None:
    routes, blocks, offsets, live = a
    routes[: k["MAX_PACKED_ROUTES"]] = live
    bounds = offsets.tolist()
    for i in range(k["MAX_ROUTE_BLOCKS"]):
        start = i * k["BLOCK_SIZE"]
        blocks[i] = next((e for e in range(k["NUM_EXPERTS"]) if bounds[e] <= start < bounds[e + 1]), -1)


def _small(a: Any, k: Any) -> None:
    ids, expert_map, routes, blocks, total, offsets, live = a
    counts = torch.zeros(k["NUM_EXPERTS"], dtype=torch.int32)
    _count((ids, expert_map, counts, live), k)
    _prefix((counts, total, offsets), k)
    _post((routes, blocks, offsets, live), k)


def _sort(a: Any, k: Any) -> None:
    ids, expert_map, routes, offsets, live = a
    for route, expert in enumerate(_mapped(ids, expert_map, k["NUM_EXPERTS"], live)):
        if expert >= 0:
            routes[int(offsets[expert])] = route
            offsets[expert] += 1


def _patch_torch(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    properties = SimpleNamespace(
        multi_processor_count=SMS, shared_memory_per_block_optin=SHARED_MEMORY, name="emulated", uuid="0"
    )
    replaced = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: gpu.capability,
        "is_current_stream_capturing": lambda: gpu.capturing,
        "current_stream": lambda device=None: gpu.stream,
        "synchronize": lambda device=None: None,
        "memory_allocated": lambda device=None: 0,
        "device": lambda device: contextlib.nullcontext(),
    }
    for name, function in replaced.items():
        monkeypatch.setattr(torch.cuda, name, function)


@contextlib.contextmanager
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """An emulated GPU under b12x, for as long as the context lasts."""
    gpu = Gpu()
    kernel, _ = b12x_probe.kernels()
    from b12x.moe._shared.kernels.w4a16 import route_pack

    def compile_(func: Any, *arguments: Any, compile_spec: Any, **options: Any) -> Compiled:
        gpu.compiled.append(compile_spec.json_key)
        return Compiled(gpu, func)

    def check(layer: PackedMoELayer) -> None:
        check_tensors(layer)
        gpu.know(layer)

    _patch_torch(monkeypatch, gpu)
    monkeypatch.setattr(b12x_backend, "check_tensors", check)
    monkeypatch.setattr(kernel, "b12x_compile", compile_)
    monkeypatch.setattr(kernel, "current_cuda_stream", lambda: kernel.cuda.CUstream(gpu.stream.cuda_stream))
    flat = {
        "w4a16_fused_moe_launch": kernel._w4a16_fused_moe_launch_op._init_fn,
        "w4a16_topk_sum_launch": kernel._w4a16_topk_sum_launch_op._init_fn,
        "w4a16_fused_moe_hybrid_launch": kernel._w4a16_fused_moe_hybrid_launch_flat,
    }
    for name, function in flat.items():
        monkeypatch.setattr(torch.ops.b12x, name, function, raising=False)
    triton = {
        "_w4a16_route_count_kernel": _count, "_w4a16_route_prefix_from_counts_kernel": _prefix,
        "_pack_topk_routes_post_prefix_kernel": _post, "_pack_topk_routes_small_prefix_kernel": _small,
        "_pack_topk_routes_sort_kernel": _sort,
    }  # fmt: skip
    for name, run in triton.items():
        monkeypatch.setattr(route_pack, name, _Triton(gpu, name, run))
    kernel.clear_w4a16_kernel_cache()
    kernel._ROT_SCALES_DUMMY.clear()
    moe_runtime._SHARED.clear()
    b12x_backend.self_test.cache_clear()
    try:
        with _Factories():
            yield gpu
    finally:
        kernel.clear_w4a16_kernel_cache()
        kernel._ROT_SCALES_DUMMY.clear()
        moe_runtime._SHARED.clear()
        b12x_backend.self_test.cache_clear()
