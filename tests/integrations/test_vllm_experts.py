"""What vLLM asks of a pack, and one rank's experts: what is refused, in which words, what is loaded when."""

from __future__ import annotations

import ast
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hybrid_pack
from hybrid_pack.errors import EnvironmentFailure, HybridPackError, UsageError
from hybrid_pack.integrations.vllm import experts
from hybrid_pack.integrations.vllm.advice import command_for
from hybrid_pack.integrations.vllm.options import Options
from hybrid_pack.integrations.vllm.request import Request, require
from hybrid_pack.integrations.vllm.words import hint_for
from hybrid_pack.runtime import backends
from hybrid_pack.runtime.build import layer_geometry
from hybrid_pack.runtime.pack import Pack
from hybrid_pack.runtime.stream.files import AGAIN
from hybrid_pack.schemas.manifest import Requantized

GOOD = Request(
    prefix="model.layers.3.mlp.experts", layer=3, tp_size=2, tp_rank=1, ep_size=1, ep_rank=0, dp_size=1,
    hidden_size=256, intermediate_size=256, num_experts=8, top_k=2, activation="silu", limit=None, dtype="bfloat16",
    expert_map=None,
)  # fmt: skip


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Pack]:
    from tests.convert.support import pack, small

    folder = tmp_path_factory.mktemp("packs")
    from hybrid_pack.synthetic import write_checkpoint

    write_checkpoint(folder / "source", small())
    made = {}
    for tp, ep in ((2, 1), (1, 2), (2, 2)):
        pack(folder / "source", folder / f"{tp}-{ep}", tp, ep)
        made[tp, ep] = hybrid_pack.open_pack(folder / f"{tp}-{ep}")
    return made


def good(pack: Pack, **changes: Any) -> Request:
    sizes = pack.manifest.geometry
    request = replace(
        GOOD, hidden_size=sizes.hidden_size, intermediate_size=sizes.intermediate_size, num_experts=sizes.num_experts,
        top_k=sizes.top_k,
    )  # fmt: skip
    return replace(request, **changes)


def test_what_fits_is_let_through(packs: dict[tuple[int, int], Pack]) -> None:
    pack = packs[2, 1]
    require(good(pack), pack.manifest, pack.root)
    assert good(pack).rank == 1
    pack = packs[1, 2]
    experts_ = pack.manifest.geometry.num_experts
    half = experts_ // 2
    second = tuple(e - half if e >= half else -1 for e in range(experts_))
    request = good(pack, tp_size=1, tp_rank=0, ep_size=2, ep_rank=1, expert_map=second)
    require(request, pack.manifest, pack.root)
    with pytest.raises(UsageError, match=r"placed the experts otherwise.*--expert-placement-strategy linear"):
        require(replace(request, ep_rank=0), pack.manifest, pack.root)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tp_size": 4},
            r"made for other ranks \(expected --tensor-parallel-size 2 \(tp 2, ep 1\), found tp 4, ep 1\)",
        ),
        (
            {"tp_size": 1, "ep_size": 2},
            r"serve it so, or make one for these: `hybrid-pack convert SRC --out OUT --tp 1 --ep 2` \(SRC is source;",
        ),
        ({"tp_size": 4}, r"--tp 4 --ep 1 --pad` .*; --pad makes the intermediate size 256, and tp 1, 2 need none\)$"),
        ({"tp_size": 3}, r"or no pack can be for tp 3: .*not divisible by 3; legal sizes: 1, 2$"),
        ({"tp_size": 1, "ep_size": 3}, r"or no pack can be for ep 3: 4 experts .*; legal sizes: 1, 2, 4$"),
        ({"dp_size": 2}, r"data parallelism"),
        ({"hidden_size": 64}, r"hidden size of model.layers.3.mlp.experts"),
        ({"intermediate_size": 64}, r"intermediate size"),
        ({"num_experts": 16}, r"number of experts"),
        ({"top_k": 4}, r"experts a token visits"),
        ({"dtype": "float16"}, r"dtype .* \(expected bfloat16, found float16\)"),
        ({"activation": "gelu"}, r"activation .* is not the pack's \(expected silu, found gelu\)"),
        ({"limit": 7.0}, r"expected silu, found silu\(limit=7.0\)"),
        ({"refused": ("biases of experts",)}, r"cannot be served with biases of experts"),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], message: str, packs: dict[tuple[int, int], Pack]
) -> None:
    pack = packs[2, 1]
    with pytest.raises(UsageError, match=message):
        require(good(pack, **changes), pack.manifest, pack.root)


