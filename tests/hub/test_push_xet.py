"""``hybrid-pack push`` and ``pull`` by Xet, whose store is hf_xet's own in a local folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from hybrid_pack.errors import DataError
from hybrid_pack.hub import pull, push
from hybrid_pack.verify import verify_pack
from tests.hub.conftest import REPO, tree
from tests.hub.expected import check_history, on_hub
from tests.hub.server import Hub


@pytest.fixture
def xet(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A Hub with Xet, whose store is hf_xet's own for a local folder."""
    (tmp_path / "cas").mkdir()
    hub.cas = f"local://{tmp_path}/cas"
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    return hub


def test_by_xet_and_back(xet: Hub, good_pack: Path, tmp_path: Path) -> None:
    """What most users have: hf_xet moves the large files, no LFS upload is made."""
    done = push(good_pack, REPO)
    assert on_hub(xet) == tree(good_pack)
    assert done.files_sent == len(tree(good_pack))
    assert done.bytes_moved is not None
    assert done.bytes_moved > 0
    assert not any(method == "PUT" or "objects/batch" in path for method, path in xet.requests)
    check_history(xet)
    xet.sent.clear()
    pull(REPO, tmp_path / "out", ranks=[2])
    assert verify_pack(tmp_path / "out", rank=2).ok
    assert not any(path.endswith(".safetensors") for path in xet.sent), "by Xet, not by HTTP"
    assert push(good_pack, REPO).files_sent == 0


def test_by_xet_and_back_by_http(xet: Hub, good_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who pulls need not have hf_xet."""
    push(good_pack, REPO)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    xet.sent.clear()
    pull(REPO, tmp_path / "out", ranks=[2])
    assert verify_pack(tmp_path / "out", rank=2).ok
    assert sum(path.endswith(".safetensors") for path in xet.sent) == 4


def test_by_xet_in_many_commits(xet: Hub, good_pack: Path, other_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub cuts an upload of many files into commits; the manifest is in the last all the same."""
    from huggingface_hub import _upload_pipeline

    monkeypatch.setattr(_upload_pipeline, "COMMIT_SIZE_SCALE", [3] * 10)
    push(other_pack, REPO)
    push(good_pack, REPO, replace=True)
    assert len(xet.repos[REPO].log) > 6
    assert on_hub(xet) == tree(good_pack)
    check_history(xet)


def test_wrong_bytes_by_xet(xet: Hub, good_pack: Path, pack: Path, tmp_path: Path) -> None:
    """Xet brings what was pushed; if that is not what the manifest lists, it is not accepted."""
    path = next(pack.rglob("rank-2/layer-003.safetensors"))
    data = path.read_bytes()
    path.write_bytes(data[:8000] + bytes([data[8000] ^ 1]) + data[8001:])
    push(pack, REPO)
    with pytest.raises(DataError, match=r"rank-2/layer-003\.safetensors: arrived wrong twice"):
        pull(REPO, tmp_path / "out", ranks=[2])
    assert not (tmp_path / "out" / path.relative_to(pack)).exists()
