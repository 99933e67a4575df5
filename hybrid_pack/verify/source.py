"""The pack against its source, all but the experts' bytes: identity, structure, base tensors, small files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hybrid_pack.errors import DataError, EnvironmentFailure, UsageError
from hybrid_pack.io.bitmap import KEY, MAP_HOLDERS
from hybrid_pack.io.checkpoint import Checkpoint, open_checkpoint
from hybrid_pack.io.config import CONFIG, HF_QUANT_CONFIG, read_config, read_document
from hybrid_pack.io.digest import blake3_digest
from hybrid_pack.io.manifest import MANIFEST
from hybrid_pack.io.progress import Progress
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.shards import Located
from hybrid_pack.plan import SCALE_FORMATS, small_files
from hybrid_pack.report.png import TIER_MAP, tier_map_png
from hybrid_pack.schemas.manifest import Manifest
from hybrid_pack.sharding import padded_intermediate
from hybrid_pack.verify.pool import Buffers, Pool
from hybrid_pack.verify.report import Recorder, Tally
from hybrid_pack.verify.scope import Scope

IDENTITY = "source identity"
STRUCTURE = "source structure"
BASE_BYTES = "base tensors against the source"
BASE_HEADERS = "base headers against the source"
SMALL_FILES = "small files against the source"
SMALL_NAMES = "names of small files and config.json against the source"
CHUNK_BYTES = 1 << 20


def open_source(
    root: Path, manifest: Manifest, source: Path, recorder: Recorder, bit_map_file: Path | None = None
) -> Checkpoint | None:
    """Open the source as the conversion did, with the pack's own bit map; where that fails, what differs is a finding.

    A conversion may have been given a map that the checkpoint does not hold. Opening compares the map with the stored
    formats, so a map that is wrong shows. If the pack's config.json, which has the map, is damaged, the source's own is
    used.
    """
    chosen = manifest.report.options
    options: dict[str, Any] = {
        "kept_format": chosen.kept_format, "requantize": chosen.requantize, "mx_bias": chosen.mx_bias,
    }  # fmt: skip
    if bit_map_file is not None:
        return open_checkpoint(source, bit_map_file=bit_map_file, **options)
    if recorder.was_told(CONFIG) or CONFIG in recorder.bad_paths:
        try:
            return open_checkpoint(source, **options)
        except (DataError, EnvironmentFailure):
            recorder.skip("the source's documents and headers", f"the pack's {CONFIG}, which has the map, is damaged")
            return None
    try:
        return open_checkpoint(source, bit_map_file=root / CONFIG, **options)
    except UsageError as error:  # options that a manifest names and that do not fit
        recorder.find_error(IDENTITY, str(source), error)
        return None
    except DataError as error:
        try:
            digest = blake3_digest(read_config(source, root / CONFIG).digest_input)
        except DataError:
            digest = None  # the error below says it
        if digest is not None and digest != manifest.source.config_digest:
            _differs(str(source), f"{CONFIG} and {HF_QUANT_CONFIG}", manifest.source.config_digest, digest, recorder)
        recorder.find_error(IDENTITY, str(source), error)
        return None
    except EnvironmentFailure as error:
        recorder.cannot_read(IDENTITY, str(source), error)
        return None


def _differs(path: str, what: str, expected: object, found: object, recorder: Recorder) -> None:
    message = "not the source this pack was made from, or changed since"
    recorder.find(IDENTITY, path, message, where=what, expected=expected, found=found)


def check_identity(manifest: Manifest, source: Checkpoint, recorder: Recorder) -> None:
    """The source's documents, index and headers are those the pack was made from."""
    theirs, root = manifest.source, str(source.root)
    with recorder.checking(IDENTITY, "files") as tally:
        tally.add(2 + len(source.shards.files))
        for what, expected, found in (
            (f"{CONFIG} and {HF_QUANT_CONFIG}", theirs.config_digest, source.config_digest),
            ("index", theirs.index_digest, source.index_digest),
        ):
            if expected != found:
                _differs(root, what, expected, found, recorder)
        listed = {file.path: file for file in theirs.files}
        present = {source.file_name(file): file for file in source.shards.files}
        for name in sorted({*listed, *present}):
            then, now = listed.get(name), present.get(name)
            if then is None or now is None:
                _differs(root, name, "there" if then else "not there", "there" if now else "not there", recorder)
            elif then.bytes != now.nbytes:
                _differs(root, name, f"{then.bytes} bytes", f"{now.nbytes} bytes", recorder)
            elif then.digest != now.digest:
                _differs(root, name, f"header {then.digest}", f"header {now.digest}", recorder)


def _padded(source: Checkpoint, manifest: Manifest) -> int:
    """The padded size a pack of this topology has: the source's, or where that was not enough the next that is."""
    if manifest.geometry.intermediate_size_padded == source.intermediate:
        return source.intermediate
    tp, gated = manifest.topology.tensor_parallel, manifest.layout.w13_order == "gate_up"
    return padded_intermediate(source.hidden, source.intermediate, tp, gated) or source.intermediate


