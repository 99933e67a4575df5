"""The part of vLLM's interface the plugin uses, read from its sources without importing them.

    python -m tests.integrations.interface FOLDER ...   # prints the snapshot of the vLLM in each site folder

``interface.json`` holds it for the versions the plugin was written against; a name or signature that moves is a
difference.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

SNAPSHOT = Path(__file__).with_name("interface.json")
LAYERS = "model_executor/layers"
MOE = f"{LAYERS}/fused_moe"
QUANT = f"{LAYERS}/quantization"

METHODS = [
    "__init__",
    "create_weights",
    "get_fused_moe_quant_config",
    "maybe_make_prepare_finalize",
    "maybe_roundup_sizes",
    "topk_indices_dtype",
    "is_monolithic",
    "supports_eplb",
    "apply",
]
CONFIG_METHODS = [
    "get_name",
    "get_supported_act_dtypes",
    "get_min_capability",
    "get_config_filenames",
    "from_config",
    "get_quant_method",
    "maybe_update_config",
    "apply_vllm_mapper",
]
CACHE_SCALES = ("get_cache_scale", "get_cache_scale_mapper")
"""Methods of ``QuantizationConfig`` by which models ask for KV-cache scales: the first before 0.25, then the second."""
LOADS = ["load_column_parallel_weight", "load_row_parallel_weight", "load_merged_column_weight", "load_qkv_weight"]

USED: dict[str, dict[str, tuple[str, ...]]] = {
    f"{QUANT}/__init__.py": {"": ("register_quantization_config", "get_quantization_config", "QUANTIZATION_METHODS")},
    f"{QUANT}/base_config.py": {
        "QuantizationConfig": tuple(CONFIG_METHODS),
        "QuantizeMethodBase": ("process_weights_after_loading",),
    },
    f"{QUANT}/modelopt.py": {
        "ModelOptMxFp8Config": ("__init__",),
        "ModelOptMxFp8LinearMethod": ("__init__", "create_weights"),
        "ModelOptNvFp4Config": ("__init__",),
        "ModelOptNvFp4LinearMethod": ("__init__", "create_weights"),
        "ModelOptFp8LinearMethod": ("create_weights",),
        "ModelOptFp8PcPtLinearMethod": ("create_weights",),
    },
    f"{QUANT}/fp8.py": {"Fp8Config": ("__init__",), "Fp8LinearMethod": ("__init__", "create_weights")},
    f"{MOE}/fused_moe_method_base.py": {"FusedMoEMethodBase": tuple(METHODS)},
    f"{MOE}/config.py": {
        "FusedMoEConfig": (
            "num_experts", "num_logical_experts", "experts_per_token", "hidden_dim", "intermediate_size_per_partition",
            "activation", "in_dtype", "has_bias", "moe_parallel_config",
        ),
        "FusedMoEParallelConfig": (
            "tp_size", "tp_rank", "ep_size", "ep_rank", "dp_size", "pcp_size", "use_ep", "is_sequence_parallel",
            "use_all2all_kernels",
        ),
    },
    f"{LAYERS}/linear.py": {
        "": ("register_weight_loader_v2_supported_method",),
        "LinearBase": ("__init__",),
        "UnquantizedLinearMethod": ("create_weights", "process_weights_after_loading", "apply"),
    },
    f"{LAYERS}/vocab_parallel_embedding.py": {
        "VocabParallelEmbedding": ("__init__",), "ParallelLMHead": ("__init__",),
        "UnquantizedEmbeddingMethod": ("create_weights", "process_weights_after_loading"),
    },
    "model_executor/parameter.py": {
        "BasevLLMParameter": ("__init__", "weight_loader", "load_row_parallel_weight"),
        "_ColumnvLLMParameter": ("__init__", *LOADS[::2], "load_qkv_weight"),
        "RowvLLMParameter": ("__init__", "load_row_parallel_weight"),
        "PerTensorScaleParameter": ("__init__", *LOADS),
    },
    "model_executor/models/utils.py": {"WeightsMapper": ("apply_dict",)},
    "config/vllm.py": {
        "": ("get_current_vllm_config",),
        "VllmConfig": (
            "additional_config", "model_config", "parallel_config", "scheduler_config", "load_config", "device_config",
            "lora_config", "quant_config", "cache_config", "speculative_config",
        ),
    },
    "config/scheduler.py": {"SchedulerConfig": ("max_num_batched_tokens",)},
    "config/model.py": {"ModelConfig": ("model", "revision", "enforce_eager", "enable_sleep_mode", "hf_text_config")},
    "config/parallel.py": {"ParallelConfig": ("enable_eplb", "use_ubatching")},
    "config/load.py": {"LoadConfig": ("download_dir", "device", "load_format")},
    "config/cache.py": {"CacheConfig": ("cache_dtype",)},
    "config/speculative.py": {"SpeculativeConfig": ("target_model_config",)},
    "compilation/backends.py": {"": ("model_tag", "set_model_tag")},
    "plugins/__init__.py": {"": ("DEFAULT_PLUGINS_GROUP", "load_general_plugins")},
    "logger.py": {"": ("init_logger",)},
}  # fmt: skip
"""File -> class ("" for the module) -> functions, fields or attributes."""

EXPERTS = ("moe_config", "expert_map", "swiglu_limit", "apply_router_weight_on_input", "expert_map_manager")
"""Attributes of the layer that holds the experts: ``RoutedExperts``, before 0.25 ``FusedMoE``."""


@lru_cache(maxsize=64)
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Parameters as ``name``, ``name=`` with a default, ``*name`` and ``**name``; those after a bare star have one."""
    args = function.args
    plain = [*args.posonlyargs, *args.args]
    first = len(plain) - len(args.defaults)
    found = [a.arg + ("=" if i >= first else "") for i, a in enumerate(plain)]
    if args.vararg or args.kwonlyargs:
        found.append(f"*{args.vararg.arg if args.vararg else ''}")
    found += [a.arg + ("=" if d else "") for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return found + ([f"**{args.kwarg.arg}"] if args.kwarg else [])


def _targets(node: ast.stmt) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign):
        yield from node.targets
    elif isinstance(node, ast.AnnAssign):
        yield node.target


