"""Sources of every format and family to packs: what can be moved is moved, all else is quantised and says so.

Packs are decoded by the naive decoder of tests/reference, sources by ``io.weights``, which tests/io holds against the
decoders of tests/reference and the libraries that write such checkpoints.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hybrid_pack.cli.main import run
from hybrid_pack.convert import Conversion, convert
from hybrid_pack.errors import DataError, UsageError
from hybrid_pack.io.bitmap import find_bit_map
from hybrid_pack.io.checkpoint import Checkpoint, open_checkpoint
from hybrid_pack.io.names import FAMILIES
from hybrid_pack.io.quantization import QuantizeOptions, _expectation
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.weights import read_matrix
from hybrid_pack.plan import make_plan
from hybrid_pack.schemas.manifest import Manifest
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec, write_checkpoint
from hybrid_pack.synthetic.models import VARIANTS
from hybrid_pack.verify import verify_pack
from tests.convert.stored import read_file
from tests.convert.support import tree
from tests.reference import packed

F64 = NDArray[np.float64]
TP = 2
BASE = Spec(
    hidden=128, intermediate=128, num_experts=4, kept=2, vocab=8, moe_layers=(1,), dense_layers=(0,), mtp_layer=False
)
STORED = (
    "nvfp4", "mxfp4", "ct_nvfp4", "ct_mxfp4", "mxfp8", "mxfp8_inv", "fp8_block", "fp8_row", "fp8_tensor", "bf16", "f16",
    "f32",
)  # fmt: skip
MIX = ("bf16", "nvfp4", "mxfp8", "mxfp4")
SPECS: dict[str, Spec] = {
    "hybrid": BASE,
    **{name: replace(BASE, stored=(name,)) for name in STORED},  # type: ignore[arg-type]
    "mixed in a layer": replace(BASE, stored=MIX),
    "mixed in an expert": replace(BASE, stored=(*MIX, "fp8_block"), mix_matrices=True),
    **{f"family {family.models}": replace(BASE, family=i) for i, family in enumerate(FAMILIES)},
    **{f"variant {name}": replace(BASE, variant=name) for name in VARIANTS},
}
FOUR_BIT = {"nvfp4", "mxfp4"}


def pack(source: Path, out: Path, *, tp: int = TP, kept_format: Any = None, **options: Any) -> Conversion:
    plan = make_plan(
        open_checkpoint(source, kept_format=kept_format), Topology(tp), pad=True, options=QuantizeOptions(**options)
    )
    return convert(plan, out, workers=2)


def packed_experts(root: Path, manifest: Manifest) -> Iterator[tuple[int, int, str, F64, F64]]:
    """(layer, expert, format, w13 [(gate and) up, H], w2) of every expert, its ranks put together."""
    geometry, layout = manifest.geometry, manifest.layout
    tp, gated = manifest.topology.tensor_parallel, layout.w13_order == "gate_up"
    share = geometry.intermediate_size_padded // tp
    for key, tiers in manifest.layers.items():
        files = [
            {n: t.array for n, t in read_file(root / s.path).items()} for s in manifest.shards if s.layer == int(key)
        ]
        kept = {"e4m3_k16": "nvfp4", "e8m0_k32": "mxfp4", None: ""}[tiers.kept_scale_format]
        for name, ids in ((kept, tiers.kept), ("nf3", tiers.tail)):
            for row, expert in enumerate(ids):
                parts = [
                    packed.expert(
                        name, tensors, row, geometry.hidden_size, share, layout.tiles, layout.nf3_levels, gated
                    )  # type: ignore[arg-type]
                    for tensors in files
                ]
                halves = [np.split(w13, 1 + gated) for w13, _ in parts]
                w13 = np.concatenate([np.concatenate(rows) for rows in zip(*halves, strict=True)])
                yield int(key), expert, name, w13, np.concatenate([w2 for _, w2 in parts], axis=1)


def stored_weights(source: Checkpoint, layer: int, expert: int) -> list[F64]:
    """Gate, up, down, or up, down."""
    with TensorReader() as reader:
        matrices = source.layers[layer].experts[expert].matrices
        levels = source.config.nf3_levels
        return [read_matrix(reader, m, "", levels=levels).astype(np.float64) for m in matrices]


def differences(root: Path, source: Checkpoint, manifest: Manifest) -> Iterator[tuple[int, int, str, F64, F64]]:
    """(layer, expert, format, weights, differences) of every expert; padding was looked at."""
    size, padded = source.intermediate, manifest.geometry.intermediate_size_padded
    for layer, expert, name, w13, w2 in packed_experts(root, manifest):
        *rows, down = stored_weights(source, layer, expert)
        parts = np.split(w13, len(rows))
        found = [*(part[:size] for part in parts), w2[:, :size]]
        assert w2.shape[1] == padded
        assert not any(part[size:].any() for part in parts)
        assert not w2[:, size:].any()
        wanted = np.concatenate([w.reshape(-1) for w in (*rows, down)])
        yield layer, expert, name, wanted, np.concatenate([w.reshape(-1) for w in found]) - wanted


@pytest.mark.parametrize("kept_format", [None, "nvfp4", "mxfp4"])
@pytest.mark.parametrize("case", SPECS)
def test_every_expert_is_moved_or_its_error_is_told(case: str, kept_format: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", SPECS[case])
    manifest = pack(tmp_path / "source", tmp_path / "out", kept_format=kept_format).manifest
    source = open_checkpoint(tmp_path / "source", kept_format=kept_format)
    told = {
        (entry.layer, expert): db
        for entry in manifest.report.experts_quantized
        for expert, db in zip(entry.experts, entry.sqnr_db, strict=True)
    }
    cast = 0
    for layer, expert, name, weights, error in differences(tmp_path / "out", source, manifest):
        formats = {m.format.name for m in source.layers[layer].experts[expert].matrices}
        if (layer, expert) in told:
            assert formats != {name}, "what is stored in the tier's format is moved"
            db = told[layer, expert]
            assert db is not None
            assert db == pytest.approx(10 * np.log10((weights**2).sum() / (error**2).sum()), abs=0.001)
            assert db > {"nf3": 14.5, "nvfp4": 18.5, "mxfp4": 17.5}[name]
        else:
            cast += formats == {"mxfp4"} and name == "nvfp4"
            assert formats == {name} or (formats <= FOUR_BIT and name == "nvfp4")
            assert (np.abs(error) <= 2.0**-23 * np.abs(weights)).all(), "all but the rounding of weights to float32"
    assert manifest.report.experts_cast == cast
    assert not manifest.report.scales_saturated
    report = verify_pack(tmp_path / "out", source=tmp_path / "source")
    assert report.ok, report.findings


@pytest.mark.parametrize("case", ["bf16", "mixed in an expert", "ct_mxfp4"])
def test_tensor_parallel_sizes_hold_the_same_weights(case: str, tmp_path: Path) -> None:
    """Experts are quantised whole, so that how they are cut does not matter."""
    write_checkpoint(tmp_path / "source", SPECS[case])
    found = []
    for tp in (1, 2):
        out = tmp_path / str(tp)
        manifest = pack(tmp_path / "source", out, tp=tp).manifest
        found.append({(layer, e): (w13, w2) for layer, e, _, w13, w2 in packed_experts(out, manifest)})
    assert found[0].keys() == found[1].keys()
    for key, (w13, w2) in found[0].items():
        assert np.array_equal(w13, found[1][key][0])
        assert np.array_equal(w2, found[1][key][1])


@pytest.mark.parametrize("case", ["bf16", "mixed in a layer"])
def test_workers_do_not_change_the_bytes(case: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", SPECS[case])
    plan = make_plan(open_checkpoint(tmp_path / "source"), Topology(TP))
    for workers in (1, 5):
        convert(plan, tmp_path / f"out{workers}", workers=workers)
    assert tree(tmp_path / "out1") == tree(tmp_path / "out5")


def test_an_interrupted_conversion_is_taken_up_again(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", SPECS["bf16"])
    whole = tmp_path / "whole"
    pack(tmp_path / "source", whole)
    plan = make_plan(open_checkpoint(tmp_path / "source"), Topology(TP))
    out = tmp_path / "out"

    class Stop(Exception):
        pass

    class Watch:
        def start(self, total_bytes: int, done_bytes: int) -> None: ...
        def note(self, text: str) -> None: ...
        def advance(self, nbytes: int) -> None:
            if list(out.rglob("rank-0/*.safetensors")):
                raise Stop

    write_checkpoint(tmp_path / "two", replace(SPECS["bf16"], moe_layers=(1, 2)))
    plan = make_plan(open_checkpoint(tmp_path / "two"), Topology(TP))
    convert(plan, tmp_path / "reference", workers=1)
    with pytest.raises(Stop):
        convert(plan, out, workers=1, progress=Watch())
    done = convert(plan, out, workers=1, resume=True)
    assert done.files_kept
    assert tree(out) == tree(tmp_path / "reference")


def test_a_search_is_an_option_of_the_pack(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", SPECS["bf16"])
    plain = pack(tmp_path / "source", tmp_path / "absmax", search="absmax").manifest.report
    best = pack(tmp_path / "source", tmp_path / "mse").manifest.report
    assert {entry.method for entry in plain.experts_quantized} == {"absmax"}
    assert {entry.method for entry in best.experts_quantized} == {"mse"}
    for worse, better in zip(plain.experts_quantized, best.experts_quantized, strict=True):
        assert worse.tier_sqnr_db is not None and better.tier_sqnr_db is not None
        assert worse.tier_sqnr_db < better.tier_sqnr_db
    plan = make_plan(open_checkpoint(tmp_path / "source"), Topology(TP), options=QuantizeOptions(search="absmax"))
    with pytest.raises(UsageError, match="other options is there: --search was mse, now absmax"):
        convert(plan, tmp_path / "mse", resume=True)


def test_what_will_be_quantised_is_said_before(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", replace(BASE, stored=("nvfp4",)))
    plan = make_plan(open_checkpoint(tmp_path / "source"), Topology(TP))
    (line,) = plan.expectations
    assert line.startswith(
        "2 experts become NF3 from NVFP4 (search mse): about 15.8 dB, but about 14.4 against the weights"
    )
    write_checkpoint(tmp_path / "wide", replace(BASE, stored=("bf16",)))
    plan = make_plan(open_checkpoint(tmp_path / "wide"), Topology(TP))
    assert list(plan.expectations) == [
        "2 experts become NF3 from BF16 (search mse): about 15.8 dB",
        "2 experts become NVFP4 from BF16 (search mse): about 21.8 dB",
    ]


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (["MXFP8", "BF16"], "7 experts become NF3 from MXFP8 or BF16 ("),
        (["MXFP8", "BF16", "F16", "FP8"], "14 experts become NF3 from 4 formats, such as MXFP8 ("),
        (["BF16+F16", "BF16+F32", "BF16+FP8", "F16+FP8"], "from 4 mixtures, such as BF16+F16 ("),
        (["MXFP8", "BF16", "F16", "BF16+FP8"], "from 4 formats and mixtures, such as MXFP8 ("),
    ],
)
def test_pure_formats_are_no_mixtures(kinds: list[str], words: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", replace(BASE, stored=("bf16",)))
    chosen = make_plan(open_checkpoint(tmp_path / "source"), Topology(TP)).quantization
    numbers = [4, 3, 5, 2][: len(kinds)]
    assert words in _expectation("nf3", "", Counter(dict(zip(kinds, numbers, strict=True))), chosen)


def test_the_page_s_example_prints_what_convert_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The snippet of docs/guide.md, run on experts that are quantised: the notes of the command line, and a pack."""
    write_checkpoint(tmp_path / "SRC", replace(BASE, stored=("bf16",)))
    config = json.loads((tmp_path / "SRC" / "config.json").read_text())
    (tmp_path / "map.json").write_text(json.dumps(find_bit_map(config)))
    monkeypatch.chdir(tmp_path)
    assert run(["convert", "SRC", "--bit-map", "map.json", "--tp", "4", "--pad", "--out", "O", "--dry-run"]) == 0
    notes = [line.removeprefix("note: ") for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    page = (Path(__file__).parents[2] / "docs" / "guide.md").read_text().partition("## From Python")[2]
    (snippet,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(snippet, {})
    assert notes and capsys.readouterr().out.splitlines() == notes


def test_a_hybrid_with_a_map_of_another_is_no_request_to_quantise(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", BASE)
    original = json.loads((tmp_path / "source" / "config.json").read_text())["quantization_config"]["hybrid_bit_map"]
    tail = {layer: [3] * len(bits) for layer, bits in original.items()}
    (tmp_path / "map.json").write_text(json.dumps(tail))
    with pytest.raises(DataError, match="the bit map and the stored format disagree"):
        open_checkpoint(tmp_path / "source", bit_map_file=tmp_path / "map.json")
    source = open_checkpoint(tmp_path / "source", bit_map_file=tmp_path / "map.json", requantize=True)
    manifest = convert(make_plan(source, Topology(TP)), tmp_path / "out").manifest
    (entry,) = manifest.report.experts_quantized
    assert (entry.tier, entry.sources) == ("tail", ("nvfp4",))
    assert entry.experts == tuple(e for e, bit in enumerate(original["1"]) if bit == 4)
    report = verify_pack(tmp_path / "out", source=tmp_path / "source")
    assert report.ok, report.findings
