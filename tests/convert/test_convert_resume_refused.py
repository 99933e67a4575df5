"""What an unfinished conversion, or a pack, is not gone on with for: other options, another or a changed source."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_pack.convert import _fingerprint, convert
from hybrid_pack.convert.difference import difference
from hybrid_pack.errors import DataError, UsageError
from hybrid_pack.synthetic import write_checkpoint
from tests.checkpoints import edit_config, edit_header, edit_json, edit_tensors
from tests.convert.conftest import Sources
from tests.convert.interrupted import Stop, stop_after
from tests.convert.support import pack, plan_of, small, stamps, tree, weights
from tests.convert.test_convert_sources import BASE

MANIFEST = "hybrid_pack.json"


UNMAPPED = small(seed=50)
"""Its MTP layer may be in the map or not."""


def another_source(root: Path, tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "other", small(seed=51))
    return tmp_path / "other"


def with_mtp_in_the_map(root: Path, tmp_path: Path) -> dict[str, Any]:
    bit_map = json.loads((root / "config.json").read_text())["quantization_config"]["hybrid_bit_map"]
    path = tmp_path / "map.json"
    path.write_text(json.dumps({**bit_map, "2": [4] * 4}))
    return {"bit_map_file": path}


CHANGES: dict[str, tuple[str, Callable[[Path, Path], dict[str, Any]]]] = {
    "tp": ("--tp was 2, now 1", lambda *_: {"tp": 1}),
    "ep": ("--ep was 1, now 2", lambda *_: {"ep": 2}),
    "layers": ("--layers was 1-2, now 2", lambda *_: {"layers": [2]}),
    "bit map": ("the bit map has changed", with_mtp_in_the_map),
}


@pytest.mark.parametrize("case", CHANGES)
def test_resume_with_other_options(case: str, sources: Sources, tmp_path: Path, unfinish: Callable[..., Path]) -> None:
    root = sources(UNMAPPED)
    words, change = CHANGES[case]
    options = {"tp": 2, "ep": 1, **change(root, tmp_path)}
    tp, ep = options.pop("tp"), options.pop("ep")
    plan = plan_of(root, tp, ep, **options)
    unfinished, done = unfinish(root, tmp_path / "unfinished"), tmp_path / "done"
    pack(root, done, 2)
    for out, message in (
        (unfinished, rf"the unfinished conversion there is of another source or other options: {words}; give the"),
        (done, rf"a pack of another source or other options is there: {words}; choose another --out"),
    ):
        before = tree(out)
        with pytest.raises(UsageError, match=message):
            convert(plan, out, workers=1, resume=True)
        assert tree(out) == before


@pytest.mark.parametrize("theirs", [None, "nvfp4"])
def test_resume_with_another_kept_format(theirs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal knows it of each layer, a manifest as an option."""
    root = tmp_path / "source"
    write_checkpoint(root, replace(BASE, stored=("bf16",)))
    stopped, done = tmp_path / "stopped", tmp_path / "done"
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(Stop):
            convert(plan_of(root, kept_format=theirs), stopped, workers=1)
    convert(plan_of(root, kept_format=theirs), done, workers=1)
    was = theirs or "not given"
    for out, words in (
        (stopped, "--kept-format was nvfp4, now mxfp4 in layer 1"),
        (done, f"--kept-format was {was}, now mxfp4"),
    ):
        with pytest.raises(UsageError, match=rf"another source or other options[^:]*: {words}; "):
            convert(plan_of(root, kept_format="mxfp4"), out, workers=1, resume=True)


def test_every_difference_has_words(source: Path) -> None:
    """None is told by the name it has in the journal; where an earlier version recorded nothing there are words too."""
    fingerprint = _fingerprint(plan_of(source), "refuse")
    for key, ours in fingerprint.items():
        for theirs in (None, {"1": "mxfp4"} if isinstance(ours, dict) else [7, 8] if isinstance(ours, list) else "x"):
            if key != "statistics":  # they never stand in the way
                words = difference(key, theirs, ours).replace("hf_quant_config.json", "").replace(str(ours), "")
                assert "_" not in words


def test_resume_with_another_scale_rule(sources: Sources, tmp_path: Path, unfinish: Callable[..., Path]) -> None:
    root = sources(small(seed=52, second_scale="unequal"))
    out = unfinish(root, tmp_path / "unfinished", on_scale_mismatch="requantize")
    with pytest.raises(UsageError, match=r"other options: --on-scale-mismatch was requantize, now refuse"):
        pack(root, out, 2, resume=True)
    pack(root, out, 2, resume=True, on_scale_mismatch="requantize")
    with pytest.raises(UsageError, match="--on-scale-mismatch was requantize, now refuse"):
        pack(root, out, 2, resume=True)


