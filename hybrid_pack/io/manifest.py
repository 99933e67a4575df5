"""The manifest on disk: canonical bytes, self digest, and every rule that ties its parts together."""

from __future__ import annotations

import json
import math
import stat
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hybrid_pack.errors import DataError, EnvironmentFailure, HybridPackError, UsageError
from hybrid_pack.io.digest import blake3_digest, shard_digest
from hybrid_pack.io.safetensors import build_header, parse_json
from hybrid_pack.layouts.shard import RankGeometry, ShardTensor, shard_path, shard_tensors
from hybrid_pack.schemas.manifest import FORMAT, FORMAT_VERSION, LAYOUT_ABI, Manifest, ShardEntry, path_key
from hybrid_pack.sharding import Topology, tiles_for, why_not_ep, why_not_tp

MANIFEST = "hybrid_pack.json"
README = "README.md"
BASE_INDEX = "model.safetensors.index.json"
STATE = "hybrid_pack.state.partial"
"""Journal of an unfinished conversion."""

PULL_STAGING = ".hybrid-pack-pull"
"""Folder in a pack where a pull puts files until they are checked. Begins with a dot, so that no reader looks at it."""

ROW_TENSORS = ("w13", "w2", "w13_scale", "w2_scale")
"""Tensors (after the tier's name) whose digest is a ``blake3-rows``."""

_TAIL_START = b',\n "self_digest": "'
_TAIL_END = b'"\n}\n'
_DIGEST_CHARS = len("blake3:") + 64
_MAX_MANIFEST_BYTES = 1 << 30


def encode_manifest(document: dict[str, Any]) -> bytes:
    """Bytes of the manifest file: JSON indented by one space, and last its digest over all bytes before that key.

    Args:
        document: The manifest as plain JSON values without ``self_digest``.
    """
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False).encode("utf-8")
    body = text.removesuffix(b"\n}")
    return body + _TAIL_START + blake3_digest(body).encode() + _TAIL_END


def decode_manifest(text: bytes, where: object) -> Manifest:
    """Parse and check the bytes of a manifest file.

    Raises:
        DataError: Another format or version, the self digest does not match, a value against the schema or the rules.
    """
    document = parse_json(text, where)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise DataError("not a hybrid-pack manifest", where=where, expected=f"format {FORMAT!r}", found=repr(found))
    if document.get("format_version") != FORMAT_VERSION or type(document["format_version"]) is not int:
        raise DataError(
            "unsupported format_version",
            where=where,
            expected=FORMAT_VERSION,
            found=repr(document.get("format_version")),
            hint="use a hybrid-pack that reads it",
        )
    tail = len(_TAIL_START) + _DIGEST_CHARS + len(_TAIL_END)
    body, end = text[:-tail], text[-tail:]
    expected = _TAIL_START + blake3_digest(body).encode() + _TAIL_END
    if end != expected:
        raise DataError(
            "the manifest's self_digest does not match its bytes: it was edited or damaged",
            where=where,
            expected=expected[len(_TAIL_START) : -len(_TAIL_END)].decode(),
            found=repr(document.get("self_digest"))[:90],
            hint="get the file again or convert again",
        )
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        at = ".".join(map(str, first["loc"])) or "the document"
        raise DataError(f"{at}: {first['msg']}", where=where, found=repr(first.get("input"))[:80]) from None
    check_manifest(manifest, where)
    return manifest


def read_manifest(root: Path) -> Manifest:
    """The checked manifest of a pack folder.

    Raises:
        UsageError: No such folder.
        DataError: There is none, or it is not right.
        EnvironmentFailure: It cannot be read.
    """
    path = root / MANIFEST
    try:
        if path.is_symlink() and not path.exists():
            raise DataError("a symbolic link to a file that is not there", where=path)
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):  # a pipe would be read for ever
            raise DataError("not a regular file", where=path)
        if status.st_size > _MAX_MANIFEST_BYTES:
            raise DataError("too large for a manifest", where=path, found=f"{status.st_size} bytes")
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise _no_manifest(root) from None
    except OSError as error:
        raise EnvironmentFailure("cannot read", where=path, found=error.strerror) from error
    return decode_manifest(text, path)


