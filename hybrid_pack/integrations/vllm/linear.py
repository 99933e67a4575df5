"""How a linear layer of the base is run: by vLLM's own method for its format, or dequantised while it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from hybrid_pack.errors import DataError
from hybrid_pack.formats import e8m0
from hybrid_pack.integrations.vllm.arriving import arriving, expect, own
from hybrid_pack.integrations.vllm.base import INTEGERS, Stored, name_of
from hybrid_pack.integrations.vllm.dequantised import DequantisedLinearMethod
from hybrid_pack.integrations.vllm.fits import why_not_held

if TYPE_CHECKING:
    from hybrid_pack.integrations.vllm.config import HybridPackConfig

logger = init_logger("vllm.hybrid_pack")
_told: set[tuple[str, str, str]] = set()
MXFP8_LEAST = 128
"""Rows and columns that vLLM's kernels for Blackwell assert (``kernels/linear/mxfp8/flashinfer.py``)."""
_READ_BY_ATTENTION = "kv_b_proj"
"""MLA converts its input to the dtype of this layer's weight, which is int32 where a kernel packs it."""


def _mxfp8() -> Any:
    from vllm.model_executor.layers.quantization import modelopt

    return modelopt.ModelOptMxFp8LinearMethod(modelopt.ModelOptMxFp8Config(True, None, []))


def _nvfp4() -> Any:
    from vllm.model_executor.layers.quantization import modelopt

    config = modelopt.ModelOptNvFp4Config(is_checkpoint_nvfp4_serialized=True, exclude_modules=[], group_size=16)
    return config.LinearMethodCls(config)


def _fp8_block() -> Any:
    from vllm.model_executor.layers.quantization import fp8

    return fp8.Fp8LinearMethod(fp8.Fp8Config(True, "dynamic", None, [128, 128]))


def _candidates(stored: Stored) -> tuple[frozenset[str] | None, Callable[[], Any] | None]:
    """(names of vLLM's methods that read these tensors, how to make one where the source's config gives none).

    None for integers: what they mean is the config's to say, so its method is taken if it reads just these tensors.

    Shapes and dtypes must be just those a method registers, or they would be converted. Whether it registers just the
    fields that are stored is known once it has made them: see ``_guarded``.
    """
    form, fields = stored.form, stored.fields
    scale = fields[form.scale_field] if form.scale_field else ("", ())
    has_input = "input_scale" in stored.every
    if form.scale_bias != e8m0.BIAS:  # which vLLM's methods take for granted
        return frozenset(), None
    if form.name in INTEGERS.values():
        return None, None
    if form.codes_field == "weight_packed":
        return frozenset({"CompressedTensorsLinearMethod"}), None
    match form.name, form.scale_field:
        case "mxfp8", "weight_scale" if scale[0] == "U8":  # an E8M0 tensor would be converted, not copied
            return frozenset({"ModelOptMxFp8LinearMethod"}), _mxfp8
        case "nvfp4", "weight_scale" if has_input and fields["weight"][0] == "U8":
            return frozenset({"ModelOptNvFp4LinearMethod"}), _nvfp4
        case "fp8_block", "weight_scale_inv" if scale[0] == "F32":
            return frozenset({"Fp8LinearMethod"}), _fp8_block
        case "fp8_tensor", "weight_scale":
            names = {"CompressedTensorsLinearMethod", *(["ModelOptFp8LinearMethod", "Fp8LinearMethod"] * has_input)}
            return frozenset(names), None
        case "fp8_row", "weight_scale":
            return frozenset(
                {"CompressedTensorsLinearMethod" if len(scale[1]) == 2 else "ModelOptFp8PcPtLinearMethod"}
            ), None
    return frozenset(), None


def linear_method(config: HybridPackConfig, layer: Any, prefix: str, stored: Stored) -> Any:
    """The method for a linear layer stored in a known way.

    Raises:
        DataError: Neither vLLM nor this can run it.
    """
    if stored.plain:
        return arriving(UnquantizedLinearMethod(), stored, prefix)
    if prefix.rpartition(".")[2] == _READ_BY_ATTENTION:
        return _dequantised(stored, prefix, "vLLM's attention reads its weight")
    names, make = _candidates(stored)
    reason = f"vLLM has no method for {name_of(stored.form)} stored as {', '.join(sorted(stored.fields))}"
    if names is None or names:
        source = config.session.source
        try:
            method = source.method(layer, prefix, config.packed_modules_mapping, config.mappers)
            if method is None or (names is not None and type(method).__name__ not in names):
                reason = source.problem or f"the source's config gives {type(method).__name__}"
                method = None if make is None else make()
            if method is not None:
                return _guarded(method, stored, prefix)
        except Exception as error:  # a GPU that lacks what a kernel needs, a config of another vLLM
            reason = f"vLLM's method failed: {type(error).__name__}: {error}"
    return _dequantised(stored, prefix, reason)


