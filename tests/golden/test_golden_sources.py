"""Source formats as their own libraries write them: compressed-tensors and transformers are the oracles."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hybrid_pack.formats.source import Unsupported, detect
from hybrid_pack.io.checkpoint import Matrix, open_checkpoint
from hybrid_pack.io.reader import TensorReader
from hybrid_pack.io.weights import read_matrix
from hybrid_pack.synthetic import Spec, read_tensor, write_checkpoint
from tests.checkpoints import Stored, edit_tensors


@pytest.fixture(autouse=True)
def oracles() -> None:
    """Skip where a library is not installed, or fail where the environment promises all oracles."""
    missing = [name for name in ("compressed_tensors", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        (pytest.fail if os.environ.get("HYBRID_PACK_REQUIRE_B12X") == "1" else pytest.skip)(f"no {', '.join(missing)}")


NAME = "model.layers.1.mlp.experts.1.up_proj"
ROWS, COLUMNS = 160, 192
DTYPES = {
    torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32", torch.bfloat16: "BF16",
    torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip


def spec(**values: Any) -> Spec:
    return Spec(
        hidden=COLUMNS, intermediate=ROWS, num_experts=2, kept=1, moe_layers=(1,), dense_layers=(0,), mtp_layer=False,
        vocab=4, **values,
    )  # fmt: skip


def matrix_of(root: Path, state: dict[str, torch.Tensor], kind: Any) -> Matrix:
    """A checkpoint with one matrix as a library wrote it."""
    write_checkpoint(root, spec(stored=(kind,)))
    with edit_tensors(root) as tensors:
        for old in tensors.matching(f"{NAME}."):
            del tensors[old]
        for field, value in state.items():
            data = value.contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else value.numpy().tobytes()
            tensors[f"{NAME}.{field}"] = Stored(DTYPES[value.dtype], tuple(value.shape), data)
    return open_checkpoint(root).layers[1].experts[1].up


def read(matrix: Matrix) -> NDArray[np.float32]:
    with TensorReader() as reader:
        return read_matrix(reader, matrix, "here")


def weights() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(5), dtype=torch.float32) * 0.02


def test_nvfp4_of_compressed_tensors(tmp_path: Path) -> None:
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    scheme: QuantizationScheme = preset_name_to_scheme("NVFP4", ["Linear"])
    w = weights()
    global_scale = (2688 / w.abs().max()).reshape(1).to(torch.float32)
    blocks = w.reshape(ROWS, COLUMNS // 16, 16).abs().amax(-1) / 6
    scale = (blocks * global_scale).to(torch.float8_e4m3fn)
    state = {"weight": w, "weight_scale": scale.to(torch.float32), "weight_global_scale": global_scale}
    packed = NVFP4PackedCompressor.compress(state, scheme)
    found = read(matrix_of(tmp_path, {k: packed[k] for k in
                           ("weight_packed", "weight_scale", "weight_global_scale")}, "ct_nvfp4"))  # fmt: skip
    theirs = NVFP4PackedCompressor.decompress(dict(packed), scheme)["weight"].to(torch.float32).numpy()
    assert np.abs(theirs - w.numpy()).max() < 0.02  # it is this matrix, quantised
    # compressed-tensors computes in bfloat16 (8 bits) and divides by the stored number, we multiply by one over it
    assert np.abs(found - theirs).max() <= np.abs(theirs).max() * 2.0**-7
    exact = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    codes = torch.stack([packed["weight_packed"] & 15, packed["weight_packed"] >> 4], -1).reshape(ROWS, COLUMNS)
    wide = packed["weight_scale"].to(torch.float64).repeat_interleave(16, 1)
    wanted = (exact[codes.long()] * wide / global_scale.to(torch.float64)).numpy()
    assert np.abs(found - wanted).max() <= np.abs(wanted).max() * 2.0**-22  # two roundings to float32


def test_mxfp4_of_compressed_tensors(tmp_path: Path) -> None:
    from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    w = weights()
    octave = torch.floor(torch.log2(w.reshape(ROWS, COLUMNS // 32, 32).abs().amax(-1))) - 2
    packed = MXFP4PackedCompressor.compress({"weight": w, "weight_scale": torch.exp2(octave)}, scheme)
    assert packed["weight_scale"].dtype == torch.uint8
    found = read(matrix_of(tmp_path, {k: packed[k] for k in ("weight_packed", "weight_scale")}, "ct_mxfp4"))
    theirs = MXFP4PackedCompressor.decompress(dict(packed), scheme)["weight"].to(torch.float32).numpy()
    assert np.abs(theirs - w.numpy()).max() < 0.02
    assert np.array_equal(found, theirs)  # powers of two: bfloat16 holds them all


def test_mxfp8_of_compressed_tensors(tmp_path: Path) -> None:
    from compressed_tensors.compressors.mx_utils import compress_mx_scale, decompress_mx_scale

    w = weights()
    octave = torch.floor(torch.log2(w.reshape(ROWS, COLUMNS // 32, 32).abs().amax(-1))) - 7
    scale = torch.exp2(octave)
    codes = (w / scale.repeat_interleave(32, 1)).to(torch.float8_e4m3fn)
    stored = compress_mx_scale(scale, torch.uint8)
    found = read(matrix_of(tmp_path, {"weight": codes, "weight_scale": stored}, "mxfp8"))
    theirs = codes.to(torch.float32) * decompress_mx_scale(stored).to(torch.float32).repeat_interleave(32, 1)
    assert np.array_equal(found, theirs.numpy())
    assert np.abs(found - w.numpy()).max() < 0.004


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_e4m3_and_e8m0_of_torch(dtype: torch.dtype) -> None:
    """Every byte, as torch reads it."""
    from hybrid_pack.formats import e4m3, e8m0

    every = torch.arange(256, dtype=torch.uint8)
    theirs = every.view(torch.float8_e4m3fn).to(dtype).to(torch.float64).numpy()
    assert np.array_equal(e4m3.VALUES, theirs, equal_nan=True)
    theirs = every.view(torch.float8_e8m0fnu).to(torch.float32).to(torch.float64).numpy()
    assert np.array_equal(e8m0.VALUES[1:], theirs[1:], equal_nan=True)


def test_gpt_oss_of_transformers(tmp_path: Path) -> None:
    """transformers makes [E, H, 2I] of the blocks, gate in the even columns; so do gate and up here."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    write_checkpoint(tmp_path, spec(family=11))
    source = open_checkpoint(tmp_path)
    prefix = "model.layers.1.mlp.experts"

    def stored(name: str) -> torch.Tensor:
        _, shape, data = read_tensor(tmp_path, f"{prefix}.{name}")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(shape)

    theirs = {
        name: convert_moe_packed_tensors(stored(f"{name}_blocks"), stored(f"{name}_scales"), dtype=torch.float32)
        for name in ("gate_up_proj", "down_proj")
    }
    assert theirs["gate_up_proj"].shape == (2, COLUMNS, 2 * ROWS)
    for e, expert in source.layers[1].experts.items():
        assert expert.gate is not None
        gate_up, down = theirs["gate_up_proj"][e].numpy(), theirs["down_proj"][e].numpy()
        assert np.array_equal(read(expert.gate), gate_up[:, 0::2].T)
        assert np.array_equal(read(expert.up), gate_up[:, 1::2].T)
        assert np.array_equal(read(expert.down), down.T)


