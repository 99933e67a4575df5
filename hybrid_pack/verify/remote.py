"""A pack on the Hub, held against its manifest and a local copy by names, sizes and hashes: no payload is fetched."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from hybrid_pack.errors import DataError, EnvironmentFailure
from hybrid_pack.io.declared import declared
from hybrid_pack.io.manifest import MANIFEST, README, decode_manifest, read_manifest
from hybrid_pack.io.progress import Progress, Silent
from hybrid_pack.io.remote import RemoteFile
from hybrid_pack.schemas.manifest import Manifest
from hybrid_pack.verify.pool import Pool, worker_count
from hybrid_pack.verify.report import Recorder, Tally, VerifyReport

RULES = "manifest"
FILE_SET = "file set and sizes"
HASHES = "hashes against the local pack"
PUSH = "push it again"


def verify_remote(
    name: str,
    files: Mapping[str, RemoteFile],
    manifest: bytes | DataError,
    *,
    against: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check a pack on the Hub.

    Args:
        name: Of the repository and revision, for messages.
        files: What the Hub lists, by path.
        manifest: Bytes of the manifest that is there, or why it could not be had.
        against: A local copy of the pack, or of some of its ranks: what the Hub hashed is held against its bytes.
        workers: Threads that hash; by default one a usable core.
        progress: Told how it goes on.

    Returns:
        What was checked, what was not, what is wrong.

    Raises:
        UsageError: No such local folder.
        DataError: The local folder is no pack.
        EnvironmentFailure: Its manifest cannot be read.
    """
    local = None if against is None else Path(against)
    ours = None if local is None else read_manifest(local)
    recorder, pool, watch = Recorder(Path(name)), Pool(worker_count(workers)), progress or Silent()
    theirs = _manifest(name, manifest, recorder)
    if theirs is None:
        recorder.skip("everything else", "there is no valid manifest")
        return recorder.report(name)
    recorder.declared = declared(theirs.report)
    _file_set(theirs, files, recorder)
    if local is None or ours is None:
        recorder.skip("bytes of the files", "names and sizes were compared; --against OUT compares hashes")
    elif ours != theirs:
        recorder.find(
            HASHES, MANIFEST, "the local manifest is another one", expected=ours.self_digest, found=theirs.self_digest
        )
        recorder.skip("bytes of the files", "the local pack is another one")
    else:
        _hashes(local, theirs, files, pool, recorder, watch)
    return recorder.report(name)


def _manifest(name: str, text: bytes | DataError, recorder: Recorder) -> Manifest | None:
    with recorder.checking(RULES, "files") as tally:
        try:
            if isinstance(text, DataError):
                raise text
            manifest = decode_manifest(text, name)
        except DataError as error:
            recorder.find_error(RULES, MANIFEST, error)
            return None
        tally.add(1, len(text))
        return manifest


def _file_set(manifest: Manifest, files: Mapping[str, RemoteFile], recorder: Recorder) -> None:
    """Every file of the manifest is there in its size, and no other."""
    sizes = manifest.sizes()
    with recorder.checking(FILE_SET, "files") as tally:
        for path, nbytes in sizes.items():
            tally.add(1)
            file = files.get(path)
            if file is None:
                recorder.find(FILE_SET, path, f"missing; {PUSH}")
            elif file.nbytes != nbytes:
                message = f"of another size; {PUSH}"
                recorder.find(FILE_SET, path, message, expected=f"{nbytes} bytes", found=file.nbytes)
        extra = {path: file for path, file in files.items() if path not in sizes and path not in (MANIFEST, README)}
        wrong = {path for path in extra if _may_mislead(path)}
        for path in wrong:
            tally.add(1)
            recorder.find(FILE_SET, extra[path].shown(), "not in the manifest; remove it")
    tools = {path for path in extra if _is_dot_name(path)} - wrong
    ignored = sorted(files[path].shown() for path in tools | ({README} & set(files)))
    if ignored:
        recorder.skip(_some(ignored), "no digest covers them: people and tools may edit them")
    foreign = sorted(file.shown() for path, file in extra.items() if path not in wrong | tools)
    if foreign:
        recorder.skip(_some(foreign), "not of the pack: no digest covers them, and pull leaves them")


def _is_dot_name(path: str) -> bool:
    """Whether the name at the top begins with a dot, and the path is one that stays below the top."""
    return path.startswith(".") and not {"", ".", ".."} & set(path.split("/"))


def _may_mislead(path: str) -> bool:
    """Whether a reader could take it for a part of the pack, or the path for another one: push leaves no such file."""
    names = path.split("/")
    strange = bool({"", ".", ".."} & set(names)) or not path.isprintable() or "\\" in path
    return strange or names[0].casefold() == "experts" or path.casefold().endswith((".safetensors", ".partial"))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _hashes(
    local: Path,
    manifest: Manifest,
    files: Mapping[str, RemoteFile],
    pool: Pool,
    recorder: Recorder,
    progress: Progress,
) -> None:
    """The Hub's own hash of each file against the bytes of the local one, the largest first."""
    sizes = manifest.sizes()
    here: list[str] = []
    absent = 0
    for path, nbytes in {**sizes, MANIFEST: 0}.items():
        file = files.get(path)
        found = _local_size(local / path)
        if file is None or (path in sizes and file.nbytes != nbytes):
            continue  # the file set says it
        if found is None:
            absent += 1
        elif found != file.nbytes:
            message = "the local file is of another size; verify it"
            recorder.find(HASHES, path, message, expected=f"{file.nbytes} bytes on the Hub", found=found)
        else:
            here.append(path)
    if absent:
        recorder.skip(f"bytes of {absent} files", f"{local} does not have them")
    recorder.skip("whether the local files are right", f"hybrid-pack verify {local} proves that")
    progress.start(sum(files[path].nbytes for path in here), 0)
    with recorder.checking(HASHES, "files", threads=True) as tally:
        here.sort(key=lambda path: -files[path].nbytes)
        pool.run(partial(_compare, local, path, files[path], recorder, tally, progress) for path in here)


def _local_size(path: Path) -> int | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _compare(local: Path, path: str, file: RemoteFile, recorder: Recorder, tally: Tally, progress: Progress) -> None:
    try:
        name, expected, found = file.digest_of(local / path, progress.advance)
    except EnvironmentFailure as error:
        recorder.cannot_read(HASHES, path, error)
        return
    tally.add(1, file.nbytes)
    if found != expected:
        message = f"the Hub has other bytes than the local file; verify the local one, then {PUSH}"
        recorder.find(HASHES, path, message, expected=f"{name} {found}", found=expected)
