"""The GPU kernel's logic, run by Triton's interpreter: the same bytes as the CPU's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.quantize.cases import cases
from tests.quantize.interpreted import SHAPE
from tests.quantize.ours import quantize

CASES = cases(*SHAPE, stacked=True)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    out = tmp_path_factory.mktemp("triton") / "found.npz"
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "tests.quantize.interpreted", str(out)]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    with np.load(out) as found:
        return dict(found)


@pytest.mark.parametrize("key", CASES)
def test_same_bytes(interpreted: dict[str, np.ndarray], key: str) -> None:
    case = CASES[key]
    expected = quantize(case.name, case.weights, case.search, case.importance, case.second, case.levels)
    assert np.array_equal(interpreted[f"{key}/scales"], expected.scales)
    assert np.array_equal(interpreted[f"{key}/codes"], expected.codes)
    stats = expected.stats
    counts = [stats.groups, stats.zero, stats.subnormal, stats.saturated]
    assert interpreted[f"{key}/counts"].tolist() == counts
    sums = np.array([stats.signal, stats.error, stats.weighted_error])
    assert np.allclose(interpreted[f"{key}/sums"], sums, rtol=1e-12, atol=0)
