"""vLLM's own quantisation config for what the source stores, made from the source's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch

_MODELOPT = {"NVFP4": "modelopt_fp4", "W4A16_NVFP4": "modelopt_fp4", "MXFP8": "modelopt_mxfp8"}
_MIXED = "MIXED_PRECISION"
_OURS = ("hybrid_bit_map", "kept_format", "nf3_levels", "dense_format", "demoted_format", "ignored_layers")


def method_name(source: Mapping[str, Any]) -> str | None:
    """vLLM's name of the source's method; None where it had none."""
    method = source.get("quant_method")
    if method is None:
        producer = source.get("producer")
        named = producer.get("name") if isinstance(producer, Mapping) else None
        method = "modelopt" if named == "modelopt" or "quantization" in source else None
    if not isinstance(method, str) or not method:
        return None
    if not method.startswith("modelopt"):
        return method.lower()
    nested = source.get("quantization")
    algo = str((nested if isinstance(nested, Mapping) else source).get("quant_algo", "")).upper()
    return "modelopt_mixed" if algo == _MIXED else _MODELOPT.get(algo, "modelopt")


def excludes(source: Mapping[str, Any]) -> tuple[str, ...]:
    """What the source's config leaves unquantised, under any of the names such lists have."""
    nested = source.get("quantization")
    found: list[str] = []
    for place in (source, nested if isinstance(nested, Mapping) else {}):
        for key in ("ignore", "exclude_modules", "ignored_layers", "modules_to_not_convert"):
            value = place.get(key)
            items = [value] if isinstance(value, str) else value if isinstance(value, Sequence) else []
            found += [item for item in items if isinstance(item, str)]
    return tuple(dict.fromkeys(found))


def fp8_kv_cache(source: Mapping[str, Any]) -> bool:
    """Whether the source's config keeps the KV cache in FP8 (vLLM reads this only from methods it knows)."""
    nested = source.get("quantization")
    for place in (source, nested if isinstance(nested, Mapping) else {}):
        scheme = place.get("kv_cache_scheme")
        if isinstance(scheme, Mapping) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float"):
            return True
        if "FP8" in (str(scheme).upper(), str(place.get("kv_cache_quant_algo")).upper()):
            return True
    return False


class Source:
    """The source's quantisation, as vLLM has it.

    Args:
        document: The source's own ``quantization_config``.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = dict(document)
        self.problem: str | None = None
        self._renamed = 0

    @property
    def name(self) -> str | None:
        """vLLM's name of its method."""
        return method_name(self.document)

    @cached_property
    def excluded(self) -> tuple[str, ...]:
        """Patterns of what it leaves unquantised."""
        return excludes(self.document)

    @cached_property
    def config(self) -> Any | None:
        """vLLM's config; None where there is none, for the reason in ``problem``."""
        from vllm.model_executor.layers.quantization import get_quantization_config

        name = self.name
        if name is None:
            self.problem = "the source's config names no quantisation"
            return None
        document = {key: value for key, value in self.document.items() if key not in _OURS}
        try:
            return get_quantization_config(name).from_config(document)
        except Exception as error:  # vLLM raises what it likes, for configs it does not know
            self.problem = f"vLLM has no config for {name}: {type(error).__name__}: {error}"
            return None

    def method(self, layer: torch.nn.Module, prefix: str, packed: dict[str, list[str]], mappers: Sequence[Any]) -> Any:
        """vLLM's own method for a layer, as if the source were served; None where it has none."""
        config = self.config
        if config is None:
            return None
        config.packed_modules_mapping = packed
        for mapper in mappers[self._renamed :]:
            config.apply_vllm_mapper(mapper)
        self._renamed = len(mappers)
        return config.get_quant_method(layer, prefix)