def comparable_layers(manifest: Manifest, source: Checkpoint, scope: Scope, recorder: Recorder) -> list[int]:
    """Layers of the scope whose experts can be compared: same sizes, same tiers. What differs is a finding."""
    geometry, layout, config = manifest.geometry, manifest.layout, source.config
    left_out = tuple(sorted(set(source.layers) - set(map(int, manifest.layers))))
    sizes: tuple[tuple[str, object, object], ...] = (
        ("hidden size", source.hidden, geometry.hidden_size),
        ("intermediate size", source.intermediate, geometry.intermediate_size),
        ("padded intermediate size", _padded(source, manifest), geometry.intermediate_size_padded),
        ("number of experts", config.num_experts, geometry.num_experts),
    )
    rest: tuple[tuple[str, object, object], ...] = (
        ("experts a token visits", config.top_k, geometry.top_k),
        ("activation", config.activation, layout.activation),
        ("NF3 levels", config.nf3_levels, layout.nf3_levels),
        ("gate", source.gated, layout.w13_order == "gate_up"),
        ("expert biases", source.expert_biases, layout.expert_biases),
        ("layers omitted", left_out, manifest.report.layers_omitted),
    )
    with recorder.checking(STRUCTURE, "layers") as tally:
        tally.add(len(manifest.layers))
        for what, expected, found in (*sizes, *rest):
            if expected != found:
                recorder.find(STRUCTURE, MANIFEST, "not that of the source", where=what, expected=expected, found=found)
        same_sizes = all(expected == found for _, expected, found in sizes)
        layers = list(map(int, manifest.layers))
        same = [index for index in layers if same_sizes and _same_tiers(manifest, index, source, recorder)]
    if same != layers:
        others = ", ".join(str(index) for index in layers if index not in same)
        recorder.skip(f"experts of layers {others} against the source", "the source has another structure there")
    return [index for index in same if scope.layers is None or index in scope.layers]


def _same_tiers(manifest: Manifest, index: int, source: Checkpoint, recorder: Recorder) -> bool:
    tiers, layer = manifest.layers[str(index)], source.layers.get(index)
    if layer is None:
        recorder.find(STRUCTURE, MANIFEST, "the source has no experts to pack in this layer", where=f"layer {index}")
        return False
    if tiers.kept != layer.kept:
        expert = min(set(tiers.kept) ^ set(layer.kept))
        stored, packed = ("kept" if expert in ids else "tail" for ids in (layer.kept, tiers.kept))
        message, where = "the source stores the expert in the other tier", f"layer {index} expert {expert}"
        recorder.find(STRUCTURE, MANIFEST, message, where=where, expected=stored, found=packed)
        return False
    wanted, found = SCALE_FORMATS[layer.kept_format], tiers.kept_scale_format
    if wanted != found:
        where = f"layer {index}"
        recorder.find(STRUCTURE, MANIFEST, "not that of the source", where=where, expected=wanted, found=found)
    return wanted == found


class _BaseComparison:
    def __init__(self, reader: TensorReader, tally: Tally, pool: Pool, recorder: Recorder, progress: Progress) -> None:
        self._reader, self._tally, self._pool = reader, tally, pool
        self._recorder, self._progress = recorder, progress
        self._buffers = Buffers()

    def compare(self, wanted: Located, packed: Located) -> None:
        """Compare one tensor, byte for byte."""
        if not self.compare_headers(BASE_BYTES, wanted, packed):
            return
        try:
            at = self._first_difference(wanted, packed)
        except (DataError, EnvironmentFailure) as error:
            self._recorder.find_error(BASE_BYTES, packed.path.name, error, wanted.header.name)
            return
        if at is not None:
            where = f"{wanted.header.name} byte {at}"
            self._recorder.find(BASE_BYTES, packed.path.name, "not the source's bytes", where=where)

    def compare_headers(self, check: str, wanted: Located, packed: Located) -> bool:
        """Whether dtype and shape are the same; if not, a finding says so."""
        name, file = wanted.header.name, packed.path.name
        self._tally.add(1)
        expected, found = (f"{at.header.dtype} {list(at.header.shape)}" for at in (wanted, packed))
        if expected != found:
            self._recorder.find(check, file, "not as in the source", where=name, expected=expected, found=found)
        return expected == found

    def _first_difference(self, wanted: Located, packed: Located) -> int | None:
        size = wanted.header.nbytes
        for begin in range(0, size, CHUNK_BYTES):
            if self._pool.stopped.is_set():
                return None
            count = min(CHUNK_BYTES, size - begin)
            theirs, ours = self._buffers.take("source", count), self._buffers.take("pack", count)
            self._reader.read(wanted, theirs, begin)
            self._reader.read(packed, ours, begin)
            self._tally.add(0, 2 * count)
            self._progress.advance(2 * count)
            if not np.array_equal(theirs, ours):
                return begin + int(np.flatnonzero(theirs != ours)[0])
        return None


