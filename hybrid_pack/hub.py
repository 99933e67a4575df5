"""The Hugging Face Hub; the only module that imports huggingface_hub."""

from __future__ import annotations

from pathlib import Path

from hybrid_pack.errors import EnvironmentFailure, UsageError

WANTED = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.py",
    "*.tiktoken",
    "LICENSE*",
    "additional_chat_templates/*",
)
"""Files of a repository a conversion can use; other weight formats are left alone."""


def fetch_checkpoint(repo_id: str, revision: str | None = None) -> Path:
    """Bring a checkpoint into the Hugging Face cache, or find it there.

    Args:
        repo_id: ``org/name``.
        revision: Branch, tag or commit; by default the main branch.

    Returns:
        Its snapshot folder; files already in the cache are not fetched again.

    Raises:
        UsageError: No such repository or revision.
        EnvironmentFailure: No network, no access, no room.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = repo_id if revision is None else f"{repo_id}@{revision}"
    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(WANTED)))
    except GatedRepoError:
        raise EnvironmentFailure(
            "access to this repository must be granted",
            where=where,
            hint="accept its terms and log in with `hf auth login`",
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise UsageError(
            "no such repository on the Hub, nor a local folder", where=where, hint="a private one needs `hf auth login`"
        ) from None
    except RevisionNotFoundError:
        raise UsageError("no such revision", where=where) from None
    except LocalEntryNotFoundError:
        raise EnvironmentFailure(
            "not in the local cache, and the Hub cannot be reached",
            where=where,
            hint="check the network and HF_HUB_OFFLINE",
        ) from None
    except OSError as error:
        raise EnvironmentFailure("cannot fetch", where=where, found=error) from error
