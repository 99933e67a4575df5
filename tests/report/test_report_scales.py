"""Histograms of scales against the source's own, decoded by the slow reference; and shards that are not right."""

from __future__ import annotations

import os
import struct
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Literal

import pytest

from hybrid_pack.io.manifest import read_manifest
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.report import scales as scales_module
from hybrid_pack.report.scales import Histogram, Scales, read_scales
from hybrid_pack.synthetic import Spec, read_tensor, write_checkpoint
from tests.convert.support import pack
from tests.reference.floats import e4m3, e8m0

Counts = dict[tuple[str, str, str], tuple[Counter[int], int]]
GATE_UP_DOWN = (("gate_proj", "w13"), ("up_proj", "w13"), ("down_proj", "w2"))


def octave_bin(value: Fraction, per_octave: int) -> int:
    """The largest b with 2^(b / per_octave) <= value, in whole numbers: value^per_octave against powers of two."""
    power, b = value**per_octave, 0
    while Fraction(2) ** (b + 1) <= power:
        b += 1
    while Fraction(2) ** b > power:
        b -= 1
    return b


def of_source(root: Path, manifest: object, spec: Spec) -> Counts:
    """Bins of every group of every packed expert, from the checkpoint's tensors."""
    found: Counts = {}
    documents = read_manifest(root.parent / "pack").layers
    for layer, tiers in documents.items():
        for expert in range(spec.num_experts):
            tier = "kept" if expert in tiers.kept else "tail"
            kind = {"e4m3_k16": "NVFP4", "e8m0_k32": "MXFP4", None: "NF3"}[
                tiers.kept_scale_format if tier == "kept" else None
            ]
            for projection, matrix in GATE_UP_DOWN:
                stem = f"model.layers.{layer}.mlp.experts.{expert}.{projection}"
                _, _, data = read_tensor(root, f"{stem}.weight_scale")
                second = Fraction(1)
                if kind == "NVFP4":
                    second = Fraction(struct.unpack("<f", read_tensor(root, f"{stem}.weight_scale_2")[2])[0])
                times_16 = tier == "tail" and spec.nf3_scales == "e4m3_x16"
                bins, zero = found.setdefault((tier, kind, matrix), (Counter(), 0))
                for byte, groups in Counter(data).items():
                    value = Fraction(e8m0(byte) if kind == "MXFP4" else e4m3(byte)) / (16 if times_16 else 1)
                    if value == 0:
                        zero += groups
                    else:
                        bins[octave_bin(value * second, 1 if kind == "MXFP4" else 2)] += groups
                found[tier, kind, matrix] = (bins, zero)
    return found


def of_report(scales: Scales) -> Counts:
    return {
        (h.tier, h.format, h.matrix): (Counter({h.first + i: n for i, n in enumerate(h.counts) if n}), h.zero)
        for h in scales.histograms
    }


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("nf3_scales", ["e4m3", "e4m3_x16"])
@pytest.mark.parametrize("kept_format", ["nvfp4", "mxfp4"])
def test_every_group_is_counted_in_its_bin(
    kept_format: Literal["nvfp4", "mxfp4"], nf3_scales: Literal["e4m3", "e4m3_x16"], tp: int, tmp_path: Path
) -> None:
    """The mapped layers in one format, the MTP layer always NVFP4; on all ranks together every group once."""
    spec = Spec(
        hidden=128, intermediate=128, num_experts=4, kept=2, vocab=16, kept_format=kept_format, nf3_scales=nf3_scales
    )
    write_checkpoint(tmp_path / "source", spec)
    manifest = pack(tmp_path / "source", tmp_path / "pack", tp).manifest
    scales = read_scales(tmp_path / "pack", manifest, full=True)
    assert of_report(scales) == of_source(tmp_path / "source", manifest, spec)
    assert scales.notes == ()
    for h in scales.histograms:
        assert sum(h.counts) + h.zero == h.nbytes
        assert h.experts == h.experts_all


