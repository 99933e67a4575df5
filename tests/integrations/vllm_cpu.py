"""One rank of vLLM's own engine set-up and model loading, on the CPU; run by ``forks.Server``.

vLLM's wheel has no CPU kernels, but nothing up to the loaded model needs one: config, plugin, model, weight loading and
the call of the experts are vLLM's own code. What is put in place of what the wheel lacks: the platform is told to be
the CPU, ``silu_and_mul`` is written with torch, and DeepSeek's attention gets a backend that is never run.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from typing import Any

import torch

from tests.integrations import forks

TOKENS = 5
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_PLUGINS": "hybrid_pack"}


def pretend() -> None:
    """Make vLLM take the CPU for its platform."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    def backend(cls: type, *args: Any, **kwargs: Any) -> str:
        mla = any(getattr(value, "use_mla", False) for value in (*args, *kwargs.values()))
        home = "vllm.v1.attention.backends."
        return home + ("mla.triton_mla.TritonMLABackend" if mla else "cpu_attn.CPUAttentionBackend")

    CpuPlatform.get_attn_backend_cls = classmethod(backend)
    CpuPlatform.num_compute_units = classmethod(lambda cls, *args, **kwargs: 1)
    vllm.platforms._current_platform = CpuPlatform()
    vllm.platforms.current_platform = vllm.platforms._current_platform
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("silu_and_mul(Tensor! out, Tensor x) -> ()")

    def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
        gate, up = x.chunk(2, dim=-1)
        out.copy_(torch.nn.functional.silu(gate) * up)

    library.impl("silu_and_mul", silu_and_mul, "CPU")
    globals()["_library"] = library  # it goes with the object


def inputs(experts: int, top_k: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same tokens, weights and global ids in every process."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, hidden, generator=generator).to(torch.bfloat16)
    weights = torch.rand(TOKENS, top_k, generator=generator)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(TOKENS)])
    return x, weights, ids.to(torch.int32)


def look(model: torch.nn.Module, raw: bool = False) -> dict[str, Any]:
    """Methods by module; what linear layers and experts compute, or the tensors that linear layers were given."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase

    found: dict[str, Any] = {"methods": {}, "linear": {}, "experts": {}, "reports": {}, "parameters": {}, "cache": {}}
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            found["cache"][name] = float(module._k_scale), float(module._v_scale)
        method = getattr(module, "quant_method", None)
        if method is None:
            continue
        found["methods"][name] = type(method).__name__
        if isinstance(module, RoutedExperts) and type(method).__name__ == "HybridMoEMethod":
            geometry = method.hybrid.layer.geometry
            x, weights, ids = inputs(geometry.num_experts, geometry.top_k, geometry.hidden_size)
            wide = torch.cat((x, x), dim=1)[:, : x.shape[1]]  # rows apart, as a slice of something wider has them
            shared = {"shared_experts": None, "shared_experts_input": None}
            y = method.apply(layer=module, x=wide, topk_weights=weights.double(), topk_ids=ids.long(), **shared)
            assert torch.equal(y, method.hybrid(x, weights, ids))
            found["experts"][method.layer] = y
            found["reports"][method.layer] = method.report.layers
            found["parameters"][name] = [n for n, _ in module.named_parameters(recurse=False)]
        elif isinstance(module, LinearBase) and raw:
            found["linear"][name] = {field: p.data.clone() for field, p in module.named_parameters(recurse=False)}
        elif isinstance(module, LinearBase) and ".self_attn." in name:
            eye = torch.eye(module.input_size_per_partition, dtype=torch.bfloat16)
            found["linear"][name] = method.apply(module, eye, None).T.contiguous()
    return found


def rename(renamed: dict[str, str | None]) -> None:
    """Have models see tensors under other names, or not at all, as a model's own ``load_weights`` may."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    read = DefaultModelLoader.get_all_weights

    def weights(self: Any, *args: Any) -> Any:
        for name, tensor in read(self, *args):
            if (found := renamed.get(name, name)) is not None:
                yield found, tensor

    DefaultModelLoader.get_all_weights = weights


