"""Which of vLLM's linear methods may run a layer, with vLLM's classes; needs no engine."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_pack.errors import DataError, UsageError
from hybrid_pack.formats.source import Header, detect
from hybrid_pack.integrations.vllm.base import BaseTensors, Stored
from hybrid_pack.integrations.vllm.kept import why_not_read

if importlib.util.find_spec("vllm") is None:
    if os.environ.get("HYBRID_PACK_REQUIRE_VLLM") == "1":
        pytest.fail("vLLM is not installed", pytrace=False)
    pytest.skip("vLLM is not installed; tests/integrations/vllm_site.sh says how", allow_module_level=True)

from vllm.model_executor import parameter
from vllm.model_executor.layers.quantization import fp8, modelopt

from hybrid_pack.integrations.vllm import dispatch, linear
from hybrid_pack.integrations.vllm.config import HybridPackConfig

MXFP8: dict[str, Header] = {"weight": ("F8_E4M3", (256, 256)), "weight_scale": ("U8", (256, 8))}
TENSOR: dict[str, Header] = {"weight": ("F8_E4M3", (256, 256)), "weight_scale": ("F32", ())}
INPUT: dict[str, Header] = {"input_scale": ("F32", ())}


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded here; what a method requires to be is for ``test_vllm_real_arrivals.py``."""
    monkeypatch.setattr(linear, "expect", lambda *args: None)


def stored(fields: dict[str, Header], some: dict[str, Header] | None = None) -> Stored:
    """Matrices of which all have some fields, and not all have others."""
    form = detect(fields)
    assert isinstance(form, tuple)
    return Stored(("a", "b"), form[0], {**fields, **(some or {})}, frozenset(fields))


class Method:
    """As one of vLLM's, with the parameters it registers."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def create_weights(self, layer: torch.nn.Module, columns: int, rows: list[int], **extra: Any) -> None:
        made = {
            "weight": torch.zeros(sum(rows), columns, dtype=torch.float8_e4m3fn),
            "weight_scale": torch.zeros(sum(rows), columns // 32, dtype=torch.uint8)
            if isinstance(self, MxFp8Method)
            else torch.zeros(len(rows)),
            "input_scale": torch.zeros(len(rows)),
        }
        for name in self.names:
            layer.register_parameter(name, torch.nn.Parameter(made[name], requires_grad=False))


class MxFp8Method(Method):
    """As one whose kernels have a least size."""


class Ours:
    """In the place of ``DequantisedLinearMethod``, which needs vLLM's groups of ranks."""

    def __init__(self, stored: Stored, prefix: str) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def create_weights(self, layer: torch.nn.Module, *sizes: Any, **extra: Any) -> None:
        assert dict(layer.named_parameters()) == {}, "nothing of vLLM's method is left"
        self.calls.append((*sizes, extra))


@pytest.mark.parametrize(
    ("method", "found", "rows", "ours"),
    [
        (Method("weight", "weight_scale"), stored(TENSOR), [128, 128], False),
        (Method("weight", "weight_scale"), stored(TENSOR), [32, 32], False),
        (Method("weight", "weight_scale", "input_scale"), stored(TENSOR | INPUT), [128, 128], False),
        (Method("weight", "weight_scale", "input_scale"), stored(TENSOR), [128, 128], True),
        (Method("weight", "weight_scale", "input_scale"), stored(TENSOR, INPUT), [128, 128], True),
        (Method("weight", "weight_scale"), stored(TENSOR, INPUT), [128, 128], True),
        (Method("weight", "weight_scale"), stored(TENSOR, {"bias": ("BF16", (256,))}), [128, 128], False),
        (MxFp8Method("weight", "weight_scale"), stored(MXFP8), [64, 64], False),
        (MxFp8Method("weight", "weight_scale"), stored(MXFP8), [64, 32], True),
    ],
)
def test_what_a_method_registers_is_what_is_stored(
    method: Method, found: Stored, rows: list[int], ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "DequantisedLinearMethod", Ours)
    layer = torch.nn.Module()
    layer.quant_method = linear._guarded(method, found, "x.proj")
    layer.quant_method.create_weights(layer, 256, rows, weight_loader=print)
    assert isinstance(layer.quant_method, Ours) is ours
    if ours:
        assert layer.quant_method.calls == [(256, rows, {"weight_loader": print})]
    else:
        assert set(dict(layer.named_parameters())) == set(method.names)


