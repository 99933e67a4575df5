"""A damaged cache of compiled kernels costs time, never the conversion."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_pack import jit

PACK = """
import numpy as np
from hybrid_pack.layouts.rows import Rows
from hybrid_pack.layouts.scales import count_scale_bytes
print(int(count_scale_bytes(Rows.of(np.full((64, 4), 7, np.uint8)))[7]))
"""


def run(cache: Path) -> str:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", PACK], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("damage", [b"", b"garbage", b"\x80\x04X"])
def test_a_damaged_cache_is_given_up(tmp_path: Path, damage: bytes) -> None:
    assert run(tmp_path) == "256\n"
    files = [p for p in tmp_path.rglob("*") if p.suffix in (".nbi", ".nbc")]
    assert files
    for path in files:
        path.write_bytes(damage)
    assert run(tmp_path) == "256\n"


def test_an_error_of_the_kernel_itself_is_not_hidden() -> None:
    def fails(_: object) -> None:
        raise OSError("no")

    kernel = jit.Kernel(lambda x: x)
    kernel._give_up_cache()
    kernel._compiled = fails
    with pytest.raises(OSError, match="no"):
        kernel(1)
