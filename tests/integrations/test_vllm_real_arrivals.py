"""In vLLM's own code: a tensor of the base that was not loaded is refused, whichever method runs its layer."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.convert.support import pack as convert
from tests.integrations import checkpoint
from tests.integrations.real import TORCH, Failed, Made, Serve

if importlib.util.find_spec("vllm") is None:
    if os.environ.get("HYBRID_PACK_REQUIRE_VLLM") == "1":
        pytest.fail("vLLM is not installed", pytrace=False)
    pytest.skip("vLLM is not installed; tests/integrations/vllm_site.sh says how", allow_module_level=True)

AT = "model.layers.1.self_attn"


@pytest.fixture(scope="module")
def model_of(made: Callable[..., Made], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A pack of a dialect; ``fp8_channel`` has the source's config by which vLLM runs its layers itself on a CPU."""

    def model(dialect: str) -> Path:
        if dialect != "fp8_channel":
            return made(dialect)[0]
        weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
        inputs = {**weights, "strategy": "token", "dynamic": True}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
        folder = tmp_path_factory.mktemp("compressed") / "pack"
        shutil.copytree(made(dialect)[0], folder)
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"]["source_quantization_config"] |= {
            "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
            "ignore": ["lm_head"], "config_groups": {"group_0": group},
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return model


@pytest.mark.parametrize(
    ("dialect", "name", "where", "found"),
    [
        ("fp8_channel", f"{AT}.k_proj.weight_scale", f"{AT}.qkv_proj.weight_scale", "only part q, v of 3"),
        ("fp8_channel", f"{AT}.o_proj.weight_scale", f"{AT}.o_proj.weight_scale", "nothing"),
        ("fp8_channel", f"{AT}.o_proj.weight", f"{AT}.o_proj.weight", "nothing"),
        ("bf16", f"{AT}.k_proj.weight", f"{AT}.qkv_proj.weight", "only part q, v of 3"),
        ("bf16", f"{AT}.o_proj.weight", f"{AT}.o_proj.weight", "nothing"),
        ("bf16", "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight", "nothing"),
        ("bf16", "model.embed_tokens.weight", "model.embed_tokens.weight", "nothing"),
        ("bf16", "lm_head.weight", "lm_head.weight", "nothing"),
    ],
)
def test_a_tensor_that_vllm_did_not_load_into_a_layer_of_its_own_is_refused(
    dialect: str, name: str, where: str, found: str, model_of: Callable[[str], Path], serve: Serve
) -> None:
    with pytest.raises(Failed) as error:
        serve(model_of(dialect), more={"renamed": {name: None}}, additional_config=TORCH)
    text = str(error.value)
    assert f"{where}: vLLM has not loaded a tensor of the base" in text and f"found {found})" in text, text[-3000:]
    assert name in text
    if dialect == "fp8_channel":
        assert "are run by vLLM's CompressedTensorsLinearMethod" in text and "dequantised to BF16" not in text


@pytest.mark.parametrize(
    ("dialect", "name"), [("fp8_channel", f"{AT}.k_proj.weight_scale"), ("bf16", f"{AT}.k_proj.weight")]
)
def test_a_tensor_that_is_not_loaded_again_with_the_others_is_refused(
    dialect: str, name: str, model_of: Callable[[str], Path], serve: Serve
) -> None:
    model = model_of(dialect)
    with pytest.raises(Failed) as error:
        serve(model, more={"reload": str(model), "renamed_again": {name: None}}, additional_config=TORCH)
    text = str(error.value)
    assert "vLLM has not loaded a tensor of the base" in text and "found only part q, v of 3" in text, text[-3000:]


def test_plain_weights_are_loaded_again(made: Callable[..., Made], serve: Serve) -> None:
    model, meanings = made("bf16")
    (found,) = serve(model, more={"reload": str(model)}, additional_config=TORCH)
    for name in (f"{AT}.o_proj", "model.layers.0.self_attn.o_proj"):
        assert torch.equal(found["again"]["linear"][name], meanings[name].to(torch.bfloat16))


