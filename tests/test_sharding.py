"""Legal sizes, kernel tiles and which rank owns what."""

from __future__ import annotations

import pytest

from hybrid_pack.errors import UsageError
from hybrid_pack.sharding import (
    Topology,
    legal_ep,
    legal_tp,
    require_legal,
    tiles_for,
    why_not_ep,
    why_not_hidden,
    why_not_tp,
)

SIZES = (2, 3, 4, 6, 8, 16)
N256, N128, KIMI_K3 = (64, 256, 64, 256), (64, 128, 64, 128), (128, 64, 64, 128)

MODELS = {
    # model: (H, I, share of I at each of SIZES, or None where the size is illegal)
    "GLM-5.2": (6144, 2048, (1024, None, 512, None, 256, 128)),
    "DeepSeek-V3": (7168, 2048, (1024, None, 512, None, 256, 128)),
    "Qwen3-235B": (4096, 1536, (768, 512, 384, 256, 192, None)),
    "MiniMax-M3": (6144, 3072, (1536, 1024, 768, 512, 384, 192)),
    "Kimi-K3": (3584, 3072, (1536, 1024, 768, 512, 384, 192)),
    "Qwen3-30B": (2048, 768, (384, 256, 192, 128, None, None)),
    "Qwen3.6": (2048, 512, (256, None, 128, None, 64, None)),
    "Gemma-4": (2816, 704, (None,) * 6),
    "Nemotron-3": (2688, 1856, (None,) * 6),
}


@pytest.mark.parametrize(
    ("model", "tp", "share"),
    [(model, tp, share) for model, row in MODELS.items() for tp, share in zip(SIZES, row[2], strict=True)],
)
def test_legality_table(model: str, tp: int, share: int | None) -> None:
    hidden, intermediate, _ = MODELS[model]
    reason = why_not_tp(hidden, intermediate, tp)
    assert (reason is None) == (share is not None), reason
    assert (tp in legal_tp(hidden, intermediate)) == (share is not None)
    if share is None:
        with pytest.raises(UsageError):
            require_legal(hidden, intermediate, 256, Topology(tp))
    else:
        assert intermediate // tp == share
        tiles = tiles_for(hidden, share)
        assert tiles is not None
        assert require_legal(hidden, intermediate, 256, Topology(tp)) == tiles
        fc1_k, fc1_n, fc2_k, fc2_n = tiles
        assert hidden % fc1_k == 2 * share % fc1_n == share % fc2_k == hidden % fc2_n == 0


@pytest.mark.parametrize(
    ("hidden", "share", "tiles"),
    [
        (6144, 2048, N256),
        (6144, 512, N256),
        (6144, 128, N256),
        (4096, 192, N128),  # 2 I / TP = 384 is no multiple of 256
        (2048, 64, N128),
        (2688, 256, N128),  # H is no multiple of 256
        (128, 64, N128),
        (256, 128, N256),
        (3584, 192, KIMI_K3),
        (3584, 384, N256),
        (7168, 192, N128),  # the exception is of its own H alone
        (2880, 256, None),  # gpt-oss: H is no multiple of 128
        (192, 64, None),
        (64, 64, None),
        (256, 96, None),
        (256, 32, None),
    ],
)
def test_tiles(hidden: int, share: int, tiles: tuple[int, int, int, int] | None) -> None:
    assert tiles_for(hidden, share) == tiles


@pytest.mark.parametrize(
    ("hidden", "intermediate", "tp", "reason"),
    [
        (6144, 2048, 1, None),
        (6144, 2048, 3, "intermediate size 2048 is not divisible by 3"),
        (2048, 768, 8, "a rank's share 768/8 = 96 is not a multiple of 64"),
        (2816, 704, 2, "a rank's share 704/2 = 352 is not a multiple of 64"),
        (2816, 704, 11, None),
        (2880, 2048, 1, "no kernel tile fits hidden size 2880, which is not a multiple of 128"),
        (192, 160, 2, "no kernel tile fits hidden size 192, which is not a multiple of 128"),
        (6144, 2048, 4096, "intermediate size 2048 is not divisible by 4096"),
    ],
)
def test_why_not_tp(hidden: int, intermediate: int, tp: int, reason: str | None) -> None:
    assert why_not_tp(hidden, intermediate, tp) == reason


