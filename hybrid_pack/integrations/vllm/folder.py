"""Where the pack is: a folder, or a snapshot of the Hugging Face cache, to which only what is needed is fetched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hybrid_pack.errors import EnvironmentFailure
from hybrid_pack.io.manifest import MANIFEST


def commits(model: str) -> dict[str, str]:
    """Commits that the Hub's own cache has for the branches and tags of a Hub id.

    vLLM fetches config.json there, whatever folder it is told to fetch weights to.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    refs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=model, repo_type="model") / "refs"
    return {path.relative_to(refs).as_posix(): path.read_text() for path in sorted(refs.rglob("*")) if path.is_file()}


@dataclass(frozen=True)
class Folder:
    """A pack's folder.

    Attributes:
        root: The folder.
        repo: Hub id and commit it is a snapshot of; None for a folder of the user's.
        cache: Folder of the cache, None for the default.
        revision: Branch, tag or commit of the Hub id that was asked for; None for its main branch.
    """

    root: Path
    repo: tuple[str, str] | None = None
    cache: str | None = None
    revision: str | None = None

    @classmethod
    def find(cls, model: str, revision: str | None, cache: str | None) -> Folder:
        """The folder of what vLLM calls the model.

        Raises:
            EnvironmentFailure: A Hub id whose manifest cannot be fetched.
        """
        if Path(model).is_dir():
            return cls(Path(model))
        from huggingface_hub import hf_hub_download

        try:
            manifest = Path(hf_hub_download(model, MANIFEST, revision=revision, cache_dir=cache))
        except Exception as error:  # the Hub's, the network's and the file system's
            raise EnvironmentFailure(
                f"cannot fetch {MANIFEST}", where=model, found=f"{type(error).__name__}: {error}",
                hint=f"`hybrid-pack pull {model} --out DIR` says more; then serve DIR",
            ) from error  # fmt: skip
        return cls(manifest.parent, (model, manifest.parent.name), cache, revision)

    def commit_now(self) -> str | None:
        """The commit that the Hub's cache has by now for the revision; None if unknown.

        vLLM fetches base tensors by the revision, not by the commit.
        """
        if self.repo is None:
            return None
        try:
            return (self.root.parents[1] / "refs" / (self.revision or "main")).read_text().strip() or None
        except OSError:  # the revision is a commit
            return None

    def base(self) -> Path:
        """The folder, with the base tensors in it."""
        self._fetch("*.json", "model-*.safetensors", "model.safetensors", ignore="experts/*")
        return self.root

    def fetch_rank(self, topology: str, rank: int) -> None:
        """Bring the shards of one rank, and of no other."""
        self._fetch(f"experts/{topology}/rank-{rank}/*")

    def _fetch(self, *patterns: str, ignore: str | None = None) -> None:
        if self.repo is None:
            return
        from huggingface_hub import snapshot_download

        name, commit = self.repo
        try:
            snapshot_download(
                name, revision=commit, cache_dir=self.cache, allow_patterns=list(patterns), ignore_patterns=ignore
            )
        except Exception as error:
            raise EnvironmentFailure(
                "cannot fetch from the Hub", where=f"{name}@{commit[:12]}", expected=" ".join(patterns),
                found=f"{type(error).__name__}: {error}",
                hint=f"`hybrid-pack pull {name} --out DIR` goes on where it stopped; then serve DIR",
            ) from error  # fmt: skip
