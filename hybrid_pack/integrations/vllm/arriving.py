"""Methods of vLLM's own whose tensors must all have been loaded before they process them.

A method stays the object it is, since vLLM chooses by its class how a layer is loaded and run.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config

from hybrid_pack.integrations.vllm.arrivals import begun, came_otherwise, forget, require_loaded, watch
from hybrid_pack.integrations.vllm.base import Stored

ALIASES = {"weight_scale_inv": "weight_scale"}
"""What vLLM's models call a field (MiniMax-M3's loader renames it), besides its name in the checkpoint."""


def own(layer: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """A layer's own parameters by name; one that it shares with another layer is among them."""
    return dict(layer.named_parameters(recurse=False))


def arriving(method: Any, stored: Stored, prefix: str, *, once: bool = False) -> Any:
    """The method, which from now on refuses a layer not all of whose tensors were loaded.

    Args:
        method: One of vLLM's for unquantised layers.
        stored: How the layer is stored.
        prefix: vLLM's name of it.
        once: Whether what is loaded stays loaded: of a head that shares its weight with the embedding.
    """
    create = method.create_weights

    def create_weights(
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        before = set(own(layer))
        create(layer, input_size_per_partition, output_partition_sizes, *args, **kwargs)
        expect(method, layer, set(own(layer)) - before, stored, prefix, len(output_partition_sizes), once=once)

    method.create_weights = create_weights
    return method


def expect(
    method: Any, layer: torch.nn.Module, names: set[str], stored: Stored, prefix: str, parts: int, *, once: bool = False
) -> None:
    """Watch the parameters that a method has just made for a layer, and have it require them.

    Nothing is loaded into dummy weights. What a model may look for under another name gets a second parameter of that
    name in the same memory.

    Args:
        method: The layer's.
        layer: It has the parameters.
        names: Of those made by the method.
        stored: How the layer is stored.
        prefix: vLLM's name of it.
        parts: How many matrices it is made of.
        once: See ``arriving``.
    """
    if get_current_vllm_config().load_config.load_format == "dummy":
        return
    codes = str(stored.form.codes_field)
    aliases = {name: alias for name, alias in ALIASES.items() if name in names and alias not in own(layer)}
    for name, alias in aliases.items():
        layer.register_parameter(alias, _same_memory(own(layer)[name]))
    watch({name: own(layer)[name] for name in (*sorted(names), *aliases.values())}, codes)
    process = method.process_weights_after_loading

    def process_weights_after_loading(layer: torch.nn.Module) -> None:
        here = own(layer)
        wanted = {name: here[name] for name in sorted(names) if name in here}
        for name, alias in aliases.items():
            if (other := here.get(alias)) is None:
                continue
            if begun(other) and not begun(wanted[name]):
                wanted[name].data = other.data  # apart from it, where weights are loaded again
                wanted[name] = other
            delattr(layer, alias)
        if not came_otherwise(wanted, codes):
            require_loaded(wanted, parts, prefix, stored.names)
        if not once:
            for parameter in here.values():
                forget(parameter)
        process(layer)

    method.process_weights_after_loading = process_weights_after_loading


def _same_memory(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Another parameter of the same class and attributes, as vLLM copies them (``reload/meta.py``)."""
    other = torch.nn.Parameter(parameter.data, requires_grad=False)
    other.__class__ = type(parameter)
    other.__dict__ = dict(vars(parameter))
    return other
