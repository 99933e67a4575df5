"""What config.json and hf_quant_config.json say; headers decide, this is the cross-check."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from hybrid_pack.errors import DataError, EnvironmentFailure
from hybrid_pack.formats.nf3 import DEFAULT_LEVELS
from hybrid_pack.io.bitmap import BitMap, find_bit_map, parse_bit_map
from hybrid_pack.io.safetensors import parse_json

CONFIG = "config.json"
HF_QUANT_CONFIG = "hf_quant_config.json"

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_top_k")
_INTERMEDIATE = ("moe_intermediate_size",)
LATENT_WIDTH = ("routed_expert_hidden_size", "moe_latent_size")
"""Width of experts that are narrower than the model (Kimi-K3, Nemotron-3), before ``hidden_size``."""
_ACTIVATION = ("mlp_hidden_act", "hidden_act", "hidden_activation")
"""The first that is there: Nemotron-3 has Mamba layers too, and its MLPs have a key of their own."""
_NO_GATE = frozenset({"relu2"})
_OAI = ("gpt_oss", "minimax_m3")
"""Model types, or how they begin, whose experts clamp gate and up and use ``(up + 1) * gate * sigmoid(alpha * gate)``,
whatever ``hidden_act`` says (gpt-oss and some exports of MiniMax-M3 say silu)."""
_OAI_DEFAULTS = {"alpha": 1.702, "limit": 7.0}
"""Of transformers' GptOssConfig."""
MAX_DOCUMENT_BYTES = 256 << 20
"""The index of the largest models has some 20 MB."""
NO_ACTIVATION = f"{CONFIG} names no activation: silu is assumed"
_KEPT_FORMATS = {"mxfp4_e8m0k32": "mxfp4"}
_TAIL_FORMATS = ("nf3_2p1",)
_Blocks = list[Mapping[str, Any]]


@dataclass(frozen=True)
class ModelConfig:
    """The parts of a model's configuration that matter here.

    Attributes:
        raw: config.json, every key.
        quantization: The source's quantization config, from config.json or else hf_quant_config.json; may be empty.
        bit_map: The map, or None where no document has one.
        model_type: ``model_type`` of the decoder.
        hidden: Width the experts read and write.
        intermediate: Their intermediate size.
        num_experts: Routed experts in a layer.
        top_k: Experts a token visits.
        num_layers: Decoder layers, without MTP layers; 0 where the config does not say.
        activation: Activation of the experts, such as ``silu``, with its parameters where the model has some.
        kept_format: Kept format the config claims, ``nvfp4`` or ``mxfp4``; None where it claims none.
        nf3_levels: The eight NF3 levels.
        bit_map_from: The document the bit map is from; None without one.
        notes: Oddities that are no errors.
        digest_input: The bytes of config.json, and of hf_quant_config.json if it is there.
    """

    raw: Mapping[str, Any]
    quantization: Mapping[str, Any]
    bit_map: BitMap | None
    model_type: str
    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    num_layers: int
    activation: str
    kept_format: str | None
    nf3_levels: tuple[float, ...]
    bit_map_from: Path | None
    notes: tuple[str, ...]
    digest_input: bytes


def read_document(path: Path) -> tuple[Mapping[str, Any], bytes]:
    """A JSON object and its bytes.

    Raises:
        DataError: Missing, not JSON, not an object.
        EnvironmentFailure: It cannot be read.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise EnvironmentFailure(
                "cannot read", where=path, found=f"no regular file: {stat.filemode(status.st_mode)}"
            )
        if status.st_size > MAX_DOCUMENT_BYTES:
            limit = f"at most {MAX_DOCUMENT_BYTES} bytes"
            raise DataError("too large for a JSON document", where=path, expected=limit, found=status.st_size)
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise DataError(
                "a symbolic link to a file that is not there", where=path, hint="download it again"
            ) from None
        raise DataError("no such file", where=path, hint="SRC must be a checkpoint folder or a Hub id") from None
    except OSError as error:
        raise EnvironmentFailure("cannot read", where=path, found=error.strerror) from error
    document = parse_json(text, path)
    if not isinstance(document, dict):
        raise DataError("not a JSON object", where=path, found=type(document).__name__)
    return document, text


def _first_int(text: Mapping[str, Any], keys: Iterable[str], path: Path, *, required: bool = True) -> int:
    found = {key: text[key] for key in keys if text.get(key) is not None}
    for key, value in found.items():
        if type(value) is not int or not 0 < value < 2**31:
            raise DataError(f"{key} is not a positive integer", where=path, found=repr(value))
    if len(set(found.values())) > 1:
        raise DataError(
            "keys that mean the same differ", where=path, found=", ".join(f"{k}={v}" for k, v in found.items())
        )
    if not found and required:
        raise DataError(f"none of {', '.join(keys)} is given", where=path, hint="is this a mixture-of-experts model?")
    return next(iter(found.values()), 0)


def _is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number that a float can hold."""
    return type(value) in (int, float) and abs(value) < 1e300