def _no_manifest(root: Path) -> HybridPackError:
    """What a folder without a manifest is instead."""
    if not root.is_dir():
        return UsageError("not a folder" if root.exists() else "no such folder", where=root, expected="a pack")
    if (root / STATE).exists():
        return DataError(
            "not a pack: it has no manifest", where=root / MANIFEST, hint="finish the conversion with --resume"
        )
    if (root / PULL_STAGING).is_dir():
        return DataError(
            "not a pack yet: a pull was interrupted, or is running", where=root / MANIFEST, hint="run the pull again"
        )
    if (root / "experts").is_dir():
        return DataError(
            "not a pack: it has no manifest",
            where=root / MANIFEST,
            hint="finish the conversion with --resume, or download the file if there is one",
        )
    if (root / "config.json").exists() and any(root.glob("*.safetensors*")):
        return DataError("this is a checkpoint, not a pack", where=root, hint="make a pack of it with convert")
    return DataError("not a pack: it has no manifest", where=root / MANIFEST)


def topology_of(manifest: Manifest) -> Topology:
    """The topology a pack was made for."""
    return Topology(manifest.topology.tensor_parallel, manifest.topology.expert_parallel)


def rank_geometry(manifest: Manifest) -> RankGeometry:
    """Sizes of one rank's share."""
    geometry = manifest.geometry
    share = geometry.intermediate_size_padded // manifest.topology.tensor_parallel
    return RankGeometry(geometry.hidden_size, share, manifest.layout.tiles, is_gated(manifest))


def is_gated(manifest: Manifest) -> bool:
    """Whether experts have a gate matrix."""
    return manifest.layout.w13_order == "gate_up"


