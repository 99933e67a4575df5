"""compressed-tensors 0.20.1's own quantiser of NVFP4 and MXFP4 weights, as llm-compressor calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from numpy.typing import NDArray

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class Theirs:
    """Their bytes, and the weights they say these mean, f64 [N, K]."""

    codes: U8
    scales: U8
    second: float
    weights: NDArray[np.float64]


def _arguments(group: int) -> QuantizationArgs:
    kind = {
        16: {"strategy": "tensor_group", "scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn},
        32: {"strategy": "group", "scale_dtype": torch.uint8, "zp_dtype": torch.uint8},
    }[group]
    return QuantizationArgs(num_bits=4, type="float", symmetric=True, dynamic=False, group_size=group, **kind)


def quantize(weights: F32, group: int) -> Theirs:
    """NVFP4 for a group of 16, MXFP4 for one of 32."""
    tensor = torch.from_numpy(weights.copy())
    arguments = _arguments(group)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    blocks = tensor.reshape(len(tensor), -1, group)
    gparam = generate_gparam(tensor.amin(), tensor.amax()) if group == 16 else None
    scales, _ = calculate_qparams(blocks.amin(2), blocks.amax(2), arguments, global_scale=gparam)
    state: dict[str, Any] = {"weight": tensor, "weight_scale": scales}
    if gparam is not None:
        state["weight_global_scale"] = gparam
    compressor = NVFP4PackedCompressor if group == 16 else MXFP4PackedCompressor
    packed = compressor.compress(state, scheme)
    decoded = compressor.decompress(dict(packed), scheme)["weight"]
    return Theirs(
        packed["weight_packed"].numpy(),
        packed["weight_scale"].view(torch.uint8).numpy(),
        1.0 if gparam is None else 1 / float(gparam),
        decoded.double().numpy(),
    )


def decode(codes: U8, scales: U8, second: float, group: int) -> NDArray[np.float64]:
    """The weights f64 [N, K] they make of a matrix's bytes."""
    scheme = QuantizationScheme(targets=["Linear"], weights=_arguments(group))
    stored = torch.from_numpy(scales.copy())
    state: dict[str, Any] = {"weight_packed": torch.from_numpy(codes.copy())}
    if group == 16:
        state["weight_scale"] = stored.view(torch.float8_e4m3fn)
        state["weight_global_scale"] = torch.tensor([1 / second], dtype=torch.float32)
        compressor: Any = NVFP4PackedCompressor
    else:
        state["weight_scale"] = stored
        compressor = MXFP4PackedCompressor
    return np.asarray(compressor.decompress(state, scheme)["weight"].double().numpy())
