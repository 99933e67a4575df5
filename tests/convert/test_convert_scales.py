"""Scales that a pack cannot hold: refused by name, or counted; and the two second-level scales of gate and up."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hybrid_pack.cli.main import run
from hybrid_pack.errors import DataError
from hybrid_pack.synthetic import Spec, bit_map
from hybrid_pack.verify import verify_pack
from tests.checkpoints import Stored, edit_tensors
from tests.convert.conftest import Sources
from tests.convert.stored import join, manifest, source_experts
from tests.convert.support import pack, partials, small, weights

NVFP4, MXFP4, KQUANT = small(), small(kept_format="mxfp4"), small(nf3_scales="e4m3_x16")
BITS = bit_map(NVFP4)["1"]
KEPT, TAIL, LAST_KEPT = BITS.index(4), BITS.index(3), 3 - BITS[::-1].index(4)
LAYER = "model.layers.1.mlp.experts"
MTP = "model.layers.2.mlp.experts"

Copy = Callable[[Spec], Path]


@pytest.fixture
def copy(sources: Sources, tmp_path: Path) -> Copy:
    """A checkpoint to change."""

    def make(spec: Spec) -> Path:
        return Path(shutil.copytree(sources(spec), tmp_path / "source"))

    return make


def set_bytes(root: Path, tensor: str, values: dict[int, int]) -> None:
    """Change single bytes of a tensor."""
    with edit_tensors(root) as tensors:
        data = bytearray(tensors[tensor].data)
        for index, value in values.items():
            data[index] = value
        tensors[tensor].data = bytes(data)


def set_second(root: Path, matrix: str, value: float) -> None:
    with edit_tensors(root) as tensors:
        stored = tensors[f"{matrix}.weight_scale_2"]
        tensors[f"{matrix}.weight_scale_2"] = Stored("F32", stored.shape, np.float32(value).tobytes())


@dataclass(frozen=True)
class Refused:
    """A byte that means nothing where it is, and the words the message must have."""

    spec: Spec
    matrix: str
    index: int
    byte: int
    message: str


def refused(spec: Spec, matrix: str, index: int, byte: int, groups: int, value: str, limit: str) -> Refused:
    layer, expert = re.search(r"layers\.(\d+)\..*experts\.(\d+)", matrix).groups()  # type: ignore[union-attr]
    row, group = divmod(index, groups)
    message = (
        rf"source/model-\S+\.safetensors: {re.escape(matrix)}\.weight_scale: layer {layer} expert {expert}: "
        rf"scale \[{row}, {group}\] of \w+ \(expected a scale that is not negative and {limit}, "
        rf"found byte 0x{byte:02X} = {value}\); the export is damaged"
    )
    return Refused(spec, matrix, index, byte, message)


LIMIT = "below 32"
REFUSED = {
    "nvfp4_nan": refused(NVFP4, f"{LAYER}.{KEPT}.gate_proj", 0, 0x7F, 8, "nan", "finite"),
    "nvfp4_negative_nan": refused(NVFP4, f"{LAYER}.{KEPT}.up_proj", 1023, 0xFF, 8, "nan", "finite"),
    "nvfp4_negative": refused(NVFP4, f"{LAYER}.{LAST_KEPT}.down_proj", 517, 0xB8, 8, "-1", "finite"),
    "nvfp4_smallest_negative": refused(NVFP4, f"{LAYER}.{KEPT}.down_proj", 9, 0x81, 8, "-0.00195312", "finite"),
    "nvfp4_nan_in_the_mtp_layer": refused(NVFP4, f"{MTP}.3.up_proj", 77, 0x7F, 8, "nan", "finite"),
    "mxfp4_nan": refused(MXFP4, f"{LAYER}.{KEPT}.gate_proj", 3, 0xFF, 4, "nan", "finite"),
    "mxfp4_nan_down": refused(MXFP4, f"{LAYER}.{LAST_KEPT}.down_proj", 511, 0xFF, 4, "nan", "finite"),
    "nf3_32": refused(NVFP4, f"{LAYER}.{TAIL}.gate_proj", 5, 0x60, 4, "32", LIMIT),
    "nf3_448": refused(NVFP4, f"{LAYER}.{TAIL}.down_proj", 301, 0x7E, 4, "448", LIMIT),
    "nf3_nan": refused(NVFP4, f"{LAYER}.{TAIL}.up_proj", 2, 0x7F, 4, "nan", LIMIT),
    "nf3_negative": refused(NVFP4, f"{LAYER}.{TAIL}.up_proj", 2, 0x90, 4, "-0.03125", LIMIT),
    "kquant_nan": refused(KQUANT, f"{LAYER}.{TAIL}.up_proj", 8, 0x7F, 4, "nan", LIMIT),
    "kquant_negative": refused(KQUANT, f"{LAYER}.{TAIL}.up_proj", 8, 0xB8, 4, "-0.0625", LIMIT),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_scales(case: str, copy: Copy, tmp_path: Path) -> None:
    """By tensor and index; and nothing unfinished stays."""
    refusal = REFUSED[case]
    root, out = copy(refusal.spec), tmp_path / "out"
    set_bytes(root, f"{refusal.matrix}.weight_scale", {refusal.index: refusal.byte})
    with pytest.raises(DataError, match=refusal.message):
        pack(root, out, 2)
    assert not partials(out)
    assert not (out / "hybrid_pack.json").exists()


def test_the_first_of_several_is_named(copy: Copy, tmp_path: Path) -> None:
    root = copy(NVFP4)
    set_bytes(root, f"{LAYER}.{KEPT}.up_proj.weight_scale", {900: 0xFF, 33: 0x81, 500: 0x7F})
    with pytest.raises(DataError, match=r"up_proj\.weight_scale: .* scale \[4, 1\] .* 0x81"):
        pack(root, tmp_path / "out", 2)


SECONDS = {
    "zero": 0.0,
    "minus_zero": -0.0,
    "negative": -1.0,
    "infinite": math.inf,
    "minus_infinite": -math.inf,
    "nan": math.nan,
    "512": 512.0,
    "largest": 3e38,
}


@pytest.mark.parametrize("role", ["gate", "up", "down"])
@pytest.mark.parametrize("case", SECONDS)
def test_refused_second_scales(case: str, role: str, copy: Copy, tmp_path: Path) -> None:
    """Before any expert is packed."""
    root, out = copy(NVFP4), tmp_path / "out"
    matrix = f"{LAYER}.{LAST_KEPT}.{role}_proj"
    set_second(root, matrix, SECONDS[case])
    message = (
        rf"{re.escape(matrix)}\.weight_scale_2: layer 1 expert {LAST_KEPT}: second-level scale "
        rf"\(expected a finite positive number( below 512)?, found {re.escape(f'{SECONDS[case]:g}')}\)"
    )
    with pytest.raises(DataError, match=message):
        pack(root, out)
    assert not out.exists()


@pytest.mark.parametrize("value", [511.875, 2.0**-126, 2.0**-149, 3 * 2.0**-149])
def test_second_scales_at_the_limits_are_exact(value: float, copy: Copy, tmp_path: Path) -> None:
    root, out = copy(NVFP4), tmp_path / "out"
    for role in ("gate", "up", "down"):
        set_second(root, f"{LAYER}.{KEPT}.{role}_proj", value)
    pack(root, out, 2)
    check_scales(root, out, 2)


def check_scales(root: Path, out: Path, tp: int) -> int:
    """Every scale is the source's, or zero; returns how many became zero."""
    flushed = 0
    experts = source_experts(root)
    for (layer, expert, role), whole in join(out, tp, 1, experts).items():
        stored = experts[layer][expert][role]
        assert np.array_equal(whole.codes, stored.codes)
        lost = (whole.scales == 0) & (stored.scales > 0)
        assert np.array_equal(whole.scales[~lost], stored.scales[~lost])
        flushed += int(lost.sum())
    return flushed


