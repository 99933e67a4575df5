"""The Hugging Face Hub; the only package that imports huggingface_hub.

========== ==================================================================
fetch      a checkpoint to convert: whole, or its headers alone
push       a pack to a repository
pull       some ranks of a pack from a repository, checked on arrival
listing    what a repository holds, without its payload
download   one file, bounded and tried again
arrival    whether a file is the one a manifest lists
errors     what the Hub's errors mean, and which may pass
========== ==================================================================
"""

from __future__ import annotations

from hybrid_pack.hub.fetch import fetch_checkpoint, fetch_headers
from hybrid_pack.hub.listing import Remote, fetch_manifest, list_files, open_remote
from hybrid_pack.hub.pull import Pulled, pull
from hybrid_pack.hub.push import Pushed, PushPlan, plan_push, push

__all__ = [
    "Pulled",
    "PushPlan",
    "Pushed",
    "Remote",
    "fetch_checkpoint",
    "fetch_headers",
    "fetch_manifest",
    "list_files",
    "open_remote",
    "plan_push",
    "pull",
    "push",
]  # fmt: skip
