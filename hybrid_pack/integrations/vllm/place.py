"""Whether what lies at a pack's place is still the pack whose experts were taken. Imports nothing of vLLM."""

from __future__ import annotations

from hybrid_pack.integrations.vllm.folder import Folder
from hybrid_pack.io.manifest import MANIFEST, read_manifest


class Place:
    """A pack's place, which is looked at whenever weights are loaded.

    Args:
        folder: Where the pack is.
        digest: ``self_digest`` of its manifest.
    """

    def __init__(self, folder: Folder, digest: str) -> None:
        self.folder, self.digest = folder, digest
        self._seen: tuple[int, ...] | None = None

    def other(self) -> tuple[str, str] | None:
        """What the pack is, and what is in its place now; None where it is still there.

        The manifest is read only where its file is another one than the last time.

        Raises:
            HybridPackError: There is no manifest any more, or it is not right.
        """
        commit = self.folder.commit_now()
        if self.folder.repo is not None and commit not in (None, self.folder.repo[1]):
            return f"commit {self.folder.repo[1]}", f"commit {commit}"
        try:
            status = (self.folder.root / MANIFEST).stat()
            seen = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        except OSError:
            seen = None
        if seen is None or seen != self._seen:
            if (digest := read_manifest(self.folder.root).self_digest) != self.digest:
                return self.digest, digest
            self._seen = seen
        return None
