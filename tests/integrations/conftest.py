"""The Hub on loopback of ``tests/hub``, for packs that are served by their Hub id."""

from tests.hub.conftest import client, good_pack, hub, remote

__all__ = ["client", "good_pack", "hub", "remote"]