def test_a_sample_is_the_same_every_time_and_says_its_size(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = read_manifest(packed)
    whole = read_scales(packed, manifest, full=True)
    monkeypatch.setattr(scales_module, "SAMPLE", 5)
    some = read_scales(packed, manifest)
    assert some == read_scales(packed, manifest)
    assert not some.full
    for part, every in zip(some.histograms, whole.histograms, strict=True):
        assert (part.experts, part.experts_all) == (5, every.experts_all)
        assert 0 < part.nbytes < every.nbytes
        found, allowed = of_report(Scales((part,), (), False)), of_report(Scales((every,), (), True))
        for key, (bins, zero) in found.items():
            assert all(bins[b] <= allowed[key][0][b] for b in bins)
            assert zero <= allowed[key][1]


def test_no_more_is_read_than_was_announced(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    real = TensorReader.read
    monkeypatch.setattr(scales_module, "SAMPLE", 3)
    read = []

    class Progress:
        def start(self, total_bytes: int, done_bytes: int) -> None:
            told.append(total_bytes)

        def advance(self, nbytes: int) -> None:
            told.append(-nbytes)

        def note(self, text: str) -> None: ...

    def spy(self, tensor, out, begin=0):  # type: ignore[no-untyped-def]
        read.append(out.nbytes)
        real(self, tensor, out, begin)

    monkeypatch.setattr(TensorReader, "read", spy)
    scales = read_scales(packed, read_manifest(packed), progress=Progress())
    assert sum(told) == 0
    assert told[0] == sum(h.nbytes for h in scales.histograms)
    globals_read = 4 * sum(h.experts for h in scales.histograms)
    assert sum(read) == told[0] + globals_read


def test_one_rank_alone_is_enough(copy: Path) -> None:
    manifest = read_manifest(copy)
    for shard in manifest.shards:
        if shard.rank == 1:
            (copy / shard.path).unlink()
    scales = read_scales(copy, manifest)
    assert scales.notes == ("3 of 6 shards are not here, or not of their size",)
    assert len(scales.histograms) == 4
    assert all(0 < 2 * h.experts == h.experts_all for h in scales.histograms)


def test_no_shard_is_no_histogram(copy: Path) -> None:
    manifest = read_manifest(copy)
    for shard in manifest.shards:
        (copy / shard.path).unlink()
    scales = read_scales(copy, manifest)
    assert scales.histograms == ()
    assert scales.notes == ("6 of 6 shards are not here, or not of their size",)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [_truncate, _pipe, _folder])
def test_a_shard_that_is_not_whole_is_left_out(damage: object, copy: Path) -> None:
    manifest = read_manifest(copy)
    assert callable(damage)
    damage(copy / manifest.shards[0].path)
    scales = read_scales(copy, manifest)
    assert scales.notes == ("1 of 6 shards are not here, or not of their size",)
    assert len(scales.histograms) == 4


def test_a_shard_that_cannot_be_read_is_noted(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = read_manifest(copy)
    first = copy / manifest.shards[0].path
    real = os.open

    def refuse(path: object, *rest: int, **more: int) -> int:
        if path == first:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    (note,) = read_scales(copy, manifest).notes
    assert note.startswith(f"left out, run hybrid-pack verify: {manifest.shards[0].path}: cannot read, and ")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_global_scale_that_is_none_is_noted(value: float, copy: Path) -> None:
    manifest = read_manifest(copy)
    shard = manifest.shards[0]
    with (copy / shard.path).open("r+b") as file:
        file.seek(shard.tensors["tail.w2_global_scale"].begin)
        file.write(struct.pack("<f", value))
    scales = read_scales(copy, manifest, full=True)
    assert scales.notes == (
        f"left out, run hybrid-pack verify: {shard.path}: a tail.w2_global_scale is no finite positive number",
    )
    tail: list[Histogram] = [h for h in scales.histograms if h.tier == "tail"]
    assert [h.experts_all - h.experts for h in tail] == [0, 1]