def test_minus_zero_is_zero(copy: Copy, tmp_path: Path) -> None:
    root, out = copy(NVFP4), tmp_path / "out"
    pack(root, tmp_path / "before")
    tensors = [f"{LAYER}.{KEPT}.down_proj.weight_scale", f"{LAYER}.{TAIL}.gate_proj.weight_scale"]
    added = 0
    with edit_tensors(root) as editor:
        for tensor in tensors:
            data = editor[tensor].data
            editor[tensor].data = bytes([0x80] * 10) + data[10:]
            added += sum(byte > 0 for byte in data[:10])
    pack(root, out, 2)
    assert check_scales(root, out, 2) == 0
    before, after = (manifest(folder)["report"]["groups_zero_scale"] for folder in (tmp_path / "before", out))
    assert after == before + added > before


@pytest.mark.parametrize("exponent", [-24, -3, -1, 0, 1, 2, 24])
@pytest.mark.parametrize("tp", [1, 2])
def test_second_scales_a_power_of_two_apart(exponent: int, tp: int, copy: Copy, tmp_path: Path) -> None:
    """Exact where the block scales can make up for it; what is too small for the device byte is counted."""
    root, out = copy(NVFP4), tmp_path / "out"
    set_second(root, f"{LAYER}.{KEPT}.gate_proj", 1e-5)
    set_second(root, f"{LAYER}.{KEPT}.up_proj", float(np.ldexp(np.float32(1e-5), exponent)))
    if abs(exponent) == 24:  # nearly all blocks of one of them would become zero
        with pytest.raises(DataError, match=rf"layer \d+ expert {KEPT}: gate and up .* \d+ blocks would become zero"):
            pack(root, out, tp)
        pack(root, out, tp, on_scale_mismatch="requantize", overwrite=True)
    else:
        pack(root, out, tp)
    report = manifest(out)["report"]
    assert report["experts_requantized"] == []
    flushed = check_scales(root, out, tp)
    assert report["blocks_flushed"] == flushed
    assert (flushed > 0) == (abs(exponent) == 24), flushed


