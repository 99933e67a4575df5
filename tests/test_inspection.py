"""What ``inspect`` says of checkpoints with and without a bit map, of packs, and of folders that are neither."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hybrid_pack.cli.tables import inspection_text
from hybrid_pack.convert import convert
from hybrid_pack.errors import DataError, UsageError
from hybrid_pack.inspection import inspect_path
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.io.manifest import MANIFEST, STATE, read_manifest
from hybrid_pack.plan import make_plan
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec, bit_map, write_checkpoint
from tests.checkpoints import SMALL
from tests.verify.packs import editing


def made(root: Path, spec: Spec = SMALL) -> Path:
    write_checkpoint(root, spec)
    return root


def pack_of(source: Path, out: Path, topology: Topology) -> Path:
    convert(make_plan(open_checkpoint(source), topology), out, workers=2)
    return out


@pytest.fixture(scope="module")
def pack(small_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack_of(small_checkpoint, tmp_path_factory.mktemp("inspected") / "pack", Topology(2, 2))


# checkpoints


@pytest.mark.parametrize(
    ("map_in", "origin"),
    [
        ("config", "config.json quantization_config"),
        ("hf_quant", "hf_quant_config.json"),
        ("none", None),
    ],
)
def test_where_the_bit_map_is_from(tmp_path: Path, map_in: str, origin: str | None) -> None:
    source = made(tmp_path / "source", replace(SMALL, map_in=map_in))
    view = inspect_path(source)
    assert (view.bit_map_from or "none").startswith(origin or "none")
    assert re.search(rf"^bit map +{origin or 'none'}", inspection_text(view), re.MULTILINE)
    assert ("there is no bit map" in "\n".join(view.notes)) == (origin is None)


def test_a_map_that_is_given(tmp_path: Path) -> None:
    source, given = made(tmp_path / "source", replace(SMALL, map_in="none")), tmp_path / "map.json"
    given.write_text(json.dumps(bit_map(SMALL)))
    view = inspect_path(str(source), bit_map_file=str(given))
    assert view.bit_map_from == f"--bit-map {given}"
    assert not view.notes
    assert json.loads(json.dumps(view.as_dict()))["pack"] is None


def test_without_a_map_the_stored_formats_tell(tmp_path: Path) -> None:
    """NF3 experts are the tail; no map is blamed."""
    with_map, without = (made(tmp_path / name, replace(SMALL, map_in=name)) for name in ("config", "none"))
    known, view = inspect_path(with_map), inspect_path(without)
    assert [(v.layer, v.kept, v.tail, v.kept_format) for v in view.layers] == [
        (v.layer, v.kept, v.tail, v.kept_format) for v in known.layers
    ]
    assert view.topologies == known.topologies
    assert inspection_text(view).partition("tier map")[2].partition("\n\n")[0] == (
        inspection_text(known).partition("tier map")[2].partition("\n\n")[0].replace(" + 0 NF3", "")
    )
    with pytest.raises(DataError, match="no hybrid_bit_map"):
        open_checkpoint(without)


WIDE = replace(SMALL, stored=("bf16",), map_in="none", second_scale="equal")


def test_nothing_is_drawn_of_tiers_nobody_has_chosen(tmp_path: Path) -> None:
    """What is stored, layers that are alike together; with a map the tiers."""
    view = inspect_path(made(tmp_path / "source", WIDE))
    assert [layer.stored for layer in view.layers] == [{"BF16": WIDE.num_experts}] * 3
    text = inspection_text(view)
    assert f"\n  3-5:  {WIDE.num_experts} BF16\n" in text
    assert "tier map" not in text and "NF3" not in text
    assert (
        "note: there is no bit map, so no tiers yet: sizes are with every expert kept as NVFP4; hybrid-pack pl" in text
    )
    (tmp_path / "map.json").write_text(json.dumps(bit_map(WIDE)))
    view = inspect_path(tmp_path / "source", bit_map_file=tmp_path / "map.json")
    assert {layer.stored for layer in view.layers} == {None}
    assert f"{WIDE.kept} NVFP4 + {WIDE.num_experts - WIDE.kept} NF3" in inspection_text(view)


def test_mixed_formats_are_counted_by_layer(tmp_path: Path) -> None:
    spec = replace(WIDE, stored=("bf16", "nvfp4", "bf16"), num_experts=4, mtp_layer=False)
    view = inspect_path(made(tmp_path / "source", spec))
    assert view.layers[0].stored == {"BF16": 3, "NVFP4": 1}
    assert "\n  3-4:  3 BF16 + 1 NVFP4\n" in inspection_text(view)


# packs


def test_a_padded_pack_shows_both_sizes(tmp_path: Path) -> None:
    source = open_checkpoint(made(tmp_path / "source", replace(SMALL, hidden=256, intermediate=160)))
    convert(make_plan(source, Topology(2), pad=True), tmp_path / "pack", workers=2)
    view = inspect_path(tmp_path / "pack")
    assert (view.intermediate, view.intermediate_padded) == (160, 256)
    assert view.as_dict()["intermediate_padded"] == 256
    assert "hidden 256, intermediate 160, padded to 256, 4 experts" in inspection_text(view)


def test_a_pack(pack: Path) -> None:
    manifest = read_manifest(pack)
    view = inspect_path(str(pack))
    assert view.pack is not None
    assert (view.folder, view.name) == (str(pack), "small")
    assert (view.pack.tensor_parallel, view.pack.expert_parallel) == (2, 2)
    assert [rank.rank for rank in view.pack.ranks] == [0, 1, 2, 3]
    packed = sum(t.end - t.begin for s in manifest.shards for t in s.tensors.values())
    assert sum(rank.kept_bytes + rank.tail_bytes for rank in view.pack.ranks) == packed
    text = inspection_text(view)
    for what in (
        f"pack +{pack}", "source +small", "made for +tp 2, ep 2; tiles .*", "made by +hybrid-pack .*",
        f"abi +{re.escape(manifest.layout.abi)}", f"self digest +{manifest.self_digest}",
    ):  # fmt: skip
        assert re.search(f"^{what}$", text, re.MULTILINE), (what, text)
    assert "by the report" not in text
    assert view.intermediate == view.intermediate_padded and "padded" not in text


def test_ranks_of_equal_sizes_share_a_row_and_others_do_not(tmp_path: Path) -> None:
    source = made(tmp_path / "source", replace(SMALL, num_experts=8, kept=3))
    view = inspect_path(pack_of(source, tmp_path / "pack", Topology(2, 4)))
    assert view.pack is not None
    sizes = [(rank.kept_bytes, rank.tail_bytes) for rank in view.pack.ranks]
    changes = sum(a != b for a, b in pairwise(sizes))
    text = inspection_text(view)
    rows = text[text.index("kept/rank") :].split("\n\n")[0].splitlines()[1:]
    assert len(rows) == changes + 1 > 1
    assert rows[0].split()[0].startswith("0-")


def test_what_the_report_of_a_pack_says(small_checkpoint: Path, tmp_path: Path) -> None:
    pack = pack_of(small_checkpoint, tmp_path / "pack", Topology(1, 1))
    with editing(pack) as editor:
        editor.document["report"].update(blocks_flushed=3, notes=["an oddity"])
    view = inspect_path(pack)
    assert view.pack is not None and view.notes == ("an oddity",)
    text = inspection_text(view)
    assert "by the report: 3 kept blocks too small for the kernel beside the largest of the matrix, flushed" in text
    assert text.count("an oddity") == 1 and "by the report: an oddity" in text


def test_a_bit_map_for_a_pack(pack: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--bit-map: a pack has its own bit map"):
        inspect_path(pack, bit_map_file=tmp_path / "map.json")


# neither


def test_an_unfinished_conversion(tmp_path: Path) -> None:
    (tmp_path / STATE).touch()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"an unfinished conversion, or one that is running; .*convert --resume"):
        inspect_path(tmp_path)


def test_a_pack_that_lost_its_manifest(small_checkpoint: Path, tmp_path: Path) -> None:
    pack = pack_of(small_checkpoint, tmp_path / "pack", Topology(1, 1))
    (pack / MANIFEST).unlink()
    with pytest.raises(DataError, match="not a pack: it has no manifest"):
        inspect_path(pack)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither a checkpoint nor a pack: it has no config.json and no hybrid_pack"):
        inspect_path(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere: no such folder"):
        inspect_path(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file: not a folder"):
        inspect_path(tmp_path / "file")