class Fp8Kernel:
    """In the place of a GPU's kernel for FP8 in blocks of 128 by 128: each row by the scales of its block."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        pass

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight = layer.weight.double()
        rows, columns = weight.shape
        factor = layer.weight_scale_inv.double().repeat_interleave(128, dim=0)[:rows]
        weight *= factor.repeat_interleave(128, dim=1)[:, :columns]
        return (x.double() @ weight.T).to(torch.bfloat16)


def bring_fp8_kernel() -> None:
    """Have vLLM's ``Fp8LinearMethod`` find a kernel, as it does on a GPU."""
    from vllm.model_executor.layers.quantization import fp8

    fp8.init_fp8_linear_kernel = lambda **kwargs: Fp8Kernel()


def reload(model: torch.nn.Module, config: Any, path: str) -> None:
    """Load the weights once more, as a worker's ``reload_weights`` does, from a folder."""
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    loader = get_model_loader(config.load_config)
    config.model_config.model = path
    with torch.device("cpu"):
        initialize_layerwise_reload(model)
        model.load_weights(loader.get_all_weights(config.model_config, model))
        finalize_layerwise_reload(model, config.model_config)


def run() -> None:
    """Load a model as a worker does, and save what was found.

    All up to the loading of plugins is done once for all cases. Nothing of ours may be imported by then, so that each
    case has vLLM find the plugin, and imports it into the same vLLM as a process that did nothing else.
    """
    pretend()
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.model_loader import get_model
    from vllm.plugins import load_general_plugins

    assert "hybrid_pack" not in sys.modules
    case = forks.case()
    load_general_plugins()
    rename(case.get("renamed", {}))
    if case.get("fp8_kernel"):
        bring_fp8_kernel()
    for module, name in case.get("missing", []):
        get_quantization_config("hybrid_pack")  # brings vLLM's methods, so that only the plugin lacks what is taken
        delattr(importlib.import_module(module), name)
    if case.get("raw"):  # as loaded: the CPU lacks the kernels that they would be made ready for
        from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors

        compressed_tensors.CompressedTensorsLinearMethod.process_weights_after_loading = lambda self, layer: None
    arguments: dict[str, Any] = {
        "model": case["model"], "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 256,
        "max_num_batched_tokens": 256, "dtype": "bfloat16", "tensor_parallel_size": case.get("tp", 1),
        **case.get("engine", {}),
    }  # fmt: skip
    config = EngineArgs(**arguments).create_engine_config()
    key = config.compute_hash()
    config.parallel_config.rank = rank = case.get("rank", 0)
    with set_current_vllm_config(config):
        size = case.get("tp", 1)
        init_distributed_environment(size, rank, f"tcp://127.0.0.1:{case['port']}", rank, backend="gloo")
        initialize_model_parallel(size, 1, backend="gloo")
        model = get_model(vllm_config=config)
        found = look(model, case.get("raw", False))
        if case.get("draft"):
            from vllm.compilation.backends import set_model_tag

            experts = next(m for m in model.modules() if type(m).__name__ == "RoutedExperts")
            with set_model_tag("eagle_head"):
                config.quant_config.get_quant_method(experts, case["draft"])
        if case.get("draft_embedding"):
            from vllm.compilation.backends import set_model_tag

            embedding = model.get_submodule(case["draft_embedding"])
            with set_model_tag("eagle_head"):
                found["of_draft"] = config.quant_config.get_quant_method(embedding, case["draft_embedding"]) is not None
        if case.get("reload"):
            rename(case.get("renamed_again", {}))
            if case.get("swap"):
                shutil.rmtree(case["reload"])
                shutil.copytree(case["swap"], case["reload"])
            reload(model, config, case["reload"])
            found["again"] = look(model)
    import vllm

    found |= {"key": key, "quantization": config.model_config.quantization, "vllm": vllm.__version__}
    torch.save(found, case["out"])


if __name__ == "__main__":
    os.environ |= ENVIRONMENT
    run()