@pytest.mark.parametrize("tp", [1, 2])
def test_flushed_blocks_are_counted(tp: int, copy: Copy, tmp_path: Path) -> None:
    """Blocks below 2^-6 beside one of 448 in the same rank are lost, and only those."""
    root, out = copy(NVFP4), tmp_path / "out"
    tensor = f"{LAYER}.{KEPT}.down_proj.weight_scale"
    with edit_tensors(root) as tensors:
        scales = np.full((128, 8), 0x38, np.uint8)  # 1.0
        scales[0, 0] = 0x7E  # 448, in the columns of rank 0 of 2
        scales[5:9, 1] = [0x01, 0x07, 0x08, 0x09]  # 2^-9, 7 * 2^-9, 2^-6, 9 * 2^-9
        scales[5:9, 6] = [0x01, 0x07, 0x08, 0x09]
        tensors[tensor].data = scales.tobytes()
    pack(root, out, tp)
    assert manifest(out)["report"]["blocks_flushed"] == (4 if tp == 1 else 2)
    assert check_scales(root, out, tp) == (4 if tp == 1 else 2)


@pytest.mark.parametrize("tp", [1, 2])
def test_one_expert_does_not_flush_another(tp: int, copy: Copy, tmp_path: Path) -> None:
    root, out = copy(NVFP4), tmp_path / "out"
    with edit_tensors(root) as tensors:
        for expert, byte in ((KEPT, 0x7E), (LAST_KEPT, 0x01)):
            for role in ("gate", "up", "down"):
                stored = tensors[f"{LAYER}.{expert}.{role}_proj.weight_scale"]
                stored.data = bytes([byte]) * len(stored.data)
    pack(root, out, tp)
    assert check_scales(root, out, tp) == manifest(out)["report"]["blocks_flushed"] == 0


def test_all_scales_zero(copy: Copy, tmp_path: Path) -> None:
    root, out = copy(NVFP4), tmp_path / "out"
    with edit_tensors(root) as tensors:
        for expert in (KEPT, TAIL):
            for role in ("gate", "up", "down"):
                stored = tensors[f"{LAYER}.{expert}.{role}_proj.weight_scale"]
                stored.data = bytes(len(stored.data))
    pack(root, out, 2)
    assert check_scales(root, out, 2) == 0
    assert manifest(out)["report"]["groups_zero_scale"] >= 3 * (1024 + 512)


def test_saturated_mxfp4_bytes_are_counted(copy: Copy, tmp_path: Path) -> None:
    """The kernel takes bytes up to 247; beside a larger one nothing else changes."""
    root, out = copy(MXFP4), tmp_path / "out"
    set_bytes(root, f"{LAYER}.{KEPT}.up_proj.weight_scale", {0: 254, 1: 248, 2: 247, 3: 246, 4: 0, 511: 250})
    pack(root, out)
    report = manifest(out)["report"]
    assert report["scales_saturated"] == 3
    assert report["blocks_flushed"] == check_flushed_by_the_kernel(root, 1) > 0
    assert report["experts_requantized"] == []
    experts = source_experts(root)
    for (layer, expert, role), whole in join(out, 1, 1, experts).items():
        stored = experts[layer][expert][role]
        wanted = np.minimum(stored.scales, 2.0 ** (247 - 127)) if stored.name == "mxfp4" else stored.scales
        assert np.array_equal(whole.scales, wanted)


