"""Every attack of FORMAT.md, section 16, is caught by the check it names, and by ``hybrid-pack verify``."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybrid_pack.sharding import Topology
from hybrid_pack.verify import verify_pack
from tests.format_page import page, reader, weights
from tests.format_page.made import SMALL, Made, make
from tests.format_page.reader import Wrong
from tests.format_page.verifier import verify
from tests.runtime.sources import experts_of

SHARD = "experts/tp2-ep1/rank-{}/layer-000.safetensors"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("plain"), SMALL, Topology(2))


def seal(document: dict[str, Any], *, text: str | None = None) -> bytes:
    document = {key: value for key, value in document.items() if key != "self_digest"}
    body = (text or json.dumps(document, indent=1, ensure_ascii=False)).encode().removesuffix(b"\n}")
    return body + reader.tail_of(body)


@dataclass
class Target:
    """A copy of a pack to attack."""

    root: Path

    @property
    def manifest(self) -> Path:
        return self.root / "hybrid_pack.json"

    def shard(self, rank: int = 0) -> Path:
        return self.root / SHARD.format(rank)

    def edit(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the manifest and seal it again."""
        document = json.loads(self.manifest.read_bytes())
        change(document)
        self.manifest.write_bytes(seal(document))

    def poke(self, path: Path, offset: int, change: Callable[[int], int]) -> None:
        data = bytearray(path.read_bytes())
        data[offset] = change(data[offset])
        path.write_bytes(data)

    def tensor(self, name: str) -> dict[str, Any]:
        found = json.loads(self.manifest.read_bytes())["shards"][0]["tensors"][name]
        assert isinstance(found, dict)
        return found

    def reseal(self) -> None:
        """Every digest anew from the bytes that are there."""

        def change(document: dict[str, Any]) -> None:
            for entry in reader.listed(document):
                data = (self.root / entry["path"]).read_bytes()
                if "tensors" not in entry:
                    entry["bytes"], entry["digest"] = len(data), reader.digest(data)
                    continue
                header, _ = reader.header_and_data(self.root / entry["path"])
                for name, at in entry["tensors"].items():
                    part = data[at["begin"] : at["end"]]
                    rows = reader.has_rows(name)
                    at["digest"] = reader.digest_of_rows(part, at["shape"][0]) if rows else reader.digest(part)
                digests = [at["digest"] for at in entry["tensors"].values()]
                entry["digest"] = reader.digest_of_shard(header, digests)

        self.edit(change)

    def add_file(self, path: str) -> Callable[[dict[str, Any]], object]:
        return lambda m: m["files"].append({"path": path, "bytes": 0, "digest": reader.digest(b"")})


def no_manifest(t: Target) -> None:
    t.manifest.unlink()


def edited_manifest(t: Target) -> None:
    t.manifest.write_bytes(t.manifest.read_bytes().replace(b'"top_k": 2', b'"top_k": 1'))


def unknown_key(t: Target) -> None:
    t.edit(lambda m: m["layout"].update(extra=1))


def unknown_version(t: Target) -> None:
    t.edit(lambda m: m.update(format_version=2))


def unknown_abi(t: Target) -> None:
    t.edit(lambda m: m["layout"].update(abi="b12x-1.1.0/nf3_2p1+packed/2"))


def wrong_tiles(t: Target) -> None:
    t.edit(lambda m: m["layout"].update(tiles=[64, 256, 64, 256]))


def traversal(t: Target) -> None:
    t.edit(t.add_file("../x"))


def absolute_path(t: Target) -> None:
    t.edit(t.add_file("/etc/hostname"))


def case_twins(t: Target) -> None:
    for name in ("a.txt", "A.txt"):
        (t.root / name).touch()
        t.edit(t.add_file(name))


def duplicate_key(t: Target) -> None:
    text = json.dumps({k: v for k, v in json.loads(t.manifest.read_bytes()).items() if k != "self_digest"}, indent=1)
    (layout,) = re.findall(r'^ "layout": \{.*?^ \},\n', text, flags=re.M | re.S)
    t.manifest.write_bytes(seal({}, text=text.replace(layout, layout + layout)))


def moved_tensor(t: Target) -> None:
    def change(m: dict[str, Any]) -> None:
        entry = m["shards"][0]["tensors"]["tail.w2"]
        entry["begin"], entry["end"] = entry["begin"] - 4096, entry["end"] - 4096

    t.edit(change)


def expert_in_both_tiers(t: Target) -> None:
    def change(m: dict[str, Any]) -> None:
        tiers = m["layers"]["0"]
        tiers["kept"] = sorted([*tiers["kept"][1:], tiers["tail"][0]])

    t.edit(change)


