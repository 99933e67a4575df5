"""Are a pack's answers in vLLM those of the dequantised checkpoint, and what do its calls wait for and allocate?

    python -m benchmarks.vllm_answers FOLDER [--machine RESULT.json] [--out FILE]

Puts what ``tests/gpu/test_gpu_vllm.py`` left in FOLDER (``OUT``) into one result: for each engine the places whose
token is decided, the wrong ones among them, and the root mean square and largest difference of log-probabilities in
nats beside what is allowed; and of the calls of the experts how many there were and by how many allocations.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import common, watch

CALLS = ("backends", "layers", "calls", "tokens", "allocations", "errors", "memory")


def collect(folder: Path) -> dict[str, Any]:
    """Comparisons of the last run of each engine, and calls, as far as their stages were run."""
    found: dict[str, Any] = {}
    lines = folder / "vllm_comparisons.jsonl"
    if lines.exists():
        rows = map(json.loads, lines.read_text().splitlines())
        found["comparisons"] = {row.pop("case"): row for row in rows}
    for stage in ("parity", "calls", "shared", "two_ranks"):
        path = folder / f"vllm_{stage}.json"
        if not path.exists():
            continue
        results = json.loads(path.read_text())
        found.setdefault("failed", {}).update({name: r["error"] for name, r in results.items() if "error" in r})
        versions = {r["vllm"]["version"] for r in results.values() if "vllm" in r}
        found["vllm"] = sorted(versions.union(found.get("vllm", ())))
        if stage == "calls":
            found["calls"] = {name: {key: r[key] for key in CALLS if key in r} for name, r in results.items()}
    return found


def main() -> None:
    """Collect and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--machine", type=Path, help="a result of the machine they ran on, by default this one")
    parser.add_argument("--out", type=Path, help="where the result goes")
    options = parser.parse_args()
    result: dict[str, Any] = {"question": (__doc__ or "").strip().splitlines()[0]}
    if options.machine is None:
        result |= {"machine": common.machine(options.folder), "gpu": watch.gpu()}
    else:
        other = json.loads(options.machine.read_text())
        result |= {key: other[key] for key in ("machine", "gpu")}
    common.save("vllm_answers", result | collect(options.folder), options.out)


if __name__ == "__main__":
    main()