@pytest.mark.parametrize("largest", [0, 1, 74, 127, 199, 200, 201, 247])
def test_mxfp4_bytes_are_moved_and_exact(largest: int, copy: Copy, tmp_path: Path) -> None:
    root, out = copy(MXFP4), tmp_path / "out"
    with edit_tensors(root) as tensors:
        for role in ("gate", "up", "down"):
            stored = tensors[f"{LAYER}.{KEPT}.{role}_proj.weight_scale"]
            spread = np.resize(np.arange(largest, max(largest - 40, -1), -1, dtype=np.uint8), len(stored.data))
            stored.data = spread.tobytes()
    pack(root, out, 2)
    assert check_scales(root, out, 2) == 0
    report = manifest(out)["report"]
    assert (report["scales_saturated"], report["blocks_flushed"]) == (0, 0)


def check_flushed_by_the_kernel(root: Path, tp: int) -> int:
    """Groups of layer 1's kept MXFP4 experts of which a rank's BF16 operands, level * 2^(byte - 246), are subnormal."""
    flushed = 0
    for expert, roles in source_experts(root)[1].items():
        if BITS[expert] != 4:
            continue
        for names in (("gate", "up"), ("down",)):
            for rank in range(tp):
                parts = []
                for name in names:
                    axis = name == "down"
                    codes, scales = (np.split(a, tp, axis=axis)[rank] for a in (roles[name].codes, roles[name].scales))
                    used = (codes.reshape(*scales.shape, 32) % 8 != 0).any(axis=2)
                    parts.append((used, np.log2(scales).astype(int) + 127))
                largest = max(int(stored.max()) for _, stored in parts)
                for used, stored in parts:
                    device = stored + min(max(200 - largest, 0), 126)
                    flushed += int((used & (np.ldexp(0.5, device - 246) < 2.0**-126)).sum())
    return flushed


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("largest", [121, 199, 200, 201, 240, 254])
def test_mxfp4_groups_that_the_kernel_flushes_are_counted(largest: int, tp: int, copy: Copy, tmp_path: Path) -> None:
    """Scales so far below one of their matrix that no shift brings both where the kernel holds them."""
    root, out = copy(MXFP4), tmp_path / "out"
    with edit_tensors(root) as tensors:
        for role in ("gate", "up", "down"):
            stored = tensors[f"{LAYER}.{KEPT}.{role}_proj.weight_scale"]
            stored.data = np.resize(np.arange(42, 122, dtype=np.uint8), len(stored.data)).tobytes()
            codes = bytearray(tensors[f"{LAYER}.{KEPT}.{role}_proj.weight"].data)
            codes[:16], codes[16:32], codes[32:48] = bytes(16), bytes([0x88] * 16), bytes([0] * 15 + [0x10])
            tensors[f"{LAYER}.{KEPT}.{role}_proj.weight"].data = bytes(codes)
    set_bytes(root, f"{LAYER}.{KEPT}.up_proj.weight_scale", {9: largest})
    set_bytes(root, f"{LAYER}.{KEPT}.down_proj.weight_scale", {7: largest})
    pack(root, out, tp)
    flushed = manifest(out)["report"]["blocks_flushed"]
    assert flushed == check_flushed_by_the_kernel(root, tp)
    assert (flushed > 0) == (largest > 121)
    report = verify_pack(out, source=root)
    assert report.ok, report.findings


def test_groups_that_are_zero_by_their_codes_are_not_flushed(copy: Copy, tmp_path: Path) -> None:
    """Converters write scale 2^-127 where all weights are zero."""
    root, out = copy(MXFP4), tmp_path / "out"
    with edit_tensors(root) as tensors:
        codes = bytearray(tensors[f"{LAYER}.{KEPT}.up_proj.weight"].data)
        codes[64:96] = bytes([0x00, 0x88] * 16)
        tensors[f"{LAYER}.{KEPT}.up_proj.weight"].data = bytes(codes)
    set_bytes(root, f"{LAYER}.{KEPT}.up_proj.weight_scale", {4: 0, 5: 1})
    pack(root, out)
    assert manifest(out)["report"]["blocks_flushed"] == 0
    report = verify_pack(out, source=root)
    assert report.ok, report.findings


