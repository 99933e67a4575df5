"""The small documents and the base tensors' headers and index, held against the manifest. Cheap."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybrid_pack.errors import DataError, EnvironmentFailure
from hybrid_pack.io.bitmap import KEPT_BITS, KEY, TAIL_BITS, parse_bit_map
from hybrid_pack.io.config import CONFIG, read_config, read_document
from hybrid_pack.io.digest import blake3_digest
from hybrid_pack.io.experts import BIAS
from hybrid_pack.io.manifest import MANIFEST
from hybrid_pack.io.names import parse
from hybrid_pack.io.safetensors import build_header, read_header
from hybrid_pack.io.shards import Located
from hybrid_pack.schemas.manifest import Manifest
from hybrid_pack.verify.report import Recorder

DOCUMENTS = "config.json"
BASE = "base headers and index"
QUANT_METHOD = "hybrid_pack"
QUANTIZATION_KEYS = {"quant_method", "manifest", KEY, "source_quantization_config"}


def _read(
    root: Path, manifest: Manifest, name: str, check: str, recorder: Recorder
) -> tuple[Mapping[str, Any], int] | None:
    """A JSON document and its size, if its digest is right: what else is wrong with another one, the digest says."""
    if name in recorder.bad_paths:
        return None
    try:
        document, text = read_document(root / name)
    except (DataError, EnvironmentFailure) as error:
        recorder.find_error(check, name, error)
        recorder.tell(name)
        return None
    digest = next(file.digest for file in manifest.files if file.path == name)
    if blake3_digest(text) != digest:
        recorder.find(
            check,
            name,
            "its digest is not the manifest's: edited or damaged",
            expected=digest,
            found=blake3_digest(text),
        )
        recorder.tell(name)
        return None
    return document, len(text)


def check_config(root: Path, manifest: Manifest, recorder: Recorder) -> None:
    """config.json says hybrid_pack, and its map, sizes and levels are the manifest's."""
    with recorder.checking(DOCUMENTS, "files") as tally:
        read = _read(root, manifest, CONFIG, DOCUMENTS, recorder)
        if read is None:
            return
        tally.add(1, read[1])
        block = read[0].get("quantization_config")
        if not isinstance(block, Mapping):
            recorder.find(DOCUMENTS, CONFIG, "no quantization_config", expected="an object")
            return
        if set(block) != QUANTIZATION_KEYS:
            recorder.find(
                DOCUMENTS,
                CONFIG,
                "not the keys a pack has",
                where="quantization_config",
                expected=", ".join(sorted(QUANTIZATION_KEYS)),
                found=", ".join(sorted(map(str, block))),
            )
        for key, expected in (("quant_method", QUANT_METHOD), ("manifest", MANIFEST)):
            if block.get(key) != expected:
                where = f"quantization_config.{key}"
                recorder.find(
                    DOCUMENTS, CONFIG, "not what a pack has", where=where, expected=expected, found=repr(block.get(key))
                )
        try:
            _check_map(manifest, block.get(KEY), recorder)
            _check_sizes(root, manifest, recorder)
        except (DataError, EnvironmentFailure) as error:
            recorder.find_error(DOCUMENTS, CONFIG, error)
        source = block.get("source_quantization_config")
        levels = source.get("nf3_levels") if isinstance(source, Mapping) else None
        expected_levels = list(manifest.layout.nf3_levels)
        if levels is not None and expected_levels != levels:  # else they may be in the source's hf_quant_config.json
            where = "source_quantization_config.nf3_levels"
            recorder.find(DOCUMENTS, CONFIG, "not the manifest's", where=where, expected=expected_levels, found=levels)


