"""Two ranks: the sum of their outputs against TP1, and which files each rank opened.

    python -m tests.gpu.tp2 [--one-gpu]

On two GPUs the sum is NCCL's. ``--one-gpu`` is for machines that have but one: both processes use it, and since NCCL
refuses that, copies of their outputs are summed on the host by gloo.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import hybrid_pack
from hybrid_pack.convert import convert
from hybrid_pack.io.checkpoint import open_checkpoint
from hybrid_pack.plan import make_plan
from hybrid_pack.runtime import HybridMoE
from hybrid_pack.sharding import Topology
from hybrid_pack.synthetic import Spec, write_checkpoint
from tests.gpu.support import given, relative

SPEC = Spec(hidden=1024, intermediate=512, num_experts=16, kept=4, top_k=4, moe_layers=(3,), dense_layers=())
TOKENS = (1, 8, 9, 256, 4096)
NOISE = 8e-3
"""BF16 rounding of each rank's results and of TP1's own."""


def make_packs(folder: Path) -> None:
    """A source, and packs of it for one rank and for two."""
    write_checkpoint(folder / "source", SPEC)
    for tp in (1, 2):
        convert(make_plan(open_checkpoint(folder / "source"), Topology(tp, 1)), folder / f"tp{tp}")


def worker(rank: int, folder: str, port: int, one_gpu: bool) -> None:
    """One rank: load, run, reduce; rank 0 compares and writes ``result.json``."""
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = torch.device("cuda", 0 if one_gpu else rank)
    torch.cuda.set_device(device)
    if one_gpu:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", rank=rank, world_size=2)
    else:
        dist.init_process_group("nccl", rank=rank, world_size=2, device_id=device)
    pack = hybrid_pack.open_pack(Path(folder, "tp2"))
    loaded = pack.load_rank(rank, device, expect_tp=2)
    moes = {number: HybridMoE(layer, SPEC.top_k, max(TOKENS)) for number, layer in loaded.items()}
    files = sorted({os.path.relpath(name, pack.root) for name in opened if name.startswith(str(pack.root))})
    result: dict[str, Any] = {"files": files, "backends": sorted({moe.backend for moe in moes.values()})}
    single = {}
    if rank == 0:
        layers = hybrid_pack.open_pack(Path(folder, "tp1")).load_rank(0, device)
        single = {number: HybridMoE(layer, SPEC.top_k, max(TOKENS)) for number, layer in layers.items()}
    result["distances"] = {}
    for number, moe in moes.items():
        for tokens in TOKENS:
            arguments = given(tokens, SPEC.hidden, SPEC.num_experts, SPEC.top_k)  # the same on both: same seed
            total = moe(*arguments).float()
            total = total.cpu() if one_gpu else total
            dist.all_reduce(total)
            if rank == 0:
                whole = single[number](*arguments)
                result["distances"][f"{number}/{tokens}"] = relative(total.to(device), whole.float())
    dist.barrier()
    Path(folder, f"result-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def run(folder: Path, *, one_gpu: bool) -> list[dict[str, Any]]:
    """Both ranks' results."""
    make_packs(folder)
    arguments = (str(folder), 29500 + os.getpid() % 1000, one_gpu)
    mp.spawn(worker, args=arguments, nprocs=2)  # type: ignore[no-untyped-call]
    return [json.loads(Path(folder, f"result-{rank}.json").read_text()) for rank in range(2)]


def complaints(results: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the results; empty if nothing is."""
    found = []
    for rank, result in enumerate(results):
        own = [f"experts/tp2-ep1/rank-{rank}/layer-{layer:03d}.safetensors" for layer in (3, 4)]
        if result["files"] != [*own, "hybrid_pack.json"]:
            found.append(f"rank {rank} opened {result['files']}")
        if result["backends"] != ["b12x"]:
            found.append(f"rank {rank} ran {result['backends']}")
    found += [f"{at}: distance {d:.1e}" for at, d in results[0]["distances"].items() if not d <= NOISE]
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        outcome = run(Path(scratch), one_gpu=sys.argv[1:] == ["--one-gpu"])
    print(json.dumps(outcome, indent=1))
    sys.exit("\n".join(complaints(outcome)) or None)