def _name(text: Mapping[str, Any], key: str, path: Path) -> str | None:
    """A string, or None where there is none."""
    value = text.get(key)
    if value is not None and not isinstance(value, str):
        raise DataError(f"{key} is not a name", where=path, expected="a string", found=repr(value)[:120])
    return value or None


def _number(text: Mapping[str, Any], key: str, path: Path) -> float | None:
    """A number, or None where there is none or it is zero."""
    value = text.get(key)
    if value is not None and not _is_number(value):
        raise DataError(f"{key} is not a finite number", where=path, found=repr(value)[:120])
    return float(value) if value else None


def _object(document: Mapping[str, Any], key: str, path: Path) -> Mapping[str, Any]:
    """An object, or an empty one where there is none."""
    value = document.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise DataError(f"{key} is not a JSON object", where=path, found=repr(value)[:120])
    return value or {}


def _limits(text: Mapping[str, Any], path: Path) -> dict[int, float]:
    """Step-3.5's clamp of each layer, of those that have one: ``min(silu(gate), limit) * clamp(up, -limit, limit)``."""
    limits = text.get("swiglu_limits")
    if limits is None:
        return {}
    if not isinstance(limits, list) or not all(value is None or _is_number(value) for value in limits):
        raise DataError("swiglu_limits is not a number for each layer", where=path, found=repr(limits)[:120])
    return {layer: float(value) for layer, value in enumerate(limits) if value}


def _activation(text: Mapping[str, Any], path: Path) -> str:
    """``silu``, or ``silu(limit=10.0)`` for a clamped one, and so on; parameters a kernel must know are part of it.

    What is no plain silu has another name, so that no kernel takes it for one: ``swigluoai(...)``, ``swiglustep(...)``
    with the limit of each layer that has one, and ``silu(router_weight=input)`` for Llama-4, which multiplies an
    expert's input by the router's weight and not its output.
    """
    name = next(filter(None, [_name(text, key, path) for key in _ACTIVATION]), "silu")
    keys = {
        "swiglu_limit": "limit",
        "swiglu_alpha": "alpha",
        "activation_situ_beta": "beta",
        "activation_situ_linear_beta": "linear_beta",
    }
    numbers = {short: _number(text, key, path) for key, short in keys.items()}
    found: dict[str, object] = {short: value for short, value in numbers.items() if value is not None}
    model = _name(text, "model_type", path) or ""
    limits = _limits(text, path)
    if model.startswith(_OAI) and name in ("silu", "swigluoai"):
        name, found = "swigluoai", {**_OAI_DEFAULTS, **found}
    elif limits:
        name, found = "swiglustep", {str(layer): limit for layer, limit in limits.items()}
        return f"{name}({', '.join(f'{k}={v}' for k, v in found.items())})"
    elif model.startswith("llama4"):
        found["router_weight"] = "input"
    return f"{name}({', '.join(f'{k}={v}' for k, v in sorted(found.items()))})" if found else name


def is_gated(activation: str) -> bool:
    """Whether an activation, as ``ModelConfig`` has it, takes a gate."""
    return activation.partition("(")[0] not in _NO_GATE


def _setting(blocks: _Blocks, key: str, path: Path) -> Any:
    """A key of the quantization blocks, which may be in any of them but must not differ."""
    found = [block[key] for block in blocks if block.get(key) is not None]
    if any(value != found[0] for value in found):
        raise DataError(
            f"{key} differs between {CONFIG} and {HF_QUANT_CONFIG}",
            where=path,
            found=" and ".join(map(repr, found))[:120],
        )
    return found[0] if found else None


def _levels(blocks: _Blocks, path: Path) -> tuple[float, ...]:
    levels = _setting(blocks, "nf3_levels", path)
    if levels is None:
        return DEFAULT_LEVELS
    numbers = isinstance(levels, list) and all(map(_is_number, levels))
    if not numbers or len(levels) != 8 or any(a >= b for a, b in pairwise(levels)):
        raise DataError("nf3_levels is not eight finite ascending numbers", where=path, found=repr(levels)[:120])
    return tuple(float(v) for v in levels)


