"""The interface of vLLM the plugin was written against, and that it is still there."""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

from hybrid_pack.integrations.vllm.versions import why_not_version
from tests.integrations.interface import (
    CONFIG_METHODS,
    METHODS,
    interface,
    member,
    merged,
    recorded,
    signature,
    version_of,
)

PLUGIN = Path(__file__).parents[2] / "hybrid_pack/integrations/vllm"
VERSIONS = ("0.22.1", "0.25.1", "0.27.1")
QUANT = "model_executor/layers/quantization/base_config.py QuantizationConfig."
MOE = "model_executor/layers/fused_moe/fused_moe_method_base.py FusedMoEMethodBase."


def sites() -> list[Path]:
    """Site folders to hold against the snapshot: those of ``HYBRID_PACK_VLLM_SITES``, and where vLLM is installed."""
    named = [Path(name) for name in os.environ.get("HYBRID_PACK_VLLM_SITES", "").split(os.pathsep) if name]
    spec = importlib.util.find_spec("vllm")
    installed = [] if spec is None or spec.origin is None else [Path(spec.origin).parents[1]]
    return list(dict.fromkeys(named + installed))


def ours(file: str, name: str) -> dict[str, Any]:
    tree = ast.parse((PLUGIN / file).read_text())
    body = next(n.body for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)
    return {n.name: member(body, n.name) for n in body if isinstance(n, ast.FunctionDef)}


def accepts(our: list[str], theirs: list[str]) -> bool:
    """Whether a function with our parameters can be called as one with theirs, by place or by name."""
    stars = [name for name in our if name.startswith("**")]
    plain = [name.rstrip("=") for name in our if not name.startswith("*")]
    for place, name in enumerate(theirs):
        if name.startswith("**"):
            if not stars:
                return False
        elif name.rstrip("=") not in plain:
            if not (stars and any(n.startswith("*") and not n.startswith("**") for n in our)):
                return False
        elif plain[place] != name.rstrip("="):
            return False
    needed = [name for name in our if not name.startswith("*") and not name.endswith("=")]
    return all(name in [t.rstrip("=") for t in theirs] for name in needed)


def test_the_snapshot_is_of_the_supported_versions_and_complete() -> None:
    table = recorded()
    assert tuple(table) == VERSIONS
    for version, found in table.items():
        assert why_not_version(version) is None
        missing = [key for key, value in found.items() if value is None or value is False]
        assert not missing, f"vLLM {version} lacks {missing}"


@pytest.mark.parametrize("version", VERSIONS)
def test_our_methods_take_what_theirs_take(version: str) -> None:
    table = recorded()[version]
    for file, name, prefix, methods in (
        ("config.py", "HybridPackConfig", QUANT, CONFIG_METHODS),
        ("moe_method.py", "HybridMoEMethod", MOE, METHODS[1:]),
    ):
        found = ours(file, name)
        for method in methods:
            theirs = table[prefix + method]
            if theirs == "property":
                assert found[method] == "property", method
            else:
                assert accepts(found[method], theirs), (method, found[method], theirs)


@pytest.mark.parametrize("version", VERSIONS)
def test_our_config_answers_how_kv_cache_scales_are_asked_for(version: str) -> None:
    asked = recorded()[version]["KV-cache scales are asked for by"]
    assert asked and set(asked) <= set(ours("config.py", "HybridPackConfig"))


@pytest.mark.parametrize("version", VERSIONS)
def test_apply_has_the_keywords_vllm_calls_it_with(version: str) -> None:
    keywords = recorded()[version]["keywords of quant_method.apply"]
    apply = [name.rstrip("=") for name in ours("moe_method.py", "HybridMoEMethod")["apply"]]
    assert set(keywords) == set(apply) - {"self"}


@pytest.mark.parametrize(
    ("our", "theirs", "fits"),
    [
        ("def f(self, a, b=1): ...", "def f(self, a, b=1): ...", True),
        ("def f(self, a, *args, **kwargs): ...", "def f(self, a, b=1): ...", True),
        ("def f(self, a): ...", "def f(self, a, b): ...", False),
        ("def f(self, a, b): ...", "def f(self, a): ...", False),
        ("def f(self, b, a): ...", "def f(self, a, b): ...", False),
        ("def f(self, a): ...", "def f(self, a, **more): ...", False),
        ("def f(self, a, **kw): ...", "def f(self, a, b=1): ...", False),
    ],
)
def test_a_signature_that_moved_is_seen(our: str, theirs: str, fits: bool) -> None:
    parsed = [signature(ast.parse(text).body[0]) for text in (our, theirs)]  # type: ignore[arg-type]
    assert accepts(*parsed) is fits


def test_the_vllm_that_is_here_is_as_recorded() -> None:
    found = sites()
    if not found:
        if os.environ.get("HYBRID_PACK_REQUIRE_VLLM") == "1":
            pytest.fail("no vLLM is installed, and HYBRID_PACK_VLLM_SITES names none")
        pytest.skip("no vLLM here; tests/integrations/vllm_site.sh brings its sources")
    for site in found:
        version = version_of(site)
        assert version in VERSIONS, f"{site} has vLLM {version}; make the snapshot anew and look at what moved"
        assert interface(site / "vllm") == recorded()[version]


def test_a_table_of_versions_can_be_taken_apart_again() -> None:
    table = {"1": {"a": 1, "b": 2}, "2": {"a": 1, "b": 3, "c": None}}
    whole = merged(table)
    assert whole == {"all": {"a": 1}, "1": {"b": 2}, "2": {"b": 3, "c": None}}
