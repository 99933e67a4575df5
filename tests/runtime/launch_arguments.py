"""What a compiled kernel is called with, so that two ways to call it can be compared."""

from __future__ import annotations

from typing import Any

import torch


def comparable(argument: Any) -> object:
    """What a kernel sees of an argument."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr(), argument.shape, argument.dtype
    if hasattr(argument, "_pointer"):
        return int(argument._pointer), argument._dtype, argument._assumed_align, argument._addr_space
    return int(getattr(argument, "value", argument)), type(argument).__name__