SILU, SWIGLU = "silu(limit=10.0)", "swigluoai(alpha=1.702, limit=7.0)"
PACKED_OAI = "swigluoai_uninterleave"


@pytest.mark.parametrize(
    ("pack", "activation", "numbers", "fits"),
    [
        ("silu", "silu", {}, True),
        ("silu", "silu", {"limit": 0.0, "alpha": 1.0, "beta": 0.0}, True),
        ("silu", "silu", {"alpha": 1.702}, False),
        ("silu", "silu", {"beta": 1.0}, False),
        (SILU, "silu", {"limit": 10.0}, True),
        (SILU, "silu", {}, False),
        (SWIGLU, PACKED_OAI, {"limit": 7.0, "alpha": 1.702, "beta": 1.0}, True),
        (SWIGLU, PACKED_OAI, {"limit": 7.0, "alpha": 1.702}, True),
        (SWIGLU, PACKED_OAI, {"limit": 5.0, "alpha": 1.702}, False),
        (SWIGLU, PACKED_OAI, {"limit": 7.0, "alpha": 1.5}, False),
        (SWIGLU, PACKED_OAI, {"limit": 7.0, "alpha": 1.702, "beta": 0.0}, False),
        (SWIGLU, PACKED_OAI, {}, False),
        (SWIGLU, "swigluoai", {}, True),
        (SWIGLU, "swigluoai", {"limit": 5.0}, False),
        ("swigluoai(alpha=1.5, limit=7.0)", "swigluoai", {}, False),
        ("relu2", "relu2_no_mul", {}, True),
    ],
)  # fmt: skip
def test_the_numbers_of_an_activation_are_compared(
    pack: str, activation: str, numbers: dict[str, float], fits: bool, packs: dict[tuple[int, int], Pack]
) -> None:
    made = packs[2, 1]
    manifest = made.manifest.model_copy(update={"layout": made.manifest.layout.model_copy(update={"activation": pack})})
    request = good(made, activation=activation, **numbers)
    if fits:
        require(request, manifest, made.root)
        return
    with pytest.raises(UsageError, match=r"activation of model.layers.3.mlp.experts is not the pack's") as error:
        require(request, manifest, made.root)
    assert all(f"{key}={value}" in str(error.value) for key, value in numbers.items())


@pytest.mark.parametrize(("tp", "ep"), [(4, 1), (1, 4), (2, 1)])
def test_a_pack_split_both_ways_is_for_no_vllm(tp: int, ep: int, packs: dict[tuple[int, int], Pack]) -> None:
    pack = packs[2, 2]
    with pytest.raises(UsageError, match="vLLM splits experts one way; make a pack with --tp N or --ep N") as error:
        require(good(pack, tp_size=tp, ep_size=ep), pack.manifest, pack.root)
    assert "serve it so" not in str(error.value)


