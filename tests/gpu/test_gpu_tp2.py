"""Tensor parallel: two ranks on two GPUs with NCCL, and two that share one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.gpu import tp2
from tests.gpu.support import note

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("b12x")]


def test_the_sum_of_two_ranks_is_tp1(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        wanted = int(os.environ.get("HYBRID_PACK_REQUIRE_GPUS", "1"))
        (pytest.fail if wanted > 1 else pytest.skip)(f"needs two GPUs, found {torch.cuda.device_count()}")
    check(tmp_path, one_gpu=False)


def test_the_sum_of_two_ranks_that_share_a_gpu_is_tp1(tmp_path: Path) -> None:
    check(tmp_path, one_gpu=True)


def check(folder: Path, *, one_gpu: bool) -> None:
    results = tp2.run(folder, one_gpu=one_gpu)
    files = [result["files"] for result in results]
    note("two ranks against TP1", one_gpu=one_gpu, distances=results[0]["distances"], files=files)
    assert tp2.complaints(results) == []
