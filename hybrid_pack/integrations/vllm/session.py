"""What one process knows of the pack it serves, and of the engine it serves it in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm import __version__ as vllm_version
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger

from hybrid_pack.errors import UsageError
from hybrid_pack.integrations.vllm.base import BaseTensors
from hybrid_pack.integrations.vllm.drafts import Decoder
from hybrid_pack.integrations.vllm.experts import RankExperts
from hybrid_pack.integrations.vllm.folder import Folder
from hybrid_pack.integrations.vllm.options import Options, misplaced, parse_options
from hybrid_pack.integrations.vllm.place import Place
from hybrid_pack.integrations.vllm.source import Source, fp8_kv_cache
from hybrid_pack.integrations.vllm.versions import indexer_keys
from hybrid_pack.runtime.pack import Pack, open_pack

if TYPE_CHECKING:
    from hybrid_pack.integrations.vllm.config import HybridPackConfig

logger = init_logger("vllm.hybrid_pack")


@dataclass(frozen=True)
class Engine:
    """The engine's settings that matter to experts.

    Attributes:
        max_tokens: Most tokens of a call, as far as vLLM's own buffers go.
        eager: Whether no CUDA graphs are made.
        device: Where the model is.
        refused: What is on that packs cannot be served with.
    """

    max_tokens: int
    eager: bool
    device: torch.device
    refused: tuple[str, ...]

    @classmethod
    def of(cls, config: Any) -> Engine:
        """From vLLM's config of this process."""
        parallel, model = config.parallel_config, config.model_config
        refused = {
            "sleep mode (--enable-sleep-mode), which cannot bring the experts back": getattr(
                model, "enable_sleep_mode", False
            ),
            "expert load balancing (--enable-eplb), which moves experts": getattr(parallel, "enable_eplb", False),
            "micro-batches (--enable-dbo, or --ubatch-size above 1)": getattr(parallel, "use_ubatching", False),
            "LoRA on a model with packed experts": getattr(config, "lora_config", None) is not None,
        }
        return cls(
            max_tokens=int(config.scheduler_config.max_num_batched_tokens),
            eager=bool(model.enforce_eager),
            device=_device(config),
            refused=tuple(name for name, on in refused.items() if on),
        )


def _device(config: Any) -> torch.device:
    """The device of this worker; vLLM makes its own GPU the current one."""
    device = torch.device(getattr(config.load_config, "device", None) or config.device_config.device)
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device


class Session:
    """A pack in a process.

    Attributes:
        folder: Where it is.
        pack: The pack.
        place: Tells whether it is still where it was.
        base: What its base tensors are stored as.
        source: vLLM's own config for the source's format.
        engine: The engine's settings.
        options: The user's.
        decoder: The layers of the model itself.
        served: Says which model vLLM has now, where that is known; it changes where weights of another are loaded.
    """

    served: Callable[[], object] | None = None

    def __init__(
        self, folder: Folder, source: Source, engine: Engine, options: Options, layers: int | None = None
    ) -> None:
        self.folder, self.source, self.engine, self.options = folder, source, engine, options
        self.pack: Pack = open_pack(folder.root)
        self.place = Place(folder, self.pack.manifest.self_digest)
        self.base = BaseTensors.read(folder.base(), self.pack.manifest.report.options.mx_bias)
        self.base.indexer_keys = indexer_keys(str(vllm_version))
        self.decoder = Decoder(layers)
        self._first: object = None
        self._experts: RankExperts | None = None
        self._fetched: set[int] = set()

    @classmethod
    def of(cls, config: HybridPackConfig) -> Session:
        """The session of a config, in a process that builds a model."""
        vllm_config = get_current_vllm_config()
        model = vllm_config.model_config
        name = config.model or getattr(model, "model", None)
        if name is None:
            raise UsageError("which model is served is not known", where="hybrid_pack")
        options = parse_options(vllm_config.additional_config)
        for text in misplaced(vllm_config.additional_config):
            logger.warning("hybrid_pack: %s", text)
        if fp8_kv_cache(config.source) and vllm_config.cache_config.cache_dtype == "auto":
            logger.info("hybrid_pack: the source keeps its KV cache in FP8; --kv-cache-dtype fp8 does so here")
        revision = getattr(model, "revision", None) if getattr(model, "model", None) == name else None
        folder = Folder.find(name, revision, vllm_config.load_config.download_dir)
        target = getattr(vllm_config.speculative_config, "target_model_config", None) or model
        own = getattr(target, "model", None) == name
        layers = getattr(getattr(target, "hf_text_config", None), "num_hidden_layers", None) if own else None
        session = cls(folder, Source(config.source), Engine.of(vllm_config), options, layers)
        if getattr(model, "model", None) == name:
            session.served = lambda: (model.model, getattr(model, "revision", None))
            session._first = session.served()
        return session

    def require_same_model(self) -> None:
        """Refuse base weights of another pack, for the experts would stay those of this one.

        Raises:
            UsageError: vLLM was told to reload weights from somewhere else, or another pack was put in the place of
                this one.
        """
        now = None if self.served is None else self.served()
        first, found = (self._first, now) if now != self._first else self.place.other() or (None, None)
        if first != found:
            raise UsageError(
                "weights cannot be loaded from another model: experts stay those of the first", where=self.folder.root,
                expected=first, found=found,
                hint="this engine cannot go on, since its weights were taken away: start vLLM anew",
            )  # fmt: skip

    def experts(self, rank: int) -> RankExperts:
        """The experts of this process's rank; ``fetch`` brings their files."""
        if self._experts is None:
            engine = self.engine
            self._experts = RankExperts(
                self.pack, rank, engine.device, self.options, engine.max_tokens, engine.eager, logger
            )
        if self._experts.rank != rank:
            raise UsageError("one process, two ranks", where=self.folder.root, expected=self._experts.rank, found=rank)
        return self._experts

    def fetch(self, rank: int) -> None:
        """Bring the shards of a rank, where the pack is on the Hub."""
        if rank not in self._fetched:
            self.folder.fetch_rank(self.pack.topology.folder, rank)
            self._fetched.add(rank)
