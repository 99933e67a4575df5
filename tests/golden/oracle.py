"""b12x 1.1.0's own packers behind numpy arrays: the oracle of every device layout.

Tests call ``require()`` first: without b12x they are skipped, or fail where HYBRID_PACK_REQUIRE_B12X=1.
"""

from __future__ import annotations

import importlib.metadata
import os
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
VERSION = "1.1.0"
"""The only b12x release with nf3_2p1."""


def unavailable() -> str | None:
    """Why b12x cannot be the oracle here, or None if it can."""
    try:
        found = importlib.metadata.version("b12x")
    except importlib.metadata.PackageNotFoundError:
        return "b12x is not installed"
    if found != VERSION:
        return f"b12x {found} is installed, the layouts are those of {VERSION}"
    try:
        module()
    except ImportError as error:
        return f"b12x does not import: {error}"
    return None


def require() -> None:
    """Skip the running test without b12x, or fail it where the environment promises b12x."""
    reason = unavailable()
    if reason is None:
        return
    if os.environ.get("HYBRID_PACK_REQUIRE_B12X") == "1":
        pytest.fail(f"HYBRID_PACK_REQUIRE_B12X=1, but {reason}")
    pytest.skip(reason)


def module() -> ModuleType:
    """The module with the packers."""
    from b12x.moe._shared.kernels.w4a16 import prepare

    return prepare  # type: ignore[no-any-return]


def _torch(array: NDArray[Any], dtype: str | None = None) -> Any:
    import torch

    tensor = torch.from_numpy(np.array(array))
    return tensor if dtype is None else tensor.view(getattr(torch, dtype))


def nf3_codes(codes: U8, tile_n: int) -> NDArray[np.uint32]:
    """Codes u8 [N, K] to words u32 [(K/16) * (N/2) * 3]."""
    n, k = codes.shape
    words = module()._nf3_pack_codes(_torch(codes.astype(np.int64)), size_k=k, size_n=n, tile_n=tile_n)
    return words.numpy().view(np.uint32)


def nf3_scales(scales: NDArray[np.float64], k: int) -> U8:
    """Scales [N, K/32] as values to bytes u8 [K/32, N]. b12x raises scales under 2^-10 to it, zero excepted."""
    n = scales.shape[0]
    return module()._nf3_pack_scales(_torch(scales.astype(np.float32)), size_k=k, size_n=n).numpy()


def fp4_codes(stored: U8) -> NDArray[np.uint32]:
    """Stored rows u8 [N, K/2] to words u32 [K/16, N/64 * 128]."""
    n, width = stored.shape
    return module()._repack_weight(_torch(stored[None]), size_k=2 * width, size_n=n)[0].numpy().view(np.uint32)


def nvfp4_scales(scale_bytes: U8, second: float, k: int) -> tuple[U8, float]:
    """E4M3 bytes u8 [N, K/16] of one expert and its second scale to bytes u8 [K/16, N] and its global scale."""
    import torch

    packed, global_scale = module()._permute_nvfp4_scales(
        _torch(scale_bytes[None], "float8_e4m3fn"),
        torch.tensor([second], dtype=torch.float32),
        size_k=k,
        size_n=scale_bytes.shape[0],
        a_dtype=torch.bfloat16,
    )
    return packed[0].view(torch.uint8).numpy(), float(global_scale[0])


def nvfp4_factor(scale_bytes: U8) -> float:
    """The power of two b12x multiplies the block scales of one expert with, from E4M3 bytes u8 [N, K/16]."""
    import torch

    return float(module()._nvfp4_compute_scale_factor(_torch(scale_bytes[None], "float8_e4m3fn"), torch.bfloat16))


def mxfp4_scales(scale_bytes: U8, k: int) -> U8:
    """E8M0 bytes u8 [N, K/32] of one expert to bytes u8 [K/32, N]."""
    return module()._pack_e8m0_k32_scales(_torch(scale_bytes[None]), size_k=k, size_n=scale_bytes.shape[0])[0].numpy()
