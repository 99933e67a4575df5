"""Good files of Hessians and of importance, to read and to break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from hybrid_pack.io.calibration import Wanted
from tests.checkpoints import Stored, Tensors, read_file, write_file

H, INNER = 64, 32
WANTED = Wanted({3: (0, 2), 11: (1,)}, {"gate_up": H, "down": INNER})
"""Layer 11 has only shared tensors, layer 3 everything of its own."""


def f32(values: np.ndarray) -> Stored:
    return Stored("F32", values.shape, values.astype("<f4").tobytes())


def hessian(channels: int, seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((2 * channels, channels))
    return (x.T @ x).astype(np.float32)


def mean_squares(channels: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).exponential(size=channels).astype(np.float32)


SEEDS = {(3, "0"): 1, (3, "2"): 2, (3, "1"): 3, (11, "shared"): 4, (3, "shared"): 5}
"""Experts with tensors: all wanted ones, one nobody wants (3, 1), and a shared one nobody needs."""


def value(kind: str, layer: int, expert: str, matrix: str) -> np.ndarray:
    channels = WANTED.channels[matrix]
    make = hessian if kind == "hessians" else mean_squares
    return make(channels, 10 * SEEDS[layer, expert] + (matrix == "down"))


def write_hessians(root: Path) -> Path:
    """The folder, made."""
    root.mkdir()
    for layer in (3, 11, 12):
        tensors = {
            f"{expert}.{matrix}.hessian": f32(value("hessians", at, expert, matrix))
            for at, expert in SEEDS
            for matrix in WANTED.channels
            if at == layer
        }
        write_file(root / f"layer-{layer}.safetensors", tensors or {"not looked at": f32(np.zeros(1))})
    (root / "README.md").write_text("what was collected, and how")
    return root


def write_importance(root: Path) -> Path:
    """The file, written into a folder that is made."""
    root.mkdir()
    path = root / "importance.safetensors"
    write_file(
        path,
        {
            f"{layer}.{expert}.{matrix}": f32(value("importance", layer, expert, matrix))
            for layer, expert in SEEDS
            for matrix in WANTED.channels
        },
    )
    return path


def edit(name: str, change: Callable[[Tensors], object]) -> Callable[[Path], object]:
    """Rewrite a file of a folder with other tensors."""

    def apply(root: Path) -> None:
        tensors = read_file(root / name)
        change(tensors)
        write_file(root / name, tensors)

    return apply


def put(name: str, tensor: str, at: object, number: float) -> Callable[[Path], object]:
    """Write a number into a tensor of F32."""

    def change(tensors: Tensors) -> None:
        stored = tensors[tensor]
        values = np.frombuffer(stored.data, "<f4").reshape(stored.shape).copy()
        values[at] = number  # type: ignore[index]
        tensors[tensor] = f32(values)

    return edit(name, change)
