"""The card's warning is true of the transformers that is installed: it loads a pack's base and makes up the experts."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_pack.report.card import WARNING


@pytest.fixture(autouse=True)
def oracle() -> None:
    """Skip where it is not installed, or fail where the environment promises all oracles."""
    if importlib.util.find_spec("transformers") is None:
        required = os.environ.get("HYBRID_PACK_REQUIRE_B12X") == "1"
        (pytest.fail if required else pytest.skip)("no transformers")


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def test_experts_are_random_numbers_and_the_words_are_those(tmp_path: Path) -> None:
    """A model of theirs without its experts and with a pack's quant_method, as the base of a pack is."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=16,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    file, settings = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(file)
    base = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    assert 0 < len(base) < len(tensors)
    save_file(base, file, metadata={"format": "pt"})
    method = {"quantization_config": {"quant_method": "hybrid_pack", "manifest": "hybrid_pack.json"}}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **method}))

    said, logger = Said(), logging.getLogger("transformers")
    logger.addHandler(said)
    try:
        found = [Qwen3MoeForCausalLM.from_pretrained(tmp_path).state_dict() for _ in range(2)]
    finally:
        logger.removeHandler(said)
    experts = [name for name in found[0] if ".experts." in name]
    assert experts
    for name in experts:
        assert not torch.equal(found[0][name], found[1][name]), f"{name} is made up anew each time"
    words = " ".join(said.text.split())
    quoted = re.findall(r'"([^"]+)"', " ".join(WARNING.split()))
    assert len(quoted) == 3
    for phrase in (*quoted, "MISSING"):
        assert phrase in words
