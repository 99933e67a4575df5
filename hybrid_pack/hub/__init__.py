"""The Hugging Face Hub; the only package that imports huggingface_hub.

========== ==================================================================
fetch      a checkpoint to convert: whole, or its headers alone
stream     a checkpoint while it is converted: shards come when needed and go after use
push       a pack to a repository
branch     what a push finds there, and whether it may
sending    bytes that go out while huggingface_hub sends
pull       some ranks of a pack from a repository, checked on arrival
listing    what a repository holds, without its payload
download   one file, bounded and tried again
arrival    whether a file is the one a manifest lists
logs       what huggingface_hub says itself, without what gives access
errors     what the Hub's errors mean, and which may pass
========== ==================================================================
"""

from __future__ import annotations

from hybrid_pack.hub.fetch import cache_need, cached_checkpoint, fetch_checkpoint, fetch_headers
from hybrid_pack.hub.listing import Remote, fetch_manifest, list_files, open_remote
from hybrid_pack.hub.pull import Pulled, pull
from hybrid_pack.hub.push import Pushed, PushPlan, plan_push, push
from hybrid_pack.hub.stream import HubSupply, stream_checkpoint, window_bytes

__all__ = [
    "HubSupply",
    "Pulled",
    "PushPlan",
    "Pushed",
    "Remote",
    "cache_need",
    "cached_checkpoint",
    "fetch_checkpoint",
    "fetch_headers",
    "fetch_manifest",
    "list_files",
    "open_remote",
    "plan_push",
    "pull",
    "push",
    "stream_checkpoint",
    "window_bytes",
]
