"""The end of a conversion: small files, and the manifest last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid_pack._version import __version__
from hybrid_pack.convert.card import write_card
from hybrid_pack.convert.files import refuse_links
from hybrid_pack.convert.journal import Journal, Record
from hybrid_pack.convert.quantized import lost_notes, quantized_tiers
from hybrid_pack.io.digest import blake3_digest, shard_digest
from hybrid_pack.io.manifest import BASE_INDEX, MANIFEST, ROW_TENSORS, decode_manifest, encode_manifest
from hybrid_pack.io.output import PARTIAL, make_folder, write_small
from hybrid_pack.io.progress import Progress
from hybrid_pack.plan import SCALE_FORMATS, Plan, ShardPlan
from hybrid_pack.schemas.manifest import FORMAT, FORMAT_VERSION, LAYOUT_ABI, Manifest


def _text(text: str) -> str:
    """Text that UTF-8 can hold: a file name of other bytes has surrogates in it."""
    return text.encode("utf-8", "backslashreplace").decode()


def _small_files(out: Path, plan: Plan, journal: Journal) -> list[Record]:
    contents = {name: path.read_bytes() for name, path in plan.copied.items()} | dict(plan.written)
    entries = []
    for name in {*journal.records} - {*contents} - {s.path for s in plan.shards} - {b.path for b in plan.base}:
        refuse_links(out, (out / name).parent)
        (out / name).unlink(missing_ok=True)  # an earlier run copied it, the source has lost it since
        (out / f"{name}{PARTIAL}").unlink(missing_ok=True)
    for name in sorted(contents):
        entry = {"path": name, "bytes": len(contents[name]), "digest": blake3_digest(contents[name])}
        journal.add(entry)  # until there is a manifest, only this tells that the file is ours
        make_folder(out, (out / name).parent)
        write_small(out / name, contents[name])
        entries.append(entry)
    return entries


def _shard(plan: ShardPlan, record: Record) -> Record:
    tensors = {
        name: {
            "dtype": t.dtype,
            "shape": list(t.shape),
            "begin": t.begin,
            "end": t.end,
            "digest": record["tensors"][name],
        }
        for name, t in plan.placed.items()
    }
    return {
        "path": plan.path, "layer": plan.layer, "rank": plan.rank, "bytes": record["bytes"], "digest": record["digest"],
        "tensors": tensors,
    }  # fmt: skip


def _report(plan: Plan, records: dict[str, Record]) -> Record:
    shards = [records[s.path] for s in plan.shards]
    worst: dict[tuple[int, int], float] = {}
    for shard in plan.shards:
        for expert, error in records[shard.path]["requantized"].items():
            key = (shard.layer, int(expert))
            worst[key] = max(worst.get(key, 0.0), error)
    layers = [plan.source.layers[i] for i in plan.layers]
    cast = {(shard.layer, expert) for shard in plan.shards for expert in records[shard.path]["cast"]}
    return {
        "experts_kept": sum(len(layer.kept) for layer in layers),
        "experts_tail": sum(len(layer.tail) for layer in layers),
        "groups_zero_scale": sum(r["zero"] for r in shards),
        "blocks_flushed": sum(r["flushed"] for r in shards),
        "scales_saturated": sum(r["saturated"] for r in shards),
        "experts_requantized": [
            {"layer": layer, "expert": expert, "worst_relative_error": error}
            for (layer, expert), error in sorted(worst.items())
        ],
        "experts_cast": len(cast),
        "experts_quantized": quantized_tiers(plan, records),
        "options": plan.options,
        "layers_omitted": list(plan.omitted),
        "notes": [_text(note) for note in (*plan.notes, *lost_notes(plan, records))],
    }


def _document(plan: Plan, records: dict[str, Record], small: list[Record]) -> dict[str, Any]:
    source, config = plan.source, plan.source.config
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "created_by": {"tool": "hybrid-pack", "version": __version__},
        "layout": {
            "abi": LAYOUT_ABI,
            "tiles": list(plan.geometry.tiles),
            "kept_weight_layout": "packed",
            "tail_weight_layout": "nf3_2p1",
            "tail_scale_format": "e4m3_k32",
            "w13_order": "gate_up" if plan.geometry.gated else "up",
            "expert_biases": source.expert_biases,
            "nf3_levels": list(config.nf3_levels),
            "activation": config.activation,
        },
        "topology": {
            "tensor_parallel": plan.topology.tensor_parallel,
            "expert_parallel": plan.topology.expert_parallel,
        },
        "geometry": {
            "hidden_size": source.hidden,
            "intermediate_size": source.intermediate,
            "intermediate_size_padded": plan.intermediate,
            "num_experts": config.num_experts,
            "top_k": config.top_k,
        },
        "layers": {
            str(i): {
                "kept": list(source.layers[i].kept),
                "tail": list(source.layers[i].tail),
                "kept_scale_format": SCALE_FORMATS[source.layers[i].kept_format],
            }
            for i in plan.layers
        },
        "shards": [_shard(s, records[s.path]) for s in plan.shards],
        "base": {
            "index": BASE_INDEX if plan.base else None,
            "files": [{key: records[b.path][key] for key in ("path", "bytes", "digest")} for b in plan.base],
        },
        "files": small,
        "source": {
            "name": _text(source.name),
            "config_digest": source.config_digest,
            "index_digest": source.index_digest,
            "files": [
                {"path": source.file_name(f), "bytes": f.nbytes, "digest": f.digest} for f in source.shards.files
            ],
        },
        "report": _report(plan, records),
    }


def write_manifest(out: Path, plan: Plan, journal: Journal, progress: Progress) -> Manifest:
    """Write the small files, the model card and, last, the manifest.

    Args:
        out: The pack.
        plan: What was written.
        journal: Has a record of every shard and base file.
        progress: Told of a card that is kept.
    """
    data = encode_manifest(_document(plan, journal.records, _small_files(out, plan, journal)))
    manifest = decode_manifest(data, out / MANIFEST)
    kept = write_card(out, plan, manifest)
    if kept is not None:
        progress.note(kept)
    write_small(out / MANIFEST, data)
    return manifest


def rehearse_manifest(plan: Plan) -> None:
    """Hold the manifest this plan will end in against its rules before any work is done, with made-up digests.

    Raises:
        DataError: A name or a number that no manifest may have.
    """
    nothing = "0" * 64
    records: dict[str, Record] = {
        b.path: {"path": b.path, "bytes": b.nbytes, "digest": f"blake3:{nothing}"} for b in plan.base
    }
    for shard in plan.shards:
        digests = {
            name: f"blake3-rows:{nothing}" if name.split(".")[1] in ROW_TENSORS else f"blake3:{nothing}"
            for name in shard.placed
        }
        records[shard.path] = {
            "path": shard.path, "bytes": shard.nbytes, "digest": shard_digest(shard.header, digests.values()),
            "tensors": digests, "zero": 0, "flushed": 0, "saturated": 0, "requantized": {}, "cast": [],
            "quantized": {},
        }  # fmt: skip
    names = sorted({*plan.copied, *plan.written})
    small = [{"path": name, "bytes": 0, "digest": f"blake3:{nothing}"} for name in names]
    decode_manifest(encode_manifest(_document(plan, records, small)), f"the manifest of {plan.source.name}")