def test_a_hidden_size_is_blamed_where_no_intermediate_size_helps() -> None:
    for hidden in range(32, 1024, 32):
        fits = any(tiles_for(hidden, share) for share in range(64, 1025, 64))
        assert (why_not_hidden(hidden) is None) == fits


def test_legal_sizes() -> None:
    assert legal_tp(6144, 2048) == [1, 2, 4, 8, 16, 32]
    assert legal_tp(6144, 2048, limit=8) == [1, 2, 4, 8]
    assert legal_tp(2688, 1856) == [1, 29]
    assert legal_tp(2880, 2880) == []
    assert legal_ep(256) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert legal_ep(256, limit=4) == [1, 2, 4]
    assert legal_ep(6) == [1, 2, 3, 6]
    assert why_not_ep(256, 3) == "256 experts are not divisible by 3"
    assert why_not_ep(8, 16) == "8 experts are not divisible by 16"
    assert why_not_ep(384, 3) is None


@pytest.mark.parametrize(
    ("hidden", "intermediate", "experts", "topology", "message"),
    [
        (
            *(2048, 768, 128, Topology(8)),
            "--tp: tensor-parallel size 8 is not possible: a rank's share 768/8 = 96 is not a multiple of 64;"
            " legal sizes: 1, 2, 3, 4, 6, 12; or --pad, to 1024",
        ),
        (
            *(2880, 2880, 32, Topology(1)),
            "--tp: tensor-parallel size 1 is not possible: no kernel tile fits hidden size 2880, which is not a"
            " multiple of 128; legal sizes: none",
        ),
        (
            *(128, 80, 4, Topology(1)),
            "--tp: tensor-parallel size 1 is not possible: a rank's share 80/1 = 80 is not a multiple of 64; legal"
            " sizes: none; or where nothing is quantised (80 is not a multiple of 32), --pad, to 128",
        ),
        (
            *(6144, 2048, 256, Topology(4, 3)),
            "--ep: expert-parallel size 3 is not possible: 256 experts are not divisible by 3;"
            " legal sizes: 1, 2, 4, 8, 16, 32, 64, 128, 256",
        ),
    ],
)
def test_messages_give_the_reason_and_what_is_legal(
    hidden: int, intermediate: int, experts: int, topology: Topology, message: str
) -> None:
    with pytest.raises(UsageError) as raised:
        require_legal(hidden, intermediate, experts, topology)
    assert str(raised.value) == message
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(("tp", "ep", "option"), [(0, 1, "--tp"), (-2, 1, "--tp"), (1, 0, "--ep")])
def test_sizes_below_one(tp: int, ep: int, option: str) -> None:
    with pytest.raises(UsageError, match=f"^{option}: a parallel size must be at least 1 \\(found {min(tp, ep)}\\)$"):
        Topology(tp, ep)


def test_one_rank_owns_everything() -> None:
    topology = Topology()
    assert (topology.ranks, topology.folder) == (1, "tp1-ep1")
    assert topology.experts(0, 256) == range(256)


def test_rank_is_ep_rank_times_tp_plus_tp_rank() -> None:
    topology = Topology(tensor_parallel=4, expert_parallel=2)
    assert (topology.ranks, topology.folder) == (8, "tp4-ep2")
    assert [topology.tp_rank(rank) for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [topology.ep_rank(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert topology.experts(3, 256) == range(128)
    assert topology.experts(4, 256) == range(128, 256)


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_every_expert_slice_has_one_owner(tp: int, ep: int) -> None:
    topology, experts = Topology(tp, ep), 16
    ranks = range(topology.ranks)
    owned = [(expert, topology.tp_rank(rank)) for rank in ranks for expert in topology.experts(rank, experts)]
    assert sorted(owned) == [(expert, tp_rank) for expert in range(experts) for tp_rank in range(tp)]