def _dequantised(stored: Stored, prefix: str, reason: str) -> DequantisedLinearMethod:
    if stored.form.name in INTEGERS.values():
        raise DataError(
            f"a layer of {stored.form.name}, which is read by a method of vLLM's alone", where=prefix,
            expected=f"one that reads {', '.join(sorted(stored.fields))} as they are stored",
            found=" ".join(reason.split()), hint="dequantise it in the source and convert again",
        )  # fmt: skip
    method = DequantisedLinearMethod(stored, prefix)
    _tell("dequantised to BF16 while loading", stored, prefix, f", since {' '.join(reason.split())}")
    return method


def _unlike(layer: torch.nn.Module, before: set[str], stored: Stored) -> str | None:
    """How what a method has registered differs from what is stored; None where it is the same.

    A parameter that one of the parts lacks would hold what its memory happened to hold.

    Args:
        layer: With the parameters.
        before: Names of those it had before.
        stored: What is stored.
    """
    registered = {name: p for name, p in own(layer).items() if name not in {*before, "bias"}}
    lacking = sorted(set(registered) - stored.every)
    unread = sorted(set(stored.fields) - set(registered) - {"bias"})
    if lacking:
        return f"needs {', '.join(lacking)}, which not all of its parts have"
    if unread:
        return f"does not read {', '.join(unread)}"
    columns = getattr(layer, "input_size", 1)
    cut = columns // getattr(layer, "input_size_per_partition", columns)
    ordered = "weight_g_idx" in stored.fields  # then every rank has all scales
    for name, parameter in registered.items():
        ranks = 1 if ordered and name != stored.form.codes_field else cut
        if (why_not := why_not_held(parameter.dtype, parameter.shape, stored.fields[name], ranks)) is not None:
            return f"reads {name} {why_not}"
    return None


def _too_small(method: Any, rows: int, columns: int) -> str | None:
    """Why a kernel that is chosen later cannot run a layer of this size; None where it can."""
    if "MxFp8" not in type(method).__name__ or min(rows, columns) >= MXFP8_LEAST:
        return None
    return f"needs {MXFP8_LEAST} rows and columns a rank on Blackwell: {rows} and {columns}"


def _guarded(method: Any, stored: Stored, prefix: str) -> Any:
    """A method of vLLM's that gives its place to ours where ``create_weights`` shows that it cannot run the layer.

    Some look for a kernel only there, and what it registers need not be what is stored. It keeps its class, by whose
    name vLLM chooses how the layer is loaded.
    """
    create = method.create_weights

    def create_weights(
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        sizes = input_size_per_partition, output_partition_sizes
        before = set(own(layer))
        reason = _too_small(method, sum(output_partition_sizes), input_size_per_partition)
        try:
            if reason is None:
                create(layer, *sizes, *args, **kwargs)
                reason = _unlike(layer, before, stored)
        except Exception as error:
            reason = f"failed: {type(error).__name__}: {error}"
        if reason is None:
            _tell(f"run by vLLM's {type(method).__name__}", stored, prefix)
            names = set(own(layer)) - before
            expect(method, layer, names, stored, prefix, len(output_partition_sizes))
            return
        for name in set(own(layer)) - before:
            delattr(layer, name)
        layer.quant_method = _dequantised(stored, prefix, f"vLLM's {type(method).__name__} {reason}")
        layer.quant_method.create_weights(layer, *sizes, *args, **kwargs)

    method.create_weights = create_weights
    return method


def _tell(how: str, stored: Stored, prefix: str, why: str = "") -> None:
    """One line for each format, way and reason."""
    key = how, stored.form.name, why.partition(":")[0]  # without what differs from layer to layer
    if key not in _told:
        _told.add(key)
        logger.info("hybrid_pack: base layers stored as %s (from %s on) are %s%s", stored.form.name, prefix, how, why)
