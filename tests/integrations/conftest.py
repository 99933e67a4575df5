"""The Hub on loopback of ``tests/hub``, for packs that are served by their Hub id; packs that vLLM loads."""

from tests.hub.conftest import client, good_pack, hub, remote
from tests.integrations.real import made, plugins, serve, servers

__all__ = ["client", "good_pack", "hub", "made", "plugins", "remote", "serve", "servers"]
