"""How a linear layer of the base is run: by vLLM's own method for its format, or dequantised while it is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from hybrid_pack.integrations.vllm.base import Stored
from hybrid_pack.integrations.vllm.dequantised import DequantisedLinearMethod

if TYPE_CHECKING:
    from hybrid_pack.integrations.vllm.config import HybridPackConfig

logger = init_logger("vllm.hybrid_pack")
_told: set[tuple[str, str]] = set()


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


def _candidates(stored: Stored) -> tuple[frozenset[str], Callable[[], Any] | None]:
    """(names of vLLM's methods that read these tensors, how to make one where the source's config gives none).

    A method that expects a tensor the checkpoint lacks would run with what its memory happened to hold, so the fields
    and shapes must be just those a method registers.
    """
    form, fields = stored.form, stored.fields
    scale = fields[form.scale_field] if form.scale_field else ("", ())
    has_input = "input_scale" in fields
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
        return UnquantizedLinearMethod()
    names, make = _candidates(stored)
    reason = f"vLLM has no method for {stored.form.name} stored as {', '.join(sorted(stored.fields))}"
    if names:
        source = config.session.source
        try:
            method = source.method(layer, prefix, config.packed_modules_mapping, config.mappers)
            if type(method).__name__ not in names:
                reason = source.problem or f"the source's config gives {type(method).__name__}"
                method = None if make is None else make()
            if method is not None:
                return _falling_back(method, stored, prefix)
        except Exception as error:  # a GPU that lacks what a kernel needs, a config of another vLLM
            reason = _failure(error)
    return _dequantised(stored, prefix, reason)


def _dequantised(stored: Stored, prefix: str, reason: str) -> DequantisedLinearMethod:
    method = DequantisedLinearMethod(stored, prefix)
    _tell("dequantised to BF16 while loading", stored, prefix, f", since {' '.join(reason.split())}")
    return method


def _failure(error: Exception) -> str:
    return f"vLLM's method failed: {type(error).__name__}: {error}"


def _falling_back(method: Any, stored: Stored, prefix: str) -> Any:
    """A method of vLLM's that gives its place to ours if it finds no kernel, which some look for in create_weights.

    It keeps its class, by whose name vLLM chooses how the layer is loaded.
    """
    create = method.create_weights

    def create_weights(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        before = dict(layer.named_parameters(recurse=False))
        try:
            create(layer, *args, **kwargs)
            _tell(f"run by vLLM's {type(method).__name__}", stored, prefix)
        except Exception as error:
            for name in dict(layer.named_parameters(recurse=False)):
                if name not in before:
                    delattr(layer, name)
            ours = _dequantised(stored, prefix, _failure(error))
            layer.quant_method = ours
            ours.create_weights(layer, *args, **kwargs)

    method.create_weights = create_weights
    return method


def _tell(how: str, stored: Stored, prefix: str, why: str = "") -> None:
    """One line for each format and way."""
    if (how, stored.form.name) not in _told:
        _told.add((how, stored.form.name))
        logger.info("hybrid_pack: base layers stored as %s (from %s on) are %s%s", stored.form.name, prefix, how, why)