def test_the_command_has_the_options_the_pack_was_made_with(packs: dict[tuple[int, int], Pack]) -> None:
    manifest = packs[1, 2].manifest
    plain = command_for(manifest, 2, 1)
    assert plain.startswith("make one for these: `hybrid-pack convert SRC --out OUT --tp 2 --ep 1` (SRC is source; and")
    assert "--bit-map it was made with, if it was given one" in plain
    changed = {
        "kept_format": "mxfp4", "requantize": True, "mx_bias": 125, "search": "weighted",
        "importance": "blake3:" + "0" * 64, "hessians": "blake3:" + "1" * 64,
    }  # fmt: skip
    expected = {
        "kept_format": "--kept-format mxfp4", "requantize": "--requantize", "mx_bias": "--mx-bias 125",
        "search": "--search weighted", "importance": "--importance FILE", "hessians": "--hessians FOLDER",
    }  # fmt: skip
    assert set(changed) == set(type(manifest.report.options).model_fields), "an option is not told"
    for name, value in changed.items():
        options = manifest.report.options.model_copy(update={name: value})
        report = manifest.report.model_copy(update={"options": options})
        told = command_for(manifest.model_copy(update={"report": report}), 2, 1)
        assert told == plain.replace("--ep 1`", f"--ep 1 {expected[name]}`")
    sizes = manifest.geometry.model_copy(update={"intermediate_size_padded": 256})
    padded = manifest.model_copy(update={"geometry": sizes})
    assert "--ep 1 --pad`" in command_for(padded, 2, 1)
    worst = Requantized(layer=1, expert=0, worst_relative_error=0.1)
    report = manifest.report.model_copy(update={"experts_requantized": (worst,)})
    told = command_for(manifest.model_copy(update={"report": report}), 2, 1)
    assert "--ep 1 --on-scale-mismatch requantize`" in told


def test_the_command_pads_where_only_that_makes_the_size_legal(packs: dict[tuple[int, int], Pack]) -> None:
    manifest = packs[2, 1].manifest
    sizes = manifest.geometry.model_copy(update={"intermediate_size": 192, "intermediate_size_padded": 192})
    uneven = manifest.model_copy(update={"geometry": sizes})
    assert "--tp 2 --ep 1 --pad`" in command_for(uneven, 2, 1), "96 rows a rank are no multiple of 64"
    assert "no pack can be for tp 5: intermediate size 192 is not divisible by 5" in command_for(uneven, 5, 1)


def rank_experts(pack: Pack, rank: int = 1) -> experts.RankExperts:
    log = logging.getLogger("test_vllm_experts")
    return experts.RankExperts(pack, rank, torch.device("cpu"), Options(), 8, True, log)


def test_layers_announced_together_come_together(
    packs: dict[tuple[int, int], Pack], caplog: pytest.LogCaptureFixture
) -> None:
    pack = packs[2, 1]
    rank = rank_experts(pack)
    first, *_, last = pack.layers
    for layer in pack.layers[:-1]:
        rank.announce(layer)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it loads
    try:
        with caplog.at_level(logging.INFO):
            moe, report = rank.take(first)
            assert torch.get_default_dtype() is torch.bfloat16
    finally:
        torch.set_default_dtype(before)
    assert report.layers == pack.layers[:-1]
    assert (moe.layer.layer, moe.layer.rank, moe.backend, moe.max_tokens) == (first, 1, "torch", 8)
    rank.announce(last)
    assert rank.take(last)[1].layers == (last,)
    count = len(pack.layers) - 1
    expected = f"hybrid_pack: loading {count} layer{'s' * (count != 1)} of rank 1 from"
    assert caplog.records[0].getMessage().startswith(expected)
    assert any("not b12x: " in record.getMessage() for record in caplog.records), "why it is the slow one is said"


