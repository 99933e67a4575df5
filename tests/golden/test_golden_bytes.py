"""Our packers against the committed bytes of b12x 1.1.0; needs no b12x."""

from __future__ import annotations

import numpy as np
import pytest

from hybrid_pack.layouts import scale_bytes
from hybrid_pack.layouts.nf3_2p1 import Nf32p1
from hybrid_pack.layouts.packed_fp4 import PackedFp4
from hybrid_pack.layouts.scales import BlockScales
from tests.golden.make_golden import PATH, inputs, read
from tests.layouts.ours import pack_codes, pack_scales, same
from tests.reference import floats, packed, source

GOLDEN = read()


def cases(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [name for name in GOLDEN if name.startswith(kind)])


def test_file_is_small_and_has_exactly_the_cases_of_the_script() -> None:
    assert list(GOLDEN) == list(inputs())
    assert PATH.stat().st_size < 200_000


@pytest.mark.parametrize("case", GOLDEN)
def test_committed_inputs_are_those_of_the_script(case: str) -> None:
    for field, value in inputs()[case].items():
        assert same(GOLDEN[case][field], value), field


@cases("nf3_codes")
def test_nf3_codes(case: str) -> None:
    stored, tile_n = GOLDEN[case]["stored"], int(GOLDEN[case]["tile_n"])
    words = pack_codes(Nf32p1(tile_n), stored, stored.shape[1] // 3 * 8)
    assert same(words, GOLDEN[case]["packed"])


@cases("nf3_codes")
def test_nf3_reference_decoder(case: str) -> None:
    codes, tile_n = source.nf3_codes(GOLDEN[case]["stored"]), int(GOLDEN[case]["tile_n"])
    assert same(packed.nf3_codes(GOLDEN[case]["packed"], *codes.shape, tile_n), codes)


@cases("nf3_scales")
def test_nf3_scales(case: str) -> None:
    stored = GOLDEN[case]["stored"]
    table = scale_bytes.nf3_table(floats.E4M3)
    assert same(pack_scales(BlockScales(32), stored, stored.shape[1] * 32, table.device), GOLDEN[case]["packed"])


@cases("fp4_codes")
def test_fp4_codes(case: str) -> None:
    stored = GOLDEN[case]["stored"]
    words = pack_codes(PackedFp4(), stored, stored.shape[1] * 2)
    assert same(words.reshape(GOLDEN[case]["packed"].shape), GOLDEN[case]["packed"])


@cases("fp4_codes")
def test_fp4_reference_decoder(case: str) -> None:
    codes = source.fp4_codes(GOLDEN[case]["stored"])
    assert same(packed.fp4_codes(GOLDEN[case]["packed"], *codes.shape), codes)


@cases("nvfp4_scales")
def test_nvfp4_scales(case: str) -> None:
    stored = GOLDEN[case]["stored"]
    factor = scale_bytes.nvfp4_factor(float(floats.E4M3[stored].max()))
    table = scale_bytes.nvfp4_table(floats.E4M3, factor)
    assert same(pack_scales(BlockScales(16), stored, stored.shape[1] * 16, table.device), GOLDEN[case]["packed"])
    global_scale = scale_bytes.nvfp4_global_scale(float(GOLDEN[case]["second"]), factor)
    assert same(np.array(global_scale, np.float32), GOLDEN[case]["global_scale"])


@cases("mxfp4_scales")
def test_mxfp4_scales(case: str) -> None:
    stored, shift = GOLDEN[case]["stored"], int(GOLDEN[case]["shift"])
    assert scale_bytes.mxfp4_shift(int(stored.max())) == shift
    table = scale_bytes.mxfp4_table(shift)
    assert same(pack_scales(BlockScales(32), stored, stored.shape[1] * 32, table.device), GOLDEN[case]["packed"])