def test_resume_with_another_scale_rule_where_it_makes_no_difference(finished: Path, source: Path) -> None:
    before = stamps(finished)
    pack(source, finished, 2, resume=True, on_scale_mismatch="requantize")
    assert stamps(finished) == before


def far_apart(root: Path, layer: int) -> None:
    """Gate and up of a kept expert 2^16 apart in their second-level scales: more than block scales can take in."""
    bits = json.loads((root / "config.json").read_text())["quantization_config"]["hybrid_bit_map"][str(layer)]
    name = f"model.layers.{layer}.mlp.experts.{bits.index(4)}.{{}}_proj.weight_scale_2"
    with edit_tensors(root) as tensors:
        gate = tensors[name.format("gate")]
        small = np.frombuffer(gate.data, "<f4") * np.float32(2.0**-16)
        tensors[name.format("up")] = replace(gate, data=small.astype("<f4").tobytes())


def test_the_scale_rule_that_an_error_names_can_be_gone_on_with(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was finished under ``refuse`` is what it would be under ``requantize``; not the other way round."""
    root, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(sources(small(seed=53, moe_layers=(1, 2, 3), second_scale="equal", mtp_layer=False)), root)
    far_apart(root, 3)
    with pytest.raises(DataError, match=r"layer 3 .*would become zero .*; --on-scale-mismatch requantize lets them"):
        pack(root, out, 2, workers=1)
    done = weights(out)
    assert len([name for name in done if "layer-" in name]) == 4
    before = stamps(out, done)
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(Stop):
            pack(root, out, 2, workers=1, resume=True, on_scale_mismatch="requantize")
    with pytest.raises(UsageError, match="--on-scale-mismatch was requantize, now refuse"):
        pack(root, out, 2, resume=True)
    pack(root, out, 2, resume=True, on_scale_mismatch="requantize")
    assert stamps(out, done) == before
    pack(root, tmp_path / "anew", 2, on_scale_mismatch="requantize")
    assert tree(out) == tree(tmp_path / "anew")


def edit_generation(root: Path) -> None:
    with edit_config(root) as config:
        config["vocab_size"] += 1


def edit_metadata(root: Path) -> None:
    edit_header(next(iter(root.glob("*.safetensors"))), lambda header: header.update(__metadata__={"format": "np"}))


def edit_weight_index(root: Path) -> None:
    with edit_json(root / "model.safetensors.index.json") as index:
        index["metadata"]["more"] = 1


TIMES = "a safetensors file of the source was written to, by its modification time"
SOURCE_CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "config": ("the source's config.json or hf_quant_config.json has changed", edit_generation),
    "index": ("the source's index has changed", edit_weight_index),
    "header": ("the source's safetensors files have changed", edit_metadata),
    "payload": (TIMES, lambda root: os.utime(next(iter(root.glob("*.safetensors"))))),
}


@pytest.mark.parametrize("case", SOURCE_CHANGES)
def test_resume_with_a_changed_source(case: str, copy: Path, tmp_path: Path, unfinish: Callable[..., Path]) -> None:
    """A payload written anew under the same header is seen by its time, as long as the pack is not finished."""
    words, change = SOURCE_CHANGES[case]
    unfinished, done = unfinish(copy, tmp_path / "unfinished"), tmp_path / "done"
    pack(copy, done, 2)
    change(copy)
    before = tree(unfinished), tree(done)
    with pytest.raises(UsageError, match=rf"of another source or other options: {words}; give the same"):
        pack(copy, unfinished, 2, resume=True)
    if words != TIMES:
        with pytest.raises(UsageError, match=rf"a pack of another source or other options is there: {words}"):
            pack(copy, done, 2, resume=True)
    assert (tree(unfinished), tree(done)) == before


def test_resume_with_another_source(source: Path, tmp_path: Path, unfinish: Callable[..., Path]) -> None:
    other = another_source(source, tmp_path)
    out = unfinish(source, tmp_path / "out")
    with pytest.raises(UsageError, match="of another source or other options"):
        pack(other, out, 2, resume=True)


def test_resume_of_an_edited_pack(finished: Path, source: Path) -> None:
    (finished / MANIFEST).write_text((finished / MANIFEST).read_text().replace('"silu"', '"gelu"'))
    with pytest.raises(UsageError, match=r"the pack there cannot be resumed: .*self_digest"):
        pack(source, finished, 2, resume=True)