def check_base_bytes(
    manifest: Manifest, source: Checkpoint, packed: Mapping[str, Located], pool: Pool, recorder: Recorder,
    progress: Progress, *, quick: bool,
) -> None:  # fmt: skip
    """The base tensors are the tensors of the source that are no packed experts: all of them, byte for byte.

    Args:
        manifest: Of the pack.
        source: What the pack was made from.
        packed: Base tensors of the pack, by name; those of a broken file are missing.
        pool: Threads.
        recorder: Gets the findings.
        progress: Told bytes read.
        quick: Names, dtypes and shapes only; no payload is read.
    """
    wanted = {at.header.name: at for at in source.base}
    check = BASE_HEADERS if quick else BASE_BYTES
    broken = sorted(file.path for file in manifest.base.files if file.path in recorder.bad_paths)
    with recorder.checking(check, "tensors", threads=True) as tally, TensorReader() as reader:
        for name in sorted(set(packed) - set(wanted)):
            recorder.find(check, packed[name].path.name, "not a base tensor of the source", where=name)
        for name in sorted(set(wanted) - set(packed)) if not broken else ():
            recorder.find(check, str(wanted[name].path), "a tensor that the pack does not have", where=name)
        comparison = _BaseComparison(reader, tally, pool, recorder, progress)
        both = [(at, packed[name]) for name, at in wanted.items() if name in packed]
        if quick:
            for theirs, ours in both:
                comparison.compare_headers(check, theirs, ours)
        else:
            unread = recorder.unread_paths
            pool.run(partial(comparison.compare, at, ours) for at, ours in both if ours.path.name not in unread)
    if broken:
        recorder.skip(f"base tensors of {', '.join(broken)} against the source", "the file is damaged or unread")


def check_small_files(root: Path, manifest: Manifest, source: Checkpoint, recorder: Recorder, *, quick: bool) -> None:
    """Tokenizer, licence and so on are the source's, and config.json is but for its quantization_config.

    A quick check leaves out their bytes, all but those of config.json.
    """
    check = SMALL_NAMES if quick else SMALL_FILES
    with recorder.checking(check, "files") as tally:
        copied, _ = small_files(source.root)
        listed = {file.path: file.digest for file in manifest.files if file.path not in (CONFIG, manifest.base.index)}
        if TIER_MAP in listed:
            tally.add(1)
            _check_picture(manifest, listed.pop(TIER_MAP), check, recorder)
        for name in sorted({*copied, *listed}):
            tally.add(1)
            if name not in listed:
                recorder.find(check, name, "a file of the source that the pack does not have")
            elif name not in copied:
                recorder.find(check, name, "not a file of the source")
            elif not quick:
                _compare_small(copied[name], name, listed[name], tally, recorder)
        tally.add(1)
        _check_config(root, source, check, recorder)


def _check_picture(manifest: Manifest, packed: str, check: str, recorder: Recorder) -> None:
    kept = {int(layer): tiers.kept for layer, tiers in manifest.layers.items()}
    digest = blake3_digest(tier_map_png(manifest.geometry.num_experts, kept))
    if digest != packed:
        recorder.find(check, TIER_MAP, "not the picture of this pack's tiers", expected=digest, found=packed)


def _compare_small(path: Path, name: str, packed: str, tally: Tally, recorder: Recorder) -> None:
    try:
        data = path.read_bytes()
    except OSError as error:
        failure = EnvironmentFailure("cannot read", where=path, found=error.strerror)
        recorder.cannot_read(SMALL_FILES, str(path), failure)
        return
    tally.add(0, len(data))
    digest = blake3_digest(data)
    if digest != packed:
        recorder.find(SMALL_FILES, name, "not the source's bytes", expected=digest, found=packed)


def _same(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same; NaN is NaN."""
    return bool(one == other) or json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _without_maps(document: Mapping[str, Any], depth: int = 2) -> dict[str, Any]:
    """A configuration without its bit maps: a pack has the one in use in every place, in one spelling."""
    return {
        key: _without_maps(value, depth - 1) if depth and key in MAP_HOLDERS and isinstance(value, Mapping) else value
        for key, value in document.items()
        if key != KEY
    }


def _check_config(root: Path, source: Checkpoint, check: str, recorder: Recorder) -> None:
    if recorder.was_told(CONFIG) or CONFIG in recorder.bad_paths:
        return
    try:
        document, _ = read_document(root / CONFIG)
    except (DataError, EnvironmentFailure) as error:  # changed meanwhile
        recorder.find_error(check, CONFIG, error)
        return
    ours, theirs = _without_maps(document), _without_maps(source.config.raw)
    ours.pop("quantization_config", None), theirs.pop("quantization_config", None)
    for key in sorted({*ours, *theirs}):
        if key not in ours or key not in theirs or not _same(ours[key], theirs[key]):
            expected, found = (repr(side[key])[:80] if key in side else "no such key" for side in (theirs, ours))
            recorder.find(check, CONFIG, "not as in the source's", where=key, expected=expected, found=found)
    block = document.get("quantization_config")
    kept = block.get("source_quantization_config") if isinstance(block, Mapping) else None
    if not _same(kept, source.config.quantization):
        where = "quantization_config.source_quantization_config"
        recorder.find(check, CONFIG, "not the source's quantization config", where=where)