def test_vllm_sees_the_classes_of_its_own_methods(made: Callable[..., Made], serve: Serve) -> None:
    (found,) = serve(made("bf16")[0], more={"draft_embedding": "model.embed_tokens"}, additional_config=TORCH)
    assert found["methods"]["lm_head"] == found["methods"]["model.embed_tokens"] == "UnquantizedEmbeddingMethod"
    assert found["methods"][f"{AT}.o_proj"] == "UnquantizedLinearMethod"
    assert found["of_draft"] is False, "a draft may be given the model's embedding after it was loaded"


def test_a_head_that_is_the_embedding_needs_no_tensor(serve: Serve, tmp_path: Path) -> None:
    source = tmp_path / "source"
    checkpoint.write(source, "bf16")
    tensors = load_file(source / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, source / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "pack")
    model = tmp_path / "pack"
    (found,) = serve(model, more={"reload": str(model)}, additional_config=TORCH)
    assert found["again"]["methods"]["lm_head"] == "UnquantizedEmbeddingMethod"
    with pytest.raises(Failed, match="vLLM has not loaded a tensor of the base"):
        serve(model, more={"renamed": {"model.embed_tokens.weight": None}}, additional_config=TORCH)


@pytest.mark.parametrize("renames", [False, True])
def test_scales_in_blocks_reach_vllms_own_method_under_either_name(
    renames: bool, made: Callable[..., Made], serve: Serve
) -> None:
    """vLLM's MiniMax-M3 renames them, and skips what it then does not find."""
    model, meanings = made("fp8_block")
    parts = [f"{AT}.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    renamed = {f"{part}.weight_scale_inv": f"{part}.weight_scale" for part in parts} if renames else {}
    more = {"fp8_kernel": True, "renamed": renamed, "reload": str(model)}
    (found,) = serve(model, more=more, additional_config=TORCH)
    for looked in (found, found["again"]):
        assert looked["methods"][f"{AT}.qkv_proj"] == looked["methods"][f"{AT}.o_proj"] == "Fp8LinearMethod"
        qkv = torch.cat([meanings[part] for part in parts[:3]]).to(torch.bfloat16)
        assert torch.equal(looked["linear"][f"{AT}.qkv_proj"], qkv)
        assert torch.equal(looked["linear"][f"{AT}.o_proj"], meanings[parts[3]].to(torch.bfloat16))


def test_scales_in_blocks_that_come_under_neither_name_are_refused(made: Callable[..., Made], serve: Serve) -> None:
    renamed = {f"{AT}.k_proj.weight_scale_inv": None, f"{AT}.q_proj.weight_scale_inv": f"{AT}.q_proj.weight_scale"}
    renamed[f"{AT}.v_proj.weight_scale_inv"] = f"{AT}.v_proj.weight_scale"
    with pytest.raises(Failed, match=f"{AT}.qkv_proj.weight_scale_inv: .* found only part q, v of 3"):
        serve(made("fp8_block")[0], more={"fp8_kernel": True, "renamed": renamed}, additional_config=TORCH)


@pytest.mark.parametrize("dialect", ["bf16", "fp8_channel", "fp8_row"])
def test_dummy_weights_are_not_missed(dialect: str, model_of: Callable[[str], Path], serve: Serve) -> None:
    (found,) = serve(model_of(dialect), load_format="dummy", additional_config=TORCH)
    assert len(found["experts"]) == checkpoint.LAYERS, "experts are the pack's all the same"


def test_vllms_own_check_finds_a_norm_that_was_not_loaded(made: Callable[..., Made], serve: Serve) -> None:
    """The docs say so: norms have no method of ours."""
    model, extra = made("bf16")[0], {"enable_weights_track": True}
    serve(model, model_loader_extra_config=extra, additional_config=TORCH)
    with pytest.raises(Failed, match=r"weights were not initialized from checkpoint: \{'model.norm.weight'\}"):
        serve(
            model, more={"renamed": {"model.norm.weight": None}}, model_loader_extra_config=extra,
            additional_config=TORCH,
        )  # fmt: skip
