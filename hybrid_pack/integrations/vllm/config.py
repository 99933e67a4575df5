"""``HybridPackConfig``: what vLLM asks how each layer of a pack is stored and run."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm import __version__ as vllm_version
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from hybrid_pack.errors import DataError, UsageError
from hybrid_pack.integrations.vllm import QUANT_METHOD
from hybrid_pack.integrations.vllm.processes import spawn_if_needed
from hybrid_pack.integrations.vllm.request import require_served
from hybrid_pack.integrations.vllm.versions import known_names

if TYPE_CHECKING:
    from hybrid_pack.integrations.vllm.session import Session

WHERE = "config.json quantization_config"
logger = init_logger("vllm.hybrid_pack")
MANIFEST = "hybrid_pack.json"


class HybridPackConfig(QuantizationConfig):
    """Experts of a pack go to its own method, everything else to the one vLLM has for the source's format.

    vLLM makes it in the first process and sends it to the workers, so it holds nothing but the config's text until a
    worker asks for a layer.

    Args:
        document: ``quantization_config`` of the pack's config.json. vLLM leaves it out where there is none: the method
            was then asked for with ``--quantization``.

    Attributes:
        source: The source's own quantisation config, {} where it had none.
        model: Folder or Hub id vLLM serves, once it is known.
    """

    def __init__(self, document: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        if document is None:
            raise UsageError(
                "this is not a pack: config.json has no quantization_config", where="--quantization hybrid_pack",
                hint="convert it first: hybrid-pack convert SRC --out OUT; serving OUT needs no --quantization",
            )  # fmt: skip
        source = document.get("source_quantization_config")
        if source is not None and not isinstance(source, Mapping):
            raise DataError("not an object", where=f"{WHERE}.source_quantization_config", found=repr(source))
        if (manifest := document.get("manifest")) != MANIFEST:
            raise DataError("no such manifest", where=f"{WHERE}.manifest", expected=MANIFEST, found=repr(manifest))
        self.source: dict[str, Any] = dict(source or {})
        self.model: str | None = None
        self.mappers: list[Any] = []
        self._session: Session | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> HybridPackConfig:
        """Make it from config.json.

        Whatever the workers will import is imported here: a name that is missing is told before any of them starts.

        Raises:
            DataError: It is not what ``convert`` writes.
            EnvironmentFailure: This vLLM is not as it was.
        """
        with known_names(str(vllm_version)):
            for name in ("dispatch", "session"):
                import_module(f"hybrid_pack.integrations.vllm.{name}")
        return cls(config)

    def get_name(self) -> str:
        """Name of the method."""
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The kernels read and write BF16."""
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        """BF16 needs 80; whether a kernel runs on a GPU is decided, with reasons, when the experts are loaded."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: config.json says everything."""
        return []

    def maybe_update_config(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        """Learn the model; a folder that is no pack, or one of a family that cannot be served, is refused here, in the
        first process.

        How a pack's base is stored decides what is compiled, and vLLM's key for what it has compiled knows of a model
        only its name and config.json; so the headers' digest, or the commits of a Hub id, become part of the latter.
        Of a config that is a dataclass, as transformers 5 has them, 0.22.1 puts its fields alone into the key, so it is
        in one that nobody reads too.
        """
        spawn_if_needed(logger)
        self.model = model_name
        hf_config = kwargs.get("hf_config")
        require_served(getattr(hf_config, "model_type", None), model_name)
        if Path(model_name).is_dir():
            from hybrid_pack.integrations.vllm.base import BaseTensors
            from hybrid_pack.runtime.pack import open_pack

            bias = open_pack(model_name).manifest.report.options.mx_bias
            base: object = None if hf_config is None else BaseTensors.read(Path(model_name), bias).digest()
        else:
            from hybrid_pack.integrations.vllm.folder import commits

            base = None if hf_config is None else commits(model_name)
        if hf_config is not None:
            hf_config.hybrid_pack_base = base
            hf_config.transformers_version = f"hybrid_pack base {base}"

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Follow a model's renaming of modules."""
        unstacked = getattr(hf_to_vllm_mapper, "get_unstacked_mapper", None)
        self.mappers.append(hf_to_vllm_mapper if unstacked is None else unstacked())

    def get_cache_scale(self, name: str) -> str | None:
        """The parameter a KV-cache scale of the checkpoint goes to (vLLM before 0.25 asks this way)."""
        find = getattr(self.session.source.config, "get_cache_scale", None)
        found: str | None = None if find is None else find(name)
        return found

    def get_cache_scale_mapper(self) -> Any:
        """The names that KV-cache scales of the checkpoint have in vLLM (since 0.25), as the source's method has them.

        Returns:
            A ``WeightsMapper`` of vLLM's.
        """
        source: Any = self.session.source.config
        return super().get_cache_scale_mapper() if source is None else source.get_cache_scale_mapper()

    @property
    def session(self) -> Session:
        """What this process knows of the pack, opened when it is first asked for."""
        if self._session is None:
            from hybrid_pack.integrations.vllm.session import Session

            with known_names(str(vllm_version)):
                self._session = Session.of(self)
        return self._session

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer.

        Raises:
            HybridPackError: It does not fit the pack, or is stored in a way that cannot be read.
        """
        from hybrid_pack.integrations.vllm.dispatch import method_of

        return method_of(self, layer, prefix)

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to a process."""
        return {**self.__dict__, "_session": None, "mappers": []}
