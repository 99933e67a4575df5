"""`make demo`: a small hybrid checkpoint with GLM-5.2's names, packed for two ranks, verified, and run on the CPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import hybrid_pack  # noqa: E402
from hybrid_pack.runtime import HybridMoE  # noqa: E402
from hybrid_pack.synthetic import Spec, write_checkpoint  # noqa: E402
from tests.reference.moe import moe as reference_moe  # noqa: E402
from tests.runtime.sources import experts_of  # noqa: E402

OUT = ROOT / "demo-out"
TP = 2
TOLERANCE = 4e-3  # one rounding of each rank's sum to BF16


def hybrid_pack_command(*arguments: str) -> None:
    """Run the command line as a user would."""
    print(f"\n$ hybrid-pack {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "hybrid_pack.cli", *arguments], cwd=ROOT, check=True)


def main() -> None:
    """The whole demonstration; fails if anything is not as it should be."""
    shutil.rmtree(OUT, ignore_errors=True)
    spec = Spec(hidden=512, intermediate=256, num_experts=16, kept=4, top_k=4, moe_layers=(3, 4, 5))
    source, pack_folder = OUT / "source", OUT / "pack"
    write_checkpoint(source, spec)
    print(
        f"wrote a synthetic hybrid checkpoint to {source.relative_to(ROOT)}: GLM-5.2's names, dtypes and map, in small"
    )
    relative = [str(p.relative_to(ROOT)) for p in (source, pack_folder)]
    hybrid_pack_command("inspect", relative[0])
    hybrid_pack_command("convert", relative[0], "--out", relative[1], "--tp", str(TP))
    hybrid_pack_command("verify", relative[1], "--source", relative[0])
    hybrid_pack_command("report", relative[1], "--html", str((OUT / "report.html").relative_to(ROOT)))

    print(f"\nlayer 3 on the CPU, {TP} ranks, 32 tokens, against a float64 reference from the source's own tensors")
    generator = np.random.default_rng(0)
    x = torch.from_numpy(generator.standard_normal((32, spec.hidden))).to(torch.bfloat16)
    weights = torch.from_numpy(generator.random((32, spec.top_k), np.float32))
    ids = torch.from_numpy(np.stack([generator.permutation(spec.num_experts)[: spec.top_k] for _ in range(32)]))
    ids = ids.to(torch.int32)
    pack = hybrid_pack.open_pack(pack_folder)
    total = torch.zeros(32, spec.hidden)
    for rank in range(TP):
        layer = pack.load_layer(3, rank=rank)
        moe = HybridMoE(layer, top_k=spec.top_k, max_tokens=32)
        total += moe(x, weights, ids).float()
        print(f"  rank {rank}: {len(layer.expert_ids)} experts, backend {moe.backend}")
    experts = {e: w.share(1, 0) for e, w in experts_of(source)[3].items()}
    expected = torch.from_numpy(reference_moe(x.double().numpy(), experts, weights.numpy(), ids.numpy()))
    error = float((total.double() - expected).norm() / expected.norm())
    print(f"  relative L2 error {error:.1e} (limit {TOLERANCE:.0e}, the rounding of the output to BF16)")
    if error > TOLERANCE:
        sys.exit("the MoE layer does not match its reference")
    print(f"\nall good; look at {OUT.relative_to(ROOT)}/")


if __name__ == "__main__":
    main()