UNEQUAL = small(second_scale="unequal")


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_unequal_second_scales_are_refused(
    more: list[str], sources: Sources, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the dry run as well: they are a few numbers, and refuse whole checkpoints."""
    out = tmp_path / "out"
    experts = source_experts(sources(UNEQUAL))
    pairs = {
        (layer, expert): [roles[role].second for role in ("gate", "up")]
        for layer, found in experts.items()
        for expert, roles in found.items()
        if roles["gate"].name == "nvfp4"
    }
    apart = [key for key, (gate, up) in pairs.items() if math.frexp(gate)[0] != math.frexp(up)[0]]
    layers = len({layer for layer, _ in apart})
    assert len(apart) > 1 and layers > 1
    assert run(["convert", str(sources(UNEQUAL)), "--out", str(out), *more]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(
        rf"hybrid-pack: .*{re.escape(LAYER)}\.{KEPT}\.gate_proj\.weight_scale_2: layer 1 expert {KEPT}: "
        r"gate and up have second-level scales that are no power of two apart \(expected up's .* times a power of two, "
        rf"found .*; so it is in {len(apart)} of {len(pairs)} kept experts with NVFP4 pairs, in {layers} layers\); "
        r"--on-scale-mismatch requantize rescales",
        line,
    ), line
    assert not out.exists()


def test_one_bit_off_a_power_of_two_is_refused(copy: Copy, tmp_path: Path) -> None:
    root = copy(NVFP4)
    gate = np.float32(0.01)
    set_second(root, f"{MTP}.2.gate_proj", float(gate))
    set_second(root, f"{MTP}.2.up_proj", float(np.nextafter(gate * 2, np.float32(1))))
    with pytest.raises(DataError, match="layer 2 expert 2: gate and up"):
        pack(root, tmp_path / "out")


@pytest.mark.parametrize("tp", [1, 2])
def test_requantize(tp: int, sources: Sources, tmp_path: Path) -> None:
    """To the larger scale; the report's worst error of each expert is that of its decoded scales, at most 1/16."""
    root, out = sources(UNEQUAL), tmp_path / "out"
    pack(root, out, tp, on_scale_mismatch="requantize")
    experts = source_experts(root)
    worst: dict[tuple[int, int], float] = {}
    for (layer, expert, role), whole in join(out, tp, 1, experts).items():
        stored = experts[layer][expert][role]
        assert np.array_equal(whole.codes, stored.codes)
        used = (stored.scales > 0) & (whole.scales > 0)
        error = float(np.abs(whole.scales[used] / stored.scales[used] - 1).max())
        if stored.name == "nvfp4" and role != "down":
            worst[layer, expert] = max(worst.get((layer, expert), 0.0), error)
            larger = stored.second == max(experts[layer][expert][r].second for r in ("gate", "up"))
            assert (error == 0) == larger, "only the smaller one is rounded"
        else:
            assert error == 0
    report = manifest(out)["report"]
    listed = {(r["layer"], r["expert"]): r["worst_relative_error"] for r in report["experts_requantized"]}
    assert list(listed) == sorted(listed)
    assert set(listed) == set(worst)
    for key, error in listed.items():
        assert error == pytest.approx(worst[key], rel=1e-9)
        assert 0 < error <= 1 / 16 + 1e-3
    assert check_flushed(root, out, tp) == report["blocks_flushed"]


def check_flushed(root: Path, out: Path, tp: int) -> int:
    experts = source_experts(root)
    return sum(
        int(((whole.scales == 0) & (experts[layer][expert][role].scales > 0)).sum())
        for (layer, expert, role), whole in join(out, tp, 1, experts).items()
    )


def test_requantize_every_block_scale(copy: Copy, tmp_path: Path) -> None:
    """All 126 positive bytes, at a ratio that is as far from a power of two as it can be."""
    root, out = copy(NVFP4), tmp_path / "out"
    with edit_tensors(root) as tensors:
        for role, second in (("gate", 0.01), ("up", 0.01 * math.sqrt(2))):
            stored = tensors[f"{LAYER}.{KEPT}.{role}_proj.weight_scale"]
            stored.data = np.resize(np.arange(1, 0x7F, dtype=np.uint8), len(stored.data)).tobytes()
            tensors[f"{LAYER}.{KEPT}.{role}_proj.weight_scale_2"].data = np.float32(second).tobytes()
    pack(root, out, on_scale_mismatch="requantize")
    [entry] = manifest(out)["report"]["experts_requantized"]
    assert (entry["layer"], entry["expert"]) == (1, KEPT)
    assert 1 / 32 < entry["worst_relative_error"] <= 1 / 16 + 1e-3
    assert check_flushed(root, out, 1) == manifest(out)["report"]["blocks_flushed"] > 0


def test_requantize_changes_nothing_where_nothing_needs_it(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "refuse", 2)
    pack(source, tmp_path / "requantize", 2, on_scale_mismatch="requantize")
    for name in weights(tmp_path / "refuse"):
        assert (tmp_path / "refuse" / name).read_bytes() == (tmp_path / "requantize" / name).read_bytes()
