"""A pack named by its Hub id: what is fetched into the Hub's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

import hybrid_pack
from hybrid_pack.errors import EnvironmentFailure
from hybrid_pack.integrations.vllm.base import BaseTensors
from hybrid_pack.integrations.vllm.folder import Folder, commits
from tests.hub.conftest import REPO, tree
from tests.hub.server import Hub

RANK = 2


def test_a_rank_fetches_its_own_shards_and_no_others(remote: Hub, good_pack: Path) -> None:
    folder = Folder.find(REPO, None, None)
    pack = hybrid_pack.open_pack(folder.root)
    assert set(remote.sent) == {"hybrid_pack.json"}, "the manifest is enough to refuse another topology"
    assert not BaseTensors.read(folder.base()).names("model.layers.3.mlp.experts")
    folder.fetch_rank(pack.topology.folder, RANK)
    loaded = pack.load_rank(RANK, check="digest")
    assert list(loaded) == list(pack.layers)
    here = {path for path in tree(folder.root) if path.startswith("experts/")}
    assert here == {shard.path for shard in pack.manifest.shards if shard.rank == RANK}
    assert here == {path for path in remote.sent if path.startswith("experts/")}


def test_a_folder_is_taken_as_it_is(good_pack: Path) -> None:
    folder = Folder.find(str(good_pack), None, None)
    folder.fetch_rank("tp2-ep2", 0)
    assert folder.base() == good_pack


def test_what_is_not_on_the_hub_says_how_to_look(remote: Hub) -> None:
    with pytest.raises(EnvironmentFailure, match="hybrid-pack pull org/other"):
        Folder.find("org/other", None, None)


def test_commits_are_those_of_what_was_fetched(remote: Hub) -> None:
    assert commits(REPO) == {}
    folder = Folder.find(REPO, None, None)
    assert folder.repo is not None
    assert commits(REPO) == {"main": folder.repo[1]}
    assert commits("org/other") == {}
