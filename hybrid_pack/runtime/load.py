"""From an expert shard on disk to tensors: checked against the manifest by size and header, mapped without a copy."""

from __future__ import annotations

import mmap
import stat
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import torch

from hybrid_pack.errors import DataError, EnvironmentFailure, UsageError
from hybrid_pack.io.manifest import expected_tensors, rank_geometry, rank_tiers, shard_header
from hybrid_pack.layouts.shard import Tier
from hybrid_pack.runtime.layer import LayerGeometry, PackedMoELayer, TierWeights
from hybrid_pack.schemas.manifest import Manifest, ShardEntry

DTYPES = {"I32": torch.int32, "U8": torch.uint8, "F32": torch.float32}
_AGAIN = "get the file again or convert again; `hybrid-pack verify` checks every byte"


def load_shard(root: Path, manifest: Manifest, entry: ShardEntry, device: str | torch.device) -> PackedMoELayer:
    """One rank's experts of one layer; ``Pack.load_layer`` says what is checked and what is copied."""
    target = _device(device)
    path = root / entry.path
    mapping = _map(path, entry, shard_header(expected_tensors(manifest, entry.layer, entry.rank)))

    def tensor(name: str) -> torch.Tensor:
        at = entry.tensors[name]
        dtype = DTYPES[at.dtype]
        count = (at.end - at.begin) // dtype.itemsize
        # The tensor's storage holds a reference to the mapping, so it is unmapped with the last tensor.
        mapped = torch.frombuffer(mapping, dtype=dtype, count=count, offset=at.begin).reshape(at.shape)
        return mapped if target.type == "cpu" else mapped.to(target)

    kept_ids, tail_ids = rank_tiers(manifest, entry.layer, entry.rank)
    geometry = rank_geometry(manifest)
    return PackedMoELayer(
        layer=entry.layer,
        rank=entry.rank,
        kept=_tier("kept", kept_ids, tensor, path),
        tail=_tier("tail", tail_ids, tensor, path),
        geometry=LayerGeometry(
            hidden_size=geometry.hidden,
            intermediate_size=geometry.intermediate,
            num_experts=manifest.geometry.num_experts,
            top_k=manifest.geometry.top_k,
            kept_scale_format=manifest.layers[str(entry.layer)].kept_scale_format,
            nf3_levels=manifest.layout.nf3_levels,
            activation=manifest.layout.activation,
        ),
        tiles=manifest.layout.tiles,
    )


def _device(device: str | torch.device) -> torch.device:
    if sys.byteorder != "little":
        raise EnvironmentFailure("shards are read in place, which needs a little-endian machine", found=sys.byteorder)
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError("not a device", expected="such as cpu or cuda:0", found=repr(device)) from error
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise EnvironmentFailure(f"{target} is not available", found=f"{torch.cuda.device_count()} CUDA devices")
    return target


def _map(path: Path, entry: ShardEntry, header: bytes) -> mmap.mmap:
    """A private mapping of the whole file.

    ACCESS_COPY rather than ACCESS_READ: torch warns about buffers that cannot be written. The file is opened read-only
    all the same. A link is followed, since the Hub's cache consists of links; its name is fixed by layer and rank.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise DataError("not a regular file", where=path, expected=f"a file of {entry.bytes} bytes", hint=_AGAIN)
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size != entry.bytes:
                problem = "the file is truncated" if size < entry.bytes else "the file is too long"
                raise DataError(
                    problem, where=path, expected=f"{entry.bytes} bytes", found=f"{size} bytes", hint=_AGAIN
                )
            file.seek(0)
            _check_header(path, header, file.read(len(header)))
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (FileNotFoundError, NotADirectoryError):
        found = "a link to a file that is not there" if path.is_symlink() else "nothing"
        raise DataError(
            "no such file", where=path, expected=f"a file of {entry.bytes} bytes", found=found, hint=_AGAIN
        ) from None
    except OSError as error:
        raise EnvironmentFailure("cannot read", where=path, found=error.strerror) from error


def _check_header(path: Path, expected: bytes, found: bytes) -> None:
    if expected != found:
        at = next(i for i, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1])
        raise DataError(
            f"byte {at} of the header is not the one its manifest implies", where=path,
            expected=repr(expected[at : at + 24]), found=repr(found[at : at + 24]), hint=_AGAIN,
        )  # fmt: skip


def _tier(tier: Tier, ids: tuple[int, ...], tensor: Callable[[str], torch.Tensor], path: Path) -> TierWeights | None:
    """A tier's tensors, or None where the rank holds no expert of it."""
    if not ids:
        return None
    weights = TierWeights(**{field.name: tensor(f"{tier}.{field.name}") for field in fields(TierWeights)})
    found = weights.expert_ids.tolist()
    if found != list(ids):  # a few hundred bytes, and a wrong one would route tokens to other experts
        row = next(i for i, pair in enumerate(zip(ids, found, strict=True)) if pair[0] != pair[1])
        raise DataError(
            f"{tier}.expert_ids[{row}] is not the manifest's",
            where=path,
            expected=ids[row],
            found=found[row],
            hint=_AGAIN,
        )
    return weights
