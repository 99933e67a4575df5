"""``--hessians DIR``: second moments of the inputs of experts, for GPTQ.

``DIR/layer-<L>.safetensors`` for each layer to quantise, L in decimal without leading zeros. Its tensors, all F32:

- ``<expert>.gate_up.hessian`` [H, H], H the hidden size: ``X^T X`` of the tokens X routed to this expert (gate and up
  have the same inputs);
- ``<expert>.down.hessian`` [I, I], I the intermediate size: the same of what its down projection receives;
- ``shared.gate_up.hessian`` and ``shared.down.hessian``: for all experts of the layer that have none of their own.

Symmetric, in any unit: a sum, a mean, or twice it, since only ratios count. Experts nobody asks for are ignored.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from hybrid_pack.errors import DataError, EnvironmentFailure
from hybrid_pack.io.bitmap import spans
from hybrid_pack.io.calibration import F32, MATRICES, NUMBER, SHARED, UNSEEN, Key, Kind, Statistics, Wanted
from hybrid_pack.io.safetensors import read_header
from hybrid_pack.io.shards import Located

SUFFIX = ".safetensors"
_FILE = re.compile(rf"layer-{NUMBER}\.safetensors")
_TENSOR = re.compile(rf"(?:{NUMBER}|{SHARED})\.({'|'.join(MATRICES)})\.hessian")


TILE = 512
"""Rows and columns compared with their mirror image at a time: four of them in float64 stay in the caches."""


def _problem(values: F32) -> tuple[str, str] | None:
    """What factoring would refuse, but for definiteness, which only factoring tells: in one pass, in little memory."""
    from hybrid_pack.quantize.gptq_hessian import SYMMETRY  # imports torch, which only users of Hessians need

    diagonal = values.diagonal()
    if (diagonal < 0).any():
        channel = int(np.argmax(diagonal < 0))
        what = f"the Hessian's diagonal is negative at channel {channel} ({diagonal[channel]})"
        return what, "give X^T X of the inputs X, whose diagonal holds sums of squares"
    if not diagonal.any():
        return "the Hessian's diagonal is all zero: no token was seen", UNSEEN
    limit = SYMMETRY * max(float(values.max()), -float(values.min()))
    for first in range(0, len(values), TILE):
        for second in range(first, len(values), TILE):
            rows, columns = slice(first, first + TILE), slice(second, second + TILE)
            difference = np.subtract(values[rows, columns], values[columns, rows].T, dtype=np.float64)
            if max(difference.max(), -difference.min()) > limit:
                at = np.unravel_index(int(np.abs(difference).argmax()), difference.shape)
                i, j = first + int(at[0]), second + int(at[1])
                what = f"the Hessian is not symmetric: {values[i, j]} at [{i}, {j}], {values[j, i]} at [{j}, {i}]"
                return what, "give the whole of X^T X, both triangles"
    for dead in np.flatnonzero(diagonal == 0):
        if float(np.abs(values[dead]).max()) > limit:  # in float64, as the limit is
            what = f"channel {dead} of the Hessian has products with others, but a zero on the diagonal"
            return what, "give X^T X of the inputs X, with its diagonal"
    return None


HESSIANS = Kind("Hessian", 2, lambda layer, expert, matrix: f"{expert}.{matrix}.hessian", _problem)


def _files(root: Path) -> dict[int, Path]:
    if not root.is_dir():
        raise DataError("no such folder", where=root, expected="a folder of layer-<L>.safetensors")
    try:
        paths = sorted(path for path in root.iterdir() if path.name.endswith(SUFFIX))
    except OSError as error:
        raise EnvironmentFailure("cannot read", where=root, found=error.strerror) from error
    found = {}
    for path in paths:
        match = _FILE.fullmatch(path.name)
        if match is None:
            raise DataError(
                "a file of Hessians with a name that is no layer's", where=path, expected="layer-<L>" + SUFFIX
            )
        found[int(match[1])] = path
    return found


def open_hessians(root: Path, wanted: Wanted) -> Statistics:
    """Find the Hessians of every wanted expert; headers only.

    Args:
        root: The folder.
        wanted: Experts by layer, and the input channels of their matrices.

    Raises:
        DataError: No folder, no file for a layer, a file or tensor with a name that is none, a broken file, an expert
            without Hessian, a wrong dtype or shape.
        EnvironmentFailure: A file cannot be read.
    """
    files = _files(root)
    missing = sorted(set(wanted.experts) - set(files))
    if missing:
        raise DataError(
            f"no Hessians for layer {spans(missing)}",
            where=root,
            expected=f"layer-{missing[0]}{SUFFIX}",
            found=f"layer {spans(sorted(files))}" if files else "no such file at all",
        )
    tensors: dict[Key, Located] = {}
    for layer in sorted(wanted.experts):
        for name, header in read_header(files[layer]).tensors.items():
            match = _TENSOR.fullmatch(name)
            if match is None:
                raise DataError(
                    f"tensor {name} has a name that is no Hessian's",
                    where=files[layer],
                    expected=f"<expert>.<matrix>.hessian or {SHARED}.<matrix>.hessian, matrix {' or '.join(MATRICES)}",
                )
            tensors[layer, None if match[1] is None else int(match[1]), match[2]] = Located(files[layer], header)
    return Statistics(HESSIANS, root, tensors, wanted)
