"""One rank's experts: loaded when the first layer needs them, run by ``HybridMoE``. Imports nothing of vLLM."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

import torch

from hybrid_pack.errors import EnvironmentFailure
from hybrid_pack.integrations.vllm.options import Options
from hybrid_pack.integrations.vllm.words import in_words
from hybrid_pack.io.manifest import rank_tiers
from hybrid_pack.runtime.backends import Choice, Rejected, choose, foresee
from hybrid_pack.runtime.build import layer_geometry
from hybrid_pack.runtime.layer import PackedMoELayer
from hybrid_pack.runtime.moe import HybridMoE
from hybrid_pack.runtime.pack import Pack
from hybrid_pack.runtime.report import LoadReport


@contextmanager
def float32_by_default() -> Iterator[None]:
    """vLLM loads with BF16 as torch's default dtype, for which nothing of ours was made."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class RankExperts:
    """The layers of one rank that a process needs.

    All layers that were announced when the first one is taken are loaded in one go, which is faster than one by one; a
    draft model that is made later brings a second go.

    Args:
        pack: The pack.
        rank: Which of its ranks.
        device: Where the weights shall be.
        options: The user's.
        max_tokens: Most tokens of a call.
        eager: Whether no CUDA graphs are made, so that calls may wait for the device.
        log: vLLM's logger.
    """

    def __init__(
        self,
        pack: Pack,
        rank: int,
        device: torch.device,
        options: Options,
        max_tokens: int,
        eager: bool,
        log: logging.Logger,
    ) -> None:
        self.pack, self.rank, self.device, self.options = pack, rank, device, options
        self.max_tokens, self.eager = max_tokens, eager
        self._log = log
        self._wanted: dict[int, None] = {}
        self._loaded: dict[int, PackedMoELayer] = {}
        self._report: LoadReport | None = None
        self._told: set[str] = set()

    def announce(self, layer: int) -> None:
        """Say that a layer will be taken; what no backend will run is refused here, before anything is loaded.

        Raises:
            EnvironmentFailure: Why it cannot be run.
        """
        manifest = self.pack.manifest
        kept, tail = rank_tiers(manifest, layer, self.rank)
        # vLLM makes models with its own dtype and device as torch's defaults, for which b12x is not imported.
        with float32_by_default(), torch.device("cpu"):
            choices = foresee(
                layer_geometry(manifest, layer), self.pack.tiles, self.device, kept=bool(kept), tail=bool(tail)
            )
        where = f"layer {layer} rank {self.rank}"
        self._require_eager(choose(self.options.backend, choices, where), choices, where)
        self._wanted[layer] = None

    def take(self, layer: int) -> tuple[HybridMoE, LoadReport]:
        """A layer ready to run, and how it came; the caller owns its memory.

        Raises:
            DataError: Its shard is missing, or is not the one the manifest describes.
            EnvironmentFailure: It cannot be read, memory is not enough, or no backend can run it.
        """
        with float32_by_default():
            if layer not in self._loaded:
                self._load(layer)
            weights = self._loaded.pop(layer)
            assert self._report is not None
            return self._ready(weights), self._report

    def _load(self, layer: int) -> None:
        wanted = [number for number in self.pack.layers if number in {*self._wanted, layer}]
        self._wanted = {}
        layers = f"{len(wanted)} layer{'s' * (len(wanted) != 1)}"
        self._log.info("hybrid_pack: loading %s of rank %d from %s", layers, self.rank, self.pack.root)
        before = _peak_bytes(self.device)
        with in_words(self.pack.root, self.rank):
            loaded = self.pack.load_rank(self.rank, self.device, wanted, check=self.options.check)
        self._loaded.update(loaded)
        self._report = loaded.report
        peak, beyond = _peak_bytes(self.device), ""
        if peak > before:  # else something that was loaded earlier needed more, and nothing can be said
            rest = peak - torch.cuda.memory_allocated(self.device)
            beyond = f"; device memory beyond the weights {rest / 2**20:.0f} MiB"
        self._log.info("hybrid_pack: %s%s", loaded.report, beyond)

    def _ready(self, weights: PackedMoELayer) -> HybridMoE:
        with in_words(self.pack.root, self.rank):
            moe = HybridMoE(weights, weights.geometry.top_k, self.max_tokens, self.options.backend)
        self._require_eager(moe.backend, moe.choices, f"layer {weights.layer} rank {self.rank}")
        text = f"backend {moe.backend} ({self._why(moe.backend, moe.choices)})"
        if text not in self._told:
            self._told.add(text)
            scratch = f", scratch of all layers {moe.scratch_bytes / 2**20:.0f} MiB" if moe.scratch_bytes else ""
            self._log.info("hybrid_pack: %s, up to %d tokens a call%s", text, self.max_tokens, scratch)
        return moe

    def _require_eager(self, backend: str, choices: Sequence[Choice], where: str) -> None:
        if backend == "torch" and self.device.type == "cuda" and not self.eager:
            raise EnvironmentFailure(
                "the torch backend waits for the device, which CUDA graphs do not allow",
                where=where, found=self._why(backend, choices), hint="see `hybrid-pack doctor`, or use --enforce-eager",
            )  # fmt: skip

    def _why(self, backend: str, choices: Sequence[Choice]) -> str:
        """Why this backend."""
        better = takewhile(lambda choice: choice.backend != backend, choices)
        reasons = "; ".join(f"not {c.backend}: {c.reason}" for c in better if isinstance(c, Rejected))
        return "as asked for" if self.options.backend != "auto" else reasons or "the first choice"


def _peak_bytes(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
