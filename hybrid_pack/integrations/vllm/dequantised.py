"""A linear method that dequantises to BF16 once, after loading, for formats vLLM has no method for."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    ChannelQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)

from hybrid_pack.errors import DataError
from hybrid_pack.formats.source import FP8_BLOCK, Header
from hybrid_pack.integrations.vllm.arrivals import forget, loaded, noting, require_loaded
from hybrid_pack.integrations.vllm.arriving import ALIASES
from hybrid_pack.integrations.vllm.base import Stored
from hybrid_pack.integrations.vllm.dequantise import TORCH_DTYPES, dequantise, rows_of_blocks

_READ = frozenset({"mxfp8", "fp8_tensor", "fp8_row", "fp8_block", "nvfp4", "mxfp4"})


@register_weight_loader_v2_supported_method
class DequantisedLinearMethod(UnquantizedLinearMethod):
    """Codes and scales are loaded as vLLM loads any quantised layer, cut for the rank, and then become the weight.

    Args:
        stored: How the layer is stored.
        prefix: vLLM's name of it.

    Raises:
        DataError: It is stored in a way that is not read here.
    """

    def __init__(self, stored: Stored, prefix: str) -> None:
        super().__init__()
        self.stored, self.prefix = stored, prefix
        form = stored.form
        if form.name not in _READ or form.codes_field == "blocks" or stored.fields[form.codes_field][0] == "F4":
            raise DataError(
                "neither vLLM nor hybrid-pack can run a layer stored this way", where=prefix, found=form.name,
                hint="dequantise it in the source and convert again",
            )  # fmt: skip

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register a parameter for each tensor of the checkpoint."""
        # Of the loaders a layer has, the one for parameters such as these.
        loader = getattr(layer, "weight_loader_v2", extra_weight_attrs["weight_loader"])
        rows = sum(output_partition_sizes)
        columns = input_size_per_partition, input_size
        only = output_size if len(output_partition_sizes) == 1 else None
        self._widths, self._dtype = list(output_partition_sizes), params_dtype
        for name, header in self.stored.fields.items():
            if name != "bias":  # which is the layer's own
                parameter = self._parameter(name, header, rows, columns, only, loader)
                layer.register_parameter(name, parameter)
                if (alias := ALIASES.get(name)) is not None:
                    other = self._parameter(name, header, rows, columns, only, loader)
                    other.data = parameter.data  # one of the two will be loaded
                    layer.register_parameter(alias, other)

    def _parameter(
        self, name: str, header: Header, rows: int, columns: tuple[int, int], only: int | None, loader: Any
    ) -> BasevLLMParameter:
        """Room for a rank's part of a tensor.

        Args:
            name: Field of the tensor.
            header: Its dtype and shape in the checkpoint.
            rows: Of this rank.
            columns: K of this rank and of the whole matrix.
            only: Rows of the whole matrix, if it is the only one of the layer.
            loader: vLLM's.
        """
        if get_current_vllm_config().load_config.load_format != "dummy":
            loader = noting(loader)
        dtype, shape = header
        torch_dtype = TORCH_DTYPES[dtype]
        form = self.stored.form
        if name == form.scale_field and form.name == "fp8_block":
            return self._block_scales(rows, columns, only, loader)
        scale_of_rows = name == form.scale_field and form.name == "fp8_row"
        if scale_of_rows:
            data = torch.empty(rows, *shape[1:], dtype=torch_dtype)
            return ChannelQuantScaleParameter(data=data, output_dim=0, weight_loader=loader)
        if len(shape) == 2 and name in (form.codes_field, form.scale_field) and form.name != "fp8_tensor":
            width, rest = divmod(shape[1] * columns[0], columns[1])
            if rest:
                raise DataError(
                    "a rank's columns cut through a group of scales", where=self.prefix, found=f"{name} {list(shape)}",
                    hint="serve with fewer tensor-parallel ranks",
                )  # fmt: skip
            data = torch.empty(rows, width, dtype=torch_dtype)
            return ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
        if name == form.codes_field:
            data = torch.empty(rows, columns[0], dtype=torch_dtype)
            return ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=loader)
        if shape not in ((), (1,), (1, 1)):
            raise DataError(
                "a tensor of unknown meaning", where=f"{self.prefix}.{name}", found=f"{dtype} {list(shape)}"
            )
        data = torch.full((len(self._widths),), float("nan"), dtype=torch.float32)
        return PerTensorScaleParameter(data=data, weight_loader=_flat(loader))

    def _block_scales(self, rows: int, columns: tuple[int, int], only: int | None, loader: Any) -> BasevLLMParameter:
        """Room for a scale of each row and 128 columns: parts of a fused layer need not begin where a block does.

        Args:
            rows: Of this rank.
            columns: K of this rank and of the whole matrix.
            only: Rows of the whole matrix, if it is the only one: a replicated one is copied as it is, not cut to size.
            loader: vLLM's.
        """
        part, whole = columns
        if part % FP8_BLOCK and part != whole:
            raise DataError(
                "a rank's columns cut through a block of scales", where=self.prefix,
                expected=f"a multiple of {FP8_BLOCK}", found=f"{part} of {whole} columns",
                hint="serve with fewer tensor-parallel ranks",
            )  # fmt: skip

        @wraps(loader)
        def load(parameter: Any, loaded: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return loader(parameter, rows_of_blocks(loaded, only), *args, **kwargs)

        data = torch.empty(rows, -(-part // FP8_BLOCK), dtype=torch.float32)
        return ModelWeightParameter(data=data, input_dim=1, output_dim=0, weight_loader=load)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Put the dequantised weight in the place of what was loaded.

        vLLM loads weights again while it serves (``model_loader/reload``): it registers codes and scales anew and calls
        this again. What tells a weight that is done is that its scale is gone.
        """
        form = self.stored.form
        if form.scale_field not in dict(layer.named_parameters(recurse=False)):
            return
        parts = len(self._widths)
        parameters = {name: getattr(layer, name) for name in self.stored.fields if name != "bias"}
        for name, alias in ALIASES.items():
            if name in parameters and loaded(parameters[name], parts) is False and loaded(getattr(layer, alias), parts):
                parameters[name] = getattr(layer, alias)
        needed = (form.codes_field, form.scale_field, form.second_field)
        wanted = {name: parameter for name, parameter in parameters.items() if name in needed}
        require_loaded(wanted, parts, self.prefix, self.stored.names)
        weight = dequantise(form, {name: p.data for name, p in parameters.items()}, self._widths, self._dtype)
        for name in (*self.stored.fields, *(ALIASES[name] for name in parameters if name in ALIASES)):
            if name != "bias":
                forget(getattr(layer, name))
                delattr(layer, name)
        layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
        super().process_weights_after_loading(layer)


def _flat(loader: Any) -> Any:
    """A loader for what is one number, as [1]: vLLM's knows [1, 1] only of matrices that are not fused."""

    @wraps(loader)
    def load(parameter: Any, loaded: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return loader(parameter, loaded.reshape(1), *args, **kwargs)

    return load