def _kept_format(blocks: _Blocks, path: Path) -> str | None:
    tail = _setting(blocks, "demoted_format", path)
    if tail is not None and tail not in _TAIL_FORMATS:
        raise DataError(
            f"the tail is stored as {tail!r}, another codec", where=path, expected=" or ".join(_TAIL_FORMATS)
        )
    kept = _setting(blocks, "kept_format", path)
    if kept is None:
        return None
    if not isinstance(kept, str) or kept not in _KEPT_FORMATS:
        raise DataError(
            "unknown kept_format", where=path, expected=" or ".join([*_KEPT_FORMATS, "none (NVFP4)"]), found=repr(kept)
        )
    return _KEPT_FORMATS[kept]


def _quantization_blocks(config: Mapping[str, Any], other: Mapping[str, Any], root: Path) -> _Blocks:
    """The source's quantization blocks that are not empty: those of config.json, then those of hf_quant_config.json."""
    path = root / CONFIG
    blocks = (
        _object(config, "quantization_config", path),
        config.get("quantization"),
        _object(_object(config, "text_config", path), "quantization_config", path),
        _object(other, "quantization", root / HF_QUANT_CONFIG),
        other.get("quantization_config"),
        other,
    )
    return [block for block in blocks if isinstance(block, Mapping) and block]


def _bit_map(documents: Iterable[tuple[Path, Mapping[str, Any]]]) -> BitMap | None:
    found: dict[Path, BitMap] = {}
    for path, document in documents:
        raw = find_bit_map(document)
        if raw is not None:
            found[path] = parse_bit_map(raw, path)
    for path, bit_map in found.items():
        first = next(iter(found))
        if bit_map != found[first]:
            layer = min(k for k in {*bit_map, *found[first]} if bit_map.get(k) != found[first].get(k))
            raise DataError(
                f"its bit map disagrees with that of {first.name} in layer {layer}",
                where=path,
                hint="give the right one with --bit-map",
            )
    return next(iter(found.values()), None)


def read_bit_map_file(path: Path) -> BitMap:
    """The map in a file of its own: either the object of layers itself, or any document that holds it.

    Raises:
        DataError: As ``parse_bit_map``.
    """
    document, _ = read_document(path)
    raw = find_bit_map(document)
    return parse_bit_map(document if raw is None else raw, path)


def read_config(root: Path, bit_map_file: Path | None = None) -> ModelConfig:
    """Read a checkpoint's configuration.

    Args:
        root: Checkpoint folder.
        bit_map_file: A map that replaces those in the checkpoint.

    Raises:
        DataError: A document is missing or contradicts itself.
    """
    path = root / CONFIG
    config, digest_input = read_document(path)
    other: Mapping[str, Any] = {}
    if (root / HF_QUANT_CONFIG).exists() or (root / HF_QUANT_CONFIG).is_symlink():
        other, text = read_document(root / HF_QUANT_CONFIG)
        digest_input += text
    decoder: Mapping[str, Any] = {**config, **_object(config, "text_config", path)}
    blocks = _quantization_blocks(config, other, root)
    if bit_map_file is not None:
        bit_map: BitMap | None = read_bit_map_file(bit_map_file)
        bit_map_from: Path | None = bit_map_file
    else:
        bit_map = _bit_map(((path, config), (root / HF_QUANT_CONFIG, other)))
        bit_map_from = None if bit_map is None else path if find_bit_map(config) is not None else root / HF_QUANT_CONFIG
    hidden = _first_int(decoder, LATENT_WIDTH, path, required=False) or _first_int(decoder, ("hidden_size",), path)
    intermediate = _first_int(decoder, _INTERMEDIATE, path, required=False) or _first_int(
        decoder, ("intermediate_size",), path
    )
    num_experts, top_k = _first_int(decoder, _EXPERTS, path), _first_int(decoder, _TOP_K, path)
    if top_k > num_experts:
        few, many = (next(k for k in keys if decoder.get(k) is not None) for keys in (_EXPERTS, _TOP_K))
        raise DataError(f"{many} is above {few}", where=path, expected=f"at most {num_experts}", found=top_k)
    return ModelConfig(
        raw=config,
        quantization=blocks[0] if blocks else {},
        bit_map=bit_map,
        model_type=_name(decoder, "model_type", path) or "unknown",
        hidden=hidden,
        intermediate=intermediate,
        num_experts=num_experts,
        top_k=top_k,
        num_layers=_first_int(decoder, ("num_hidden_layers",), path, required=False),
        activation=_activation(decoder, path),
        kept_format=_kept_format(blocks, path),
        nf3_levels=_levels(blocks, path),
        bit_map_from=bit_map_from,
        notes=() if any(decoder.get(key) for key in _ACTIVATION) else (NO_ACTIVATION,),
        digest_input=digest_input,
    )
