"""In vLLM's own code: weights that are loaded into a running engine, and what it has compiled for them."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import hybrid_pack
from tests.convert.support import pack as convert
from tests.integrations import checkpoint
from tests.integrations.real import TORCH, Failed, Made, Serve

if importlib.util.find_spec("vllm") is None:
    if os.environ.get("HYBRID_PACK_REQUIRE_VLLM") == "1":
        pytest.fail("vLLM is not installed", pytrace=False)
    pytest.skip("vLLM is not installed; tests/integrations/vllm_site.sh says how", allow_module_level=True)


@pytest.mark.parametrize("dialect", ["bf16", "fp8_block"])
def test_another_pack_at_the_same_path_is_refused(
    dialect: str, made: Callable[..., Made], serve: Serve, tmp_path: Path
) -> None:
    shutil.copytree(made(dialect)[0], tmp_path / "pack")
    shutil.copytree(made(dialect)[0], tmp_path / "same")
    checkpoint.write(tmp_path / "source", dialect, seed=7)
    convert(tmp_path / "source", tmp_path / "other")
    more = {"reload": str(tmp_path / "pack"), "swap": str(tmp_path / "same")}
    (found,) = serve(tmp_path / "pack", more=more, additional_config=TORCH)
    assert found["again"]["linear"].keys() == found["linear"].keys()
    with pytest.raises(Failed) as error:
        serve(tmp_path / "pack", more={**more, "swap": str(tmp_path / "other")}, additional_config=TORCH)
    text = str(error.value)
    assert "weights cannot be loaded from another model: experts stay those of the first" in text, text[-3000:]
    digest = hybrid_pack.open_pack(tmp_path / "other").manifest.self_digest
    assert f"found {digest}); this engine cannot go on" in text


def test_compiled_code_is_not_shared_between_commits_of_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybrid_pack.integrations.vllm.config import MANIFEST, HybridPackConfig

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    ref = tmp_path / "models--org--name" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    keys = []
    for commit in ("a" * 40, "b" * 40, "a" * 40):
        ref.write_text(commit)
        hf_config = SimpleNamespace()
        HybridPackConfig({"manifest": MANIFEST}).maybe_update_config("org/name", hf_config=hf_config)
        keys.append(hf_config.hybrid_pack_base)
    assert keys[0] == keys[2] != keys[1]
