"""The output folder: who may write there, what is in the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid_pack.convert.difference import STATISTICS, difference
from hybrid_pack.convert.journal import STATE, State
from hybrid_pack.errors import DataError, UsageError
from hybrid_pack.io.config import CONFIG
from hybrid_pack.io.digest import blake3_digest
from hybrid_pack.io.manifest import MANIFEST, README, read_manifest
from hybrid_pack.plan import Plan
from hybrid_pack.schemas.manifest import Manifest


def _inside(path: Path, folder: Path) -> bool:
    return path == folder or folder in path.parents


def refuse_overlap(out: Path, plan: Plan) -> None:
    """Never write into the source.

    Raises:
        UsageError: The output lies in the source, or the source in the output, links followed.
    """
    target = out.resolve()
    homes = {plan.source.root.resolve()} | {f.path.resolve().parent for f in plan.source.shards.files}
    for home in homes:
        if _inside(target, home) or _inside(home, target):
            raise UsageError(
                "the output would lie in the source or around it", where=out, found=home, hint="choose another --out"
            )


def _entries(out: Path) -> list[str]:
    """What counts as content: everything but journal, model card and dot files such as ``.gitattributes``."""
    return sorted(p.name for p in out.iterdir() if p.name not in (STATE, README) and not p.name.startswith("."))


def matches_manifest(manifest: Manifest, fingerprint: dict[str, Any], plan: Plan) -> str | None:
    """The first respect in which a finished pack is of another source or other options, or None."""
    theirs = {
        "format_version": manifest.format_version,
        "abi": manifest.layout.abi,
        "tensor_parallel": manifest.topology.tensor_parallel,
        "expert_parallel": manifest.topology.expert_parallel,
        "layers": [int(layer) for layer in manifest.layers],
        "intermediate": manifest.geometry.intermediate_size_padded,
        "options": manifest.report.options.model_dump(),
        "source_config": manifest.source.config_digest,
        "source_index": manifest.source.index_digest,
    }
    for key, value in theirs.items():
        if value != fingerprint[key]:
            return difference(key, value, fingerprint[key])
    files = [(f.path, f.bytes, f.digest) for f in manifest.source.files]
    if files != [(plan.source.file_name(f), f.nbytes, f.digest) for f in plan.source.shards.files]:
        return difference("source_files", files, None)
    config = next(f.digest for f in manifest.files if f.path == CONFIG)
    if config != blake3_digest(plan.written[CONFIG]):
        return difference("bit_map", None, None)
    if manifest.report.experts_requantized and fingerprint["on_scale_mismatch"] == "refuse":
        return difference("on_scale_mismatch", "requantize", "refuse")
    return None


def _no_pack(out: Path, present: list[str], problem: str) -> UsageError:
    """A folder with neither manifest nor journal is refused; one that may have lost its manifest gets its own hint."""
    lost = f"if it was a pack, put its {MANIFEST} back and use --resume; else " if "experts" in present else ""
    return UsageError(
        problem, where=out, found=f"{present[0]} among {len(present)} entries", hint=f"{lost}choose another --out"
    )


def existing_pack(
    out: Path, plan: Plan, fingerprint: dict[str, Any], *, begun: bool, resume: bool, overwrite: bool
) -> Manifest | None:
    """The finished pack of the same source and options that is already there, if the call may go on with it.

    Args:
        out: The output folder.
        plan: What is to be written.
        fingerprint: Of source and options.
        begun: Whether a journal says that a conversion was begun there.
        resume: Whether to go on with what is there.
        overwrite: Whether to remove it.

    Raises:
        UsageError: Something else is there.
    """
    if not out.is_dir():
        if out.exists() or out.is_symlink():
            raise UsageError("in the way of the output", where=out, expected="a folder or nothing")
        return None
    present = _entries(out)
    nothing = MANIFEST not in present and not begun
    if not present or overwrite:
        if present and nothing:
            raise _no_pack(out, present, "not a pack, so --overwrite will not touch it")
        return None
    if nothing:
        raise _no_pack(out, present, "the output folder is not empty and no pack")
    if not resume:
        raise _in_the_way(out, finished=MANIFEST in present)
    if MANIFEST not in present:
        return None
    try:
        manifest = read_manifest(out)
    except DataError as error:
        raise UsageError(
            f"the pack there cannot be resumed: {error}", where=out, hint="replace it with --overwrite"
        ) from error
    differs = matches_manifest(manifest, fingerprint, plan)
    if differs is not None:
        raise UsageError(
            f"a pack of another source or other options is there: {differs}",
            where=out,
            hint="choose another --out, or --overwrite",
        )
    return manifest


def _in_the_way(out: Path, *, finished: bool) -> UsageError:
    if finished:
        what, hint = "a finished pack", "check and repair it with --resume, or replace it with --overwrite"
    else:
        what, hint = "an unfinished conversion", "go on with --resume, or start over with --overwrite"
    return UsageError(f"{what} is already there", where=out, hint=hint)


def _without_statistics(options: dict[str, Any]) -> dict[str, Any]:
    """Options, with no more of importances and Hessians than whether they are given."""
    return {key: value is not None if key in STATISTICS else value for key, value in options.items()}


def _goes_on(key: str, theirs: Any, ours: Any, state: State) -> bool:
    """Whether finished files are what they would be, though something differs."""
    if key == "statistics":
        return True  # of which layers they differ is for ``changed_layers``; whether they may, for the options
    if state.manifest is not None:  # a repair: digests of files tell whether the payload is still the same
        return key == "source_times"
    if key == "on_scale_mismatch":
        return bool(theirs == "refuse")  # nothing was finished that had a mismatch
    known = state.fingerprint is not None and "statistics" in state.fingerprint
    return key == "options" and known and _without_statistics(theirs) == _without_statistics(ours)


def changed_layers(state: State, fingerprint: dict[str, Any]) -> frozenset[int]:
    """Layers whose files, if there are any, were made with other importances or Hessians than those given now."""
    theirs = (state.fingerprint or {}).get("statistics", {})
    return frozenset(int(i) for i, digest in fingerprint["statistics"].items() if theirs.get(i, digest) != digest)


def check_state(out: Path, state: State, fingerprint: dict[str, Any], *, resume: bool, overwrite: bool) -> None:
    """Hold a journal against the source and the options.

    Raises:
        UsageError: It is of another source or other options.
    """
    if overwrite or not state.begun:
        return
    if not resume:
        raise _in_the_way(out, finished=False)
    if state.fingerprint is None:
        return
    for key, ours in fingerprint.items():
        theirs = state.fingerprint.get(key)
        if theirs != ours and not _goes_on(key, theirs, ours, state):
            raise UsageError(
                "the unfinished conversion there is of another source or other options: "
                + difference(key, theirs, ours),
                where=out,
                hint="give the same options and source, or start over with --overwrite",
            )