def truncated(t: Target) -> None:
    t.shard().write_bytes(t.shard().read_bytes()[:-4])


def appended(t: Target) -> None:
    t.shard().write_bytes(t.shard().read_bytes() + b"\0")


def extra_file(t: Target) -> None:
    (t.root / "experts" / "notes.txt").touch()


def partial_file(t: Target) -> None:
    t.shard().with_name("layer-001.safetensors.partial").touch()


def link_out(t: Target) -> None:
    outside = t.root.parent / "outside"
    shutil.move(t.shard(), outside)
    t.shard().symlink_to(outside)


def wrong_map(t: Target) -> None:
    config = json.loads((t.root / "config.json").read_bytes())
    bits = config["quantization_config"]["hybrid_bit_map"]["0"]
    bits[0] = 7 - bits[0]
    (t.root / "config.json").write_text(json.dumps(config))
    t.reseal()


def stale_index(t: Target) -> None:
    path = t.root / "model.safetensors.index.json"
    index = json.loads(path.read_bytes())
    index["weight_map"]["model.gone.weight"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    t.reseal()


def header_padding(t: Target) -> None:
    t.poke(t.shard(), 4095, lambda byte: ord("\t"))


def wrong_ids(t: Target) -> None:
    at = t.tensor("kept.expert_ids")["begin"]
    data = bytearray(t.shard().read_bytes())
    data[at : at + 8] = data[at + 4 : at + 8] + data[at : at + 4]
    t.shard().write_bytes(data)
    t.reseal()


def zero_global_scale(t: Target) -> None:
    at = t.tensor("kept.w2_global_scale")["begin"]
    for offset in range(4):
        t.poke(t.shard(), at + offset, lambda byte: 0)
    t.reseal()


def flipped_bit(t: Target) -> None:
    t.poke(t.shard(), t.tensor("tail.w13")["begin"] + 77, lambda byte: byte ^ 16)


def swapped_ranks(t: Target) -> None:
    first, second = (t.shard(rank).read_bytes() for rank in (0, 1))
    assert first[:4096] == second[:4096] and len(first) == len(second)
    t.shard(0).write_bytes(second)
    t.shard(1).write_bytes(first)


def flipped_base_bit(t: Target) -> None:
    (path,) = t.root.glob("model-*.safetensors")
    t.poke(path, path.stat().st_size - 1, lambda byte: byte ^ 1)


def wild_scale(t: Target) -> None:
    t.poke(t.shard(), t.tensor("tail.w13_scale")["begin"] + 5, lambda byte: 255)
    t.reseal()


def resealed_weights(t: Target) -> None:
    flipped_bit(t)
    t.reseal()


MUTATIONS = [
    no_manifest, edited_manifest, unknown_key, unknown_version, unknown_abi, wrong_tiles, traversal, absolute_path,
    case_twins, duplicate_key, moved_tensor, expert_in_both_tiers, truncated, appended, extra_file, partial_file,
    link_out, wrong_map, stale_index, header_padding, wrong_ids, zero_global_scale, flipped_bit, swapped_ranks,
    flipped_base_bit, wild_scale, resealed_weights,
]  # fmt: skip


def against_the_source(pack: reader.Pack, made: Made) -> None:
    """Check 9, as far as experts go."""
    stored = experts_of(made.source)
    for shard in pack.manifest["shards"]:
        for expert, w13, w2 in weights.experts_of(pack, shard["layer"], shard["rank"]):
            gate_up, down = stored[shard["layer"]][expert].share(made.topology.tensor_parallel, shard["rank"])
            reader.need(9, np.array_equal(w13, gate_up) and np.array_equal(w2, down), f"expert {expert}")


def test_attacks_are_those_of_the_page() -> None:
    names = [page.only(row["attack"]) for row in page.ATTACKS]
    assert names == [mutation.__name__.replace("_", "-") for mutation in MUTATIONS]
    assert {row["check"] for row in page.ATTACKS} == {row["check"] for row in page.CHECKS}


@pytest.mark.parametrize("row", page.ATTACKS, ids=lambda row: page.only(row["attack"]))
def test_attack(row: page.Row, plain: Made, tmp_path: Path) -> None:
    target = Target(tmp_path / "pack")
    shutil.copytree(plain.root, target.root)
    next(m for m in MUTATIONS if m.__name__.replace("_", "-") == page.only(row["attack"]))(target)
    with pytest.raises(Wrong) as caught:
        against_the_source(verify(target.root), plain)
    assert caught.value.check == int(row["check"])
    report = verify_pack(target.root, source=plain.source if row["check"] == "9" else None, workers=1)
    assert report.findings, "hybrid-pack verify finds it too"
