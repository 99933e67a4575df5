"""A worker of vLLM that shares the one GPU of a machine with the other ranks.

vLLM gives each rank a GPU of its own, and NCCL refuses two ranks on one. With ``worker_cls`` naming this class every
rank uses the first GPU and gloo carries what they exchange, through the host and so without CUDA graphs; all else
(model, ranks' weights, kernels) is what two GPUs have. ``VLLM_DISABLE_PYNCCL=1`` belongs to it.
"""

from __future__ import annotations

from unittest.mock import patch

import torch
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker


class SharingWorker(Worker):
    """Of any rank, on ``cuda:0``."""

    def init_device(self) -> None:
        """As vLLM's, for a machine that says it has a GPU for each rank."""
        ranks = self.parallel_config.world_size
        self.local_rank = 0
        type(current_platform).dist_backend = "gloo"
        with patch.object(torch.accelerator, "device_count", lambda: ranks):
            super().init_device()
