"""Whether b12x can run here: what is installed, which GPU, which layers its kernels take. Nothing heavy is imported.

Everything said about b12x in ``runtime/b12x_*.py`` was read from the 1.1.0 wheel,
``b12x/moe/_shared/kernels/w4a16/{host,kernel,prepare,route_pack}.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

from hybrid_pack.runnable import BIASES, SUPPORTED, gate_problem, levels_problem
from hybrid_pack.runtime.b12x_activation import kernel_activation
from hybrid_pack.runtime.layer import LayerGeometry
from hybrid_pack.sharding import Tiles, tiles_for

VERSION = "1.1.0"
"""The only b12x with NF3: older ones predate it, 1.2.0 dropped it. Private functions are used, so no other is tried."""

INSTALL = "pip install 'hybrid-pack[b12x]'"
KERNEL_MODULE = "b12x.moe._shared.kernels.w4a16.kernel"
PREPARE_MODULE = "b12x.moe._shared.kernels.w4a16.prepare"

NEEDS: Mapping[str, tuple[str, str]] = {
    "nvidia-cutlass-dsl": ("cutlass", "4.6.0"),
    "triton": ("triton", "3.0 or newer"),
    "cuda-python": ("cuda.bindings", "12 or 13"),
    "apache-tvm-ffi": ("tvm_ffi", "0.1.6 or newer"),
}
"""Distributions b12x imports: the module looked for, and the version it wants."""

OLDEST_GPU = (9, 0)
"""The kernels use ``mul.bf16x2`` and ``red.add.bf16x2``, which PTX has from compute capability 9.0."""

TRUSTED_GPUS: Mapping[tuple[int, int], str] = {
    (9, 0): "measured by hybrid-pack on an H200",
    (12, 0): "what b12x is written for",
    (12, 1): "what b12x is written for",
}
"""Compute capabilities that need no self-test."""

SCALE_FORMATS = ("e4m3_k16", "e8m0_k32")


@dataclass(frozen=True)
class Installed:
    """What is installed.

    Attributes:
        b12x: Its version, or None.
        nf3: Whether its kernel source has the layout ``nf3_2p1``; None without b12x.
        others: Version of each distribution in ``NEEDS``, None where its module is not found.
    """

    b12x: str | None
    nf3: bool | None
    others: Mapping[str, str | None]


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _found(module: str) -> bool:
    """Whether a module could be imported; its parents are."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a parent is missing, or broken
        return False


def _has_nf3() -> bool:
    spec = find_spec("b12x")
    for root in (spec and spec.submodule_search_locations) or ():
        kernel = Path(root, *KERNEL_MODULE.split(".")[1:]).with_suffix(".py")
        if kernel.is_file() and b'"nf3_2p1"' in kernel.read_bytes():
            return True
    return False


def installed() -> Installed:
    """Look at what is installed; b12x itself is not imported."""
    found = _found("b12x")
    others = {
        name: (_version(name) or "of unknown version") if _found(module) else None
        for name, (module, _) in NEEDS.items()
    }
    return Installed((_version("b12x") or "unknown") if found else None, _has_nf3() if found else None, others)


def package_problems(have: Installed | None = None) -> list[str]:
    """What is wrong with the installed packages; empty if nothing is."""
    have = installed() if have is None else have
    if have.b12x is None:
        return [f"b12x is not installed; NF3 exists only in b12x {VERSION}: {INSTALL}"]
    problems = []
    if have.b12x != VERSION:
        lack = "" if have.nf3 else ", which has no NF3 kernel (nf3_2p1)"
        problems.append(f"b12x {have.b12x} is installed{lack}; only b12x {VERSION} is supported: {INSTALL}")
    elif not have.nf3:
        problems.append(f"this b12x {VERSION} has no NF3 kernel (nf3_2p1); it is not the one on PyPI: {INSTALL}")
    problems += [
        f"{name} is not installed, which b12x imports ({NEEDS[name][1]}): {INSTALL}"
        for name, found in have.others.items()
        if found is None
    ]
    return problems


def device_problems(device: torch.device) -> list[str]:
    """Why a device cannot run b12x; empty if it can, or if a self-test has to tell."""
    if not torch.cuda.is_available():
        build = "" if torch.version.cuda else " (this torch is built without CUDA)"
        return [f"no CUDA device{build}"]
    if device.type != "cuda":
        return [f"the layer is on {device}; load it with device='cuda'"]
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_GPU:
        oldest = ".".join(map(str, OLDEST_GPU))
        return [f"the GPU has compute capability {capability[0]}.{capability[1]}; the kernels need {oldest} or newer"]
    return []


def needs_self_test(device: torch.device) -> bool:
    """Whether nobody has shown the kernels to work on this kind of GPU."""
    return torch.cuda.get_device_capability(device) not in TRUSTED_GPUS


def layer_problems(geometry: LayerGeometry, tiles: Tiles, *, kept: bool, tail: bool) -> list[str]:
    """What a layer has that the kernels do not take; empty if nothing.

    Args:
        geometry: Of the rank.
        tiles: Tiles the tail is laid out for.
        kept: Whether there are kept experts.
        tail: Whether there are tail experts.
    """
    problems = []
    right = tiles_for(geometry.hidden_size, geometry.intermediate_size, geometry.gated)
    if tiles != right:
        # The bytes do not show which tiles they are laid out for, and wrong ones give garbage.
        sizes = f"hidden size {geometry.hidden_size} and {geometry.intermediate_size} intermediate rows"
        problems.append(f"the layer says tiles {tiles}, but {sizes} are packed for {right or 'none that b12x has'}")
    if kernel_activation(geometry.activation) is None:
        problems.append(f"the activation {geometry.activation!r} is not run by b12x here, only {SUPPORTED}")
    elif (problem := gate_problem(geometry.activation, gated=geometry.gated)) is not None:
        problems.append(problem)
    if geometry.expert_biases:
        problems.append(BIASES)
    if kept and geometry.kept_scale_format not in SCALE_FORMATS:
        problems.append(f"kept experts have scales {geometry.kept_scale_format!r}, not one of {SCALE_FORMATS}")
    if tail and (problem := levels_problem(geometry.nf3_levels)) is not None:
        problems.append(problem)
    return problems


@cache
def import_problem() -> str | None:
    """Import b12x's kernels, which takes seconds; None if that worked."""
    try:
        kernels()
    except Exception as error:  # anything can happen while a foreign package is imported
        return f"b12x {VERSION} cannot be imported: {type(error).__name__}: {error}"
    return None


def kernels() -> tuple[ModuleType, ModuleType]:
    """The modules (kernel, prepare) of b12x."""
    return importlib.import_module(KERNEL_MODULE), importlib.import_module(PREPARE_MODULE)
