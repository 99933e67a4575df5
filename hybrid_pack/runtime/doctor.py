"""What this machine can run, and what is missing: the report behind ``hybrid-pack doctor``."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hybrid_pack._version import __version__
from hybrid_pack.runtime import b12x_probe, torch_backend
from hybrid_pack.runtime.backends import NOT_YET, PREFERENCE, Accepted, Choice, Rejected
from hybrid_pack.runtime.build import layer_geometry
from hybrid_pack.runtime.layer import LayerGeometry
from hybrid_pack.runtime.pack import Pack

_DRIVER = Path("/proc/driver/nvidia/version")
_SMI_SECONDS = 10.0


@dataclass(frozen=True)
class Gpu:
    """One CUDA device.

    Attributes:
        name: As the driver names it.
        capability: Compute capability, such as ``9.0``.
        memory_bytes: Of the device.
        verdict: Whether b12x is known to run on such a GPU.
    """

    name: str
    capability: str
    memory_bytes: int
    verdict: str


@dataclass(frozen=True)
class Diagnosis:
    """The machine, and what each backend says to it.

    Attributes:
        versions: Of Python, hybrid-pack, torch and what it was built for, and the NVIDIA driver; None if there is none.
        packages: Version of b12x and of what it imports, None where it is not installed.
        b12x_has_nf3: Whether the installed b12x has ``nf3_2p1``; None without b12x.
        gpus: CUDA devices.
        backends: What every backend says, best first.
        advice: What to do, a sentence each.
        pack: What the backends were asked about: a pack's layers, or any layer if None.
    """

    versions: Mapping[str, str | None]
    packages: Mapping[str, str | None]
    b12x_has_nf3: bool | None
    gpus: tuple[Gpu, ...]
    backends: tuple[Choice, ...]
    advice: tuple[str, ...]
    pack: str | None

    def rejected(self, backend: str) -> str | None:
        """Why a backend cannot run here, or None if it can."""
        return next((c.reason for c in self.backends if isinstance(c, Rejected) and c.backend == backend), None)

    @property
    def ok(self) -> bool:
        """Whether some backend can run."""
        return any(isinstance(choice, Accepted) for choice in self.backends)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        backends = [
            {
                "backend": choice.backend,
                "accepted": isinstance(choice, Accepted),
                "reason": self.rejected(choice.backend),
            }
            for choice in self.backends
        ]
        return {**asdict(self), "backends": backends, "ok": self.ok}


def driver_version() -> str | None:
    """Version of the NVIDIA driver, or None if there is none."""
    if _DRIVER.is_file():
        match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", _DRIVER.read_text(errors="replace"))
        if match:
            return match[1]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = result.stdout.split()
    return lines[0] if result.returncode == 0 and lines else None


def _gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        if capability < b12x_probe.OLDEST_GPU:
            verdict = "too old for b12x"
        else:
            untried = "not tried; a self-test decides when a layer is made"
            verdict = b12x_probe.TRUSTED_GPUS.get(capability, untried)
        found.append(Gpu(properties.name, ".".join(map(str, capability)), int(properties.total_memory), verdict))
    return tuple(found)


def _layers(pack: Pack) -> list[tuple[LayerGeometry, bool, bool]]:
    """(geometry, has kept experts, has tail experts) of each distinct kind of layer in a pack."""
    manifest = pack.manifest
    found: dict[tuple[LayerGeometry, bool, bool], None] = {}
    for number, layer in manifest.layers.items():
        geometry = layer_geometry(manifest, int(number))
        found[geometry, bool(layer.kept), bool(layer.tail)] = None
    return list(found)


def diagnose(pack: Pack | None = None) -> Diagnosis:
    """Look at this machine; b12x is imported only where it could run.

    Args:
        pack: Ask about this pack's layers, from its manifest; nothing is loaded.
    """
    have = b12x_probe.installed()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    packages = b12x_probe.package_problems(have)
    problems = [*b12x_probe.device_problems(device), *packages]
    foreign: list[str] = []
    torch_problem = None
    for geometry, kept, tail in _layers(pack) if pack is not None else ():
        found = b12x_probe.layer_problems(geometry, pack.tiles if pack else (0, 0, 0, 0), kept=kept, tail=tail)
        foreign += [problem for problem in found if problem not in foreign]
        torch_problem = torch_problem or torch_backend.why_not_geometry(geometry)
    problems += foreign
    if not problems and (problem := b12x_probe.import_problem()) is not None:
        problems.append(problem)
    reasons = {"b12x": "; ".join(problems) or None, "cuda": NOT_YET, "torch": torch_problem}
    return Diagnosis(
        versions={
            "python": platform.python_version(),
            "hybrid-pack": __version__,
            "torch": torch.__version__,
            "torch's CUDA": torch.version.cuda,
            "NVIDIA driver": driver_version(),
        },
        packages={"b12x": have.b12x, **have.others},
        b12x_has_nf3=have.nf3,
        gpus=_gpus(),
        backends=tuple(
            Accepted(name) if (reason := reasons[name]) is None else Rejected(name, reason) for name in PREFERENCE
        ),
        advice=tuple(_advice(bool(packages), tuple(foreign), torch_problem)),
        pack=None if pack is None else str(pack.root),
    )


def _advice(packages_missing: bool, foreign: tuple[str, ...], torch_problem: str | None) -> list[str]:
    """What to do.

    Args:
        packages_missing: b12x, or what it imports, is not installed as it has to be.
        foreign: What the pack has that b12x's kernels do not take, whatever the machine.
        torch_problem: Likewise for the backend ``torch``.
    """
    advice = []
    if foreign:
        advice.append(f"no GPU and no package makes b12x run this pack: {'; '.join(foreign)}")
    else:
        if not torch.cuda.is_available():
            if torch.version.cuda is None:
                how = "install a torch that is built with CUDA: https://pytorch.org/get-started/locally/"
                advice.append(f"for a GPU, {how}")
            else:
                advice.append("this torch has CUDA but no device: look at the NVIDIA driver and CUDA_VISIBLE_DEVICES")
        if packages_missing:
            advice.append(
                f"for the fast backend: {b12x_probe.INSTALL} (about 1 GB; NF3 is only in b12x {b12x_probe.VERSION})"
            )
    if torch_problem is not None:
        advice.append("the pack can be converted and verified, but this version of hybrid-pack cannot run it")
    return advice
