"""The model card: front matter as the Hub reads it, strings that mean nothing but themselves, and who wrote it."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st

from hybrid_pack.report.card import described, is_ours, marked, model_card
from hybrid_pack.report.data import PackView, make_view
from hybrid_pack.report.frontmatter import TAKEN, Value, as_list, read_front_matter, write_front_matter
from hybrid_pack.report.text import plain
from hybrid_pack.sharding import Topology
from tests.report.manifests import errors, manifest, random_tiers

TIERS = random_tiers(range(3, 6), 16, 5, mtp=9)
PRINTABLE = st.text(st.characters(exclude_categories=("C", "Z"), include_characters=" "), min_size=1, max_size=20)
SCALARS = PRINTABLE.map(str.strip).filter(bool)


def view(**options: Any) -> PackView:
    return make_view(manifest(TIERS, 16, **options), [])


def card(front: dict[str, Value] | None = None, **options: Any) -> str:
    return model_card(view(**options), {"model_type": "glm_moe_dsa"}, front or {})


# Front matter.


@given(st.dictionaries(st.sampled_from(TAKEN), SCALARS | st.lists(SCALARS, min_size=1, max_size=4)))
def test_every_reader_of_yaml_reads_what_was_written(values: dict[str, Any]) -> None:
    text = write_front_matter(values)
    assert text.startswith("---\n")
    assert (yaml.safe_load(text.strip("-\n")) or {}) == values


WORDS = st.from_regex(r"[A-Za-z][A-Za-z0-9 ._/-]{0,20}[a-z]", fullmatch=True).filter(
    lambda text: text.lower() not in ("yes", "no", "on", "off", "true", "false", "null")
)


@given(st.dictionaries(st.sampled_from(TAKEN), WORDS | st.lists(WORDS, min_size=1, max_size=4)), st.booleans())
def test_what_yaml_writes_is_read(values: dict[str, Any], flow: bool) -> None:
    """Block style, and flow style for lists."""
    text = "".join(
        yaml.safe_dump({key: value}, width=10_000)
        if isinstance(value, str) or not flow
        else f"{key}: {yaml.safe_dump(value, default_flow_style=True, width=10_000)}"
        for key, value in values.items()
    )
    found = read_front_matter(f"---\n{text}---\n# Card\n")
    assert found == {key: tuple(v) if isinstance(v, list) else v for key, v in values.items() if key in TAKEN}


@given(st.text(max_size=300))
def test_nothing_in_a_card_is_an_error(text: str) -> None:
    found = read_front_matter(f"---\n{text}\n---\n")
    assert set(found) <= set(TAKEN)
    assert all(as_list(value) for value in found.values())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("no front matter", {}),
        ("---\nlicense: mit\n", {}),
        ("\ufeff---\r\nlicense: mit\r\n---\r\n", {"license": "mit"}),
        ("---\nlicense: 'mit' # a remark\n---", {"license": "mit"}),
        ("---\nlicense: mit # a remark\n...\nlanguage: en", {"license": "mit"}),
        ("---\nlicense: other\nlicense_name: glm\nlicense_link: https://x.y/LICENSE\n---",
         {"license": "other", "license_name": "glm", "license_link": "https://x.y/LICENSE"}),
        ("---\nlanguage:\n  - en\n  - 'zh'\n---", {"language": ("en", "zh")}),
        ("---\nlanguage: [en, \"zh\"]\n---", {"language": ("en", "zh")}),
        ("---\nlanguage:\n- en\n\n# remark\n- zh\n---", {"language": ("en", "zh")}),
        ("---\nlicense: null\npipeline_tag: ~\ntags: NULL\nlanguage: Null # none\nbase_model: 'null'\n---",
         {"base_model": "null"}),
        ("---\ntags: [null, a, ~]\nlanguage:\n- en\n- null\n-\n- # nothing\n- ~\nbase_model: [~]\n---",
         {"tags": ("a",), "language": ("en",)}),
        ("---\nlicense: |\n  long\n---", {}),
        ("---\nlicense: {a: b}\n---", {}),
        ("---\nlicense: *alias\n---", {}),
        ("---\nlicense:\n  nested: x\n---", {}),
        ("---\ntags:\n- a: b\n---", {}),
        ("---\nlicense: \"a\\u0041\"\n---", {}),
        ("---\nlicense: mit\nlicense: other\n---", {"license": "other"}),
        ("---\nmodel-index:\n- name: x\n  results:\n  - task: y\nlicense: mit\n---", {"license": "mit"}),
    ],
)  # fmt: skip
def test_reading(text: str, found: dict[str, Value]) -> None:
    assert read_front_matter(text) == found


def test_a_huge_card_is_cut() -> None:
    assert read_front_matter("---\n" + "x: y\n" * 100_000 + "license: mit\n---\n") == {}


# The card.


def test_the_hub_reads_it() -> None:
    front: dict[str, Value] = {
        "license": "other", "license_name": "glm", "license_link": "LICENSE", "language": ("en", "no"),
        "pipeline_tag": "text-generation", "tags": ("chat", "moe"), "base_model": "zai-org/GLM-5",
    }  # fmt: skip
    data = ModelCard(card(front)).data.to_dict()
    assert data["base_model"] == "zai-org/GLM-5.2", "what it was made from, not what that was made from"
    assert data["base_model_relation"] == "quantized"
    assert data["library_name"] == "hybrid-pack"
    assert data["tags"] == ["hybrid-pack", "moe", "nvfp4", "nf3", "b12x", "chat"]
    assert data["language"] == ["en", "no"]
    assert {key: data[key] for key in ("license", "license_name", "license_link", "pipeline_tag")} == {
        key: front[key] for key in ("license", "license_name", "license_link", "pipeline_tag")
    }


@pytest.mark.parametrize(
    ("name", "above", "base"),
    [
        ("a-folder", None, None),
        ("a-folder", "zai-org/GLM-5.2", "zai-org/GLM-5.2"),
        ("a-folder", ("zai-org/GLM-5.2",), "zai-org/GLM-5.2"),
        ("a-folder", ("a/b", "c/d", "a/b"), ["a/b", "c/d"]),
        ("a-folder", ("a/b", "../merged"), "a/b"),
        ("a-folder", "../b", None),
        ("org/name/more", None, None),
        ("org/name", "zai-org/GLM-5.2", "org/name"),
        ("org/name", ("a/b", "c/d"), "org/name"),
    ],
)
def test_base_model(name: str, above: Value | None, base: str | list[str] | None) -> None:
    text = card({} if above is None else {"base_model": above}, name=name)
    data = ModelCard(text).data.to_dict()
    assert data.get("base_model") == base
    assert data.get("base_model_relation") == (base and "quantized")
    assert ("base_model; add" in text) == (base is None)
    for one in as_list(above):
        assert one in text or name == "org/name", "nothing the source says is dropped without a word"


def test_nulls_of_the_source_are_absent() -> None:
    front = read_front_matter("---\nlicense: null\npipeline_tag: ~\ntags: null\nbase_model: null\n---\n")
    text = card(front, name="a-folder")
    data = ModelCard(text).data.to_dict()
    assert not {"license", "pipeline_tag", "base_model", "base_model_relation"} & set(data)
    assert data["tags"] == ["hybrid-pack", "moe", "nvfp4", "nf3", "b12x"]
    assert "# not known here: license and base_model" in text


HOSTILE = "---\n# x <script>alert(1)</script> ![a](https://evil.example/x.png) | `b` www.evil.example ~~c~~ \u202e"


def test_strings_from_elsewhere_are_only_text() -> None:
    text = card({"license": HOSTILE, "tags": (HOSTILE,)}, name=HOSTILE, notes=[HOSTILE, "1. one", "- two"])
    front, body = text.split("\n---\n", 1)
    data = yaml.safe_load(front.removeprefix("---\n"))
    assert data["license"] == plain(HOSTILE)
    assert "base_model" not in data
    assert not re.search(r"(?<!\\)<(?!!-- hybrid-pack|r>)", body)
    assert not re.search(r"(?<!\\)!\[a|https:|www\.|(?<!\\)`b\\?`|(?<!\\)~|\u202e", body)
    assert re.findall(r"!\[[^\]]*\]\(([^)]*)\)", body) == ["tier_map.png"]
    assert "* 1\\. one" in body
    assert "* \\- two" in body


@given(PRINTABLE)
def test_marked_text_is_that_text(text: str) -> None:
    """A backslash before punctuation is the only change, but for spaces."""
    assert re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", marked(text)) == " ".join(plain(text).split())


def test_what_was_measured_is_what_the_manifest_says() -> None:
    made = [entry for entry in errors(TIERS, 16, exact=0) if entry["tier"] == "tail"]
    text = card(quantized=made, requantized=[{"layer": 3, "expert": TIERS[3][0][0], "worst_relative_error": 0.03125}])
    values = sorted(db for entry in made for db in entry["sqnr_db"])
    row = next(line for line in text.splitlines() if line.startswith("  | tail (NF3)"))
    assert [cell.strip() for cell in row.strip(" |").split("|")] == [
        "tail (NF3)", "mse", "BF16", "3-5", "33", f"{values[0]:.2f}", f"{values[16]:.2f}", f"{values[-1]:.2f}"
    ]  # fmt: skip
    assert "* 30 experts moved as stored" in text
    assert "* 1 expert with gate and up scales brought to one second scale" in text
    assert "is 0.031, layer 3" in text
    assert "8,880 groups with scale zero" in text


def test_what_gptq_gained_is_in_the_table() -> None:
    text = card(quantized=errors(TIERS, 16, exact=0, ratios={3: 0.5, 4: 0.25, 5: 0.75}))
    rows = {line.split("|")[1].strip(): line.strip(" |").split("|")[-1].strip() for line in text.splitlines()
            if line.startswith("  | ")}  # fmt: skip
    assert rows == {"tier": "GPTQ to nearest", "---": "---", "kept (NVFP4)": "–", "tail (NF3)": "0.50"}
    assert "GPTQ" not in card(quantized=errors(TIERS, 16))


def test_notes_are_what_no_table_says() -> None:
    assert "## Notes" not in card(quantized=errors(TIERS, 16))
    bad = errors(TIERS, 16)
    bad[1]["sqnr_db"][0] = 3.0
    text = card(quantized=bad, notes=["not copied: assets"])
    notes = text.partition("## Notes\n")[2].partition("\n\n")[0].splitlines()
    assert notes[0].startswith("* WARNING: 1 tail expert below 10 dB")
    assert notes[1:] == ["* not copied: assets"]


def test_one_of_a_kind_is_no_plural() -> None:
    found = manifest(TIERS, 16)
    counted = {"groups_zero_scale": 1, "blocks_flushed": 1, "scales_saturated": 2}
    made = found.model_copy(update={"report": found.report.model_copy(update=counted)})
    text = model_card(make_view(made, []), {}, {})
    assert "* 1 group with scale zero" in text
    assert "* 1 kept block too small for the kernel beside the largest of the matrix" in text
    assert "* 2 MXFP4 scales above the kernel's largest" in text


def test_nothing_quantised_has_no_error_table() -> None:
    text = card()
    assert "SQNR" not in text
    assert "* 64 experts moved as stored" in text


def test_it_says_how_the_pack_is_cut() -> None:
    text = card(topology=Topology(2, 4), hidden=256, intermediate=256)
    assert "packed for 8 ranks" in text
    assert "tensor parallel 2 and expert parallel 4" in text
    assert "experts/tp2-ep4/rank-<r>" in text
    assert "expect_tp=2" in text
    assert "packed for 1 rank\n" in card(topology=Topology(1, 1), hidden=256, intermediate=256)


@pytest.mark.parametrize(
    ("tp", "ep", "command"),
    [
        (1, 1, "vllm serve pack\n"),
        (4, 1, "vllm serve pack --tensor-parallel-size 4\n"),
        (1, 4, "vllm serve pack --tensor-parallel-size 4 --enable-expert-parallel\n"),
        (2, 4, None),
    ],
)
def test_it_says_how_vllm_serves_it(tp: int, ep: int, command: str | None) -> None:
    text = card(topology=Topology(tp, ep), hidden=512, intermediate=512)
    assert ("vllm" in text) == (command is not None)
    assert command is None or command in text


def test_a_family_that_vllm_does_not_serve_is_not_announced_as_served() -> None:
    for config in (
        {"model_type": "deepseek_v4"},
        {"model_type": "wrapper", "text_config": {"model_type": "deepseek_v4"}},
    ):
        text = model_card(view(), config, {})
        assert "vllm serve" not in text and "vLLM does not serve packs of this family yet: its attention" in text
        assert "HybridMoE" in text, "its experts can be run"
    assert "vllm serve pack" in model_card(view(), {"model_type": "deepseek_v3"}, {})


def test_a_pack_of_some_layers_is_not_announced_as_served() -> None:
    """The plugin refuses a model of which it has not all experts."""
    made = view(omitted=[1, 6, 7])
    for config, lacking in (({}, "layers 1, 6-7"), ({"num_hidden_layers": 9}, "layers 1, 6-7"),
                            ({"text_config": {"num_hidden_layers": 6}}, "layer 1")):  # fmt: skip
        text = model_card(made, config, {})
        assert "vllm" not in text and f"It cannot be served: experts are not in it, those of {lacking}.\n" in text
        assert "HybridMoE" in text, "those that are in it can be run"
    assert "vllm serve pack" in model_card(view(omitted=[10]), {"num_hidden_layers": 10}, {}), "no draft, but served"


def test_only_an_untouched_card_is_ours() -> None:
    text = card()
    assert text == card()
    assert is_ours(text.encode())
    for changed in (text + "\n", text.replace("Sizes", "sizes"), text.replace("\n", "\r\n"), text[1:], "", "# Mine\n"):
        assert not is_ours(changed.encode())
    assert not is_ours(b"\xff" + text.encode())


def test_transformers_is_warned_of_before_anything_can_be_loaded() -> None:
    """It would warn in these words, go on, and run with random experts."""
    text = card()
    warning, how = text.partition("## How to load it\n")[2].split("```", 1)
    words = " ".join(warning.split())
    assert words.startswith("**Do not use `from_pretrained` of transformers for the model: it would run with random")
    for phrase in ("Unknown quantization type, got hybrid_pack", "skip the quantization", "newly initialized"):
        assert phrase in words
    assert "from_pretrained" not in how, "nothing that contradicts it"


def test_no_command_is_a_redirection() -> None:
    """As a shell reads them: words, and nothing for it to do."""
    text = card()
    commands = text.partition("```\npip")[2].partition("```")[0]
    lexer = shlex.shlex(f"pip{commands}", posix=True, punctuation_chars=True)
    words = list(lexer)
    assert words[3:10] == ["hybrid-pack", "pull", "ORG/NAME", "--rank", "0", "--out", "pack"]
    assert not [word for word in words if set(word) & set("<>|&;()")]
    assert "in place of `ORG/NAME`" in text


@pytest.mark.parametrize("edited", [False, True])
def test_a_card_says_which_pack_it_describes(edited: bool) -> None:
    made, other = manifest(TIERS, 16), manifest(TIERS, 16, name="org/other")
    text = card()
    if edited:
        text = text.replace("## Sizes", "## Large?").replace("\n", "\r\n")
    assert is_ours(text.encode()) != edited
    assert described(text.encode()) == described(text.encode() + b"\xff") == made.self_digest != other.self_digest


def test_a_card_that_names_no_manifest_or_two_says_nothing() -> None:
    made = manifest(TIERS, 16)
    both = card() + card(name="org/other")
    quoted = f"built from `{made.self_digest}`, see there\n"
    for text in ("", "# Mine\n", quoted, both, card().replace("this pack's manifest", "a manifest")):
        assert described(text.encode()) is None


@pytest.mark.parametrize(
    "config", [{}, {"text_config": {"model_type": "x"}}, {"model_type": "<b>"}, {"text_config": 1}]
)
def test_any_configuration_will_do(config: dict[str, Any]) -> None:
    text = model_card(view(), config, {})
    assert "<b>" not in text
    assert ("`x`" in text) == ("text_config" in config and config["text_config"] != 1)
