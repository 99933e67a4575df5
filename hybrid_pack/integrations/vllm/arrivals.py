"""Which tensors vLLM has loaded into a layer. Imports nothing of vLLM.

vLLM looks for parameters that were never loaded only in models without quantisation, and a model may rename what it
reads; memory that nothing was written to would then be taken for codes or scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch

from hybrid_pack.errors import DataError

QKV = {"q": 0, "k": 1, "v": 2}
_NOTED = "hybrid_pack_noted"
_MARK = 0xFF
"""Every byte of it: NaN in each of the float formats, so no row of weights."""
_PART = 2
"""Place of the part among the arguments of a weight loader, after the parameter and the tensor."""


def noting(loader: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's weight loader of a parameter, which from now on keeps in mind what it was called for."""
    noted: set[Any] = set()

    @wraps(loader)
    def load(*args: Any, **kwargs: Any) -> Any:
        done = loader(*args, **kwargs)
        part = args[_PART] if len(args) > _PART else kwargs.get("loaded_shard_id")
        noted.update(part if isinstance(part, (tuple, list)) else [part])
        return done

    setattr(load, _NOTED, noted)
    return load


def _noted(parameter: torch.nn.Parameter) -> set[Any] | None:
    """What the loader of a parameter was called for; None where it is not one of ours."""
    return getattr(getattr(parameter, "weight_loader", None), _NOTED, None)


def loaded(parameter: torch.nn.Parameter, parts: int) -> bool | None:
    """Whether all of a parameter was loaded; None where a model has put a loader of its own in the place of ours.

    Args:
        parameter: Made with ``noting``.
        parts: How many matrices it is made of; each has an id, or one call without an id brings all.
    """
    noted = _noted(parameter)
    return None if noted is None else None in noted or len({QKV.get(part, part) for part in noted}) >= parts


def begun(parameter: torch.nn.Parameter) -> bool:
    """Whether anything of a parameter was loaded with its loader."""
    return bool(_noted(parameter))


def forget(parameter: torch.nn.Parameter) -> None:
    """Begin anew, for weights that are loaded again."""
    if (noted := _noted(parameter)) is not None:
        noted.clear()


def watch(parameters: Mapping[str, torch.nn.Parameter], codes: str) -> None:
    """Note from now on what the weight loaders of a layer's parameters are called for.

    Args:
        parameters: Those just made, by name; each keeps its class and its loader, which is called as before.
        codes: Which of them holds the weights. Its first row is marked, so that weights that came without the loader
            can be told from memory that nothing was written to.
    """
    for parameter in parameters.values():
        if (loader := getattr(parameter, "weight_loader", None)) is not None:
            parameter.weight_loader = noting(loader)  # type: ignore[attr-defined]
    if codes in parameters:
        parameters[codes].data[:1].view(torch.uint8).fill_(_MARK)


def came_otherwise(parameters: Mapping[str, torch.nn.Parameter], codes: str) -> bool:
    """Whether the weights of a layer are there though none of its loaders was called.

    A model may copy them itself (MiMo-V2's fused attention), a load format may (tensorizer), and what was processed
    once may be processed again.
    """
    if any(map(begun, parameters.values())) or codes not in parameters or parameters[codes].is_meta:
        return False
    return not bool((parameters[codes].data[:1].view(torch.uint8) == _MARK).all())


def require_loaded(parameters: Mapping[str, torch.nn.Parameter], parts: int, prefix: str, names: Sequence[str]) -> None:
    """Refuse a layer whose tensors were not all loaded.

    Args:
        parameters: Those that must be, by the field they are for.
        parts: Matrices of the layer.
        prefix: vLLM's name of the layer.
        names: Modules of the checkpoint it is made of.

    Raises:
        DataError: vLLM has not loaded one of them, or not all parts of it.
    """
    for field, parameter in parameters.items():
        if loaded(parameter, parts) is not False:
            continue
        noted = _noted(parameter)
        part = f"only part {', '.join(sorted(map(str, noted)))} of {parts}" if noted else "nothing"
        raise DataError(
            "vLLM has not loaded a tensor of the base", where=f"{prefix}.{field}",
            expected=" and ".join(f"{name}.{field}" for name in names), found=part,
            hint="this vLLM looks for it under another name; dequantise it in the source and convert again",
        )  # fmt: skip
