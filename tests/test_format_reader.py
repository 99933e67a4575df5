"""A reader that knows only FORMAT.md reads what the package writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hybrid_pack.sharding import Topology
from tests.format_page import page, reader, weights
from tests.format_page.made import SMALL, Made, make
from tests.format_page.verifier import verify
from tests.reference import floats
from tests.runtime.sources import experts_of, fields_of

CASES = {
    "nvfp4": (replace(SMALL, mtp_layer=True, second_scale="power_of_two"), Topology(2, 2)),
    "mxfp4": (replace(SMALL, hidden=256, kept_format="mxfp4", nf3_scales="e4m3_x16"), Topology()),
    "all tail": (replace(SMALL, kept=0, intermediate=192), Topology(3)),
}


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("made"), *CASES[request.param])


def shards_of(made: Made) -> Iterator[tuple[reader.Pack, dict[str, Any]]]:
    pack = reader.open_pack(made.root)
    for shard in pack.manifest["shards"]:
        yield pack, shard


def test_the_verifier_of_the_page_finds_nothing(made: Made) -> None:
    pack = verify(made.root)
    assert len(pack.manifest["shards"]) == made.topology.ranks * len(pack.manifest["layers"])


def test_keys_of_the_manifest_are_in_the_order_of_the_page(made: Made) -> None:
    text = (made.root / "hybrid_pack.json").read_text()
    found = list(dict.fromkeys(key for key, _ in reader.walk(json.loads(text))))
    order = [page.only(row["key"]) for row in page.KEYS]
    assert found == [key for key in order if key in found]
    assert [key for key in order if key not in found] == [
        key for key in order if key.startswith(("report.experts_requantized[]", "report.experts_quantized[]"))
    ]
    dumped = json.dumps(json.loads(text), indent=1, ensure_ascii=False)
    assert text == dumped + "\n", "section 4: how a manifest is written"


def test_config_is_changed_as_the_page_says(made: Made) -> None:
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (made.source, made.root))
    block = after.pop("quantization_config")
    original = before.pop("quantization_config")
    assert after == before
    assert list(block) == [page.only(row["key"]) for row in page.CONFIG_KEYS]
    assert block["source_quantization_config"] == original
    assert block["hybrid_bit_map"] == original["hybrid_bit_map"]


def test_every_expert_is_that_of_the_source(made: Made) -> None:
    """Exactly: no block of these sources is flushed, and gate and up are powers of two apart."""
    stored = experts_of(made.source)
    seen = []
    for pack, shard in shards_of(made):
        assert pack.manifest["report"]["blocks_flushed"] == 0
        layer, rank = shard["layer"], shard["rank"]
        for expert, w13, w2 in weights.experts_of(pack, layer, rank):
            gate_up, down = stored[layer][expert].share(
                made.topology.tensor_parallel, rank % made.topology.tensor_parallel
            )
            assert np.array_equal(w13, gate_up)
            assert np.array_equal(w2, down)
            seen.append((layer, expert))
    assert sorted(seen) == sorted(
        (layer, expert) for layer in stored for expert in stored[layer] for _ in range(made.topology.tensor_parallel)
    )


def test_global_scales_are_chosen_for_each_expert_matrix_and_rank(made: Made) -> None:
    """Section 13, from the stored scales of the rank's own slice."""
    stored = fields_of(made.source)
    nvfp4, mxfp4, nf3 = page.defined(page.section(13), "global_scale")
    (shift,) = page.defined(page.section(13), "shift")
    for pack, shard in shards_of(made):
        part = shard["rank"] % made.topology.tensor_parallel
        for tier, ids in pack.ids(shard["layer"], shard["rank"]).items():
            form = "e4m3_k32" if tier == "tail" else pack.manifest["layers"][str(shard["layer"])]["kept_scale_format"]
            for matrix, roles in (("w13", ("gate", "up")), ("w2", ("down",))):
                found = reader.read(pack, shard, f"{tier}.{matrix}_global_scale") if ids else []
                for expert, value in zip(ids, found, strict=True):
                    fields = [stored[shard["layer"]][expert][role] for role in roles]
                    scales = [slice_of(f, role, part, pack.share, form) for f, role in zip(fields, roles, strict=True)]
                    if form == "e4m3_k16":
                        seconds = [float(np.frombuffer(f["weight_scale_2"][2], "<f4")[0]) for f in fields]
                        second = max(seconds)
                        largest = max(
                            floats.E4M3[s].max() * own / second for s, own in zip(scales, seconds, strict=True)
                        )
                        factor = 2.0 ** max(e for e in range(30) if 2.0**e * largest <= 448)
                        assert value == np.float32(page.evaluate(nvfp4, second=second, f=factor))
                    elif form == "e8m0_k32":
                        moved = page.evaluate(shift, m=max(int(s.max()) for s in scales))
                        assert value == page.evaluate(mxfp4, shift=moved)
                    else:
                        assert value == page.evaluate(nf3)


def slice_of(fields: Any, role: str, part: int, share: int, form: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A rank's stored scale bytes of one matrix: section 3."""
    _, shape, data = fields["weight_scale"]
    scales = np.frombuffer(data, np.uint8).reshape(shape)
    if role != "down":
        return scales[part * share : (part + 1) * share]
    groups = share // reader.GROUP[form]
    return scales[:, part * groups : (part + 1) * groups]
