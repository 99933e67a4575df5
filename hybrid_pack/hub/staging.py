"""The folder where a pull's files arrive: what an earlier pull left there, and the commit it came from."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath

from hybrid_pack.hub.listing import Remote
from hybrid_pack.hub.place import read_plain
from hybrid_pack.io.output import write_small

COMMIT = ".commit"
"""Says what arrives here; no file of a pack begins with a dot."""

NOTES = PurePosixPath(".cache/huggingface/download")
"""Where huggingface_hub notes what it knows of a file."""

_MOST_BYTES = 4096
_HEX = re.compile(r"[0-9a-f]{40}")


def _expected_folders(paths: Iterable[str]) -> set[str]:
    """Every folder that a pull of these files makes in the staging folder."""
    folders = {NOTES, *NOTES.parents}
    for path in paths:
        for above in PurePosixPath(path).parents:
            folders |= {above, NOTES / above}
    return {folder.as_posix() for folder in folders} - {"."}


def _is_clean(staging: Path, paths: Iterable[str]) -> bool:
    """Whether everything there is of the kind that a pull makes: folders where folders belong, else regular files."""
    expected = _expected_folders(paths)
    for at, folders, files in os.walk(staging):
        for name in (*folders, *files):
            path = Path(at) / name
            mode = path.lstat().st_mode
            is_folder = path.relative_to(staging).as_posix() in expected
            if not (stat.S_ISDIR(mode) if is_folder else stat.S_ISREG(mode)):
                return False
    return True


def open_staging(staging: Path, paths: Iterable[str]) -> None:
    """Make the folder, or take up what an earlier pull left in it; what no pull leaves makes it start anew.

    Args:
        staging: No link.
        paths: Of the manifest.
    """
    if os.path.lexists(staging):
        if not staging.is_dir():
            staging.unlink()
        elif not _is_clean(staging, paths):
            shutil.rmtree(staging)
    staging.mkdir(exist_ok=True)
    for torn in staging.rglob("*.incomplete"):
        if torn.is_file():  # a pack may have a folder of such a name
            torn.unlink()


def remember(staging: Path, remote: Remote) -> None:
    """Note the commit that everything comes from."""
    note = {"repo_id": remote.repo_id, "revision": remote.revision, "commit": remote.commit}
    write_small(staging / COMMIT, json.dumps(note).encode())


def same_commit(staging: Path, remote: Remote, tell: Callable[[str], None]) -> Remote:
    """The repository at the commit that an interrupted pull of the same revision came from, if there was one.

    Args:
        staging: Folder of that pull, if there is one.
        remote: As the Hub has it now.
        tell: Told that another commit is used.
    """
    try:
        if staging.is_symlink():
            return remote
        note = json.loads(read_plain(staging / COMMIT, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return remote
    if not isinstance(note, dict) or (note.get("repo_id"), note.get("revision")) != (remote.repo_id, remote.revision):
        return remote
    commit = note.get("commit")
    if not isinstance(commit, str) or _HEX.fullmatch(commit) is None or commit == remote.commit:
        return remote
    tell(
        f"{remote.name} is at commit {remote.commit[:12]} by now; the pull that was interrupted goes on with "
        f"{commit[:12]} (for the new one, choose another --out)"
    )
    return replace(remote, commit=commit)