@pytest.mark.parametrize(
    ("backend", "device", "eager", "message"),
    [
        ("auto", "cpu", False, None), ("torch", "cpu", False, None), ("auto", "cuda", True, None),
        ("torch", "cuda", True, None),
        ("b12x", "cpu", True, r"layer 1 rank 1: the backend 'b12x' cannot run this layer: .*no CUDA device"),
        ("torch", "cuda", False, r"waits for the device.* \(found as asked for\).*--enforce-eager"),
        ("auto", "cuda", False, r"waits for the device.* \(found not b12x: no CUDA device"),
    ],
)  # fmt: skip
def test_what_no_backend_will_run_is_refused_when_it_is_announced(
    backend: str, device: str, eager: bool, message: str | None, packs: dict[tuple[int, int], Pack],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    log, options = logging.getLogger("test_vllm_experts"), Options(backend)
    rank = experts.RankExperts(packs[2, 1], 1, torch.device(device), options, 8, eager, log)
    if message is None:
        rank.announce(1)
        return
    with pytest.raises(EnvironmentFailure, match=message):
        rank.announce(1)


def test_an_activation_nobody_runs_is_refused_when_it_is_announced(packs: dict[tuple[int, int], Pack]) -> None:
    pack = packs[2, 1]
    layout = pack.manifest.layout.model_copy(update={"activation": "gelu"})
    other = Pack(pack.root, pack.manifest.model_copy(update={"layout": layout}))
    with pytest.raises(
        EnvironmentFailure, match=r"no backend can run this layer: b12x: .*torch: the activation 'gelu'"
    ):
        rank_experts(other).announce(1)


@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (1, 2)])
def test_what_backends_say_of_a_manifest_they_say_of_the_layer(
    tp: int, ep: int, packs: dict[tuple[int, int], Pack]
) -> None:
    pack = packs[tp, ep]
    for number in pack.layers:
        layer = pack.load_layer(number, 1)
        tiers = {"kept": layer.kept is not None, "tail": layer.tail is not None}
        assert layer_geometry(pack.manifest, number) == layer.geometry
        assert backends.foresee(layer.geometry, layer.tiles, layer.device, **tiers) == backends.consider(layer)


def test_a_damaged_shard_stops_it_by_name(packs: dict[tuple[int, int], Pack], tmp_path: Path) -> None:
    import shutil

    root = Path(shutil.copytree(packs[2, 1].root, tmp_path / "pack"))
    shard = min(root.glob("experts/*/rank-1/*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    pack = hybrid_pack.open_pack(root)
    with pytest.raises(HybridPackError) as error:
        rank_experts(pack).take(pack.layers[0])
    assert str(error.value).startswith(f"rank 1, {shard}: the file is truncated (expected ")
    assert str(error.value).endswith(f"; `hybrid-pack verify {root} --rank 1` checks every byte")


def hints_of_the_runtime() -> list[str]:
    """Every hint that loading a rank and choosing its backend can give."""
    folder = Path(hybrid_pack.__file__).parent / "runtime"
    files = [*folder.glob("stream/*.py"), folder / "load.py", folder / "backends.py"]
    found = []
    for node in (n for file in files for n in ast.walk(ast.parse(file.read_text()))):
        value = node.value if isinstance(node, ast.keyword) and node.arg == "hint" else None
        found += [value.value] if isinstance(value, ast.Constant) and isinstance(value.value, str) else []
    return [*found, AGAIN]


def test_hints_name_nothing_that_only_the_library_has() -> None:
    hints = hints_of_the_runtime()
    assert len(hints) >= 6 and any("max_tokens" in hint for hint in hints)
    for hint in hints:
        told = hint_for(hint, Path("/pack"), 3)
        assert told is not None
        for word in (
            "max_tokens",
            "MoERuntime",
            "host_memory_bytes",
            "readers",
            "fewer layers",
            "leave out",
            "verify`",
        ):
            assert word not in told, hint


def test_scratch_that_does_not_fit_names_vllms_option(
    packs: dict[tuple[int, int], Pack], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise torch.cuda.OutOfMemoryError("no room")

    monkeypatch.setattr(backends, "consider", lambda layer: [backends.Accepted("b12x")])
    monkeypatch.setattr(backends.b12x_backend, "B12xBackend", full)
    pack = packs[2, 1]
    with pytest.raises(EnvironmentFailure, match=r"not enough for the scratch of b12x") as error:
        rank_experts(pack).take(pack.layers[0])
    assert str(error.value).endswith("(found no room); a smaller --max-num-batched-tokens needs less")