def test_columns_may_be_too_few_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "DequantisedLinearMethod", Ours)
    layer = torch.nn.Module()
    linear._guarded(MxFp8Method("weight"), stored(MXFP8), "x.proj").create_weights(
        layer=layer, input_size_per_partition=64, output_partition_sizes=[256]
    )
    assert isinstance(layer.quant_method, Ours)


def test_what_attention_reads_is_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "DequantisedLinearMethod", Ours)
    config: Any = None  # it is not asked
    assert isinstance(linear.linear_method(config, None, "model.layers.0.self_attn.kv_b_proj", stored(MXFP8)), Ours)


@pytest.mark.parametrize(("bias", "names"), [(127, {"CompressedTensorsLinearMethod"}), (125, set())])
def test_vllms_methods_take_a_bias_for_granted(bias: int, names: set[str]) -> None:
    fields: dict[str, Header] = {"weight_packed": ("U8", (256, 128)), "weight_scale": ("U8", (256, 8))}
    form = detect(fields, bias)
    assert isinstance(form, tuple)
    assert linear._candidates(Stored(("a",), form[0], fields, frozenset(fields))) == (names, None)


class Real:
    """In the place of a method of vLLM's that has made these parameters."""

    def __init__(self, **made: torch.Tensor) -> None:
        self.made = made

    def create_weights(self, layer: torch.nn.Module, columns: int, rows: list[int], **extra: Any) -> None:
        for name, data in self.made.items():
            layer.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))


CODES, SCALES = torch.zeros(256, 256, dtype=torch.float8_e4m3fn), torch.zeros(256, 1)
ROW: dict[str, Header] = {"weight": ("F8_E4M3", (256, 256)), "weight_scale": ("F32", (256, 1))}
BLOCK: dict[str, Header] = {"weight": ("F8_E4M3", (256, 256)), "weight_scale_inv": ("F32", (2, 2))}


@pytest.mark.parametrize(
    ("fields", "made", "reason"),
    [
        (ROW, {"weight": CODES, "weight_scale": SCALES}, None),
        (ROW | {"weight_scale": ("BF16", (256, 1))}, {"weight": CODES, "weight_scale": SCALES}, None),
        (ROW, {"weight": CODES.to(torch.int8), "weight_scale": SCALES}, "reads weight as I8, and it is F8_E4M3"),
        (ROW, {"weight": CODES.bfloat16(), "weight_scale": SCALES}, "reads weight as BF16, and it is F8_E4M3"),
        (ROW, {"weight": CODES, "weight_scale": SCALES.bfloat16()}, "reads weight_scale as BF16, and it is F32"),
        (ROW, {"weight": CODES, "weight_scale": torch.zeros(2)}, r"reads weight_scale as [2], and it is [256, 1]"),
        (TENSOR, {"weight": CODES, "weight_scale": SCALES}, r"reads weight_scale as [256, 1], and it is []"),
        (TENSOR, {"weight": CODES, "weight_scale": torch.zeros(2)}, None),
        (TENSOR | {"weight_scale": ("F32", (1,))}, {"weight": CODES, "weight_scale": torch.zeros(2)}, None),
        (
            TENSOR | {"weight_scale": ("F32", (1, 1))}, {"weight": CODES, "weight_scale": torch.zeros(2)},
            "reads weight_scale as [2], and it is [1, 1]",
        ),
        (BLOCK, {"weight": CODES, "weight_scale_inv": torch.zeros(2, 2)}, None),
        (
            BLOCK, {"weight": CODES, "weight_scale_inv": torch.zeros(2, 4)},
            "reads weight_scale_inv as [2, 4], and it is [2, 2]",
        ),
        (
            BLOCK | {"weight_scale_inv": ("F8_E8M0", (2, 2))},
            {"weight": CODES, "weight_scale_inv": torch.zeros(2, 2)},
            "reads weight_scale_inv as F32, and it is F8_E8M0",
        ),
    ],
)  # fmt: skip
def test_what_a_method_registers_has_the_stored_dtype_and_columns(
    fields: dict[str, Header],
    made: dict[str, torch.Tensor],
    reason: str | None,
) -> None:
    layer = torch.nn.Module()
    Real(**made).create_weights(layer, 256, [128, 128])
    assert linear._unlike(layer, set(), stored(fields)) == reason


