"""What a load did and what it checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from hybrid_pack.runtime.layer import Check, PackedMoELayer

CHECK_DEFAULT: Check = "digest"
"""Where all bytes are read anyway. Mapped shards are read when they are used, and default to ``structure``."""


@dataclass(frozen=True)
class LoadReport:
    """What a load did.

    Attributes:
        layers: The layers, in the order they were loaded; a shard of each was opened, and no other file of the pack.
        rank: Their rank.
        device: Where they are.
        checked: What was held against the manifest.
        read: Whether all bytes were read; False where they are mapped and only looked at when used.
        tensors: Number of tensors.
        payload_bytes: Bytes of these tensors.
        seconds: From the call until the tensors may be used; opening, pinning and giving back are within it.
        readers: Threads that read; 0 where nothing was read, and so are the rest.
        chunk_bytes: Most bytes of one read.
        host_bytes: Host memory used for buffers; given back, unless the caller had made them.
        device_bytes: Device memory of the tensors: the payload and less than 256 bytes a tensor.
        direct_files: Shards read past the page cache.
    """

    layers: tuple[int, ...]
    rank: int
    device: str
    checked: Check
    read: bool
    tensors: int
    payload_bytes: int
    seconds: float
    readers: int = 0
    chunk_bytes: int = 0
    host_bytes: int = 0
    device_bytes: int = 0
    direct_files: int = 0

    @property
    def gb_per_s(self) -> float:
        """Payload over time, in units of 10^9 bytes a second."""
        return self.payload_bytes / 1e9 / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        layers = f"{len(self.layers)} layer{'s' * (len(self.layers) != 1)} of rank {self.rank}"
        how = f"in {self.seconds:.2f} s, {self.gb_per_s:.1f} GB/s" if self.read else "mapped"
        what = "every digest" if self.checked == "digest" else "sizes, headers and expert ids"
        return f"{layers} on {self.device}, {self.payload_bytes / 1e9:.2f} GB {how}; checked: {what}"


class LoadedRank(Mapping[int, PackedMoELayer]):
    """The layers of one rank by their number, and how they came.

    Args:
        layers: The layers, in the order of the report.
        report: What was done and checked.

    Attributes:
        report: What was done and checked.
    """

    report: LoadReport

    def __init__(self, layers: Iterable[PackedMoELayer], report: LoadReport) -> None:
        self._layers = {layer.layer: layer for layer in layers}
        self.report = report

    def __getitem__(self, layer: int) -> PackedMoELayer:
        return self._layers[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        return f"<LoadedRank: {self.report}>"
