"""Registers the quantisation method with vLLM, or one that says why it cannot be had."""

from __future__ import annotations

from typing import Any

from vllm import __version__ as vllm_version
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from hybrid_pack.errors import EnvironmentFailure
from hybrid_pack.integrations.vllm import QUANT_METHOD
from hybrid_pack.integrations.vllm.versions import SUPPORTED, why_not_known, why_not_version


def register_method() -> None:
    """Register ``hybrid_pack`` once in a process."""
    if QUANT_METHOD in QUANTIZATION_METHODS:
        return
    register_quantization_config(QUANT_METHOD)(_method(str(vllm_version)))


def _method(found: str) -> type[QuantizationConfig]:
    """The method for a version of vLLM."""
    why_not = why_not_version(found)
    if why_not is None:
        try:
            from hybrid_pack.integrations.vllm.config import HybridPackConfig

            return HybridPackConfig
        except (ImportError, AttributeError) as error:
            why_not = why_not_known(found, error)
    return refusing(why_not)


def refusing(reason: str) -> type[QuantizationConfig]:
    """A method that fails with a reason as soon as a model asks for it."""

    class RefusedHybridPackConfig(QuantizationConfig):
        """Only says why packs cannot be served."""

        def __init__(self) -> None:
            raise EnvironmentFailure(reason, where=QUANT_METHOD, hint=f"install vLLM {SUPPORTED}")

        def get_name(self) -> str:
            return QUANT_METHOD

        def get_supported_act_dtypes(self) -> list[Any]:
            return []

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
            return cls()

        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            raise AssertionError("there is no object to ask")

    return RefusedHybridPackConfig
