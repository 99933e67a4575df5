"""Which method runs which of vLLM's layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm import __version__ as vllm_version
from vllm.compilation import backends
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from hybrid_pack.errors import DataError
from hybrid_pack.formats.source import Header
from hybrid_pack.integrations.vllm.arriving import arriving, own
from hybrid_pack.integrations.vllm.base import PLAIN
from hybrid_pack.integrations.vllm.drafts import is_draft
from hybrid_pack.integrations.vllm.kept import why_not_experts, why_not_read
from hybrid_pack.integrations.vllm.linear import linear_method
from hybrid_pack.integrations.vllm.moe_method import HybridMoEMethod, request_of
from hybrid_pack.integrations.vllm.prefixes import layer_of, stored_names
from hybrid_pack.integrations.vllm.request import require
from hybrid_pack.integrations.vllm.versions import known_names
from hybrid_pack.io.excludes import matches

if TYPE_CHECKING:
    from hybrid_pack.integrations.vllm.config import HybridPackConfig
    from hybrid_pack.integrations.vllm.session import Session


def method_of(config: HybridPackConfig, layer: torch.nn.Module, prefix: str) -> Any:
    """The method of a layer, None where vLLM shall treat it as not quantised."""
    session = config.session
    session.base.rename(config.mappers)
    session.base.note(prefix)
    if isinstance(layer, RoutedExperts):
        return _experts(config, layer, prefix)
    if isinstance(layer, LinearBase):
        return _watched(_linear(config, layer, prefix), session)
    if isinstance(layer, VocabParallelEmbedding):
        return _embedding(config, layer, prefix)
    return session.source.method(layer, prefix, config.packed_modules_mapping, config.mappers)


def _experts(config: HybridPackConfig, layer: Any, prefix: str) -> Any:
    session = config.session
    number = layer_of(prefix)
    if number is not None and number in session.pack.layers:
        with known_names(str(vllm_version)):
            request = request_of(layer, number, prefix, session.engine)
            draft = is_draft(backends.model_tag)
        session.decoder.require_own(number, prefix, draft)
        require(request, session.pack.manifest, session.folder.root)
        session.base.require_built(prefix)
        return HybridMoEMethod(layer.moe_config, session, request)
    names = session.base.names(prefix)
    if not names:
        omitted = number in session.pack.manifest.report.layers_omitted
        raise DataError(
            "the pack has no experts for this layer", where=prefix,
            found="convert was told --layers" if omitted else None,
            hint="convert the whole model" if omitted else "it is not the model this config.json describes",
        )  # fmt: skip
    forms = session.base.forms(prefix)
    quantised = any(name.endswith("scale") or "scale_inv" in name for name in names) or not forms <= {*PLAIN, "unknown"}
    if not quantised:
        return None
    method = session.source.method(layer, prefix, config.packed_modules_mapping, config.mappers)
    given = "no method" if method is None else type(method).__name__
    if (why_not := why_not_experts(type(method).__name__, forms)) is not None:
        raise _unread(prefix, why_not, session.source.problem or f"the source's config gives {given}")
    return _reading(method, session.base.experts(prefix), prefix)


def _unread(prefix: str, expected: str, found: str) -> DataError:
    return DataError(
        "quantised experts that are not in the pack, and that this vLLM would not read", where=prefix,
        expected=expected, found=found,
        hint="dequantise them in the source and convert again, or serve without the draft they belong to",
    )  # fmt: skip


def _reading(method: Any, experts: Sequence[Mapping[str, Header]], prefix: str) -> Any:
    """A method of vLLM's for experts of the base that refuses where what it registers is not what is stored."""
    create = method.create_weights

    def create_weights(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        create(layer, *args, **kwargs)
        registered = {name: (p.dtype, tuple(p.shape)) for name, p in own(layer).items()}
        backend = getattr(getattr(method, "nvfp4_backend", None), "name", None)
        if (why_not := why_not_read(registered, experts, backend)) is not None:
            stored = ", ".join(sorted({name for fields in experts for name in fields}))
            raise _unread(prefix, f"a method that reads {stored}", f"{type(method).__name__} {why_not}")

    method.create_weights = create_weights
    return method


def _linear(config: HybridPackConfig, layer: Any, prefix: str) -> Any:
    session, packed = config.session, config.packed_modules_mapping
    stored = session.base.stored(prefix, packed)
    if stored is not None:
        return linear_method(config, layer, prefix, stored)
    # Stored under a name that cannot be told from vLLM's: the source's config is all there is to go by.
    names = stored_names(prefix, packed)
    if any(matches(pattern, name) for pattern in session.source.excluded for name in (prefix, *names)):
        return UnquantizedLinearMethod()
    return session.source.method(layer, prefix, packed, config.mappers) or UnquantizedLinearMethod()


def _watched(method: Any, session: Session) -> Any:
    """A linear method that refuses another model's weights, which ``reload_weights(weights_path=...)`` loads."""
    process = method.process_weights_after_loading

    def process_weights_after_loading(layer: torch.nn.Module) -> None:
        session.require_same_model()
        process(layer)

    create = method.create_weights

    def create_weights(layer: Any, *args: Any, **kwargs: Any) -> None:
        create(layer, *args, **kwargs)
        if layer.quant_method is not method:  # which gave its place to another
            _watched(layer.quant_method, session)

    method.process_weights_after_loading = process_weights_after_loading
    method.create_weights = create_weights
    return method


def _embedding(config: HybridPackConfig, layer: Any, prefix: str) -> Any:
    if isinstance(layer, ParallelLMHead):
        config.session.base.require_built(prefix)
    stored = config.session.base.stored(prefix, {})
    if stored is None:
        return None  # of a head, that it is the embedding
    with known_names(str(vllm_version)):
        draft = is_draft(backends.model_tag)
    if stored.plain:
        # A draft may be given those of the model, after it was loaded.
        return None if draft else arriving(UnquantizedEmbeddingMethod(), stored, prefix, once=True)
    raise DataError(
        "vLLM cannot run a quantised embedding or head of this format", where=prefix, found=stored.form.name,
        hint="dequantise it in the source and convert again",
    )  # fmt: skip
