"""Write ``golden.npz``: small inputs and the bytes b12x 1.1.0's own packers make of them.

    python -m tests.golden.make_golden

Inputs come from fixed seeds, so a second run writes the same file. Each case has arrays ``<case>.<field>``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.golden import oracle
from tests.reference import floats, source

PATH = Path(__file__).with_name("golden.npz")

NF3_CODES = [(64, 64, 64), (128, 64, 128), (256, 96, 128), (256, 64, 256), (512, 32, 256), (64, 544, 64)]
"""(N, K, tile_n)."""
NF3_SCALES = [(64, 64), (128, 96), (192, 1088)]
"""(N, K)."""
FP4_CODES = [(64, 16), (128, 48), (192, 32), (64, 544)]
"""(N, K)."""
NVFP4_SCALES = [(64, 32, 0, 0x7F), (128, 64, 0, 0x40), (64, 272, 0x01, 0x10), (192, 48, 0x68, 0x7F), (64, 64, 0, 1)]
"""(N, K, lowest E4M3 byte, one past the highest), of one expert: b12x normalises the experts of a call alike."""
MXFP4_SCALES = [(64, 64, 112, 130, 71), (128, 96, 0, 75, 126), (64, 544, 200, 255, 0)]
"""(N, K, lowest E8M0 byte, one past the highest, shift added before b12x sees them)."""

Arrays = dict[str, NDArray[Any]]


def inputs() -> dict[str, Arrays]:
    """Every case's input arrays by case name."""
    cases: dict[str, Arrays] = {}
    for n, k, tile_n in NF3_CODES:
        codes = _rng(n, k, tile_n).integers(0, 8, (n, k), np.uint8)
        cases[f"nf3_codes-{n}x{k}-t{tile_n}"] = {"stored": source.store_nf3(codes), "tile_n": np.array(tile_n)}
    for n, k in NF3_SCALES:
        cases[f"nf3_scales-{n}x{k}"] = {"stored": _rng(n, k, 1).integers(0, 0x60, (n, k // 32), np.uint8)}
    for n, k in FP4_CODES:
        cases[f"fp4_codes-{n}x{k}"] = {"stored": _rng(n, k, 2).integers(0, 256, (n, k // 2), np.uint8)}
    for n, k, low, high in NVFP4_SCALES:
        rng = _rng(n, k, 3)
        cases[f"nvfp4_scales-{n}x{k}-{low}-{high}"] = {
            "stored": rng.integers(low, high, (n, k // 16), np.uint8),
            "second": np.float32(rng.uniform(1e-6, 1e-3)).reshape(()),
        }
    for n, k, low, high, shift in MXFP4_SCALES:
        cases[f"mxfp4_scales-{n}x{k}-{shift}"] = {
            "stored": _rng(n, k, 4).integers(low, high, (n, k // 32), np.uint8),
            "shift": np.array(shift),
        }
    return cases


def outputs(name: str, arrays: Arrays) -> Arrays:
    """What b12x makes of one case."""
    stored = arrays["stored"]
    kind = name.split("-")[0]
    if kind == "nf3_codes":
        return {"packed": oracle.nf3_codes(source.nf3_codes(stored), int(arrays["tile_n"]))}
    if kind == "nf3_scales":
        return {"packed": oracle.nf3_scales(floats.E4M3[stored], stored.shape[1] * 32)}
    if kind == "fp4_codes":
        return {"packed": oracle.fp4_codes(stored)}
    if kind == "nvfp4_scales":
        packed, global_scale = oracle.nvfp4_scales(stored, float(arrays["second"]), stored.shape[1] * 16)
        return {"packed": packed, "global_scale": np.array(global_scale, np.float32)}
    if kind == "mxfp4_scales":
        shifted = (stored.astype(np.int64) + int(arrays["shift"])).astype(np.uint8)
        return {"packed": oracle.mxfp4_scales(shifted, stored.shape[1] * 32)}
    raise ValueError(name)


def make() -> Arrays:
    """All arrays of the file."""
    made: Arrays = {}
    for name, arrays in inputs().items():
        made |= {f"{name}.{field}": value for field, value in (arrays | outputs(name, arrays)).items()}
    return made


def read() -> dict[str, Arrays]:
    """The committed file: arrays by case and field."""
    cases: dict[str, Arrays] = {}
    with np.load(PATH, allow_pickle=False) as file:
        for key in file.files:
            name, field = key.rsplit(".", 1)
            cases.setdefault(name, {})[field] = file[key]
    return cases


def _rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def main() -> None:
    reason = oracle.unavailable()
    if reason is not None:
        raise SystemExit(reason)
    np.savez_compressed(PATH, **make())  # type: ignore[arg-type]
    print(f"{PATH.name}: {PATH.stat().st_size} bytes")


if __name__ == "__main__":
    main()