@pytest.mark.parametrize(
    ("part", "scales", "right"), [(256, 8, True), (128, 4, True), (128, 8, False), (128, 2, False)]
)
def test_columns_that_a_rank_has_are_its_part_of_those_stored(part: int, scales: int, right: bool) -> None:
    layer = torch.nn.Module()
    layer.input_size, layer.input_size_per_partition = 256, part
    made = {"weight": CODES[:, :part], "weight_scale": torch.zeros(256, scales, dtype=torch.uint8)}
    Real(**made).create_weights(layer, part, [256])
    assert (linear._unlike(layer, set(), stored(MXFP8)) is None) is right


@pytest.mark.parametrize("ordered", [False, True])
def test_columns_taken_in_another_order_have_all_scales_on_every_rank(ordered: bool) -> None:
    fields: dict[str, Header] = {
        "weight_packed": ("I32", (256, 32)), "weight_scale": ("BF16", (256, 2)), "weight_shape": ("I64", (2,)),
        **({"weight_g_idx": ("I32", (256,))} if ordered else {}),
    }  # fmt: skip
    layer = torch.nn.Module()
    layer.input_size, layer.input_size_per_partition = 256, 128
    made = {
        "weight_packed": torch.zeros(256, 16, dtype=torch.int32),
        "weight_scale": torch.zeros(256, 2, dtype=torch.bfloat16),
        "weight_shape": torch.zeros(2, dtype=torch.int64),
        **({"weight_g_idx": torch.zeros(128, dtype=torch.int32)} if ordered else {}),
    }
    Real(**made).create_weights(layer, 128, [256])
    form = BaseTensors({f"a.{name}": header for name, header in fields.items()}).stored("a", {})
    assert form is not None
    assert (linear._unlike(layer, set(), form) is None) is ordered


def nvfp4_experts(backend: str) -> Any:
    """vLLM's method, whose kernels this machine lacks, with what ``create_weights`` needs."""
    method = object.__new__(modelopt.ModelOptNvFp4FusedMoE)
    config = modelopt.ModelOptNvFp4Config(is_checkpoint_nvfp4_serialized=True, exclude_modules=[], group_size=16)
    method.quant_config, method.moe = config, SimpleNamespace(is_act_and_mul=True)
    method.use_global_sf, method.nvfp4_backend = False, SimpleNamespace(name=backend)
    return method


def fp8_experts(block: list[int] | None, scheme: str = "dynamic") -> Any:
    method = object.__new__(fp8.Fp8MoEMethod)
    method.quant_config = SimpleNamespace(is_checkpoint_fp8_serialized=True, activation_scheme=scheme)
    method.moe, method.weight_block_size, method.block_quant = SimpleNamespace(has_bias=False), block, bool(block)
    method.weight_scale_name = "weight_scale_inv" if block else "weight_scale"
    return method


