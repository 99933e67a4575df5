"""What a push finds on a branch: what is there already, what it would remove or overwrite, and whether it may."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hybrid_pack.errors import DataError, UsageError
from hybrid_pack.hub.download import fetch_bytes
from hybrid_pack.hub.listing import Remote, fetch_manifest, list_files
from hybrid_pack.io.manifest import MANIFEST, README, decode_manifest
from hybrid_pack.io.remote import RemoteFile
from hybrid_pack.report.card import described, is_ours
from hybrid_pack.schemas.manifest import Manifest

_OF_A_PACK = ("experts/*", "model-*.safetensors")
"""Files that, where a manifest does not list them, are of another pack."""

MAX_CARD_BYTES = 4 << 20
"""A larger README.md is not fetched to be looked at: it is not one of ours."""


@dataclass(frozen=True)
class Branch:
    """A branch, held against a pack that is to be pushed there.

    Attributes:
        files: What it has, by path.
        manifest: Of the pack it has, if that is one.
        stale: Files of something else that would be removed.
        overwritten: Weight files of something else that would be replaced.
        keeps_card: Its README.md was edited there.
        is_checkpoint: It has weights that no pack was ever part of.
    """

    files: Mapping[str, RemoteFile]
    manifest: Manifest | None
    stale: tuple[str, ...]
    overwritten: tuple[str, ...]
    keeps_card: bool
    is_checkpoint: bool

    def refusal(self, where: str, *, replace: bool) -> UsageError | None:
        """Why a pack may not be pushed here, or None if it may.

        Weights of another origin are removed by ``--replace`` only, and those of a plain checkpoint not even then.
        """
        if self.is_checkpoint:
            return UsageError(
                "the repository has the weights of a checkpoint, and no pack", where=where,
                found=_some(path for path in self.files if _is_weight(path)),
                hint="push to another repository; or remove them on the Hub first, if they may go",
            )  # fmt: skip
        if replace or not (self.stale or self.overwritten):
            return None
        parts = [f"{len(self.stale)} would be removed ({_some(self.stale)})"] if self.stale else []
        if self.overwritten:
            parts.append(f"{len(self.overwritten)} would be overwritten ({_some(self.overwritten)})")
        what = "another pack is there" if self.manifest else "files of another pack are there"
        return UsageError(
            what, where=where, found="; ".join(parts),
            hint="--replace does that (--dry-run lists all); or push to another repository or, new, --revision",
        )  # fmt: skip


def _is_weight(path: str) -> bool:
    return path.startswith("experts/") or path.endswith(".safetensors")


def _some(paths: Iterable[str]) -> str:
    shown = sorted(path if path.isprintable() else ascii(path) for path in paths)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _manifest_there(remote: Remote, files: Mapping[str, RemoteFile]) -> Manifest | None:
    if MANIFEST not in files:
        return None
    try:
        return decode_manifest(fetch_manifest(remote), remote.name)
    except DataError:
        return None


def _digests(manifest: Manifest) -> dict[str, str]:
    plain = (*manifest.base.files, *manifest.files)
    return {s.path: s.digest for s in manifest.shards} | {file.path: file.digest for file in plain}


def _edited(remote: Remote, files: Mapping[str, RemoteFile], root: Path) -> bool:
    """Whether the README.md that is there is neither the one to be sent nor one that was written here."""
    there = files.get(README)
    if there is None or not (root / README).is_file():
        return False
    if (root / README).stat().st_size == there.nbytes:
        _, expected, found = there.digest_of(root / README)
        if expected == found:
            return False
    if there.nbytes > MAX_CARD_BYTES:
        return True
    return not is_ours(fetch_bytes(remote.repo_id, remote.commit, README, there.nbytes))


def look(
    remote: Remote | None,
    root: Path,
    ours: Manifest,
    sizes: Mapping[str, int],
    *,
    replace: bool = False,
    advance: Callable[[int], None] = lambda _: None,
) -> Branch:
    """Hold a branch against a pack.

    Where there is weight but no valid manifest, as after a push that was interrupted, files of this pack's names and
    sizes are hashed: what is this pack's, to the last byte, may be gone on with.

    Args:
        remote: The branch's commit; None where nothing is there.
        root: The pack.
        ours: Its manifest.
        sizes: Bytes of every file that is to go.
        replace: An edited README.md is replaced too.
        advance: Told the bytes hashed.

    Raises:
        DataError: A listing that cannot be.
        EnvironmentFailure: No network, no access.
    """
    files = {} if remote is None else list_files(remote)
    if remote is None:
        return Branch(files, None, (), (), keeps_card=False, is_checkpoint=False)
    theirs = _manifest_there(remote, files)
    before = _digests(theirs) if theirs is not None else {}
    stale = tuple(
        sorted(
            path
            for path in files
            if path not in sizes and (path in before or any(fnmatch.fnmatchcase(path, p) for p in _OF_A_PACK))
        )
    )
    shared = [path for path in files if path in sizes and _is_weight(path)]
    if theirs is None:
        lost = [path for path in shared if not _same(files[path], root / path, sizes[path], advance)]
    elif theirs.self_digest == ours.self_digest:
        lost = []  # what differs is damaged, and is put right
    else:
        new = _digests(ours)
        lost = [path for path in shared if before.get(path) != new.get(path)]
    weights = [path for path in files if _is_weight(path)]
    strange = bool(lost) or any(path not in sizes for path in weights)
    return Branch(
        files=files,
        manifest=theirs,
        stale=stale,
        overwritten=tuple(sorted(lost)),
        keeps_card=not replace and _edited(remote, files, root),
        # A push leaves shards behind wherever it stops after its first commit, so without any it was none.
        is_checkpoint=MANIFEST not in files and strange and not any(path.startswith("experts/") for path in weights),
    )


def _same(file: RemoteFile, path: Path, nbytes: int, advance: Callable[[int], None]) -> bool:
    if file.nbytes != nbytes:
        return False
    _, expected, found = file.digest_of(path, advance)
    return expected == found


def card_warning(root: Path, manifest: Manifest) -> str | None:
    """What is wrong with a pack's README.md, if it is missing or of another pack."""
    path = root / README
    if not path.is_file():
        return f"{README} is missing: the repository will have no model card; convert --resume writes one"
    named = described(path.read_bytes())
    if named in (None, manifest.self_digest):
        return None
    return (
        f"{README} is of another pack or an earlier one: it names the manifest {named}, which is not "
        f"{manifest.self_digest}; correct it, or remove it and run convert --resume"
    )
