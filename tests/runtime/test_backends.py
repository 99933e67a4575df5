"""What b12x's candidacy says for every way a machine can lack it, with made-up installations."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hybrid_pack import EnvironmentFailure
from hybrid_pack.runtime import Accepted, HybridMoE, Rejected, b12x_probe
from hybrid_pack.runtime.b12x_probe import Installed, package_problems
from hybrid_pack.runtime.backends import choose
from hybrid_pack.runtime.random_layer import random_layer

EVERYTHING = dict.fromkeys(b12x_probe.NEEDS, "1.0")


def machine(b12x: str | None = "1.1.0", nf3: bool | None = True, **others: str | None) -> Installed:
    return Installed(b12x, nf3, {**EVERYTHING, **{name.replace("_", "-"): value for name, value in others.items()}})


@pytest.mark.parametrize(
    ("have", "problems"),
    [
        (machine(), []),
        (
            machine(None, None),
            ["b12x is not installed; NF3 exists only in b12x 1.1.0: pip install 'hybrid-pack[b12x]'"],
        ),
        (
            machine("1.2.0", False),
            [
                "b12x 1.2.0 is installed, which has no NF3 kernel (nf3_2p1); only b12x 1.1.0 is supported: "
                "pip install 'hybrid-pack[b12x]'"
            ],
        ),
        (
            machine("2.0.0", True),
            ["b12x 2.0.0 is installed; only b12x 1.1.0 is supported: pip install 'hybrid-pack[b12x]'"],
        ),
        (
            machine(nf3=False),
            ["this b12x 1.1.0 has no NF3 kernel (nf3_2p1); it is not the one on PyPI: pip install 'hybrid-pack[b12x]'"],
        ),
        (
            machine(triton=None, nvidia_cutlass_dsl=None),
            [
                "nvidia-cutlass-dsl is not installed, which b12x imports (4.6.0): pip install 'hybrid-pack[b12x]'",
                "triton is not installed, which b12x imports (3.0 or newer): pip install 'hybrid-pack[b12x]'",
            ],
        ),
    ],
)
def test_what_is_missing(have: Installed, problems: list[str]) -> None:
    assert package_problems(have) == problems


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Installs a made-up b12x, ahead of the real one."""

    def install(version: str, kernel: str) -> None:
        package = tmp_path / "b12x" / "moe" / "_shared" / "kernels" / "w4a16"
        package.mkdir(parents=True)
        (tmp_path / "b12x" / "__init__.py").write_text("raise RuntimeError('looking must not import it')")
        (package / "kernel.py").write_text(kernel)
        metadata = tmp_path / f"b12x-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: b12x\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        for name in [name for name in sys.modules if name.split(".")[0] == "b12x"]:
            monkeypatch.delitem(sys.modules, name)
        importlib.invalidate_caches()

    return install


@pytest.mark.parametrize(("kernel", "nf3"), [('_LAYOUTS = {"packed", "nf3_2p1"}', True), ('{"packed"}', False)])
def test_looking_at_an_installation(site: Callable[[str, str], None], kernel: str, nf3: bool) -> None:
    site("1.5.1", kernel)
    have = b12x_probe.installed()
    assert (have.b12x, have.nf3) == ("1.5.1", nf3)
    assert any("b12x 1.5.1 is installed" in problem for problem in package_problems())


def test_a_machine_without_b12x(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(b12x_probe, "find_spec", lambda name: None)
    have = b12x_probe.installed()
    assert (have.b12x, have.nf3, set(have.others.values())) == (None, None, {None})


def test_all_reasons_are_given_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(b12x_probe, "installed", lambda: machine(None, None))
    layer = random_layer(256, 128, 4, (0,), (1, 2, 3))
    layer = replace(layer, tiles=(64, 128, 64, 128), geometry=replace(layer.geometry, nf3_levels=(0.0,) * 8))
    moe = HybridMoE(layer, 2)
    reason = moe.choices[0]
    assert isinstance(reason, Rejected) and moe.backend == "torch"
    for part in ("CUDA device", "b12x is not installed", "the layer says tiles (64, 128, 64, 128)", "NF3 levels"):
        assert part in reason.reason


def test_an_import_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError("libcute.so: cannot open shared object file")

    monkeypatch.setattr(b12x_probe, "kernels", fails)
    b12x_probe.import_problem.cache_clear()
    assert b12x_probe.import_problem() == (
        "b12x 1.1.0 cannot be imported: OSError: libcute.so: cannot open shared object file"
    )
    b12x_probe.import_problem.cache_clear()


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    if not torch.cuda.is_available():
        assert "no CUDA device" in b12x_probe.device_problems(cpu)[0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert b12x_probe.device_problems(cpu) == ["the layer is on cpu; load it with device='cuda'"]
    for capability, trusted, refused in (
        ((8, 9), False, True), ((9, 0), True, False), ((10, 0), False, False), ((12, 0), True, False),
        ((12, 1), True, False), ((13, 0), False, False),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert bool(b12x_probe.device_problems(cuda)) is refused
        assert b12x_probe.needs_self_test(cuda) is not trusted


def test_choosing() -> None:
    choices = [Rejected("b12x", "too old"), Rejected("cuda", "not yet"), Accepted("torch")]
    assert choose("auto", choices, "here") == choose("torch", choices, "here") == "torch"
    with pytest.raises(EnvironmentFailure, match="here: the backend 'b12x' cannot run this layer: b12x: too old"):
        choose("b12x", choices, "here")
    with pytest.raises(EnvironmentFailure, match="no backend can run this layer: b12x: too old; cuda: not yet"):
        choose("auto", choices[:2], "here")


def test_a_gpu_layer_run_by_torch_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer(256, 128, 4, (0,), (1, 2, 3))
    on_gpu = SimpleNamespace(type="cuda", index=0)
    monkeypatch.setattr(type(layer), "device", property(lambda self: on_gpu))
    monkeypatch.setattr(b12x_probe, "installed", lambda: machine(None, None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.warns(RuntimeWarning, match=r"slow torch backend, because of b12x: b12x is not installed.*doctor"):
        assert HybridMoE(layer, 2).backend == "torch"