def rank_tiers(manifest: Manifest, layer: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(kept ids, tail ids) a rank holds of a layer."""
    held = topology_of(manifest).experts(rank, manifest.geometry.num_experts)
    tiers = manifest.layers[str(layer)]
    return tuple(e for e in tiers.kept if e in held), tuple(e for e in tiers.tail if e in held)


def expected_tensors(manifest: Manifest, layer: int, rank: int) -> tuple[ShardTensor, ...]:
    """The tensors of a shard in file order, from the manifest's own geometry and tiers."""
    kept, tail = rank_tiers(manifest, layer, rank)
    return shard_tensors(rank_geometry(manifest), len(kept), len(tail), manifest.layers[str(layer)].kept_scale_format)


def shard_header(tensors: tuple[ShardTensor, ...]) -> bytes:
    """The exact bytes before the data of a shard with these tensors."""
    return build_header((t.name, t.dtype, t.shape) for t in tensors)[0]


def check_manifest(manifest: Manifest, where: object) -> None:
    """Hold the parts of a manifest against each other.

    Raises:
        DataError: The first rule broken.
    """

    def refuse(problem: str, expected: object, found: object) -> None:
        raise DataError(problem, where=where, expected=expected, found=found)

    layout, geometry, topology = manifest.layout, manifest.geometry, topology_of(manifest)
    if layout.abi != LAYOUT_ABI:
        refuse("layout.abi is not one this version reads", LAYOUT_ABI, layout.abi)
    if geometry.intermediate_size_padded < geometry.intermediate_size:
        refuse(
            "geometry.intermediate_size_padded is below intermediate_size",
            f">= {geometry.intermediate_size}",
            geometry.intermediate_size_padded,
        )
    tp, gated = topology.tensor_parallel, is_gated(manifest)
    reason = why_not_tp(geometry.hidden_size, geometry.intermediate_size_padded, tp, gated)
    reason = reason or why_not_ep(geometry.num_experts, topology.expert_parallel)
    if reason:
        refuse("topology does not fit geometry", "a legal size", reason)
    if geometry.top_k > geometry.num_experts:
        refuse("geometry.top_k is above num_experts", f"<= {geometry.num_experts}", geometry.top_k)
    tiles = tiles_for(geometry.hidden_size, geometry.intermediate_size_padded // tp, gated)
    if layout.tiles != tiles:
        refuse("layout.tiles are not the tiles of this geometry", tiles, layout.tiles)
    levels = layout.nf3_levels
    if not all(map(math.isfinite, levels)) or any(a >= b for a, b in pairwise(levels)):
        refuse("layout.nf3_levels do not ascend", "eight finite ascending numbers", levels)
    _check_layers(manifest, refuse)
    _check_shards(manifest, topology, refuse)
    _check_files(manifest, refuse)
    _check_report(manifest, refuse)


def _check_layers(manifest: Manifest, refuse: Any) -> None:
    everyone = range(manifest.geometry.num_experts)
    if not manifest.layers:
        refuse("layers is empty", "at least one layer", "none")
    order = [int(layer) for layer in manifest.layers]
    if order != sorted(order):
        refuse("layers are not in order", sorted(order), order)
    for layer, tiers in manifest.layers.items():
        for tier, ids in (("kept", tiers.kept), ("tail", tiers.tail)):
            if list(ids) != sorted(set(ids)):
                refuse(f"layers.{layer}.{tier} is not ascending", "ascending expert ids", list(ids)[:8])
        ids = (*tiers.kept, *tiers.tail)
        if len(ids) != len(everyone) or sorted(ids) != list(everyone):  # in this order: the number may be absurd
            refuse(
                f"layers.{layer}: kept and tail together are not every expert once",
                f"0..{len(everyone) - 1}",
                f"{len(tiers.kept)} + {len(tiers.tail)}",
            )
        if bool(tiers.kept) != (tiers.kept_scale_format is not None):
            refuse(
                f"layers.{layer}.kept_scale_format",
                "a format where experts are kept, else null",
                tiers.kept_scale_format,
            )


def _check_shards(manifest: Manifest, topology: Topology, refuse: Any) -> None:
    count = len(manifest.layers) * topology.ranks
    if len(manifest.shards) != count:
        refuse("shards are not one for each layer and rank", count, len(manifest.shards))
    wanted = [(int(layer), rank) for layer in manifest.layers for rank in range(topology.ranks)]
    found = [(shard.layer, shard.rank) for shard in manifest.shards]
    if found != wanted:
        expected, wrong = next(pair for pair in zip(wanted, found, strict=True) if pair[0] != pair[1])
        refuse("shards are not in the order of layer and rank", f"(layer, rank) {expected}", wrong)
    for shard in manifest.shards:
        path = shard_path(topology.folder, shard.rank, shard.layer)
        if shard.path != path:
            refuse(f"path of the shard of layer {shard.layer} rank {shard.rank}", path, shard.path)
        _check_tensors(manifest, shard, refuse)


def _check_tensors(manifest: Manifest, shard: ShardEntry, refuse: Any) -> None:
    tensors = expected_tensors(manifest, shard.layer, shard.rank)
    header, placed = build_header((t.name, t.dtype, t.shape) for t in tensors)
    if set(shard.tensors) != {t.name for t in placed}:
        refuse(f"{shard.path}: tensors", ", ".join(t.name for t in placed), ", ".join(shard.tensors))
    for tensor in placed:
        entry = shard.tensors[tensor.name]
        if (entry.dtype, entry.shape, entry.begin, entry.end) != (tensor.dtype, tensor.shape, tensor.begin, tensor.end):
            refuse(
                f"{shard.path}: {tensor.name}",
                f"{tensor.dtype} {list(tensor.shape)} at {tensor.begin}..{tensor.end}",
                f"{entry.dtype} {list(entry.shape)} at {entry.begin}..{entry.end}",
            )
        kind = "blake3-rows" if tensor.name.split(".")[1] in ROW_TENSORS else "blake3"
        if not entry.digest.startswith(f"{kind}:"):
            refuse(f"{shard.path}: digest of {tensor.name}", kind, entry.digest)
    end = placed[-1].end if placed else len(header)
    if shard.bytes != end:
        refuse(f"{shard.path}: bytes", end, shard.bytes)
    digest = shard_digest(header, (shard.tensors[t.name].digest for t in placed))
    if shard.digest != digest:
        refuse(f"{shard.path}: digest is not that of its header and tensors", digest, shard.digest)


def _check_files(manifest: Manifest, refuse: Any) -> None:
    for file in (*manifest.base.files, *manifest.files):
        if not file.digest.startswith("blake3:"):
            refuse(f"{file.path}: digest", "blake3", file.digest)
        parts = path_key(file.path).split("/")  # a file system may not tell HYBRID_PACK.json from the manifest
        of_others = parts[0] in (path_key(MANIFEST), path_key(README), "experts") or parts[0].startswith(".")
        if of_others or any(part.endswith(".partial") for part in parts):
            wanted = "neither manifest, README.md, expert shard, dot file nor .partial, and nothing below one"
            refuse("a path that cannot be listed here", wanted, file.path)
    _check_prefixes(manifest, refuse)
    listed = {file.path for file in manifest.files}
    if (manifest.base.index is None) != (not manifest.base.files):
        refuse("base.index", "a path where there are base files, else null", manifest.base.index)
    for path in ("config.json", *((manifest.base.index,) if manifest.base.index else ())):
        if path not in listed:
            refuse("files does not list a file every pack has", path, f"{len(listed)} files")
    if manifest.base.index not in (None, BASE_INDEX):
        refuse("base.index", BASE_INDEX, manifest.base.index)


def _check_prefixes(manifest: Manifest, refuse: Any) -> None:
    """No file is where another needs a folder."""
    files = {path_key(path): path for path in manifest.paths()}
    for key, path in files.items():
        for i, character in enumerate(key):
            if character == "/" and key[:i] in files:
                refuse("a path goes through a file", f"a folder at {files[key[:i]]}", path)


def _check_report(manifest: Manifest, refuse: Any) -> None:
    report = manifest.report
    for tier, found in (("kept", report.experts_kept), ("tail", report.experts_tail)):
        expected = sum(len(getattr(tiers, tier)) for tiers in manifest.layers.values())
        if found != expected:
            refuse(f"report.experts_{tier} is not the number of {tier} experts", expected, found)
    both = [layer for layer in report.layers_omitted if str(layer) in manifest.layers]
    if both:
        refuse("report.layers_omitted names a layer that is packed", "layers that are not packed", both[0])
    _check_quantized(manifest, refuse)
    listed = [(entry.layer, entry.expert) for entry in report.experts_requantized]
    if listed != sorted(set(listed)):
        refuse("report.experts_requantized is not in order", "each (layer, expert) once, ascending", listed[:8])
    for layer, expert in listed:
        if str(layer) not in manifest.layers or expert not in manifest.layers[str(layer)].kept:
            where_it_is = f"layer {layer} expert {expert}"
            refuse("report.experts_requantized names an expert that is not kept", "a kept expert", where_it_is)


def _check_quantized(manifest: Manifest, refuse: Any) -> None:
    entries, report_options = manifest.report.experts_quantized, manifest.report.options
    order = [(entry.layer, entry.tier) for entry in entries]
    if order != sorted(set(order)):
        refuse("report.experts_quantized is not in order", "each (layer, tier) once, ascending", order[:8])
    cast = manifest.report.experts_cast
    kept = sum(len(tiers.kept) for tiers in manifest.layers.values() if tiers.kept_scale_format == "e4m3_k16")
    if cast > kept:
        refuse("report.experts_cast is above the number of kept NVFP4 experts", f"<= {kept}", cast)
    for entry in entries:
        where_it_is = f"layer {entry.layer} {entry.tier}"
        tiers = manifest.layers.get(str(entry.layer))
        ids = () if tiers is None else getattr(tiers, entry.tier)
        if not entry.experts or list(entry.experts) != sorted(set(entry.experts)) or not set(entry.experts) <= set(ids):
            refuse(f"report.experts_quantized of {where_it_is}", "ascending ids of that tier", list(entry.experts)[:8])
        if len(entry.sqnr_db) != len(entry.experts):
            refuse(f"report.experts_quantized of {where_it_is}: sqnr_db", len(entry.experts), len(entry.sqnr_db))
        tail_method = report_options.search if report_options.hessians is None else "gptq"
        method = tail_method if entry.tier == "tail" else report_options.search
        if entry.method != method:
            refuse(
                f"report.experts_quantized of {where_it_is}: method is not that of the options", method, entry.method
            )
        if (entry.gptq_to_rtn is None) == (entry.method == "gptq"):
            refuse(
                f"report.experts_quantized of {where_it_is}: gptq_to_rtn", "a number for gptq alone", entry.gptq_to_rtn
            )
        counted = max(entry.groups_zero_scale, entry.scales_subnormal, entry.scales_saturated)
        if counted > entry.groups:
            refuse(f"report.experts_quantized of {where_it_is}: counts", f"at most {entry.groups}", counted)