def expert_fields(form: str, *more: str, scale: str = "F32") -> list[dict[str, Header]]:
    """Headers of gate and up [256, 512] and down [512, 256] of two experts; ``more`` of all but the last."""
    found: list[dict[str, Header]] = []
    for n, k in [(256, 512), (256, 512), (512, 256)] * 2:
        fields: dict[str, Header] = {"weight": ("F8_E4M3", (n, k))}
        if form == "nvfp4":
            fields = {"weight": ("U8", (n, k // 2)), "weight_scale": ("F8_E4M3", (n, k // 16))}
            fields["weight_scale_2"] = ("F32", ())
        elif form == "block":
            fields["weight_scale_inv"] = (scale, (n // 128, k // 128))
        else:
            fields["weight_scale"] = (scale, (n, 1) if form == "row" else ())
        found.append(fields | dict.fromkeys(more, ("F32", ())))
    return found


BLOCKS = [128, 128]
IN = "input_scale"


@pytest.mark.parametrize(
    ("method", "experts", "reason"),
    [
        (lambda: nvfp4_experts("VLLM_CUTLASS"), expert_fields("nvfp4", IN), None),
        (lambda: nvfp4_experts("VLLM_CUTLASS"), expert_fields("nvfp4"), "needs input_scale, which not all experts"),
        (
            lambda: nvfp4_experts("VLLM_CUTLASS"), [*expert_fields("nvfp4", IN), *expert_fields("nvfp4")],
            "needs input_scale, which not all experts have",
        ),
        (lambda: nvfp4_experts("MARLIN"), expert_fields("nvfp4"), None),
        (lambda: nvfp4_experts("HUMMING"), expert_fields("nvfp4"), None),
        (lambda: fp8_experts(BLOCKS), expert_fields("block"), None),
        (lambda: fp8_experts(BLOCKS), expert_fields("block", scale="BF16"), None),
        (lambda: fp8_experts(BLOCKS), expert_fields("block", scale="F8_E8M0"), "weight_scale_inv as F32, and it is F8"),
        (lambda: fp8_experts(BLOCKS), expert_fields("tensor"), "needs weight_scale_inv, which not all experts"),
        (lambda: fp8_experts(BLOCKS), expert_fields("block", IN), "does not read input_scale"),
        (lambda: fp8_experts(None), expert_fields("tensor"), None),
        (lambda: fp8_experts(None), expert_fields("block"), "needs weight_scale, which not all experts have"),
        (lambda: fp8_experts(None), expert_fields("row"), "w13_weight_scale as [2, 2], and it is [256, 1] or [512, 1]"),
        (lambda: fp8_experts(None, "static"), expert_fields("tensor"), "needs input_scale, which not all experts"),
        (lambda: fp8_experts(None, "static"), expert_fields("tensor", IN), None),
        (lambda: fp8_experts(BLOCKS), [], None),
    ],
)  # fmt: skip
def test_experts_of_the_base_are_what_vllms_method_registers(
    method: Callable[[], Any], experts: list[dict[str, Header]], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (fp8, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    reading = dispatch._reading(method(), experts, "mtp.layers.0.mlp.experts")

    def create() -> None:
        reading.create_weights(
            layer=torch.nn.Module(), num_experts=2, hidden_size=512, intermediate_size_per_partition=256,
            params_dtype=torch.bfloat16, weight_loader=print, global_num_experts=2,
        )  # fmt: skip

    if reason is None:
        create()
        return
    with pytest.raises(DataError, match="that this vLLM would not read") as error:
        create()
    assert reason in str(error.value)


def test_scales_of_rows_and_of_blocks_are_told_apart() -> None:
    kinds = {"row": (512, 1), "block": (4, 4)}
    for form, shape in kinds.items():
        registered = {f"{s}weight": (torch.float8_e4m3fn, (2, 512, 512)) for s in ("w13_", "w2_")}
        registered |= {f"{s}weight_scale": (torch.float32, (2, *shape)) for s in ("w13_", "w2_")}
        for stored_as, whole in kinds.items():
            fields: dict[str, Header] = {"weight": ("F8_E4M3", (256, 512)), "weight_scale": ("F32", whole)}
            assert (why_not_read(registered, [fields]) is None) is (form == stored_as)


def test_a_family_that_cannot_be_served_is_refused_when_the_engines_config_is_made() -> None:
    config = HybridPackConfig({"manifest": "hybrid_pack.json"})
    config.maybe_update_config("org/name", hf_config=SimpleNamespace(model_type="deepseek_v3"))
    with pytest.raises(UsageError, match="org/name: packs of deepseek_v4 cannot be served"):
        config.maybe_update_config("org/name", hf_config=SimpleNamespace(model_type="deepseek_v4"))