def _check_map(manifest: Manifest, raw: Any, recorder: Recorder) -> None:
    bit_map = parse_bit_map(raw, CONFIG)
    omitted = set(manifest.report.layers_omitted)
    for layer in sorted(set(bit_map) - set(map(int, manifest.layers)) - omitted):
        recorder.find(
            DOCUMENTS, CONFIG, "in the bit map, but neither packed nor listed as omitted", where=f"layer {layer}"
        )
    for key, tiers in manifest.layers.items():
        bits = bit_map.get(int(key), (KEPT_BITS,) * manifest.geometry.num_experts)
        packed = [TAIL_BITS] * manifest.geometry.num_experts
        for expert in tiers.kept:
            packed[expert] = KEPT_BITS
        if list(bits) == packed:
            continue
        if len(bits) != len(packed):
            recorder.find(
                DOCUMENTS,
                CONFIG,
                "the bit map is of another number of experts",
                where=f"layer {key}",
                expected=len(packed),
                found=len(bits),
            )
            continue
        expert = next(e for e, (a, b) in enumerate(zip(bits, packed, strict=True)) if a != b)
        what = {KEPT_BITS: "kept (4)", TAIL_BITS: "tail (3)"}
        recorder.find(
            DOCUMENTS, CONFIG, "the bit map is not the manifest's", where=f"layer {key} expert {expert}",
            expected=what[packed[expert]], found=what[bits[expert]],
        )  # fmt: skip


def _check_sizes(root: Path, manifest: Manifest, recorder: Recorder) -> None:
    config, geometry = read_config(root), manifest.geometry
    pairs: tuple[tuple[str, object, object], ...] = (
        ("hidden size", geometry.hidden_size, config.hidden),
        ("intermediate size", geometry.intermediate_size, config.intermediate),
        ("number of experts", geometry.num_experts, config.num_experts),
        ("experts a token visits", geometry.top_k, config.top_k),
        ("activation", manifest.layout.activation, config.activation),
    )
    for what, expected, found in pairs:
        if expected != found:
            recorder.find(DOCUMENTS, CONFIG, "not the manifest's", where=what, expected=expected, found=found)


def check_base(root: Path, manifest: Manifest, recorder: Recorder) -> Mapping[str, Located]:
    """Headers of the base files and their index, both ways.

    Returns:
        The base tensors by name.
    """
    tensors: dict[str, Located] = {}
    files: dict[str, str] = {}
    with recorder.checking(BASE, "tensors") as tally:
        for file in manifest.base.files:
            if file.path in recorder.bad_paths:
                continue
            try:
                header = read_header(root / file.path)
            except (DataError, EnvironmentFailure) as error:
                recorder.find_error(BASE, file.path, error)
                recorder.spoil(file.path)
                continue
            tally.add(len(header.tensors), header.data_begin)
            if header.digest != blake3_digest(
                build_header((t.name, t.dtype, t.shape) for t in header.tensors.values())[0]
            ):
                recorder.find(BASE, file.path, "its header is not written as a pack's headers are")
            for name, tensor in header.tensors.items():
                expert = parse(name)
                if name in files:
                    recorder.find(BASE, file.path, "stored twice", where=name, found=f"also in {files[name]}")
                elif expert is not None and expert.field != BIAS and str(expert.layer) in manifest.layers:
                    recorder.find(BASE, file.path, "an expert of a packed layer among the base tensors", where=name)
                tensors[name], files[name] = Located(header.path, tensor), file.path
        if manifest.base.index is not None:
            _check_index(root, manifest, manifest.base.index, files, recorder)
    return tensors


def _check_index(root: Path, manifest: Manifest, index: str, files: Mapping[str, str], recorder: Recorder) -> None:
    read = _read(root, manifest, index, BASE, recorder)
    if read is None:
        return
    weight_map = read[0].get("weight_map")
    if not isinstance(weight_map, Mapping):
        recorder.find(BASE, index, "no weight_map", expected="an object of tensor names and files")
        return
    unread = recorder.bad_paths & {file.path for file in manifest.base.files}
    for name in sorted({*weight_map, *files}):
        listed, stored = weight_map.get(name), files.get(name)
        if listed != stored and not (stored is None and listed in unread):
            message = "the index and the base files disagree on where a tensor is"
            recorder.find(
                BASE,
                index,
                message,
                where=name,
                expected=stored or "no such tensor",
                found=repr(listed) if listed else "not listed",
            )
