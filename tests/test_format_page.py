"""FORMAT.md against the code, both ways: its tables, its formulas and every worked example."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from numpy.typing import NDArray

from hybrid_pack.formats import e2m1, nf3
from hybrid_pack.io import manifest as io_manifest
from hybrid_pack.io.bitmap import KEPT_BITS, TAIL_BITS
from hybrid_pack.io.digest import blake3_digest, rows_digest, shard_digest
from hybrid_pack.io.manifest import ROW_TENSORS, encode_manifest, shard_header
from hybrid_pack.io.safetensors import ALIGNMENT
from hybrid_pack.layouts.nf3_2p1 import Nf32p1
from hybrid_pack.layouts.packed_fp4 import PackedFp4
from hybrid_pack.layouts.scales import BlockScales, row_order
from hybrid_pack.layouts.shard import RankGeometry, shard_path, shard_tensors
from hybrid_pack.schemas.manifest import MAX_NAME_BYTES, MAX_PATH_CHARS, Manifest, is_pack_path
from hybrid_pack.sharding import ROW_BLOCK, Topology, tiles_for
from tests.format_page import page, reader, weights
from tests.layouts.ours import pack_codes, pack_scales
from tests.reference import source

GEOMETRIES = [
    (128, 64), (128, 192), (256, 128), (384, 64), (3584, 192), (6144, 512), (6144, 2048), (7168, 256),
]  # fmt: skip


# Section 4: the manifest.


def schema_keys() -> dict[str, tuple[str, bool, list[Any]]]:
    """Key in the page's notation to (type, required, constants), from the models' JSON Schema."""
    schema = Manifest.model_json_schema()
    found: dict[str, tuple[str, bool, list[Any]]] = {}

    def resolve(node: dict[str, Any]) -> dict[str, Any]:
        return schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node

    def kind(node: dict[str, Any]) -> str:
        node = resolve(node)
        if "anyOf" in node:
            return " or ".join(kind(option) for option in node["anyOf"])
        if node["type"] != "array":
            return str(node["type"])
        inner = node["items"] if "items" in node else node["prefixItems"][0]
        return f"array of {kind(inner)}s"

    def constants(node: dict[str, Any]) -> list[Any]:
        options = [resolve(option) for option in node.get("anyOf", [node])]
        return [value for option in options for value in option.get("enum", [option.get("const")]) if value is not None]

    def visit(node: dict[str, Any], prefix: str) -> None:
        for name, inner in node["properties"].items():
            key = f"{prefix}{name}"
            found[key] = (kind(inner), name in node["required"], constants(inner))
            inner = resolve(inner)
            values = list(inner.get("patternProperties", {}).values()) or [inner.get("additionalProperties")]
            if inner.get("type") == "array" and "properties" in resolve(inner.get("items", {})):
                visit(resolve(inner["items"]), f"{key}[].")
            elif "properties" in inner:
                visit(inner, f"{key}.")
            elif inner.get("type") == "object":
                (value,) = values
                found[f"{key}.<>"] = ("object", False, [])
                visit(resolve(value), f"{key}.<>.")

    visit(schema, "")
    return found


def page_keys() -> dict[str, page.Row]:
    return {re.sub(r"<\w+>", "<>", page.only(row["key"])): row for row in page.KEYS}


def test_the_manifest_table_has_every_key_of_the_models_in_order_and_no_other() -> None:
    assert list(page_keys()) == list(schema_keys())


def test_the_manifest_table_has_the_types_presences_and_constants_of_the_models() -> None:
    for key, (kind, required, constants) in schema_keys().items():
        row = page_keys()[key]
        assert row["type"] == kind, key
        assert (row["presence"] == "always") == required, key
        assert set(map(str, constants)) <= set(page.ticked(row["rule"])), key


def test_the_abi_of_the_page_is_that_of_the_code() -> None:
    assert page.ticked(page.rule("layout.abi"))[0] == io_manifest.LAYOUT_ABI
    assert page.ticked(page.rule("base.index"))[0] == io_manifest.BASE_INDEX


def test_limits() -> None:
    text = page.section(4)
    assert f"of at most 2^{io_manifest._MAX_MANIFEST_BYTES.bit_length() - 1} bytes" in text
    assert io_manifest._MAX_MANIFEST_BYTES == 2**30
    assert f"1 to {MAX_PATH_CHARS} characters" in text
    assert f"no part of more than {MAX_NAME_BYTES} bytes" in " ".join(text.split())
    properties = Manifest.model_json_schema()["$defs"]
    size, count = properties["FileEntry"]["properties"]["bytes"], properties["Geometry"]["properties"]["top_k"]
    assert (size["minimum"], size["exclusiveMaximum"]) == (0, 2**63)
    assert (count["minimum"], count["exclusiveMaximum"]) == (1, 2**31)
    assert "are 0 to 2^63 - 1; a count is 1 to 2^31 - 1" in text
    for key in schema_keys():
        holder, _, name = key.rpartition(".")
        if holder in ("topology", "geometry"):
            assert page.rule(key).startswith("count"), name


def test_manifest_example_and_its_last_bytes() -> None:
    example = page.block("text self_digest").encode() + b"\n"
    assert encode_manifest({"format": "hybrid-pack", "format_version": 1}) == example
    (size,) = re.findall(r"exactly these (\d+) bytes", page.section(4))
    assert int(size) == reader.TAIL_BYTES
    body, tail = example[: -int(size)], example[-int(size) :]
    assert tail == b',\n "self_digest": "blake3:' + blake3(body).hexdigest().encode() + b'"\n}\n'
    assert body.endswith(b'"format_version": 1')


@pytest.mark.parametrize(
    ("path", "good"),
    [
        ("a", True), ("a/b.c", True), ("a b/…", True), (".a", True), ("a/" * 511 + "aa", True), ("\u00e9", True),
        ("a" * 240, True), ("a" * 241, False), ("\u00e9" * 120, True), ("b/" + "\u00e9" * 121, False),
        ("", False), ("/a", False), ("a/", False), ("a//b", False), (".", False), ("a/./b", False), ("../a", False),
        ("a/..", False), ("a\\b", False), ("c:a", False), ("a\nb", False), ("a\x7fb", False), ("a/" * 512 + "a", False),
        ("e\u0301", False), ("a\ud800", False),
    ],
)  # fmt: skip
def test_path_rules(path: str, good: bool) -> None:
    assert is_pack_path(path) is good
    assert reader.is_path(path) is good


# Section 5: digests.


def test_digest_examples() -> None:
    for row in page.table("bytes (hex)", "taken as", "digest"):
        data = page.hexadecimal(row["bytes (hex)"])
        if row["taken as"] == "a file":
            ours, theirs = blake3_digest(data), reader.digest(data)
        else:
            rows = data[:4], data[4:]
            ours, theirs = rows_digest(blake3(row).digest() for row in rows), reader.digest_of_rows(data, 2)
        assert ours == theirs == page.only(row["digest"])


def test_algorithms_and_what_they_are_used_for() -> None:
    assert [page.only(row["algorithm"]) for row in page.ALGORITHMS] == ["blake3", "blake3-rows", "blake3-shard"]
    assert tuple(page.ticked(page.ALGORITHMS[1]["used for"])) == ("w13", "w2", "w13_scale", "w2_scale")
    assert {row["name"].strip("`").split(".")[1] for row in page.TENSORS} - set(ROW_TENSORS) == {
        "w13_global_scale", "w2_global_scale", "expert_ids",
    }  # fmt: skip
    assert set(page.ticked(page.ALGORITHMS[1]["used for"])) == set(ROW_TENSORS)


# Sections 2, 7 and 8: files, tensors, tiles.


def test_paths_of_shards() -> None:
    template = page.ticked(page.table("path", "holds")[2]["path"])[0]
    for layer, name in ((3, "layer-003"), (1234, "layer-1234")):
        assert f"layer {layer} is\n  `{name}`" in page.section(2) or f"layer {layer} is `{name}`" in page.section(2)
        path = template.replace("<T>", "8").replace("<P>", "2").replace("<r>", "11").replace("layer-<LLL>", name)
        assert shard_path(Topology(8, 2).folder, 11, layer) == path


@pytest.mark.parametrize(("hidden", "share"), GEOMETRIES)
@pytest.mark.parametrize("form", ["e4m3_k16", "e8m0_k32"])
@pytest.mark.parametrize(("kept", "tail"), [(1, 1), (64, 192), (3, 0), (0, 5), (300, 1)])
@pytest.mark.parametrize("gated", [True, False])
def test_tensors_their_order_and_header(hidden: int, share: int, form: Any, kept: int, tail: int, gated: bool) -> None:
    tiles = reader.tiles_of(hidden, share, 1 + gated)
    if tiles is None:
        assert not gated and tiles_for(hidden, share, gated) is None
        return
    geometry = RankGeometry(hidden, share, tiles, gated)  # type: ignore[arg-type]
    ours = shard_tensors(geometry, kept, tail, form if kept else None)
    theirs = reader.tensors_of(hidden, share, kept, tail, form, 1 + gated)
    assert [(t.name, t.dtype, t.shape) for t in ours] == [(t.name, t.dtype, t.shape) for t in theirs]
    assert shard_header(ours) == reader.header_of(theirs)


def test_header_example() -> None:
    tensors = shard_tensors(RankGeometry(128, 64, (64, 128, 64, 128)), 0, 1, None)
    text = page.block("json header").encode()
    (numbers,) = re.findall(r"length is (\d+), this JSON is (\d+) bytes, then (\d+) spaces", page.section(7))
    length, size, spaces = map(int, numbers)
    assert (len(text), 8 + length) == (size, ALIGNMENT)
    header = length.to_bytes(8, "little") + text + b" " * spaces
    assert header == shard_header(tensors)

    digests = {row["part"].strip("`"): page.only(row["digest"]) for row in page.table("part", "digest")}
    assert list(digests) == ["header", *(t.name for t in tensors), "file"]
    assert "global scales 2^116 (bytes `00 00 80 79`) and expert id 1" in page.section(7)
    assert np.float32(2.0**116).tobytes().hex(" ") == "00 00 80 79"
    for tensor in tensors:
        data = bytes(tensor.nbytes)
        if tensor.name.endswith("global_scale"):
            data = bytes.fromhex("00008079")
        elif tensor.name.endswith("expert_ids"):
            data = b"\1\0\0\0"
        rows = tensor.name.split(".")[1] in ROW_TENSORS
        assert digests[tensor.name] == (rows_digest([blake3(data).digest()]) if rows else blake3_digest(data))
    assert digests["header"] == blake3_digest(header)
    assert digests["file"] == shard_digest(header, (digests[t.name] for t in tensors))


def test_tiles() -> None:
    sizes = [*range(32, 1100, 32), 1536, 2048, 3072, 3584, 4096, 6144, 7168]
    found = {(h, s): reader.tiles_of(h, s) for h in sizes for s in sizes if s % ROW_BLOCK == 0}
    assert found == {at: tiles_for(*at) for at in found}
    assert {at: reader.tiles_of(*at, 1) for at in found} == {at: tiles_for(*at, gated=False) for at in found}
    assert len(set(found.values())) == len(page.TILES) + 1


# Sections 9 to 11: layouts.


def noise(text: str, n: int, k: int) -> NDArray[np.uint8]:
    """The matrix of an example, from its formula."""
    expression = next(part for part in page.ticked(text) if "2654435761" in part).partition(" = ")[2]
    row, column = np.indices((n, k))
    return np.asarray(page.evaluate(expression, n=row, k=column, g=column)).astype(np.uint8)


def fp4_words(codes: NDArray[np.uint8]) -> NDArray[np.uint32]:
    return pack_codes(PackedFp4(), source.store_fp4(codes), codes.shape[1])


def nf3_words(codes: NDArray[np.uint8], tile_n: int) -> NDArray[np.uint32]:
    return pack_codes(Nf32p1(tile_n), source.store_nf3(codes), codes.shape[1])


@pytest.mark.parametrize(("n", "k"), [(64, 16), (128, 32), (192, 64), (256, 528)])
def test_fp4_formula(n: int, k: int) -> None:
    codes = np.random.default_rng(n).integers(0, 16, (n, k), np.uint8)
    assert np.array_equal(weights.codes_of("kept", fp4_words(codes), n, k, 0), codes)


@pytest.mark.parametrize(("n", "k", "tile_n"), [(64, 32, 64), (256, 64, 128), (384, 32, 64), (512, 544, 256)])
def test_nf3_formula(n: int, k: int, tile_n: int) -> None:
    codes = np.random.default_rng(n).integers(0, 8, (n, k), np.uint8)
    assert np.array_equal(weights.codes_of("tail", nf3_words(codes, tile_n), n, k, tile_n), codes)


def test_fp4_example() -> None:
    text = page.section(9)
    codes = noise(text, 128, 32)
    assert "Row 0 has the codes 0, 15, 9, 8 in columns\n0, 8, 1, 9 and row 8 has 3, 2, 13, 12" in text
    assert codes[[0, 8]][:, [0, 8, 1, 9]].tolist() == [[0, 15, 9, 8], [3, 2, 13, 12]]
    words = fp4_words(codes)
    assert np.array_equal(weights.codes_of("kept", words, 128, 32, 0), codes)
    *rows, whole = page.table("word", "value", "bytes in the file")
    for row in rows:
        word = words[int(row["word"])]
        assert (f"{word:08x}", word.tobytes()) == (page.only(row["value"]), page.hexadecimal(row["bytes in the file"]))
    assert whole["word"] == f"all {words.size}"
    assert page.only(whole["bytes in the file"]) == blake3_digest(words.tobytes())


def test_nf3_example() -> None:
    text = page.section(10)
    codes = noise(text, 256, 32)
    assert "Row 0 has the codes 0, 4, 7, 4 in\ncolumns 0, 1, 8, 9" in text
    assert codes[0, [0, 1, 8, 9]].tolist() == [0, 4, 7, 4]
    words = nf3_words(codes, 128)
    assert np.array_equal(weights.codes_of("tail", words, 256, 32, 128), codes)
    assert f"byte 0 of `lo0` is `0b{words[0] & 255:08b}` and nibble 0 of `hi` is `0b{words[2] & 15:04b}`" in text
    *rows, whole = page.table("unit", "lo0", "lo1", "hi", "bytes in the file")
    for row in rows:
        unit = words.reshape(-1, 3)[int(row["unit"])]
        assert [f"{word:08x}" for word in unit] == [page.only(row[name]) for name in ("lo0", "lo1", "hi")]
        assert unit.tobytes() == page.hexadecimal(row["bytes in the file"])
    assert whole["unit"] == f"all {words.size // 3}"
    assert page.only(whole["bytes in the file"]) == blake3_digest(words.tobytes())
    others = re.findall(r"W\s=\s(\d+)[^`]*`(blake3:\w+)`", text)
    assert [(int(tile_n), digest) for tile_n, digest in others] == [
        (tile_n, blake3_digest(nf3_words(codes, tile_n).tobytes())) for tile_n in (64, 256)
    ]


def test_fp4_bit_picture() -> None:
    (rows,) = re.findall(r"^row (.*)$", page.section(9), flags=re.M)
    (columns,) = re.findall(r"^col (.*)$", page.section(9), flags=re.M)
    nibbles = list(zip(*(re.split(r" {2,}", line.strip())[:8] for line in (rows, columns)), strict=True))
    assert len(set(nibbles)) == 8
    for place, (row, column) in enumerate(nibbles):
        n, k = (int(label.partition(" + ")[2] or 0) for label in (row, column))
        at = page.formula("packed", n=n, k=k, N=64, K=16)
        assert (at["word"], at["bit"]) == (0, 28 - 4 * place)


def test_nf3_bit_picture() -> None:
    n, k = np.indices((64, 16))
    at = page.formula("nf3_2p1", n=n, k=k, N=64, K=16, W=64)
    digits = np.full((3, 32), -1)
    mine = at["unit"] == 0
    for i, word, bit in zip(*(at[name][mine] for name in ("i", "low_word", "low_bit")), strict=True):
        digits[word, [bit, bit + 1]] = i
    for i, word, bit in zip(*(at[name][mine] for name in ("i", "top_word", "top_bit")), strict=True):
        digits[word, bit] = i
    for word, name in enumerate(("lo0", "lo1", "hi")):
        (picture,) = re.findall(rf"^{name} +0b ([0-9 ]+?) +(?:digits|bytes)", page.section(10), flags=re.M)
        assert picture.replace(" ", "") == "".join(map(str, digits[word, ::-1]))


def test_code_books() -> None:
    assert e2m1.VALUES.tolist() == page.E2M1
    assert str(page.E2M1[8]) == "-0.0"


def test_row_order() -> None:
    order = [int(number) for number in page.block("text row_order").split()]
    assert order == row_order().tolist()
    assert page.formula("scales", n=np.array(order))["position"].tolist() == list(range(64))


@pytest.mark.parametrize(("n", "k", "group"), [(64, 32, 16), (192, 128, 32), (256, 96, 16)])
def test_scale_formula(n: int, k: int, group: int) -> None:
    stored = np.random.default_rng(n).integers(0, 256, (n, k // group), np.uint8)
    assert np.array_equal(weights.scale_bytes_of(pack_scales(BlockScales(group), stored, k)), stored)


def test_scale_example() -> None:
    stored = noise(page.section(11), 128, 2)
    packed = pack_scales(BlockScales(16), stored, 32)
    *rows, whole = page.table("group", "positions", "bytes in the file")
    for row in rows:
        first, last = map(int, row["positions"].split(" to "))
        part = packed[int(row["group"]), first : last + 1]
        assert part.tobytes() == page.hexadecimal(row["bytes in the file"])
    assert whole["positions"] == f"all {packed.size}"
    assert page.only(whole["bytes in the file"]) == blake3_digest(packed.tobytes())


# Prose.

PLAIN = " ".join(page.TEXT.split())


def test_numbers_in_sentences() -> None:
    """Rules that are prose: each with the constant of the code, where the code has a name for it."""
    kept, wide = (RankGeometry.scales("kept", form).group for form in ("e4m3_k16", "e8m0_k32"))
    tail = RankGeometry.scales("tail", None).group
    value_bits = np.finfo(np.float16)
    for sentence in (
        f"`G` is {kept} where `kept_scale_format` is `e4m3_k16` and {wide} where it is `e8m0_k32`",
        f"`group` is G for kept and {tail} for tail experts. Rows are permuted in blocks of {len(row_order())}",
        f"{len(nf3.DEFAULT_LEVELS)} finite numbers, strictly ascending",
        f"a list of E numbers: {KEPT_BITS} for a kept expert, {TAIL_BITS} for a tail one",
        "First all tensors of more than 4 bytes an expert",
        f"as make the data start at a multiple of {ALIGNMENT}",
        "Example: H = 128, S = 64, `Ek` = 0, `Et` = 1",
        "`fc1_n` decides the order of units in `tail.w13`, `fc2_n` in `tail.w2`",
        "`W` is `fc1_n` for w13 and `fc2_n` for w2",
        "in bits `low_bit` and `low_bit + 1` of word `low_word`, its top bit is bit `top_bit` of word `top_word`",
        "in bits `bit` to `bit + 3`",
        f"five exponent bits of bias {1 - value_bits.minexp}, three mantissa bits, no sign",
        "E4M3 (`0bSEEEEMMM`, bias 7, subnormals, no infinity) or E8M0 (`2^(byte - 127)`)",
        "E4M3 -0 (`80`) is zero",
        "Kernels take bit 7 of a `value` byte for a change of exponent",
        "row    n + 8    n + 8    n        n        n + 8    n + 8    n        n           n = 64 q + 16 w + t",
        "col    2c + 9   2c + 1   2c + 9   2c + 1   2c + 8   2c       2c + 8   2c          from column 16 R",
        "rows t + 8 m of the block of 64; columns 2c, 2c + 1, 2c + 8, 2c + 9 are i = 0, 1, 2, 3",
        f"T MUST divide I, {ROW_BLOCK} MUST divide S, P MUST divide E",
        "2^116 in the tail, 2^0 to 2^-126 for MXFP4",
    ):
        assert " ".join(sentence.split()) in PLAIN, sentence


def test_digest_algorithms_of_the_manifest() -> None:
    for row in page.KEYS:
        key = page.only(row["key"])
        if key.endswith("digest") and "<name>" not in key:
            wanted = "blake3-shard" if key == "shards[].digest" else "blake3"
            assert page.ticked(row["rule"])[0] == wanted, key


def test_sections_that_are_referred_to_exist() -> None:
    titles = dict(re.findall(r"^## (\d+)\. (.*)$", page.TEXT, flags=re.M))
    assert list(titles) == [str(number + 1) for number in range(len(titles))]
    assert set(re.findall(r"section (\d+)", page.TEXT)) <= set(titles)
    assert {number for row in page.TENSORS for number in row["section"].split(", ")} <= set(titles)
    for key, title in {
        "layout.abi": "Base tensors and versions", "layout.tiles": "Tiles",
        "layout.kept_weight_layout": "Packed FP4 codes", "layout.tail_weight_layout": "NF3 codes",
        "layout.tail_scale_format": "What a weight is",
        "shards[].path": "Folder", "shards[].tensors": "Expert shard", "report.blocks_flushed": "How scales are chosen",
    }.items():  # fmt: skip
        (row,) = (row for row in page.KEYS if page.only(row["key"]) == key)
        (number,) = re.findall(r"section (\d+)", row["meaning"] + row["rule"])
        assert titles[number].startswith(title), key