def experts_output(root: Path, family: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert 1 of layer 1: what transformers' experts make of x from its stored tensors, and what ours would."""
    source = open_checkpoint(root)
    expert = source.layers[1].experts[1]
    assert expert.gate is not None
    gate, up, down = (torch.from_numpy(read(m)).to(torch.float64) for m in expert.matrices)
    ours = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def stored(projection: str) -> torch.Tensor:
        name = next(n for n in source.shards.tensors if n.endswith(f".layers.1{family}.{projection}"))
        _, shape, data = read_tensor(root, name)
        return torch.frombuffer(bytearray(data), dtype=torch.bfloat16).reshape(shape).to(torch.float64)

    return ours, (stored("gate_up_proj"), stored("down_proj"))  # type: ignore[return-value]


def test_llama4_text_as_transformers_saves_it(tmp_path: Path) -> None:
    """Its text model alone: names, shapes and configuration are its own, and the experts give what its own give."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        vocab_size=8, hidden_size=COLUMNS, intermediate_size=ROWS, intermediate_size_mlp=ROWS, num_hidden_layers=2,
        num_local_experts=2, num_experts_per_tok=1, interleave_moe_layer_step=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, pad_token_id=0,
    )  # fmt: skip
    model = Llama4ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    source = open_checkpoint(tmp_path, require_map=False)
    assert list(source.layers) == [0, 1]
    x = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expert = source.layers[1].experts[1]
    assert expert.gate is not None
    gate, up, down = (torch.from_numpy(read(m)).to(torch.float64) for m in expert.matrices)
    ours = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    theirs = model.model.layers[1].feed_forward.experts.to(torch.float64)(torch.cat([torch.zeros_like(x), x]))[len(x) :]
    torch.testing.assert_close(ours, theirs.detach())


def test_llama4_of_transformers(tmp_path: Path) -> None:
    from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

    write_checkpoint(tmp_path, spec(family=14))
    x = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, (gate_up, down) = experts_output(tmp_path, ".feed_forward.experts", x)
    config = Llama4TextConfig(
        hidden_size=COLUMNS, intermediate_size=ROWS, num_local_experts=2, num_hidden_layers=1, num_attention_heads=2
    )
    module = Llama4TextExperts(config).to(torch.float64)
    module.load_state_dict({"gate_up_proj": gate_up, "down_proj": down})
    theirs = module(torch.cat([torch.zeros_like(x), x]))[len(x) :]
    torch.testing.assert_close(ours, theirs.detach())


@pytest.mark.parametrize("variant", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_qwen_of_transformers(tmp_path: Path, variant: str) -> None:
    """Their checkpoints differ in a transposition, which transformers undoes for Qwen3-VL as it loads."""
    write_checkpoint(tmp_path, spec(family=12) if variant == "qwen3_5_moe" else spec(variant=variant))
    x = torch.randn(5, COLUMNS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours, (gate_up, down) = experts_output(tmp_path, ".mlp.experts", x)
    if variant == "qwen3_vl_moe":
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    gate, up = torch.nn.functional.linear(x, gate_up[1]).chunk(2, dim=-1)
    theirs = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down[1])
    torch.testing.assert_close(ours, theirs)


def test_integers_of_compressed_tensors_are_refused() -> None:
    """Its ``weight_packed`` of INT4 is I32."""
    fields = {"weight_packed": ("I32", (64, 8)), "weight_scale": ("BF16", (64, 2)), "weight_shape": ("I64", (2,))}
    found = detect(fields)
    assert isinstance(found, Unsupported) and "I32" in found.reason