def member(body: list[ast.stmt], name: str) -> Any:
    """A function's signature, ``property``, ``field``, ``attribute`` (set in a method), or None."""
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            decorators = {d.id for d in node.decorator_list if isinstance(d, ast.Name)}
            return "property" if decorators & {"property", "cached_property"} else signature(node)
        if any(isinstance(target, ast.Name) and target.id == name for target in _targets(node)):
            return "field"
    for node in body:
        for inner in ast.walk(node) if isinstance(node, ast.FunctionDef) else ():
            targets = list(_targets(inner)) if isinstance(inner, ast.stmt) else []
            if any(isinstance(t, ast.Attribute) and t.attr == name for t in targets):
                return "attribute"
    return None


def class_body(path: Path, name: str) -> list[ast.stmt]:
    """What is in a class of a file; of the file itself for an empty name."""
    tree = _tree(path)
    return tree.body if not name else next(
        (n.body for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name), []
    )  # fmt: skip


def keywords_of_apply(root: Path) -> list[str]:
    """Keywords with which vLLM calls ``quant_method.apply``; empty if it is not called with keywords any more."""
    for path in (root / MOE / "routed_experts.py", root / MOE / "runner/moe_runner.py"):
        for node in ast.walk(_tree(path)) if path.exists() else ():
            names = {k.arg for k in node.keywords} if isinstance(node, ast.Call) else set()
            if "topk_ids" in names and isinstance(node.func, ast.Attribute) and node.func.attr == "apply":
                return [k.arg or "**" for k in node.keywords]
    return []


def interface(root: Path) -> dict[str, Any]:
    """What there is, by ``file class.member``.

    Args:
        root: The ``vllm`` folder.
    """
    found: dict[str, Any] = {}
    for file, classes in USED.items():
        for name, members in classes.items():
            body = class_body(root / file, name)
            for wanted in members:
                found[f"{file} {name}.{wanted}".replace(" .", " ")] = member(body, wanted)
    layer = (
        ("routed_experts.py", "RoutedExperts")
        if (root / MOE / "routed_experts.py").exists()
        else ("layer.py", "FusedMoE")
    )
    body = class_body(root / MOE / layer[0], layer[1])
    found |= {f"experts {layer[1]}.{name}": member(body, name) for name in EXPERTS}
    exported = (root / MOE / "__init__.py").read_text()
    found["RoutedExperts is exported by fused_moe"] = '"RoutedExperts"' in exported
    config = class_body(root / QUANT / "base_config.py", "QuantizationConfig")
    found["KV-cache scales are asked for by"] = [name for name in CACHE_SCALES if member(config, name) is not None]
    found["keywords of quant_method.apply"] = keywords_of_apply(root)
    return found


def version_of(site: Path) -> str | None:
    """Version of the vLLM in a site folder, by its metadata."""
    names = [re.fullmatch(r"vllm-(.+)\.dist-info", path.name) for path in site.glob("vllm-*.dist-info")]
    return next((match[1].split("+")[0] for match in names if match), None)


def merged(interfaces: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """One table of all versions: what is the same in all under ``all``, the rest under each version."""
    first = next(iter(interfaces.values()))
    same = {key: value for key, value in first.items() if all(i.get(key) == value for i in interfaces.values())}
    rest = {v: {key: value for key, value in i.items() if key not in same} for v, i in interfaces.items()}
    return {"all": same, **rest}


def recorded() -> dict[str, dict[str, Any]]:
    """The snapshot: what each version has."""
    table = json.loads(SNAPSHOT.read_text())
    same = table.pop("all")
    return {version: {**same, **rest} for version, rest in table.items()}


if __name__ == "__main__":
    sites = [Path(name) for name in sys.argv[1:]]
    print(json.dumps(merged({str(version_of(site)): interface(site / "vllm") for site in sites}), indent=1))
