"""Config keys and habits in which families of models differ."""

from __future__ import annotations

from dataclasses import dataclass, replace

_EXPERTS, _INNER, _TOP_K = "num_experts", "moe_intermediate_size", "num_experts_per_tok"


@dataclass(frozen=True)
class Model:
    """What a config and its expert tensors look like.

    Attributes:
        model_type: Of the document.
        nested: Of ``text_config``, where the decoder's keys are in one.
        experts: Keys of the number of experts.
        inner: Key of the experts' intermediate size.
        top_k: Key of the experts a token visits.
        latent: Key of the width of experts that are narrower than the model.
        activation: Key and name of the activation; an empty key where the config has none.
        stored: What its experts are published as: a format of ``experts.FORMATS``; "" for a hybrid checkpoint.
        transposed: Tensors of all experts are [E, K, N].
        dotted: Fields of a tensor of all experts follow a dot, and ``weight`` is one of them.
        biased: Experts have biases.
        more: Further keys.
    """

    model_type: str
    nested: str = ""
    experts: tuple[str, ...] = (_EXPERTS,)
    inner: str = _INNER
    top_k: str = _TOP_K
    latent: str = ""
    activation: tuple[str, str] = ("hidden_act", "silu")
    stored: str = ""
    transposed: bool = False
    dotted: bool = False
    biased: bool = False
    more: tuple[tuple[str, object], ...] = ()


_QWEN35 = Model("qwen3_5_moe", "qwen3_5_moe_text")
_GEMMA4 = Model(
    "gemma4", "gemma4_text", top_k="top_k_experts", activation=("hidden_activation", "gelu_pytorch_tanh")
)  # fmt: skip
_LLAMA4 = Model("llama4", "llama4_text", experts=("num_local_experts",), inner="intermediate_size")

MODELS: tuple[Model, ...] = (
    Model("glm_moe_dsa", experts=("n_routed_experts", _EXPERTS)),
    Model("deepseek_v4", experts=("n_routed_experts",)),
    _QWEN35,
    Model("minimax_m2", experts=("num_local_experts",), inner="intermediate_size"),
    Model("minimax_m3_vl", "minimax_m3", experts=("num_local_experts",), inner="intermediate_size"),
    Model("kimi_k3", "kimi_linear", top_k="num_experts_per_token", latent="routed_expert_hidden_size"),
    Model("kimi_k25", "kimi_k2", experts=("n_routed_experts",)),
    _GEMMA4,
    Model(
        "nemotron_h", experts=("n_routed_experts",), activation=("mlp_hidden_act", "relu2"), latent="moe_latent_size"
    ),
    _LLAMA4,
    Model("step3p5", experts=("moe_num_experts",), top_k="moe_top_k", activation=("", "")),
    Model(
        "gpt_oss", experts=("num_local_experts",), inner="intermediate_size", stored="mxfp4", transposed=True,
        biased=True, more=(("swiglu_limit", 7.0), ("experts_per_token", 4)),
    ),
    replace(_QWEN35, stored="bf16"),
    replace(_GEMMA4, stored="bf16"),
    replace(_LLAMA4, stored="bf16", transposed=True),
    Model("step3p7", activation=("", ""), stored="bf16", dotted=True),
    replace(_LLAMA4, model_type="llama4_text", nested="", stored="bf16", transposed=True),
)  # fmt: skip
"""For each line of ``names.FAMILIES``."""

VARIANTS: dict[str, tuple[int, Model]] = {
    "qwen3_moe": (11, Model("qwen3_moe", stored="bf16")),
    "qwen3_vl_moe": (12, Model("qwen3_vl_moe", "qwen3_vl_moe_text", stored="bf16", transposed=True)),
}
"""Other models of a line: the line's index, and the model."""
