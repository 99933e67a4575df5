"""doctor and bench: what they print here, and on machines that lack one thing or another."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybrid_pack.io.names import FAMILIES
from hybrid_pack.runtime import b12x_probe, doctor
from hybrid_pack.runtime.b12x_probe import Installed
from hybrid_pack.runtime.backends import Accepted, Rejected
from hybrid_pack.synthetic import Spec, write_checkpoint
from tests.cli.conftest import Command

NOTHING = dict.fromkeys(b12x_probe.NEEDS)
EVERYTHING = dict.fromkeys(b12x_probe.NEEDS, "1.0")
ON_A_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")


GPT_OSS = Spec(
    hidden=128, intermediate=128, num_experts=4, kept=2, moe_layers=(1,), dense_layers=(0,), mtp_layer=False, vocab=8,
    family=next(i for i, family in enumerate(FAMILIES) if family.models.startswith("gpt-oss")),
)  # fmt: skip


def install(monkeypatch: pytest.MonkeyPatch, b12x: str | None, nf3: bool | None) -> None:
    have = Installed(b12x, nf3, EVERYTHING if b12x else NOTHING)
    monkeypatch.setattr(b12x_probe, "installed", lambda: have)


def gpu(monkeypatch: pytest.MonkeyPatch, *capability: int) -> None:
    properties = SimpleNamespace(
        name="NVIDIA H200", major=capability[0], minor=capability[1], total_memory=150_000_000_000
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(b12x_probe, "import_problem", lambda: None)


@ON_A_CPU
def test_a_machine_without_gpu_and_b12x(command: Command, monkeypatch: pytest.MonkeyPatch, packed: Path) -> None:
    install(monkeypatch, None, None)
    result = command("doctor")
    assert (result.code, result.err) == (0, "")
    for line in (
        "GPU                 none", "b12x                not installed", "triton              not installed",
        "backends for any layer, best first", "  torch can run",
    ):  # fmt: skip
        assert line in result.out.splitlines()
    assert re.search(
        r"b12x  cannot: no CUDA device.*; b12x is not installed; NF3 exists only in b12x 1\.1\.0", result.out
    )
    assert "for the fast backend: pip install 'hybrid-pack[b12x]'" in result.out
    assert f"backends for {packed}, best first" in command("doctor", packed).out


@ON_A_CPU
def test_requiring_a_backend(command: Command) -> None:
    assert command("doctor", "--require", "torch").code == 0
    result = command("doctor", "--require", "b12x")
    assert result.code == 3 and "backends for any layer" in result.out
    assert result.err.startswith("hybrid-pack: this machine: the backend b12x cannot run: no CUDA device")
    assert command("doctor", "--require", "cuda").code == 2


@pytest.mark.parametrize(
    ("capability", "verdict", "accepted"),
    [
        ((9, 0), "compute capability 9.0: measured by hybrid-pack on an H200", True),
        ((12, 0), "compute capability 12.0: what b12x is written for", True),
        ((10, 0), "compute capability 10.0: not tried; a self-test decides when a layer is made", True),
        ((8, 0), "compute capability 8.0: too old for b12x", False),
    ],
)
def test_gpus(
    command: Command, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], verdict: str, accepted: bool
) -> None:
    install(monkeypatch, "1.1.0", True)
    gpu(monkeypatch, *capability)
    text = command("doctor").out
    assert f"NVIDIA H200, 150 GB, {verdict}" in text
    assert ("  b12x  can run" in text) is accepted
    assert command("doctor", "--require", "b12x").code == (0 if accepted else 3)


def test_another_b12x(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "1.2.0", False)
    gpu(monkeypatch, 9, 0)
    text = command("doctor").out
    assert "b12x                1.2.0 (has no nf3_2p1; NF3 is only in 1.1.0)" in text
    assert "cannot: b12x 1.2.0 is installed, which has no NF3 kernel (nf3_2p1); only b12x 1.1.0 is supported" in text


def test_a_pack_no_backend_can_run(command: Command, monkeypatch: pytest.MonkeyPatch, packed: Path) -> None:
    install(monkeypatch, "1.1.0", True)
    gpu(monkeypatch, 9, 0)
    assert command("doctor", packed, "--require", "b12x").code == 0
    layers = doctor._layers

    def other(pack: Any) -> Any:
        from dataclasses import replace

        return [(replace(geometry, activation="gelu"), kept, tail) for geometry, kept, tail in layers(pack)]

    monkeypatch.setattr(doctor, "_layers", other)
    result = command("doctor", packed)
    assert result.code == 3 and "torch cannot: the activation 'gelu' is not supported" in result.out
    assert "no GPU and no package makes b12x run this pack: the activation 'gelu' is not run by b12x" in result.out
    assert "no backend can run: b12x: the activation 'gelu'" in result.err
    assert command("doctor").code == 0


@pytest.mark.parametrize("machine", ["nothing", "everything"])
def test_the_advice_follows_the_reasons(
    machine: str, command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """gpt-oss: its biases, not its activation; nothing that could be installed would help."""
    write_checkpoint(tmp_path / "source", GPT_OSS)
    assert command("convert", tmp_path / "source", "--out", tmp_path / "pack").code == 0
    if machine == "everything":
        install(monkeypatch, "1.1.0", True)
        gpu(monkeypatch, 9, 0)
    else:
        install(monkeypatch, None, None)
    result = command("doctor", tmp_path / "pack")
    assert result.code == 3
    reason = "its experts have biases (base tensors), which no backend of this version adds"
    assert f"  torch cannot: {reason}\n" in result.out
    advice = result.out.partition("what to do\n")[2].splitlines()
    assert advice[0].startswith("  no GPU and no package makes b12x run this pack: ") and reason in advice[0]
    assert advice[1:] == ["  the pack can be converted and verified, but this version of hybrid-pack cannot run it"]
    assert re.fullmatch(
        rf"hybrid-pack: \S+/pack: no backend can run: b12x: .*; cuda: not impl.*; torch: {re.escape(reason)}\n",
        result.err,
    )


def test_json(command: Command, packed: Path) -> None:
    document = json.loads(command("doctor", packed, "--json").out)
    assert document["ok"] is True and document["pack"] == str(packed)
    assert [entry["backend"] for entry in document["backends"]] == ["b12x", "cuda", "torch"]
    assert document["backends"][2] == {"backend": "torch", "accepted": True, "reason": None}
    assert set(document) == {"versions", "packages", "b12x_has_nf3", "gpus", "backends", "advice", "pack", "ok"}


def test_no_pack(command: Command, tmp_path: Path) -> None:
    assert command("doctor", tmp_path).code == 1
    assert command("bench", tmp_path).code == 1


def test_driver_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "version"
    monkeypatch.setattr(doctor, "_DRIVER", file)
    file.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 12\n"
    )
    assert doctor.driver_version() == "580.159.04"
    file.unlink()
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert doctor.driver_version() is None
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name)
    for code, out, version in ((0, "580.1\n580.1\n", "580.1"), (9, "NVIDIA-SMI has failed", None), (0, "", None)):
        result = subprocess.CompletedProcess([], code, out, "")
        monkeypatch.setattr(doctor.subprocess, "run", lambda *a, found=result, **k: found)
        assert doctor.driver_version() == version


def test_rejections_by_name() -> None:
    found = doctor.Diagnosis({}, {}, None, (), (Rejected("b12x", "why"), Accepted("torch")), (), None)
    assert (found.rejected("b12x"), found.rejected("torch"), found.ok) == ("why", None, True)


def test_bench(command: Command, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hybrid_pack.runtime import timing

    monkeypatch.setattr(timing, "SIZES", (1, 4))
    result = command("bench", packed, "--rank", "1", "--layers", "1", "--device", "cpu")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("loaded 1 layer of rank 1 on cpu")
    assert "backend torch" in result.out
    assert [line.split()[0] for line in result.out.splitlines()[2:]] == ["tokens", "1", "4"]
    document = json.loads(command("bench", packed, "--json", "--device", "cpu").out)
    assert [timed["tokens"] for timed in document["moe"]] == [1, 4]
    assert document["backend"] == "torch" and document["load"]["rank"] == 0 and document["moe"][0]["how"] == "call"
    assert command("bench", packed, "--rank", "2", "--device", "cpu").code == 2
    assert command("bench", packed, "--backend", "b12x", "--device", "cpu").code == 3
