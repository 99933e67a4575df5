"""``--importance FILE``: how strong each input channel of an expert is, as weights for the search of scales.

One safetensors file. Its tensors, all F32 [K], K the hidden size for ``gate_up``, the intermediate size for ``down``:

- ``<layer>.<expert>.gate_up``, ``<layer>.<expert>.down``: the mean square of each input channel over the tokens routed
  to this expert, which is the diagonal of its Hessian in some unit;
- ``<layer>.shared.gate_up``, ``<layer>.shared.down``: for all experts of the layer that have none of their own.

Layers and experts are decimal without leading zeros; those nobody asks for are ignored.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from hybrid_pack.errors import DataError
from hybrid_pack.io.calibration import F32, MATRICES, NUMBER, SHARED, UNSEEN, Key, Kind, Statistics, Wanted
from hybrid_pack.io.safetensors import read_header
from hybrid_pack.io.shards import Located

_TENSOR = re.compile(rf"{NUMBER}\.(?:{NUMBER}|{SHARED})\.({'|'.join(MATRICES)})")


def _problem(values: F32) -> tuple[str, str] | None:
    if (values < 0).any():
        channel = int(np.argmax(values < 0))
        what = f"the importance of channel {channel} is negative ({values[channel]})"
        return what, "give mean squares of the inputs, which cannot be"
    return None if values.any() else ("the importance of every channel is zero: no token was seen", UNSEEN)


IMPORTANCE = Kind("importance", 1, lambda layer, expert, matrix: f"{layer}.{expert}.{matrix}", _problem)


def open_importance(path: Path, wanted: Wanted) -> Statistics:
    """Find the importance of every wanted expert; the header only.

    Args:
        path: The file.
        wanted: Experts by layer, and the input channels of their matrices.

    Raises:
        DataError: A broken file, a tensor with a name that is none, an expert without importance, a wrong dtype or
            shape.
        EnvironmentFailure: The file cannot be read.
    """
    tensors: dict[Key, Located] = {}
    for name, header in read_header(path).tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise DataError(
                f"tensor {name} has a name that is no importance's",
                where=path,
                expected=f"<layer>.<expert>.<matrix> or <layer>.{SHARED}.<matrix>, matrix {' or '.join(MATRICES)}",
            )
        tensors[int(match[1]), None if match[2] is None else int(match[2]), match[3]] = Located(path, header)
    return Statistics(IMPORTANCE, path, tensors, wanted)
